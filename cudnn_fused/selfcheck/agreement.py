"""When a result agrees with the reference.

On integer operands (:mod:`cudnn_fused.selfcheck.cases`) everything is exact up to the exponential in SiLU, so results
must be the reference's bit for bit, except where the exact value of SiLU lies so close to the middle of two BF16
numbers that an FP32 exponential may fall on either side.
"""

from __future__ import annotations

import functools

import torch

from cudnn_fused.selfcheck.cases import Case, Operands, run_reference
from cudnn_fused.types import BF16

Tensor = torch.Tensor

LARGEST_ACTIVATION = 64.0  # beyond it, SiLU in FP32 is no longer a matter of rounding
# Relative error of affine / (1 + exp(-affine)) in FP32: a few units of 2^-23 for the exponential and the division, and
# one more for each unit of the argument, whose scaling to base 2 is rounded.
SILU_ERROR = 2.0**-20
SILU_ERROR_PER_UNIT = 2.0**-22
TOLERATED_SHARE = 1e-4
KEYS = 1 << 16


def ordered(tensor: Tensor) -> Tensor:
    """Whole numbers in the order of the BF16 values; neighbours differ by one."""
    bits = tensor.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@functools.cache
def ambiguous_pairs() -> Tensor:
    """For the lower of every two neighbouring BF16 numbers, at its key plus half of KEYS: whether either may be right.

    That is so if SiLU of some BF16 number lies between them as close to the middle as its error in FP32.
    """
    affine = torch.arange(-(KEYS // 2), KEYS // 2).to(torch.int16).view(BF16)
    affine = affine[affine.abs() <= LARGEST_ACTIVATION].double()
    exact = affine / (1 + torch.exp(-affine))
    error = exact.abs() * (SILU_ERROR + SILU_ERROR_PER_UNIT * affine.abs())
    low, high = ordered((exact - error).to(BF16)), ordered((exact + error).to(BF16))
    assert (high - low).max() <= 1
    pairs = torch.zeros(KEYS, dtype=torch.bool)
    pairs[low[high > low].long() + KEYS // 2] = True
    return pairs


def differing(actual: Tensor, expected: Tensor, *, activated: bool = False) -> int:
    """How many elements disagree. NaN agrees with NaN, whatever its bits, and zeros need the same sign.

    ``activated`` values may fall on either side where :func:`ambiguous_pairs` says so, in one element of ten thousand.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    actual, expected = actual.contiguous(), expected.contiguous()
    unequal = actual.view(torch.int16) != expected.view(torch.int16)
    unequal &= ~(actual.isnan() & expected.isnan())
    count = int(unequal.sum())
    if not count or not activated:
        return count
    # Only finite neighbours of one pair; selecting first keeps large tensors cheap.
    got, want = ordered(actual[unequal]), ordered(expected[unequal])
    lower = torch.minimum(got, want)
    tolerated = int(((got - want).abs().eq(1) & ambiguous_pairs().to(lower.device)[lower.long() + KEYS // 2]).sum())
    return count if tolerated > max(1, TOLERATED_SHARE * actual.numel()) else count - tolerated


def against_reference(case: Case, operands: Operands, initial: Operands) -> list[str]:
    """Compare the outputs among ``operands`` with those of the reference. For integer operands.

    ``initial`` are the outputs as they were before the operation ran; they are overwritten. Returns what disagrees.
    """
    run_reference(case, {**operands, **initial})
    faults = []
    for name in case.operation.returns:
        if name in initial:
            wrong = differing(operands[name], initial[name], activated=name in case.activated_outputs)
            if wrong:
                faults.append(f"{name}: {wrong} of {initial[name].numel()} elements differ from the reference")
    return faults
