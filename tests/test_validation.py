"""Bad operands and options: what is raised, by the class and by the function, and that nothing is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_fused import cudnn_names
from cudnn_fused.operands import BF16, Option, Sample, arrows, validate
from cudnn_fused.plan import PLANS
from cudnn_fused.testing.cases import CHANNELS
from tests.cases import (
    ALL_OPERANDS,
    BY_NAME,
    INPUTS,
    OPERATION_NAMES,
    Operands,
    call,
    compiled_plan,
    extents_of,
    inputs_only,
    make_operands,
    make_plan,
    operand_of,
    small_integers,
)

CONTIGUOUS = [(op, name) for op, name in ALL_OPERANDS if not operand_of(BY_NAME[op], name).strided]


def assert_refused(operation_name: str, operands: Operands, error: type[Exception], match: str, **options: Any) -> None:
    """``check_support`` and ``compile`` of the class raise, and the function does if an input is at fault."""
    operation = BY_NAME[operation_name]
    for method in ("check_support", "compile"):
        with pytest.raises(error, match=match):
            getattr(make_plan(operation, operands, **options), method)()
    with pytest.raises(error, match=match):
        call(operation, operands, **options)
    assert len(PLANS) == 0


def assert_sample_refused(
    operation_name: str, name: str, operands: Operands, error: type[Exception], match: str
) -> None:
    """As above, for a fault in an operand that functions make themselves too."""
    if operand_of(BY_NAME[operation_name], name).written:
        with pytest.raises(error, match=match):
            make_plan(BY_NAME[operation_name], operands).check_support()
    else:
        assert_refused(operation_name, operands, error, match)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("optional", [False, True])
def test_good_operands_are_accepted(operation_name: str, optional: bool) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, optional=optional)
    assert make_plan(operation, operands).check_support() is True
    call(operation, operands)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_all_channel_combinations_are_accepted(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    for channels in CHANNELS[operation.name]:
        extents = dict(zip(operation.channel_symbols, channels, strict=True))
        assert make_plan(operation, make_operands(operation, N=1, T=3, H=3, W=3, **extents)).check_support()


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
@pytest.mark.parametrize("value", [3, "x", [1.0]])
def test_not_a_tensor(operation_name: str, name: str, value: object) -> None:
    operands = make_operands(BY_NAME[operation_name])
    operands[name] = value  # type: ignore[assignment]
    assert_sample_refused(operation_name, name, operands, TypeError, name)


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_operand_missing(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operand = operand_of(operation, name)
    operands = make_operands(operation, without=(name, *dependants(operation_name, name)))
    if not operand.optional:
        assert_sample_refused(
            operation_name, name, operands | {name: None}, TypeError, f"{name} must be a torch.Tensor"
        )
    elif not operand.required_by:
        assert make_plan(operation, operands).check_support()


def dependants(operation_name: str, name: str) -> tuple[str, ...]:
    return tuple(operand.name for operand in BY_NAME[operation_name].operands if operand.requires == name)


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16])
def test_wrong_dtype(operation_name: str, name: str, dtype: torch.dtype) -> None:
    operands = make_operands(BY_NAME[operation_name])
    operands[name] = torch.zeros_like(operands[name], dtype=dtype)
    assert_sample_refused(operation_name, name, operands, TypeError, f"{name} must have dtype torch.bfloat16")


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_wrong_rank(operation_name: str, name: str) -> None:
    operands = make_operands(BY_NAME[operation_name])
    operands[name] = operands[name][None]
    assert_sample_refused(operation_name, name, operands, ValueError, f"{name} must have . dimensions")


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_wrong_shape(operation_name: str, name: str) -> None:
    """Every axis of every operand, one too long. To a function only what contradicts another input is wrong."""
    operation = BY_NAME[operation_name]
    operand = operand_of(operation, name)
    for axis, term in enumerate(operand.shape.terms):
        operands = make_operands(operation)
        shape = list(operands[name].shape)
        shape[axis] += 1
        operands[name] = small_integers(tuple(shape))
        with pytest.raises(ValueError, match=operation_name):
            make_plan(operation, operands).check_support()
        elsewhere = "".join(str(other.shape) for other in operation.inputs if other.name != name)
        if not operand.written and (term not in "NTHW" or term in elsewhere):
            with pytest.raises(ValueError, match=operation_name):
                call(operation, operands)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_channels_that_break_the_rule(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, **dict.fromkeys(operation.channel_symbols, 100))
    rule = "12->160" if operation.channels.exactly else "multiples of 8"
    assert_refused(operation_name, operands, ValueError, f"not supported; supported are {rule}")


@pytest.mark.parametrize("operation_name", [name for name in OPERATION_NAMES if name != "causal_conv3d_with_cache"])
def test_the_reference_takes_all_channels_of_the_rule(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, N=1, T=3, H=3, W=3, **dict.fromkeys(operation.channel_symbols, 48))
    assert make_plan(operation, operands).check_support()
    call(operation, operands)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_mirrored_names_list_the_channels_of_their_api(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    odd = make_operands(operation, without=tuple(operation.extensions), **dict.fromkeys(operation.channel_symbols, 48))
    listed = ", ".join(map(arrows, cudnn_names.CHANNELS[operation_name]))
    for run in (make_plan(operation, odd, "Sm100").check_support, lambda: call(operation, odd, "_wrapper_sm100")):
        with pytest.raises(ValueError, match=f"not supported; supported are {listed}"):
            run()


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("axis", "NTHW")
def test_extents_below_the_minimum(operation_name: str, axis: str) -> None:
    operation = BY_NAME[operation_name]
    least = 1 if axis == "N" else operation.minimum
    operands = make_operands(operation)
    values = extents_of(operation, **{axis: least - 1})
    first = operation.operands[0]
    operands[first.name] = torch.zeros(first.shape.evaluate(values), dtype=BF16)
    assert_refused(operation_name, operands, ValueError, f"extent {axis} must be at least {least}, got {least - 1}")


@pytest.mark.parametrize(("operation_name", "name"), CONTIGUOUS)
def test_not_contiguous(operation_name: str, name: str) -> None:
    operands = make_operands(BY_NAME[operation_name])
    wide = torch.zeros((*operands[name].shape[:-1], 2 * operands[name].shape[-1]), dtype=BF16)
    operands[name] = wide[..., ::2]
    assert_sample_refused(operation_name, name, operands, ValueError, f"{name} must be contiguous")


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_layouts_that_are_accepted(operation_name: str) -> None:
    """Only strides that matter count: extent-1 axes may have any, and a permuted view may be contiguous."""
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, N=1)
    first = operation.operands[0]
    tensor = operands[first.name]
    odd = tensor.as_strided(tensor.shape, (999, *tensor.stride()[1:]))
    expected = call(operation, operands)
    results = [call(operation, {**operands, first.name: odd})]
    if not first.strided:
        channels_last = tensor.permute(0, 4, 1, 2, 3).contiguous(memory_format=torch.channels_last_3d)
        results.append(call(operation, {**operands, first.name: channels_last.permute(0, 2, 3, 4, 1)}))
        assert len(PLANS) == 1
        with pytest.raises(ValueError, match="must be contiguous"):
            call(operation, {**operands, first.name: torch.cat([tensor, tensor], 1)[:, ::2]})
    for result in results:
        for got, want in zip(result, expected, strict=True):
            assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_alignment(operation_name: str, name: str) -> None:
    """Each operand at every even offset from a 16-byte boundary: refused, by name, exactly where its table says."""
    operation = BY_NAME[operation_name]
    operand = operand_of(operation, name)
    for shift in range(0, 16, 2):
        operands = make_operands(operation, N=1, T=3, H=3, W=3)
        operands[name] = shifted(operands[name], shift)
        if shift % operand.alignment:
            assert_sample_refused(
                operation_name, name, operands, ValueError, f"data pointer of {name} must be {operand.alignment}-byte"
            )
        else:
            assert make_plan(operation, operands).check_support()


def shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose data starts ``offset`` bytes past a 16-byte boundary."""
    storage = torch.zeros(tensor.numel() + 16, dtype=tensor.dtype)
    start = (-storage.data_ptr() % 16 + offset) // 2
    return storage[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_meta_and_fake_tensors(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    on_meta = {**operands, name: operands[name].to("meta")}
    assert_sample_refused(operation_name, name, on_meta, ValueError, f"{name} must hold data")
    fake = {**operands, name: FakeTensorMode().from_tensor(operands[name])}
    assert_sample_refused(operation_name, name, fake, TypeError, f"{name} must be a plain torch.Tensor")
    plan = compiled_plan(operation, operands)
    for bad in (on_meta, fake):
        with pytest.raises((TypeError, ValueError), match=name):
            plan.execute(**bad)
    untouched = [operand.name for operand in operation.written if operand.name in operands and operand.name != name]
    assert all(torch.isnan(operands[each]).all() for each in untouched)


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_other_kinds_of_tensor(operation_name: str, name: str) -> None:
    operands = make_operands(BY_NAME[operation_name])
    negated = {**operands, name: torch._neg_view(operands[name])}
    assert_sample_refused(operation_name, name, negated, ValueError, f"{name} is a lazily negated view")
    plan = compiled_plan(BY_NAME[operation_name], operands)
    with pytest.raises(ValueError, match=f"{name} is a lazily negated view"):
        plan.execute(**negated)
    sparse = {**operands, name: operands[name].to_sparse()}
    assert_sample_refused(operation_name, name, sparse, ValueError, f"{name} must be a dense strided tensor")


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_parameters_are_tensors(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    expected = call(operation, operands)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in inputs_only(operation, operands).items()}
    for got, want in zip(call(operation, parameters), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_operands_on_two_devices(operation_name: str) -> None:
    """There may be one device here, so the facts of a tensor on another are made up."""
    operation = BY_NAME[operation_name]
    for index, operand in enumerate(operation.operands[1:], start=1):
        operands = make_operands(operation)
        samples = [Sample.of(operands.get(each.name)) for each in operation.operands]
        facts = samples[index].signature
        samples[index] = replace(samples[index], signature=(*facts[:3], torch.device("cuda", 1)))
        with pytest.raises(ValueError, match=f"{operand.name} must be on cpu, where input is, but is on cuda:1"):
            validate(operation, samples, {option.name: 0 for option in operation.options})


# --- combinations of operands and options --------------------------------------------------------------------------

WITH_RESIDUAL = ["conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad", "rmsnorm_silu_pad"]


@pytest.mark.parametrize("operation_name", WITH_RESIDUAL)
def test_residual_bias_without_residual(operation_name: str) -> None:
    operands = make_operands(BY_NAME[operation_name], without=("residual", "residual_output"))
    assert_refused(operation_name, operands, ValueError, "residual_bias was given without residual")


@pytest.mark.parametrize("operation_name", WITH_RESIDUAL)
def test_residual_without_residual_output(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=("residual_output",))
    with pytest.raises(ValueError, match="residual needs residual_output"):
        make_plan(operation, operands).check_support()


@pytest.mark.parametrize("operation_name", ["conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad"])
def test_residual_output_without_residual(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=("residual", "residual_bias"))
    with pytest.raises(ValueError, match="residual_output was given without residual"):
        make_plan(operation, operands).check_support()


def test_the_standalone_norm_saves_its_input_without_a_residual() -> None:
    operation = BY_NAME["rmsnorm_silu_pad"]
    operands = make_operands(operation, without=("residual", "residual_bias"))
    assert make_plan(operation, operands).check_support()
    assert call(operation, operands).residual_output is None
    saved = call(operation, operands, save_input=True)["residual_output"]
    assert torch.equal(saved, operands["input"] + operands["input_bias"])


OPTIONS = [(operation.name, option) for operation in BY_NAME.values() for option in operation.options]


@pytest.mark.parametrize(("operation_name", "option"), OPTIONS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("value", [-1, 3, 1.0, True, None, "1"])
def test_option_out_of_range(operation_name: str, option: Option, value: object) -> None:
    operands = make_operands(BY_NAME[operation_name], optional=False)
    allowed = f"{option.name} must be one of {', '.join(map(str, option.choices))}"
    assert_refused(operation_name, operands, ValueError, allowed, **{option.name: value})


@pytest.mark.parametrize("operation_name", [op for op, name in INPUTS if name == "previous"])
@pytest.mark.parametrize("frames", [0, 3])
def test_previous_holds_one_or_two_frames(operation_name: str, frames: int) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    shape = list(operands["previous"].shape)
    shape[1] = frames
    operands["previous"] = torch.zeros(shape, dtype=BF16)
    assert_refused(operation_name, operands, ValueError, f"previous must contain one or two frames, got {frames}")


def test_previous_contradicts_history_frames() -> None:
    operands = make_operands(BY_NAME["conv3d_rmsnorm_silu_pad"])
    assert_refused("conv3d_rmsnorm_silu_pad", operands, ValueError, "previous holds 2 frames", history_frames=1)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_operands_that_an_operation_does_not_have(operation_name: str) -> None:
    with pytest.raises(TypeError):
        call(BY_NAME[operation_name], {**make_operands(BY_NAME[operation_name]), "scale": torch.zeros(1)})
