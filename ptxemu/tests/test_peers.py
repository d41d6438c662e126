"""Kernels that others wrote and that are right on hardware run in the emulator, against PyTorch.

What is an integer in BF16 sums exactly in any order, so convolutions and matrix products must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ptxemu import RaceError, TensorMemoryMisuse, UninitializedRead, emulate
from ptxemu.cutedsl import peers
from ptxemu.cutedsl.checking import run_under_schedules
from torch_helpers import BF16, assert_same_bits, assert_within_one_ulp, nan, require_peer, small_integers

SCHEDULES = ("early", "late")

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
    require_peer("cudnn")
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
    require_peer("cudnn")
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
    require_peer("quack")
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
    require_peer("quack")
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
    require_peer("quack")
    x, out = torch.randn(3, channels).to(BF16), nan(3, channels)
    kernel = peers.quack_softmax(channels)
    expected = torch.softmax(x.float(), -1).to(BF16)

    def check() -> None:
        assert_within_one_ulp(out, expected, fraction=2e-2)

    run_on_ragged_tile(lambda: kernel(x, out, peers.STREAM), [out], check, channels)


# --- FlashAttention 4 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [128, pytest.param(200, marks=pytest.mark.slow)])
def test_flash_attention_forward(length: int) -> None:
    require_peer("flash_attn")
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
