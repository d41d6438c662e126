"""Where finished rows go: one object for each arrangement of an output.

Each says what it writes, how the reference writes it, and names the class that does so in a kernel. Nothing here needs
the DSL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cudnn_fused.window import DENSE_3X3X3, Window

if TYPE_CHECKING:
    from cudnn_fused.kernels.epilogue.device_stores import DeviceStore

Tensor: TypeAlias = torch.Tensor
Operands: TypeAlias = Mapping[str, Any]

CACHED_FRAMES = DENSE_3X3X3.history
"""Frames that a cache carries from one chunk to the next."""


class Store:
    """Where the rows of an operation go. Subclasses are frozen dataclasses whose fields name operands."""

    def given(self, present: Collection[str], extents: Mapping[str, int], options: Mapping[str, int]) -> Store:
        """The store as it is with the operands, extents and options of a call."""
        return self

    @property
    def operands(self) -> tuple[str, ...]:
        """The tensors that it writes, and those that it copies from."""
        raise NotImplementedError

    def reference(self, value: Tensor, operands: Operands) -> None:
        """Write finished rows ``[N, T, H, W, C]``."""
        raise NotImplementedError

    def on_device(self) -> DeviceStore:
        """What does this in a kernel."""
        raise NotImplementedError


@dataclass(frozen=True)
class Contiguous(Store):
    """``[N, T, H, W, C]``."""

    output: str = "output"

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.output,)

    def reference(self, value: Tensor, operands: Operands) -> None:
        operands[self.output].copy_(value)

    def on_device(self) -> DeviceStore:
        from cudnn_fused.kernels.epilogue.device_stores import ContiguousRows

        return ContiguousRows(self)


@dataclass(frozen=True)
class BottomRight(Store):
    """``[N, T, H+1, W+1, C]``: with a zero bottom row and right column."""

    output: str = "padded_output"

    @property
    def operands(self) -> tuple[str, ...]:
        return (self.output,)

    def reference(self, value: Tensor, operands: Operands) -> None:
        output = operands[self.output]
        output[:, :, :-1, :-1] = value
        output[:, :, -1] = 0
        output[:, :, :, -1] = 0

    def on_device(self) -> DeviceStore:
        from cudnn_fused.kernels.epilogue.device_stores import BottomRightRows

        return BottomRightRows(self)


@dataclass(frozen=True)
class Padded(Store):
    """The padded input of the next causal convolution, whose window is ``window``, and its cache.

    Behind ``window.history`` leading frames, of which the last ``history`` are earlier frames and the others zero, each
    frame stands in a zero border. The interiors of earlier frames are copied from ``previous`` or, where that is None,
    left alone. ``absent_frames`` of the zero frames are not in memory. ``cache`` gets the last frames of all.
    """

    output: str = "padded_output"
    cache: str = "cache_output"
    previous: str | None = "previous"
    window: Window = DENSE_3X3X3
    history: int = 0
    absent_frames: int = 0

    def given(self, present: Collection[str], extents: Mapping[str, int], options: Mapping[str, int]) -> Padded:
        history = extents["P"]
        absent = self.window.history - history if options.get("omit_zero_frames") else 0
        previous = self.previous if self.previous in present else None
        return replace(self, previous=previous, history=history, absent_frames=absent)

    @property
    def operands(self) -> tuple[str, ...]:
        written = (self.output, self.cache)
        return (*written, self.previous) if self.previous else written

    @property
    def leading_frames(self) -> int:
        """Frames in memory before the current ones."""
        return self.window.history - self.absent_frames

    def reference(self, value: Tensor, operands: Operands) -> None:
        previous = operands[self.previous] if self.previous else None
        write_padded(operands[self.output], value, previous, self.leading_frames, self.history)
        write_cache(operands[self.cache], value, previous)

    def on_device(self) -> DeviceStore:
        from cudnn_fused.kernels.epilogue.device_stores import PaddedRows

        return PaddedRows(self)


def write_padded(output: Tensor, value: Tensor, previous: Tensor | None, leading: int, history: int) -> None:
    """Store ``value`` inside its zero border behind ``leading`` frames, the last ``history`` of them earlier ones.

    The interiors of those are ``previous``, or left as they are.
    """
    output[:, :, 0] = 0
    output[:, :, -1] = 0
    output[:, :, :, 0] = 0
    output[:, :, :, -1] = 0
    output[:, : leading - history] = 0
    output[:, leading:, 1:-1, 1:-1] = value
    if previous is not None:
        output[:, leading - history : leading, 1:-1, 1:-1] = previous


def write_cache(cache: Tensor, current: Tensor, previous: Tensor | None) -> None:
    """Keep the last frames: the current ones in the tail, those of ``previous``, where given, before them."""
    newest = min(cache.shape[1], current.shape[1])
    oldest = cache.shape[1] - newest
    if previous is not None and oldest:
        cache[:, :oldest] = previous[:, previous.shape[1] - oldest :]
    cache[:, oldest:] = current[:, current.shape[1] - newest :]
