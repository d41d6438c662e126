"""Zero frames that are not in memory: in front of what a convolution reads, and left out of what is padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cudnn_fused
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.selfcheck.cases import Case, Skip, make_inputs
from tests.cases import assert_same_bits
from tests.kernels.emulated import LATE, NEWEST, check, sm90, sm100

SQUARE = (160, 160)
CASES = (
    Case("conv3d_raw", 1, 1, 3, 5, SQUARE, absent_zero_frames=2),
    Case("conv3d_raw", 2, 2, 2, 3, SQUARE, absent_zero_frames=1, leading_zero_frames=1),
    Case("conv3d_rmsnorm_silu_pad", 2, 1, 3, 5, SQUARE, absent_zero_frames=2, omit_zero_frames=1),
    Case("conv3d_rmsnorm_silu_pad", 1, 2, 3, 5, SQUARE, skip=Skip.PLAIN, history=1, omit_zero_frames=1),
    Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, SQUARE, history=1, absent_zero_frames=1),
    Case("conv3d_bias_residual_pad", 1, 1, 3, 5, SQUARE, skip=Skip.PLAIN, absent_zero_frames=2),
    Case("rmsnorm_silu_pad", 2, 1, 3, 5, (160,), omit_zero_frames=1),
    Case("rmsnorm_silu_pad", 1, 2, 3, 5, (160,), history=1, omit_zero_frames=1),
)


@pytest.mark.parametrize(("kernels", "schedule"), [(sm90(), LATE), (sm100(), NEWEST)], ids=["sm90", "sm100"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_kernels_equal_the_reference(case: Case, kernels: GpuBackend, schedule: str) -> None:
    check(kernels, case, schedule=schedule)


@pytest.mark.parametrize("absent", [1, 2])
def test_absent_frames_are_zeros(absent: int) -> None:
    """A convolution gives the same whether its zero frames are there or not."""
    case = Case("conv3d_raw", 1, 2, 3, 5, SQUARE, leading_zero_frames=absent)
    operands = make_inputs(case, "cpu", integers=True)
    whole = cudnn_fused.conv3d_raw(**operands, leading_zero_frames=absent)
    stored = operands["input"][:, absent:].contiguous()
    assert_same_bits(cudnn_fused.conv3d_raw(stored, operands["packed_weight"], absent_zero_frames=absent), whole)


@pytest.mark.parametrize("history", [0, 1, 2])
def test_omitted_planes_are_what_is_missing(history: int) -> None:
    """Nothing but the zero planes in front goes; the cache stays as it is."""
    case = Case("rmsnorm_silu_pad", 1, 2, 3, 5, (160,), history=history)
    operands = make_inputs(case, "cpu", integers=True)
    whole = cudnn_fused.rmsnorm_silu_pad(**operands)
    without = cudnn_fused.rmsnorm_silu_pad(**operands, omit_zero_frames=1)
    assert_same_bits(without.padded_output, whole.padded_output[:, 2 - history :].contiguous())
    assert not whole.padded_output[:, : 2 - history].any()
    assert_same_bits(without.cache_output, whole.cache_output)


def test_what_is_left_out_is_what_the_next_convolution_lacks() -> None:
    case = Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, SQUARE)
    operands = make_inputs(case, "cpu", integers=True)
    packed = operands["packed_weight"]
    whole = cudnn_fused.conv3d_raw(cudnn_fused.conv3d_rmsnorm_silu_pad(**operands).padded_output, packed)
    first = cudnn_fused.conv3d_rmsnorm_silu_pad(**operands, omit_zero_frames=1).padded_output
    assert first.shape[1] == 1
    assert_same_bits(cudnn_fused.conv3d_raw(first, packed, absent_zero_frames=2), whole)


def test_frames_that_are_not_there_cannot_be_too_many() -> None:
    operands = make_inputs(replace(CASES[0], t=2), "cpu", integers=True)
    with pytest.raises(ValueError, match="2 absent and 1 leading zero frames are more than a 3x3x3 window looks back"):
        cudnn_fused.conv3d_raw(**operands, absent_zero_frames=2, leading_zero_frames=1)
    with pytest.raises(ValueError, match="extent T must be at least 2, got 1"):
        cudnn_fused.conv3d_raw(
            torch.zeros_like(operands["input"][:, :1]), operands["packed_weight"], absent_zero_frames=1
        )
