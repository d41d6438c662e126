"""Tensors, comparisons and requirements of the tests that run compiled launchers."""

from __future__ import annotations

import os

import pytest
import torch

BF16 = torch.bfloat16
MUST_HAVE_PEERS = "PTXEMU_REQUIRE_PEERS"  # set where an absent peer is a fault and not a reason to skip


def require_peer(package: str) -> None:
    """Skips the test without a package of the `peers` extra, unless it has to be there."""
    if not os.environ.get(MUST_HAVE_PEERS):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'ptxemu[peers]'", exc_type=ImportError)


def nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=BF16)


def small_integers(shape: tuple[int, ...], low: int = -2, high: int = 3) -> torch.Tensor:
    """Integers whose products sum exactly in FP32 in any order."""
    return torch.randint(low, high, shape).to(BF16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, NaN and the sign of zero included."""
    assert actual.shape == expected.shape
    differing = (actual.contiguous().view(torch.int16) != expected.contiguous().view(torch.int16)).sum().item()
    assert differing == 0, f"{differing} of {actual.numel()} elements differ"


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
