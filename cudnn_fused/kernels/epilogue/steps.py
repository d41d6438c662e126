"""The operations behind a convolution, one small object each: what they read, and their arithmetic twice.

A step takes a row of channels, BF16 in and out, and rounds wherever the contract rounds: ``B(x)`` is the conversion of
an FP32 value to BF16. ``reference`` is the arithmetic on whole tensors in plain PyTorch, the oracle; ``apply`` is that
on a *fragment*, one lane's share of the channels of one row, in a kernel (see :mod:`.arithmetic`). A step may need sums
over the whole row first, its *statistic*.

Nothing here needs the DSL: kernels hand their arithmetic in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

if TYPE_CHECKING:
    from cudnn_fused.kernels.epilogue.rows import Span

Tensor: TypeAlias = torch.Tensor
Fragment: TypeAlias = list[Any]
Operands: TypeAlias = Mapping[str, Tensor]

MIN_NORM = 1e-12


def to_bf16(value: Tensor) -> Tensor:
    """A rounding point: FP32 to BF16."""
    return value.to(torch.bfloat16)


def square_root(value: Tensor) -> Tensor:
    """The correctly rounded FP32 square root.

    PyTorch's own is not on every CPU (torch 2.13 on AVX2: 19 % of the values in [0.5, 1.5) are an ulp off). The FP64
    root of an FP32 number lies too far from the middle of two FP32 numbers for its own error to matter.
    """
    return value.double().sqrt().float()


def add(value: Tensor, term: Tensor) -> Tensor:
    """``B(float(value) + float(term))``."""
    return to_bf16(value.float() + term.float())


class Step:
    """One operation on a row of channels. Subclasses are frozen dataclasses whose fields name operands."""

    sums: ClassVar[int] = 0
    """FP32 sums over the whole row that the step needs first; 0 if each channel stands for itself."""

    def given(self, present: Collection[str]) -> Step | None:
        """The step as it is with the operands of a call, or None if it does not happen."""
        return self

    @property
    def vectors(self) -> tuple[str, ...]:
        """Operands with a value for every channel."""
        return ()

    @property
    def rows(self) -> tuple[str, ...]:
        """Operands with a value for every output pixel and channel."""
        return ()

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        """The step on a tensor with the channels last."""
        raise NotImplementedError

    def statistic(self, fragment: Fragment, math_: Any) -> list[Any]:
        """What some channels of a row contribute to each of the ``sums``."""
        raise NotImplementedError

    def prepared(self, sums: list[Any], channels: int, math_: Any) -> Any:
        """What ``apply`` needs to know of the whole row, from its sums over all ``channels``."""
        raise NotImplementedError

    def apply(self, fragment: Fragment, span: Span, prepared: Any) -> Fragment:
        """The step on the channels of a row that ``span`` covers."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bias(Step):
    """``B(float(x) + float(bias))``."""

    bias: str = "bias"

    def given(self, present: Collection[str]) -> Bias | None:
        return self if self.bias in present else None

    @property
    def vectors(self) -> tuple[str, ...]:
        return (self.bias,)

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        return add(value, operands[self.bias])

    def apply(self, fragment: Fragment, span: Span, prepared: Any) -> Fragment:
        return span.math.add(fragment, span.vector(self.bias))


@dataclass(frozen=True)
class Residual(Step):
    """``B(float(x) + float(skip))``, where the skip gets its own bias first, with its own rounding."""

    residual: str = "residual"
    bias: str | None = "residual_bias"

    def given(self, present: Collection[str]) -> Residual | None:
        if self.residual not in present:
            return None
        return self if self.bias in present else replace(self, bias=None)

    @property
    def vectors(self) -> tuple[str, ...]:
        return (self.bias,) if self.bias else ()

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.residual,)

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        skip = operands[self.residual]
        return add(value, add(skip, operands[self.bias]) if self.bias else skip)

    def apply(self, fragment: Fragment, span: Span, prepared: Any) -> Fragment:
        skip = span.row_of(self.residual)
        if self.bias:
            skip = span.math.add(skip, span.vector(self.bias))
        return span.math.add(fragment, skip)


@dataclass(frozen=True)
class Save(Step):
    """Writes the value that the row has here to an output of its own. Changes nothing."""

    output: str = "residual_output"

    def given(self, present: Collection[str]) -> Save | None:
        return self if self.output in present else None

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        operands[self.output].copy_(value)
        return value


@dataclass(frozen=True)
class RmsNorm(Step):
    """L2 normalization over the row, ``sqrt(C)`` and gamma: ``B(B(B(x / max(|x|, 1e-12)) * sqrt(C)) * gamma)``.

    NaN and infinity pass through. The sum of squares is FP32, in any order.
    """

    gamma: str = "gamma"
    sums: ClassVar[int] = 1

    @property
    def vectors(self) -> tuple[str, ...]:
        return (self.gamma,)

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        wide = value.float()
        denominator = square_root(wide.square().sum(dim=-1, keepdim=True)).clamp_min(MIN_NORM)
        scaled = to_bf16(to_bf16(wide / denominator).float() * math.sqrt(value.shape[-1]))
        return to_bf16(scaled.float() * operands[self.gamma].float())

    def statistic(self, fragment: Fragment, math_: Any) -> list[Any]:
        return [math_.sum_of_squares(fragment)]

    def prepared(self, sums: list[Any], channels: int, math_: Any) -> Any:
        return math_.Reciprocal.of_norm(sums[0], MIN_NORM)

    def apply(self, fragment: Fragment, span: Span, prepared: Any) -> Fragment:
        normalized = span.math.map_wide(prepared.times, fragment)
        scaled = span.math.scale(normalized, math.sqrt(span.channels))
        return span.math.multiply(scaled, span.vector(self.gamma))


@dataclass(frozen=True)
class Silu(Step):
    """``B(x / (1 + exp(-x)))``."""

    def reference(self, value: Tensor, operands: Operands) -> Tensor:
        wide = value.float()
        return to_bf16(wide / (1 + torch.exp(-wide)))

    def apply(self, fragment: Fragment, span: Span, prepared: Any) -> Fragment:
        return span.math.map_wide(span.math.silu, fragment)
