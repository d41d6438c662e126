"""From a problem to kernel calls: what an operation computes, as its module states it, and the kernels that do so.

A :class:`Computation` is a source of rows, steps on them, and a store. Each source knows its arithmetic in plain
PyTorch and the kernel calls that it becomes. A call names its tensors by the operands of the operation, or
:data:`WORKSPACE`. Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid, too_many_pixels
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.steps import Step, to_bf16
from cudnn_fused.kernels.epilogue.stores import CACHED_FRAMES, Store, write_cache, write_padded
from cudnn_fused.problem import Problem
from cudnn_fused.types import ELEMENT_BYTES
from cudnn_fused.weights import CAUSAL_PIXEL, unpack_causal_conv3d_weight, unpack_conv3d_weight
from cudnn_fused.window import DENSE_3X3X3, Window

Tensor: TypeAlias = torch.Tensor
Operands: TypeAlias = Mapping[str, Tensor]

WORKSPACE = "workspace"
"""The name of the plan's own memory among the tensors of a kernel call."""


# --- kernel calls --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvCall:
    """A convolution with its epilogue."""

    spec: Conv3dSpec
    grid: PaddedGrid
    input: str
    weight: str


@dataclass(frozen=True)
class RowsCall:
    """An epilogue over the rows of a tensor; ``grid`` numbers them."""

    epilogue: Epilogue
    grid: PaddedGrid
    input: str


@dataclass(frozen=True)
class PackCall:
    """A raw chunk into the padded input of the causal convolution; ``grid`` is that of the padded tensor."""

    history: int
    grid: PaddedGrid
    input: str
    previous: str
    padded: str
    cache: str


Call: TypeAlias = ConvCall | RowsCall | PackCall


@dataclass(frozen=True)
class Lowered:
    """Kernel calls, one after the other, and the bytes of workspace between them."""

    calls: tuple[Call, ...]
    workspace_bytes: int = 0

    def can_implement(self) -> str | None:
        """Why the calls cannot be numbered by kernels, or None if they can."""
        return next(filter(None, (too_many_pixels(call.grid) for call in self.calls)), None)


Serves: TypeAlias = Callable[[Conv3dSpec], "str | None"]
"""Why no kernel of an architecture serves a convolution, or None if one does."""


# --- sources of rows -----------------------------------------------------------------------------------------------


def convolve(input: Tensor, weight: Tensor, window: Window, zero_frames: int = 0, absent_frames: int = 0) -> Tensor:
    """``B(Conv3D(input, weight))`` without padding: BF16 ``[N, T, H, W, Ci]`` -> ``[N, To, Ho, Wo, Co]``.

    ``weight`` is ``[Co, Ci, kt, kh, kw]``. ``zero_frames`` frames at the front count as zeros and are not read;
    ``absent_frames`` of them are not in ``input``.
    """
    samples, stored, height, width, _ = input.shape
    out_t, out_h, out_w = window.output_extents(stored + absent_frames, height, width)
    output = input.new_empty((samples, out_t, out_h, out_w, weight.shape[0]))
    kernel = weight.float()
    for n in range(samples):
        for t in range(out_t):
            first = t * window.stride[0]
            skipped = min(max(zero_frames - first, 0), window.kt)
            if skipped == window.kt:
                output[n, t] = 0
                continue
            frames = slice(first + skipped - absent_frames, first + window.kt - absent_frames)
            clip = input[n, frames].float().permute(3, 0, 1, 2)
            sums = F.conv3d(clip[None], kernel[:, :, skipped:], stride=(1, *window.stride[1:]))
            output[n, t] = to_bf16(sums[0, :, 0].permute(1, 2, 0))
    return output


class Source:
    """Where the rows of an operation come from. Subclasses are frozen dataclasses whose fields name operands."""

    def reference(self, operands: Operands, problem: Problem) -> Tensor:
        """The rows ``[N, T, H, W, C]`` in plain PyTorch."""
        raise NotImplementedError

    def refusal(self, problem: Problem) -> str | None:
        """Why options do not go together, or None if they do."""
        return None

    def lower(self, problem: Problem, epilogue: Epilogue, serves: Serves) -> Lowered:
        """The kernel calls."""
        raise NotImplementedError


@dataclass(frozen=True)
class Convolution(Source):
    """A convolution of a padded input."""

    window: Window = DENSE_3X3X3
    input: str = "input"
    weight: str = "packed_weight"

    def zero_frames(self, problem: Problem) -> tuple[int, int]:
        """How many frames in front are zeros, and how many of those are not in memory."""
        absent = problem.options.get("absent_zero_frames", 0)
        return absent + problem.options.get("leading_zero_frames", 0), absent

    def refusal(self, problem: Problem) -> str | None:
        zeros, absent = self.zero_frames(problem)
        if zeros <= self.window.history:
            return None
        return (
            f"{absent} absent and {zeros - absent} leading zero frames are more than a {self.window} window looks back"
        )

    def reference(self, operands: Operands, problem: Problem) -> Tensor:
        input = operands[self.input]
        weight = unpack_conv3d_weight(operands[self.weight], input.shape[-1])
        return convolve(input, weight, self.window, *self.zero_frames(problem))

    def lower(self, problem: Problem, epilogue: Epilogue, serves: Serves) -> Lowered:
        extents = problem.extents
        zeros, absent = self.zero_frames(problem)
        spec = Conv3dSpec(extents["Ci"], epilogue, self.window, zeros, absent)
        grid = spec.grid(extents["N"], extents["T"], extents["H"], extents["W"])
        if serves(spec) is None or not epilogue.statistic:
            return Lowered((ConvCall(spec, grid, self.input, self.weight),))
        # No tile is as wide as a row of so many channels: the sums go to memory, and what follows reads them there.
        bare = Conv3dSpec(extents["Ci"], epilogue.into(WORKSPACE), self.window, zeros, absent)
        elements = math.prod((grid.n, grid.out_t, grid.out_h, grid.out_w, epilogue.channels))
        return Lowered(
            (ConvCall(bare, grid, self.input, self.weight), RowsCall(epilogue, grid, WORKSPACE)),
            elements * ELEMENT_BYTES,
        )


@dataclass(frozen=True)
class CausalConvolution(Source):
    """A 3x3x3 convolution of a raw chunk behind its history, with zero padding, through a padded copy of both."""

    input: str = "input"
    weight: str = "packed_weight"
    previous: str = "previous"
    padded: str = "padded_input"
    cache: str = "cache_output"

    def reference(self, operands: Operands, problem: Problem) -> Tensor:
        chunk, previous = operands[self.input].permute(0, 2, 3, 4, 1), operands.get(self.previous)
        history = problem.extents["P"]
        padded = operands[self.padded].zero_()
        pixels = padded[..., : chunk.shape[-1]]
        write_padded(pixels, chunk, previous, CACHED_FRAMES, history)
        write_cache(operands[self.cache], chunk, previous)
        weight = unpack_causal_conv3d_weight(operands[self.weight])
        return convolve(pixels, weight, DENSE_3X3X3, CACHED_FRAMES - history)

    def lower(self, problem: Problem, epilogue: Epilogue, serves: Serves) -> Lowered:
        extents = problem.extents
        history = extents["P"]
        grid = PaddedGrid.around(extents["N"], extents["T"], extents["H"], extents["W"])
        spec = Conv3dSpec(CAUSAL_PIXEL, epilogue, DENSE_3X3X3, CACHED_FRAMES - history, joins_w_taps=True)
        return Lowered(
            (
                PackCall(history, grid, self.input, self.previous, self.padded, self.cache),
                ConvCall(spec, grid, self.padded, self.weight),
            )
        )


@dataclass(frozen=True)
class Rows(Source):
    """The rows of a tensor that is there."""

    input: str = "input"

    def reference(self, operands: Operands, problem: Problem) -> Tensor:
        return operands[self.input]

    def lower(self, problem: Problem, epilogue: Epilogue, serves: Serves) -> Lowered:
        extents = problem.extents
        grid = PaddedGrid.around(extents["N"], extents["T"], extents["H"], extents["W"])
        absent = getattr(epilogue.store, "absent_frames", 0)
        return Lowered((RowsCall(epilogue, grid.following(grid.window, absent), self.input),))


# --- computations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Computation:
    """What an operation computes."""

    source: Source
    steps: tuple[Step, ...]
    store: Store

    def epilogue(self, problem: Problem) -> Epilogue:
        """What happens to the rows of a problem."""
        channels = problem.channels[-1]
        return Epilogue.of(channels, self.steps, self.store, problem.present, problem.extents, problem.options)

    def lower(self, problem: Problem, serves: Serves) -> Lowered:
        """The kernel calls of a problem, on an architecture whose kernels serve what ``serves`` says."""
        return self.source.lower(problem, self.epilogue(problem), serves)

    def reference(self, problem: Problem, operands: Mapping[str, Any]) -> None:
        """Fill the outputs among ``operands`` in plain PyTorch, with every rounding point of the contract.

        A convolution accumulates in FP32 and is rounded once; each sample, and each frame of a sample, is convolved by
        a call of its own shape, so that results do not depend on the batch or on how a clip was cut into chunks.
        """
        self.epilogue(problem).reference(self.source.reference(operands, problem), operands)
