"""Rounding points, NaN and infinity, and lanes that nobody initialized."""

from __future__ import annotations

import pytest
import torch

from cudnn_fused.testing.cases import Case, Operands, Skip, make_inputs, make_outputs, make_plan
from tests.cases import assert_same_bits
from tests.gpu.harness import ALL_OPERATIONS, assert_equals_reference, call, inputs_of

WITH_RESIDUAL = ("conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad", "conv3d_bias_residual_pad", "rmsnorm_silu_pad")
NORMALIZING = ("conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad", "rmsnorm_silu_pad")
CHANNELS = 160


def one_pixel(name: str, skip: Skip = Skip.PLAIN) -> Case:
    """A case of one output pixel."""
    channels = (CHANNELS,) if name == "rmsnorm_silu_pad" else (CHANNELS, CHANNELS)
    return Case(name, 1, 1, 1, 1, channels, skip=skip, input_bias=name == "rmsnorm_silu_pad")


def zeros_on(case: Case, device: torch.device) -> Operands:
    """Inputs that are all zero, except gamma, which is one."""
    operands = {name: tensor.zero_() for name, tensor in make_inputs(case, device, integers=True).items()}
    if "gamma" in operands:
        operands["gamma"].fill_(1)
    return operands


def executed(case: Case, operands: Operands) -> Operands:
    """``operands`` and the outputs of the class."""
    everything = {**operands, **make_outputs(case, operands["input"].device)}
    make_plan(case, everything).execute(**everything)  # type: ignore[attr-defined]
    return everything


def set_convolution(case: Case, operands: Operands, value: int) -> None:
    """Make the convolution of every channel ``value``: its even part through one channel, the rest through another."""
    if not case.flops:
        operands["input"].fill_(value)
        return
    even = value & ~1
    operands["input"][:, 1, 1, 1, 0] = even
    operands["input"][:, 1, 1, 1, 1] = value - even
    operands["packed_weight"][:, 1, 1, 1, :2] = 1


@pytest.mark.parametrize("name", WITH_RESIDUAL)
@pytest.mark.parametrize(
    ("convolution", "bias", "residual", "residual_bias", "right"),
    [
        (257, 1, 0, 0, 256),  # the convolution rounds to 256, and 257 again
        (256, 1, 1, 0, 256),  # 256 + 1 rounds before the residual is added
        (0, 0, 256, 1, 256),  # the skip and its bias
        (1, 0, 256, 1, 256),  # round before the sum: 257 -> 256, then 257 -> 256
        (256, 2, 0, 0, 258),
    ],
)
def test_no_rounding_point_is_lost(
    device: torch.device, name: str, convolution: int, bias: int, residual: int, residual_bias: int, right: int
) -> None:
    if name == "rmsnorm_silu_pad":
        convolution = min(convolution, 256)  # its input is BF16 already, which has no 257
    case = one_pixel(name, Skip.BIASED)
    operands = zeros_on(case, device)
    set_convolution(case, operands, convolution)
    operands["input_bias" if name == "rmsnorm_silu_pad" else "bias"].fill_(bias)
    operands["residual"].fill_(residual)
    operands["residual_bias"].fill_(residual_bias)
    results = executed(case, operands)
    value = results["padded_output"][:, :, 0, 0] if "residual_output" not in results else results["residual_output"]
    assert value.float().unique().tolist() == [right]


def pixel(results: Operands) -> torch.Tensor:
    """The activated channels of the only output pixel."""
    if "output" in results:
        return results["output"].flatten()
    return results["padded_output"][0, 2, 1, 1]


@pytest.mark.parametrize("name", NORMALIZING)
@pytest.mark.parametrize("operand", ["input", "residual"])
def test_nan_fills_its_pixel(device: torch.device, name: str, operand: str) -> None:
    case = one_pixel(name)
    operands = zeros_on(case, device)
    operands["residual"].fill_(1)
    # In a convolution, a NaN reaches every channel by itself.
    operands[operand].view(-1, CHANNELS)[0, 7] = torch.nan
    results = executed(case, operands)
    assert results["residual_output"].isnan().sum() == (CHANNELS if operand == "input" and case.flops else 1)
    assert pixel(results).isnan().all()
    cache = results.get("cache_output")
    assert cache is None or cache.isnan().all()
    if "padded_output" in results:
        assert results["padded_output"].isnan().sum() == CHANNELS  # and no border


@pytest.mark.parametrize("name", NORMALIZING)
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_infinity_is_nan_and_the_rest_zero(device: torch.device, name: str, infinity: float) -> None:
    case = one_pixel(name)
    operands = zeros_on(case, device)
    operands["residual"].fill_(1)
    operands["residual"][..., 7] = infinity
    result = pixel(executed(case, operands))
    assert result[7].isnan()
    assert result.count_nonzero() == 1  # the NaN


@pytest.mark.parametrize("name", NORMALIZING)
def test_a_zero_pixel_stays_zero(device: torch.device, name: str) -> None:
    case = one_pixel(name)
    results = executed(case, zeros_on(case, device))
    assert_same_bits(pixel(results), torch.zeros_like(pixel(results)))


@pytest.mark.parametrize("name", NORMALIZING)
def test_tiny_and_huge_values(device: torch.device, name: str) -> None:
    """Squares that underflow, where the smallest norm counts, and sums of squares that overflow."""
    case = one_pixel(name)
    for value in (1e-30, 1e-13, 1e-12, 1e-6, 1e18, 3e38):
        operands = zeros_on(case, device)
        operands["residual"].fill_(value)
        operands["residual"][..., ::3] *= -1
        assert_equals_reference(case, operands, call(case, operands))


def poison_freed_memory(device: torch.device) -> None:
    """Leave NaN in memory that the next allocations are likely to get."""
    blocks = [
        torch.full((size,), torch.nan, dtype=torch.bfloat16, device=device)
        for size in (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
        for _ in range(4)
    ]
    del blocks


@pytest.mark.parametrize(
    "case",
    [
        Case("causal_conv3d_with_cache", 1, 2, 5, 6, (12, 160)),
        Case("causal_conv3d_with_cache", 1, 2, 5, 6, (12, 160), history=2),
        Case("conv3d_raw", 1, 1, 3, 4, (160, 160)),
        Case("conv3d_raw", 1, 1, 3, 4, (160, 320)),
        Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 4, (160, 160)),
    ],
    ids=lambda case: f"{case.variant}-{case.channels[1]}-{case.history}",
)
def test_uninitialized_memory_is_not_met(device: torch.device, case: Case) -> None:
    """Channels 12 to 15 of packed pixels and 160 to 191 of weights must not meet what was in memory before."""
    operands = make_inputs(case, device, integers=True)
    for _ in range(20 if device.type == "cuda" else 2):
        poison_freed_memory(device)
        results = call(case, operands)
        assert all(bool(tensor.isfinite().all()) for tensor in results.values())
        assert_equals_reference(case, operands, results)


@ALL_OPERATIONS
def test_bits_do_not_depend_on_modes(device: torch.device, case: Case) -> None:
    """Autocast, TF32 and reduced precision are about PyTorch's own arithmetic; parameters are tensors."""
    operands = inputs_of(case, make_inputs(case, device, integers=False))
    expected = call(case, operands)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in operands.items()}
    variants = [
        (torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16), operands),
        (torch.inference_mode(), operands),
        (torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True), operands),
        (torch.no_grad(), parameters),
    ]
    for context, given in variants:
        with context:
            results = call(case, given)
        for name, tensor in expected.items():
            assert_same_bits(results[name].detach().clone(), tensor)
