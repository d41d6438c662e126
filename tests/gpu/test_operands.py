"""Strides, aliasing and alignment: what is accepted gives the right answer, and what is refused launches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_fused.plan import PLANS
from cudnn_fused.testing.cases import Case, make_inputs, make_plan
from tests.cases import assert_same_bits
from tests.gpu.harness import ALL_OPERATIONS, TYPICAL, Prepared, assert_equals_reference, call, prepare


def assert_nothing_written(prepared: Prepared) -> None:
    if prepared.operands["input"].is_cuda:
        torch.cuda.synchronize()
    for name, tensor in prepared.initial.items():
        assert_same_bits(prepared.operands[name], tensor)
    prepared.assert_guards()


def refused(prepared: Prepared, error: type[Exception], match: str, **replaced: Any) -> None:
    """``execute`` with some operands replaced must raise, and write nothing."""
    plan = make_plan(prepared.case, prepared.operands)
    # Without what holds no data, and views that are not what their memory holds.
    before = {name: tensor.clone() for name, tensor in replaced.items() if has_data(tensor)}
    with pytest.raises(error, match=match):
        plan.execute(**{**prepared.operands, **replaced})  # type: ignore[attr-defined]
    assert_nothing_written(prepared)
    for name, tensor in before.items():
        assert_same_bits(replaced[name], tensor)


def has_data(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.is_meta and not tensor.is_neg()


# --- strides -------------------------------------------------------------------------------------------------------


def test_strides_of_extent_one_axes_are_free(device: torch.device) -> None:
    case = Case("conv3d_raw", 1, 2, 4, 5, (160, 160))
    prepared = prepare(case, device)
    plan = make_plan(case, prepared.operands)
    odd = prepared.operands["input"].as_strided((1, 4, 6, 7, 160), (999, 6720, 1120, 160, 1))
    plan.execute(**{**prepared.operands, "input": odd})  # type: ignore[attr-defined]
    prepared.assert_right()
    before = len(PLANS)
    call(case, prepared.operands)
    call(case, {**prepared.operands, "input": odd})
    assert len(PLANS) == before + 1


def test_channels_last_is_nthwc(device: torch.device) -> None:
    """A permuted channels_last_3d tensor is accepted, a slice of frames is not."""
    case = Case("conv3d_raw", 2, 2, 4, 5, (160, 160))
    prepared = prepare(case, device)
    ncthw = prepared.operands["input"].permute(0, 4, 1, 2, 3).contiguous(memory_format=torch.channels_last_3d)
    results = call(case, {**prepared.operands, "input": ncthw.permute(0, 2, 3, 4, 1)})
    assert_equals_reference(case, prepared.operands, results)
    doubled = torch.cat([prepared.operands["input"]] * 2, dim=1)
    with pytest.raises(ValueError, match="input must be contiguous"):
        call(case, {**prepared.operands, "input": doubled[:, ::2]})


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3, 4), (0, 4, 1, 2, 3), (4, 3, 2, 1, 0), (2, 0, 1, 4, 3)], ids=str)
def test_causal_input_of_any_strides(device: torch.device, permutation: tuple[int, ...]) -> None:
    case = Case("causal_conv3d_with_cache", 2, 3, 4, 5, (12, 160), history=1)
    operands = make_inputs(case, device, integers=True)
    inverse = [permutation.index(axis) for axis in range(5)]
    strided = operands["input"].permute(permutation).contiguous().permute(inverse)
    assert_equals_reference(case, operands, call(case, {**operands, "input": strided}))


def test_causal_input_of_stride_zero(device: torch.device) -> None:
    """One frame expanded to several."""
    case = Case("causal_conv3d_with_cache", 1, 3, 4, 5, (12, 160))
    operands = make_inputs(case, device, integers=True)
    frame = operands["input"][:, :, :1].expand(-1, -1, 3, -1, -1)
    assert_equals_reference(case, {**operands, "input": frame}, call(case, {**operands, "input": frame}))


# --- aliasing ------------------------------------------------------------------------------------------------------


def test_an_output_that_is_an_input(device: torch.device) -> None:
    prepared = prepare(TYPICAL["conv3d_rmsnorm_silu"], device)
    refused(prepared, ValueError, "must not overlap", residual_output=prepared.operands["residual"])


def test_an_output_over_the_input(device: torch.device) -> None:
    prepared = prepare(TYPICAL["conv3d_raw"], device)
    output = prepared.operands["output"]
    over = prepared.operands["input"].view(-1)[: output.numel()].view(output.shape)
    refused(prepared, ValueError, "must not overlap", output=over)


def test_a_cache_inside_the_padded_output(device: torch.device) -> None:
    prepared = prepare(TYPICAL["rmsnorm_silu_pad"], device)
    cache = prepared.operands["cache_output"]
    over = prepared.operands["padded_output"].view(-1)[-cache.numel() :].view(cache.shape)
    refused(prepared, ValueError, "must not overlap", cache_output=over)


def test_an_output_over_the_end_of_the_weight(device: torch.device) -> None:
    """Over its last 16 bytes."""
    case = TYPICAL["conv3d_raw"]
    prepared = prepare(case, device)
    weight, output = prepared.operands["packed_weight"], prepared.operands["output"]
    both = torch.zeros(weight.numel() + output.numel(), dtype=torch.bfloat16, device=device)
    start = weight.numel() - 8
    refused(
        prepared,
        ValueError,
        "must not overlap",
        packed_weight=both[: weight.numel()].view(weight.shape),
        output=both[start : start + output.numel()].view(output.shape),
    )


def test_adjacent_halves_of_one_buffer(device: torch.device) -> None:
    case = TYPICAL["conv3d_raw"]
    prepared = prepare(case, device)
    source, output = prepared.operands["input"], prepared.operands["output"]
    both = torch.full((source.numel() + output.numel(),), torch.nan, dtype=torch.bfloat16, device=device)
    prepared.operands["input"] = both[: source.numel()].view(source.shape).copy_(source)
    prepared.operands["output"] = both[source.numel() :].view(output.shape)
    make_plan(case, prepared.operands).execute(**prepared.operands)  # type: ignore[attr-defined]
    prepared.assert_right()


# --- alignment -----------------------------------------------------------------------------------------------------


def shifted(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A copy that begins ``count`` elements past a 16-byte boundary."""
    storage = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    assert storage.data_ptr() % 16 == 0
    return storage[count : count + tensor.numel()].view(tensor.shape).copy_(tensor)


@ALL_OPERATIONS
def test_misaligned_operands(device: torch.device, case: Case) -> None:
    """Two bytes past an aligned address: a ValueError that names the operand, both as a sample and at execute."""
    prepared = prepare(case, device)
    for operand in case.operation.operands:
        if operand.name not in prepared.operands or operand.alignment == 2:
            continue
        bad = {operand.name: shifted(prepared.operands[operand.name], 1)}
        refused(prepared, ValueError, operand.name, **bad)
        with pytest.raises(ValueError, match=operand.name):
            make_plan(case, {**prepared.operands, **bad})


def test_the_causal_operands_may_be_less_aligned(device: torch.device) -> None:
    """The input by 2 bytes, the history by 8; by 2 it is refused."""
    case = TYPICAL["causal_conv3d_with_cache"]
    prepared = prepare(case, device)
    given = prepared.operands
    given["input"] = shifted(given["input"], 1)
    given["previous"] = shifted(given["previous"], 4)
    make_plan(case, given).execute(**given)  # type: ignore[attr-defined]
    prepared.assert_right()
    prepared.refill()
    refused(prepared, ValueError, "previous", previous=shifted(given["previous"], 1))


# --- no tensors ----------------------------------------------------------------------------------------------------


@ALL_OPERATIONS
def test_tensors_without_data_are_refused(device: torch.device, case: Case) -> None:
    prepared = prepare(case, device)
    with FakeTensorMode():
        fake = torch.empty(prepared.operands["input"].shape, dtype=torch.bfloat16, device=device.type)
    refused(prepared, TypeError, "input", input=fake)
    refused(prepared, ValueError, "input", input=prepared.operands["input"].to("meta"))
    refused(prepared, ValueError, "input", input=torch._neg_view(prepared.operands["input"]))


@pytest.mark.gpu
def test_a_cpu_tensor_among_others(gpu: torch.device) -> None:
    prepared = prepare(TYPICAL["conv3d_raw"], gpu)
    refused(prepared, ValueError, "packed_weight", packed_weight=prepared.operands["packed_weight"].cpu())
