"""What a backend is given: an operation with the extents, operands and options of one call.

It stands apart from the declarations and their checks, so that kernels do not depend on those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cudnn_fused.operands import Operand, Operation


@dataclass(frozen=True)
class Problem:
    """An operation with everything known about its operands: what a backend compiles for.

    ``extents`` maps every extent name (N, T, H, W, channels, and P for the history frames) to its value, ``present``
    holds the names of the operands in use.
    """

    operation: Operation
    extents: Mapping[str, int] = field(hash=False)
    present: frozenset[str]
    options: Mapping[str, int] = field(hash=False)
    device: torch.device

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(self.extents[symbol] for symbol in self.operation.channel_symbols)

    def shape(self, operand: Operand) -> tuple[int, ...]:
        return operand.shape.evaluate(self.extents)
