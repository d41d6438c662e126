"""The rule by which results of whole VAEs agree."""

from __future__ import annotations

import math

import pytest
import torch

from benchmark.agreement import judge


def results(fused_error: float, eager_error: float = 0.01) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fused, eager and FP32 results whose errors have these sizes, in different directions."""
    fp32 = torch.ones(1000)
    direction = torch.tensor([1.0, -1.0]).repeat(500)
    return fp32 + fused_error * direction, fp32 + eager_error * direction.roll(1), fp32


@pytest.mark.parametrize(("fused_error", "holds"), [(0.0, True), (0.01, True), (0.0109, True), (0.0111, False)])
def test_the_limit_is_a_tenth_more_than_eager(fused_error: float, holds: bool) -> None:
    assert judge(*results(fused_error), atol=1.0).holds is holds


def test_tolerance_is_elementwise() -> None:
    fused, eager, fp32 = results(0.01)
    assert judge(fused, eager, fp32, atol=0.0199, rtol=0.001).holds
    assert not judge(fused, eager, fp32, atol=0.0199, rtol=0.0).holds


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("position", range(3))
def test_what_is_not_finite_never_agrees(value: float, position: int) -> None:
    tensors = [tensor.clone() for tensor in results(0.01)]
    tensors[position][7] = value
    assert not judge(*tensors, atol=1.0).holds
    for tensor in tensors:
        tensor[7] = value
    assert not judge(*tensors, atol=1.0).holds
