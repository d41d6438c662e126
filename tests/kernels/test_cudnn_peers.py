"""cuDNN's own fused convolutions, run in the emulator, give what the reference gives.

They are right on hardware, so this judges the emulator and the reference at once. What is an integer in BF16 sums
exactly in any order: convolutions must be equal bit for bit.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from cudnn_fused import reference
from cudnn_fused.operands import BF16
from cudnn_fused.testing.agreement import ordered
from cudnn_fused.testing.cases import BY_NAME as OPERATIONS
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight
from ptxemu.cutedsl import peers
from ptxemu.cutedsl.checking import run_under_schedules
from tests.cases import assert_same_bits, small_integers


@pytest.fixture(autouse=True)
def _cudnn() -> None:
    """Skips without cuDNN's frontend, unless the peers have to be there."""
    if not os.environ.get("CUDNN_FUSED_REQUIRE_PEERS"):
        pytest.importorskip("cudnn", reason="needs cudnn: pip install 'cudnn-fused[peers]'", exc_type=ImportError)


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=BF16)


def small_multiples(shape: tuple[int, ...]) -> torch.Tensor:
    """Values of either sign with few bits: sums stay exact, and normalized rows are not all alike."""
    return small_integers(shape, -4, 5)


def assert_within_one_ulp(actual: torch.Tensor, expected: torch.Tensor, fraction: float) -> None:
    """At most `fraction` of the elements differ, and by no more than one BF16 ulp. NaN must stand where NaN stands."""
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (ordered(actual) - ordered(expected)).abs()[~actual.isnan()]
    assert distance.max() <= 1, f"up to {distance.max()} ulp"
    differing = distance.float().mean().item()
    assert differing <= fraction, f"{differing:.2e} of the elements differ by one ulp"


class ConvCase:
    """Operands of a 3x3x3 convolution in small integers, and what stands behind it."""

    def __init__(self, channels: tuple[int, int], extents: tuple[int, int, int, int]):
        ci, co = channels
        n, t, h, w = extents
        self.input = small_integers((n, t, h, w, ci))
        self.weight = pack_conv3d_weight(small_integers((co, ci, 3, 3, 3), -1, 2))
        self.bias = small_multiples((co,))
        self.gamma = (torch.randint(1, 9, (co,)) / 4).to(BF16)
        self.residual = small_multiples((n, t - 2, h - 2, w - 2, co))
        self.residual_bias = small_multiples((co,))
        self.shape = (n, t - 2, h - 2, w - 2, co)

    def padded(self, frames: int, rows: int, columns: int) -> torch.Tensor:
        n, t, h, w, co = self.shape
        return nan(n, t + frames, h + rows, w + columns, co)


def run_reference(name: str, *, history_frames: int = 0, **operands: torch.Tensor | None) -> None:
    """Fill the outputs among the operands of our operation of that name."""
    given = {operand: tensor for operand, tensor in operands.items() if tensor is not None}
    reference.run(OPERATIONS[name], given, history_frames=history_frames)


def fill(
    name: str,
    case: ConvCase,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    **others: Any,
) -> None:
    """The same on the operands of a case, of which an operation takes those that it knows."""
    held = {"input": case.input, "packed_weight": case.weight, "bias": case.bias, "gamma": case.gamma}
    known = {operand.name for operand in OPERATIONS[name].operands}
    inputs = {operand: tensor for operand, tensor in held.items() if operand in known}
    run_reference(name, **inputs, residual=residual, residual_bias=residual_bias, **others)


ONE_TILE = (1, 3, 12, 14)  # 120 pixels: part of one tile of 256
TWO_TILES = (1, 4, 14, 16)  # 336 pixels on one pair of CTAs: the persistent loop turns, the last tile is ragged


@pytest.mark.parametrize(
    ("channels", "extents"),
    [
        pytest.param((160, 160), ONE_TILE, id="160-160"),
        pytest.param((160, 160), TWO_TILES, id="160-160-two-tiles"),
        pytest.param((160, 320), ONE_TILE, id="160-320"),
        pytest.param((320, 320), ONE_TILE, id="320-320", marks=pytest.mark.slow),
        pytest.param((320, 640), ONE_TILE, id="320-640", marks=pytest.mark.slow),
    ],
)
def test_cudnn_conv3d_raw(channels: tuple[int, int], extents: tuple[int, int, int, int]) -> None:
    case = ConvCase(channels, extents)
    output, expected = nan(*case.shape), nan(*case.shape)
    fill("conv3d_raw", case, output=expected)
    call = peers.cudnn_conv3d("raw", case.input, case.weight, output)
    run_under_schedules(call, [output], lambda: assert_same_bits(output, expected))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("channels", [(160, 160), pytest.param((320, 320), marks=pytest.mark.slow)])
def test_cudnn_conv3d_rmsnorm_silu(channels: tuple[int, int], with_residual: bool) -> None:
    case = ConvCase(channels, ONE_TILE)
    output, expected = nan(*case.shape), nan(*case.shape)
    sums, expected_sums = (nan(*case.shape), nan(*case.shape)) if with_residual else (None, None)
    skip = (case.residual, case.residual_bias) if with_residual else (None, None)
    fill("conv3d_rmsnorm_silu", case, *skip, output=expected, residual_output=expected_sums)
    options = {"bias": case.bias, "gamma": case.gamma, "residual": skip[0], "residual_bias": skip[1]}
    call = peers.cudnn_conv3d("norm", case.input, case.weight, output, residual_output=sums, **options)

    def check() -> None:
        assert_within_one_ulp(output, expected, fraction=1e-3)
        if sums is not None:
            assert_same_bits(sums, expected_sums)

    run_under_schedules(call, [output] + ([sums] if with_residual else []), check)


@pytest.mark.parametrize(
    ("history", "channels", "with_residual"),
    [
        (0, (160, 160), False),
        (1, (160, 160), False),
        (2, (160, 160), True),
        pytest.param(1, (320, 320), False, marks=pytest.mark.slow),
    ],
)
def test_cudnn_conv3d_rmsnorm_silu_pad(history: int, channels: tuple[int, int], with_residual: bool) -> None:
    case = ConvCase(channels, ONE_TILE)
    n, frames, height, width, co = case.shape
    padded, cache = case.padded(2, 2, 2), nan(n, min(2, frames + history), height, width, co)
    expected, expected_cache = padded.clone(), cache.clone()
    sums, expected_sums = (nan(*case.shape), nan(*case.shape)) if with_residual else (None, None)
    skip = (case.residual, case.residual_bias) if with_residual else (None, None)
    written = {"padded_output": expected, "cache_output": expected_cache, "residual_output": expected_sums}
    fill("conv3d_rmsnorm_silu_pad", case, *skip, history_frames=history, **written)
    options = {"bias": case.bias, "gamma": case.gamma, "residual": skip[0], "residual_bias": skip[1]}
    call = peers.cudnn_conv3d(
        "pad", case.input, case.weight, padded, cache=cache, history_frames=history, residual_output=sums, **options
    )

    def check() -> None:
        assert_within_one_ulp(padded, expected, fraction=1e-3)
        assert_within_one_ulp(cache, expected_cache, fraction=1e-3)
        if sums is not None:
            assert_same_bits(sums, expected_sums)

    run_under_schedules(call, [padded, cache] + ([sums] if with_residual else []), check)


def test_cudnn_conv3d_bias_residual_pad() -> None:
    case = ConvCase((160, 160), ONE_TILE)
    padded = case.padded(0, 1, 1)
    expected = padded.clone()
    fill("conv3d_bias_residual_pad", case, case.residual, case.residual_bias, padded_output=expected)
    options = {"bias": case.bias, "residual": case.residual, "residual_bias": case.residual_bias}
    call = peers.cudnn_conv3d("spatial", case.input, case.weight, padded, **options)
    run_under_schedules(call, [padded], lambda: assert_same_bits(padded, expected))


@pytest.mark.parametrize("history", [0, 1, 2])
def test_cudnn_causal_conv3d_with_cache(history: int) -> None:
    n, frames, height, width = 1, 2, 6, 10
    chunk = small_integers((n, 12, frames, height, width))
    weight = pack_causal_conv3d_weight(small_integers((160, 12, 3, 3, 3)))
    previous = small_integers((n, history, height, width, 12)) if history else None
    padded, cache = nan(n, frames + 2, height + 2, width + 2, 16), nan(n, 2, height, width, 12)
    output = nan(n, frames, height, width, 160)
    expected = [tensor.clone() for tensor in (padded, cache, output)]
    written = dict(zip(("padded_input", "cache_output", "output"), expected, strict=True))
    run_reference("causal_conv3d_with_cache", input=chunk, packed_weight=weight, previous=previous, **written)
    pack = peers.cudnn_causal_pack(chunk, padded, cache, previous)
    convolve = peers.cudnn_causal_conv(padded, weight, output)

    def check() -> None:
        for actual, wanted in zip((padded, cache, output), expected, strict=True):
            assert_same_bits(actual, wanted)

    run_under_schedules(lambda: (pack(), convolve()), [padded, cache, output], check)


@pytest.mark.parametrize(("channels", "history", "with_residual"), [(160, 0, False), (320, 1, True), (640, 2, True)])
def test_cudnn_rmsnorm_silu_pad(channels: int, history: int, with_residual: bool) -> None:
    shape = (1, 2, 3, 5, channels)
    n, frames, height, width, _ = shape
    value, gamma = small_multiples(shape), (torch.randint(1, 9, (channels,)) / 4).to(BF16)
    bias, residual_bias, residual = small_multiples((channels,)), small_multiples((channels,)), small_multiples(shape)
    previous = small_multiples((n, history, height, width, channels)) if history else None
    padded, cache = nan(n, frames + 2, height + 2, width + 2, channels), nan(n, 2, height, width, channels)
    sums = nan(*shape) if with_residual else None
    skip = (residual, residual_bias) if with_residual else (None, None)
    expected = [None if t is None else t.clone() for t in (padded, cache, sums)]
    written = dict(zip(("padded_output", "cache_output", "residual_output"), expected, strict=True))
    read = {"input": value, "gamma": gamma, "input_bias": bias, "previous": previous}
    run_reference("rmsnorm_silu_pad", **read, residual=skip[0], residual_bias=skip[1], **written)
    call = peers.cudnn_rmsnorm_silu_pad(
        value,
        gamma,
        padded,
        cache,
        input_bias=bias,
        previous=previous,
        residual=skip[0],
        residual_bias=skip[1],
        residual_output=sums,
    )

    def check() -> None:
        assert_within_one_ulp(padded, expected[0], fraction=1e-3)
        assert_within_one_ulp(cache, expected[1], fraction=1e-3)
        if sums is not None:
            assert_same_bits(sums, expected[2])

    run_under_schedules(call, [padded, cache] + ([sums] if with_residual else []), check, ("early",))
