"""Kernels that others wrote and that are right on hardware run in the emulator, against PyTorch.

What is an integer in BF16 sums exactly in any order, so convolutions and matrix products must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cudnn_fused import reference
from cudnn_fused.testing.ptx import RaceError, TensorMemoryMisuse, UninitializedRead, emulate
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight
from tests.cases import assert_same_bits, small_integers
from tests.ptx import peers

BF16 = torch.bfloat16
SCHEDULES = ("early", "late")


def run_under_schedules(
    call: Callable[[], Any],
    written: list[torch.Tensor],
    check: Callable[[], None],
    schedules: tuple[str, ...] = SCHEDULES,
    **options: Any,
) -> None:
    """Runs `call` under each schedule, from the same initial values of what it writes, and checks the result."""
    initial = [tensor.clone() for tensor in written]
    for schedule in schedules:
        for tensor, value in zip(written, initial, strict=True):
            tensor.copy_(value)
        with emulate(schedule=schedule, **options) as emulation:
            call()
        assert emulation.launches
        check()


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=BF16)


def small_multiples(shape: tuple[int, ...]) -> torch.Tensor:
    """Values of either sign with few bits: sums stay exact, and normalized rows are not all alike."""
    return small_integers(shape, -4, 5)


def ordinals(tensor: torch.Tensor) -> torch.Tensor:
    """BF16 values numbered in their order: neighbours differ by one, both zeros are 0."""
    pattern = tensor.contiguous().view(torch.int16).int()
    return torch.where(pattern < 0, -0x8000 - pattern, pattern)


def assert_within_one_ulp(actual: torch.Tensor, expected: torch.Tensor, fraction: float) -> None:
    """At most `fraction` of the elements differ, and by no more than one BF16 ulp. NaN must stand where NaN stands."""
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (ordinals(actual) - ordinals(expected)).abs()[~actual.isnan()]
    assert distance.max() <= 1, f"up to {distance.max()} ulp"
    differing = distance.float().mean().item()
    assert differing <= fraction, f"{differing:.2e} of the elements differ by one ulp"


# --- cuDNN's fused convolutions --------------------------------------------------------------------------------------


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
    reference.conv3d_raw(case.input, case.weight, expected)
    call = peers.cudnn_conv3d("raw", case.input, case.weight, output)
    run_under_schedules(call, [output], lambda: assert_same_bits(output, expected))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("channels", [(160, 160), pytest.param((320, 320), marks=pytest.mark.slow)])
def test_cudnn_conv3d_rmsnorm_silu(channels: tuple[int, int], with_residual: bool) -> None:
    case = ConvCase(channels, ONE_TILE)
    output, expected = nan(*case.shape), nan(*case.shape)
    sums, expected_sums = (nan(*case.shape), nan(*case.shape)) if with_residual else (None, None)
    skip = (case.residual, case.residual_bias) if with_residual else (None, None)
    reference.conv3d_rmsnorm_silu(case.input, case.weight, case.bias, case.gamma, expected, *skip, expected_sums)
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
    reference.conv3d_rmsnorm_silu_pad(
        case.input,
        case.weight,
        case.bias,
        case.gamma,
        expected,
        expected_cache,
        *skip,
        expected_sums,
        None,
        history_frames=history,
    )
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
    reference.conv3d_bias_residual_pad(case.input, case.weight, case.bias, case.residual, expected, case.residual_bias)
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
    reference.causal_conv3d_with_cache(chunk, weight, *expected, previous)
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
    reference.rmsnorm_silu_pad(value, gamma, expected[0], expected[1], bias, previous, *skip, expected[2])
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


# --- cuDNN's general convolution -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "channels", "geometry"),
    [
        pytest.param((128, 128, 2), 128, {"padding": 1}, id="2cta-128x128-padded"),
        pytest.param((128, 64, 1), 64, {"padding": 1, "stride": 2}, id="1cta-128x64-strided"),
        pytest.param((64, 64, 1), 64, {"padding": 2, "dilation": 2}, id="1cta-64x64-dilated"),
    ],
)
def test_cudnn_fprop(tile: tuple[int, int, int], channels: int, geometry: dict[str, int]) -> None:
    input, weight = small_integers((1, 5, 7, 9, 64)), small_integers((channels, 3, 3, 3, 64), -1, 2)
    call, output = peers.cudnn_fprop(input, weight, tile=tile, **geometry)
    planes = F.conv3d(input.float().permute(0, 4, 1, 2, 3), weight.float().permute(0, 4, 1, 2, 3), **geometry)
    expected = planes.permute(0, 2, 3, 4, 1).to(BF16)
    # This kernel's PTX reads tensor memory without tcgen05.wait::ld, which the checks rightly report.
    with pytest.raises(RaceError), emulate(schedule="early"):
        call()
    run_under_schedules(call, [output], lambda: assert_same_bits(output, expected), races=False)


def test_cudnn_fprop_with_lanes_of_other_warps() -> None:
    """Its 64-row pair tile names the lanes of warps 0 and 1 in warps 2 and 3 as well, and means their own.

    The PTX ISA lets a warp reach its own quarter of the lanes only, so this is an error unless it is allowed.
    """
    input, weight = small_integers((1, 4, 5, 6, 64)), small_integers((64, 3, 3, 3, 64), -1, 2)
    call, output = peers.cudnn_fprop(input, weight, tile=(64, 64, 2))
    with pytest.raises(TensorMemoryMisuse, match="lanes"), emulate(races=False):
        call()
    planes = F.conv3d(input.float().permute(0, 4, 1, 2, 3), weight.float().permute(0, 4, 1, 2, 3))
    expected = planes.permute(0, 2, 3, 4, 1).to(BF16)
    run_under_schedules(call, [output], lambda: assert_same_bits(output, expected), races=False, relative_lanes=True)


# --- quack -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "tile", "cluster", "options"),
    [
        pytest.param(peers.SM90, (128, 128), (1, 1), {}, id="sm90-128x128"),
        pytest.param(peers.SM90, (128, 192), (2, 1), {}, id="sm90-128x192-multicast"),
        pytest.param(peers.SM90, (64, 128), (1, 2), {"pingpong": True}, id="sm90-64x128-pingpong"),
        pytest.param(peers.SM100, (128, 128), (1, 1), {}, id="sm100-1cta"),
        pytest.param(peers.SM100, (256, 128), (2, 1), {}, id="sm100-2cta"),
        pytest.param(peers.SM100, (256, 128), (2, 2), {}, id="sm100-2cta-multicast"),
    ],
)
def test_quack_gemm(arch: str, tile: tuple[int, int], cluster: tuple[int, int], options: dict[str, Any]) -> None:
    """Two tiles each way and a depth that is no whole number of stages."""
    m, n, k = 2 * tile[0] - 8, 2 * tile[1] - 16, 200
    a, b, product = small_integers((m, k)), small_integers((n, k)), nan(m, n)
    expected = (a.float() @ b.float().T).to(BF16)
    for schedule in SCHEDULES:
        product.fill_(torch.nan)
        with emulate(arch, schedule=schedule), peers.quack_gemm_on(arch) as gemm:
            gemm(a, b, product, None, None, *tile, *cluster, **options)
        assert_same_bits(product, expected)


def run_on_ragged_tile(
    call: Callable[[], Any], written: list[torch.Tensor], check: Callable[[], None], channels: int
) -> None:
    """Runs a row kernel of which a CTA has several rows if they are short.

    Of rows past the last it copies nothing to shared memory, loads them from there and drops what it got, which is
    reported unless it is allowed.
    """
    if channels > 512:
        run_under_schedules(call, written, check)
        return
    with pytest.raises(UninitializedRead), emulate():
        call()
    run_under_schedules(call, written, check, uninitialized="poison")


@pytest.mark.parametrize("channels", [512, pytest.param(32768, id="32768-cluster")])
def test_quack_rmsnorm(channels: int) -> None:
    """The wide rows are reduced over a cluster, through distributed shared memory."""
    rows, with_residual, eps = 3, channels == 512, 1e-6
    x, weight = torch.randn(rows, channels).to(BF16), torch.rand(channels) + 0.5
    residual = torch.randn(rows, channels).to(BF16) if with_residual else None
    out, rstd = nan(rows, channels), torch.full((rows,), torch.nan)
    sums = nan(rows, channels) if with_residual else None
    kernel = peers.quack_rmsnorm(channels, residual=with_residual)
    value = x.float() + (residual.float() if with_residual else 0)
    scale = torch.rsqrt(value.square().mean(-1) + eps)

    def check() -> None:
        torch.testing.assert_close(rstd, scale, rtol=1e-5, atol=0)
        assert_within_one_ulp(out, (value * scale[:, None] * weight).to(BF16), fraction=2e-3)
        if sums is not None:
            assert_same_bits(sums, value.to(BF16))

    arguments = (x, weight, None, residual, out, sums, rstd, None, eps, peers.STREAM)
    run_on_ragged_tile(lambda: kernel(*arguments), [out, rstd] + ([sums] if with_residual else []), check, channels)


@pytest.mark.parametrize("channels", [512, pytest.param(65536, id="65536-cluster")])
def test_quack_softmax(channels: int) -> None:
    x, out = torch.randn(3, channels).to(BF16), nan(3, channels)
    kernel = peers.quack_softmax(channels)
    expected = torch.softmax(x.float(), -1).to(BF16)

    def check() -> None:
        assert_within_one_ulp(out, expected, fraction=2e-2)

    run_on_ragged_tile(lambda: kernel(x, out, peers.STREAM), [out], check, channels)


# --- FlashAttention 4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, pytest.param(200, marks=pytest.mark.slow)])
def test_flash_attention_forward(length: int) -> None:
    query, key, value = (torch.randn(1, length, 1, 64).to(BF16) for _ in range(3))
    call, output, log_sum_exp = peers.flash_attention_forward(query, key, value)
    scores = query[0, :, 0].double() @ key[0, :, 0].double().T / 8
    truth = torch.softmax(scores, -1) @ value[0, :, 0].double()

    def check() -> None:
        torch.testing.assert_close(log_sum_exp[0, 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        rounded = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value)))[0, 0].double()
        error, allowed = (output[0, :, 0].double() - truth).abs().max(), (rounded - truth).abs().max()
        assert error <= 2 * allowed + 1e-3

    run_under_schedules(call, [output, log_sum_exp], check)
