"""When a result agrees with the reference, and when it is close enough to the truth.

On integer operands results must be those of the reference (:mod:`cudnn_fused.selfcheck.agreement`). On random operands
the largest distance from the truth must not be over twice that of the same computation in BF16 PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_fused import reference
from cudnn_fused.selfcheck.agreement import against_reference, ambiguous_pairs, differing, ordered
from cudnn_fused.selfcheck.cases import Case, Operands
from cudnn_fused.testing import eager

__all__ = [
    "Accuracy",
    "against_reference",
    "against_truth",
    "ambiguous_pairs",
    "differing",
    "inaccuracies",
    "ordered",
]

Tensor = torch.Tensor

BOUND_FACTOR = 2.0
FP32_SHARE = 1e-6  # of the largest value: what FP32 arithmetic may differ by


@dataclass(frozen=True)
class Accuracy:
    """The largest distances of one output from the truth."""

    name: str
    error: float
    torch_error: float
    largest: float

    @property
    def bound(self) -> float:
        return BOUND_FACTOR * self.torch_error + FP32_SHARE * self.largest

    @property
    def holds(self) -> bool:
        return self.error <= self.bound  # False for NaN


def against_truth(case: Case, operands: Operands, frames: Tensor | None = None) -> list[Accuracy]:
    """Measure the outputs among ``operands``, and those of BF16 PyTorch, against FP32. For random operands.

    ``frames`` are the earlier frames that the caller copied.
    """
    inputs = {operand.name: operands[operand.name] for operand in case.operation.inputs if operand.name in operands}
    function = eager.FUNCTIONS[case.variant]
    rounded = function(**eager.arguments(case, inputs, frames))
    with reference.full_precision(operands["input"].device):
        truth = function(**eager.arguments(case, inputs, frames, torch.float32))
    return [
        Accuracy(
            name,
            _distance(operands[name], exact),
            _distance(rounded[name], exact),
            exact.abs().max().item(),
        )
        for name, exact in truth.items()
    ]


def _distance(tensor: Tensor, truth: Tensor) -> float:
    return (tensor.float() - truth).abs().max().item()


def inaccuracies(case: Case, operands: Operands, frames: Tensor | None = None) -> list[str]:
    """What lies further from the truth than it may."""
    return [
        f"{accuracy.name}: off by up to {accuracy.error:.3g}, allowed {accuracy.bound:.3g}"
        for accuracy in against_truth(case, operands, frames)
        if not accuracy.holds
    ]
