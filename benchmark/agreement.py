"""Whether the fused encoder agrees with Diffusers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

MAX_ERROR_RATIO = 1.1
"""The fused encoder may be this many times as far from FP32 as eager BF16 is: both round, at different points."""

DEFAULT_ATOL_RMS = 0.2
"""The default of ``atol``, in units of the RMS of the eager result (seen: up to 0.09 on random weights)."""


@dataclass(frozen=True)
class Difference:
    """How far a result is from another. Any NaN or infinity makes all three NaN or infinite."""

    max_abs: float
    mean_abs: float
    relative_l2: float

    @classmethod
    def between(cls, result: torch.Tensor, other: torch.Tensor) -> Difference:
        error = result.double() - other.double()
        return cls(
            error.abs().max().item(),
            error.abs().mean().item(),
            (error.norm() / other.double().norm()).item(),
        )


@dataclass(frozen=True)
class Agreement:
    """One fused result, judged.

    ``ratio`` is its relative L2 distance to FP32 over that of eager BF16; ``within_tolerance`` says whether every
    element is within ``atol + rtol * |eager|`` of eager BF16.
    """

    to_fp32: Difference
    to_eager: Difference
    ratio: float
    atol: float
    rtol: float
    within_tolerance: bool

    @property
    def holds(self) -> bool:
        """False also where a number is NaN."""
        return self.ratio <= MAX_ERROR_RATIO and self.within_tolerance

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "holds": self.holds}


def judge(
    fused: torch.Tensor, eager: torch.Tensor, fp32: torch.Tensor, atol: float | None = None, rtol: float = 0.0
) -> Agreement:
    """Judge a fused result by eager BF16 and FP32 results of the same shape; ``atol`` None takes the default."""
    if atol is None:
        atol = DEFAULT_ATOL_RMS * eager.double().square().mean().sqrt().item()
    to_fp32, eager_to_fp32 = Difference.between(fused, fp32), Difference.between(eager, fp32)
    return Agreement(
        to_fp32=to_fp32,
        to_eager=Difference.between(fused, eager),
        ratio=to_fp32.relative_l2 / max(eager_to_fp32.relative_l2, torch.finfo(torch.float64).tiny),
        atol=atol,
        rtol=rtol,
        within_tolerance=bool(((fused.double() - eager.double()).abs() <= atol + rtol * eager.double().abs()).all()),
    )
