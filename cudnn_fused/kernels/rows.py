"""What happens to a finished row: post-operations, and stores into each of the output layouts.

A *row* is one place of the padded linear grid (:mod:`.padded_grid`), junk included. ``lanes`` neighbouring lanes share
a row, and a lane holds the chunks of eight channels ``lane, lane + lanes, ...`` of it. The same code stands behind the
convolutions, which take rows from their accumulators, and the standalone normalization, which reads them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cudnn_fused.kernels.arguments import KernelArgument
from cudnn_fused.kernels.device import (
    CHUNK_BYTES,
    CHUNK_CHANNELS,
    CHUNK_REGISTERS,
    chunk_address,
    chunks,
    divide,
    load_chunk,
    masked,
    prefetch,
    store_chunk,
    sum_over_lanes,
)
from cudnn_fused.kernels.padded_grid import HALO, PaddedGrid
from cudnn_fused.kernels.postops import Fragment, PostOps, Quotient
from cudnn_fused.operands import ELEMENT_BYTES


class Layout(enum.Enum):
    """Where an output row goes."""

    CONTIGUOUS = enum.auto()  # [N, T-2, H-2, W-2, C]
    PADDED = enum.auto()  # [N, T, H, W, C]: behind two leading frames, inside a zero border
    BOTTOM_RIGHT = enum.auto()  # [N, T-2, H-1, W-1, C]: with a zero bottom row and right column


@dataclass(frozen=True)
class Tensors(KernelArgument):
    """Device addresses of the tensors behind the convolution; 0 stands for one that the operation does not use."""

    bias: Int64
    gamma: Int64
    residual: Int64
    residual_bias: Int64
    previous: Int64
    output: Int64
    cache_output: Int64
    residual_output: Int64


@dataclass(frozen=True)
class Row:
    """Where a row lies. Values of a running kernel."""

    grid: PaddedGrid
    n: Int32
    t: Int32
    frame: Int32  # of all output frames
    ho: Int32
    wo: Int32
    in_frame: Boolean
    real: Boolean
    pixel: Int32  # in a contiguous output; of rows without one the first, so that loads from there are harmless

    @classmethod
    def at(cls, grid: PaddedGrid, n: Int32, t: Int32, ho: Int32, wo: Int32) -> Row:
        frame = n * grid.out_t + t
        in_frame = ho < grid.out_h
        real = in_frame & (wo < grid.out_w)
        # Rows without an output take part in the arithmetic, whose shuffles need every lane, with the first pixel's
        # residual; nothing of them is stored but zeros.
        pixel = Int32(cutlass.select_(real, grid.contiguous_pixel(frame, ho, wo), Int32(0)))
        return cls(grid, n, t, frame, ho, wo, in_frame, real, pixel)


@dataclass(frozen=True)
class Destination:
    """A pixel of an output where a row goes, if it does. Values of a running kernel."""

    tensor: Int64
    pixel: Int32
    present: Boolean


@dataclass(frozen=True)
class RowFinish:
    """How rows are finished. Fixed when a kernel is compiled."""

    post: PostOps
    layout: Layout = Layout.CONTIGUOUS
    saves_value: bool = False  # residual_output
    history: int = 0  # earlier frames in front of a padded output
    copies_history: bool = False  # from `previous`; otherwise their interiors are left alone

    @property
    def channels(self) -> int:
        return self.post.channels

    @cute.jit
    def store(
        self,
        main: list,
        grid: PaddedGrid,
        n: Int32,
        t: Int32,
        ho: Int32,
        wo: Int32,
        channel: Int32,
        lanes: cutlass.Constexpr[int],
        tensors: Tensors,
    ):
        """Finish row ``(ho, wo)`` of output frame ``t`` of sample ``n``; ``channel`` is the first of the lane's.

        A row below the frame (``ho >= H-2``) may be passed; nothing is stored for it.
        """
        row = Row.at(grid, n, t, ho, wo)
        value = self.value(main, row, channel, lanes, tensors)
        for destination in self.value_destinations(row, tensors):
            self.put_if_present(destination, channel, lanes, value)
        quotient = self.post.quotient(value, sum_over_lanes(lanes))
        result = self.result(value, quotient, row, channel, lanes, tensors)
        for destination in self.result_destinations(row, tensors):
            self.put_if_present(destination, channel, lanes, result)

    # The steps of `store`. The arithmetic takes any part of a lane's channels; only the norm needs them all.

    def value(self, main: Fragment, row: Row, channel: Int32, lanes: int, tensors: Tensors) -> Fragment:
        """Add biases and residual."""
        size = len(main) // CHUNK_REGISTERS
        return self.post.value(
            main,
            bias=lambda: self.load(tensors.bias, Int32(0), channel, lanes, size),
            residual=lambda: self.load(tensors.residual, row.pixel, channel, lanes, size),
            residual_bias=lambda: self.load(tensors.residual_bias, Int32(0), channel, lanes, size),
        )

    def value_destinations(self, row: Row, tensors: Tensors) -> list[Destination]:
        """Where the value goes before a norm: where it is saved, if that is an output."""
        return [Destination(tensors.residual_output, row.pixel, row.real)] if self.saves_value else []

    def result(
        self, value: Fragment, quotient: Quotient | None, row: Row, channel: Int32, lanes: int, tensors: Tensors
    ) -> Fragment:
        """Normalize and activate where that follows. Rows that are stored though they are junk become zeros."""
        size = len(value) // CHUNK_REGISTERS
        gamma = lambda: self.load(tensors.gamma, Int32(0), channel, lanes, size)  # noqa: E731
        result = self.post.activated(value, quotient, gamma)
        return result if self.layout is Layout.CONTIGUOUS else masked(row.real, result)

    def result_destinations(self, row: Row, tensors: Tensors) -> list[Destination]:
        """Where the result goes: into the output, and with a padded one into the cache while it keeps the frame."""
        grid = row.grid
        if self.layout is Layout.CONTIGUOUS:
            return [Destination(tensors.output, row.pixel, row.real)]
        if self.layout is Layout.BOTTOM_RIGHT:
            target = grid.bottom_right_pixel(row.frame, row.ho, row.wo)
            return [Destination(tensors.output, target, row.in_frame & (row.wo <= grid.out_w))]
        cached = self.cached_frames(grid)
        slot = row.t - grid.out_t + cached
        kept = ((row.n * cached + slot) * grid.out_h + row.ho) * grid.out_w + row.wo
        return [
            Destination(tensors.output, grid.padded_pixel(row.n, row.t, row.ho, row.wo), row.in_frame),
            Destination(tensors.cache_output, kept, row.real & (slot >= 0)),
        ]

    def cached_frames(self, grid: PaddedGrid) -> Int32:
        """Frames of the cache: the last two of all there are, earlier ones included."""
        return cutlass.min(grid.out_t + self.history, HALO)

    def load(self, tensor: Int64, pixel: Int32, channel: Int32, lanes: int, size: int) -> Fragment:
        """``size`` chunks of a pixel, ``lanes`` chunks apart."""
        first = chunk_address(tensor, pixel, self.channels, channel)
        fragment = []
        for index in range(size):
            fragment += load_chunk(first + index * lanes * CHUNK_BYTES)
        return fragment

    @cute.jit
    def prefetch_residual(self, row: Row, channel: Int32, count: cutlass.Constexpr[int], tensors: Tensors):
        """Ask for ``count`` channels of a row's residual, so that a later load finds them in the L2 cache."""
        if row.real:
            address = chunk_address(tensors.residual, row.pixel, self.channels, channel)
            prefetch(address, count * ELEMENT_BYTES)

    @cute.jit
    def put_if_present(self, destination: Destination, channel: Int32, lanes: cutlass.Constexpr[int], fragment: list):
        """Store chunks of a row at one of its destinations, ``lanes`` chunks apart."""
        if destination.present:
            self.put(destination.tensor, destination.pixel, channel, lanes, fragment)

    def put(self, tensor: Int64, pixel: Int32, channel: Int32, lanes: int, fragment: Fragment) -> None:
        """Store chunks of a pixel, ``lanes`` chunks apart."""
        first = chunk_address(tensor, pixel, self.channels, channel)
        for index, chunk in enumerate(chunks(fragment)):
            store_chunk(first + index * lanes * CHUNK_BYTES, chunk)

    # --- pixels that no row falls on ---------------------------------------------------------------------------------

    def filler_pixels(self, grid: PaddedGrid) -> Int32:
        """How many there are."""
        if self.layout is Layout.PADDED:
            return grid.n * grid.sample_filler
        if self.layout is Layout.BOTTOM_RIGHT:
            return grid.n * grid.out_t * (grid.out_w + 1)
        return Int32(0)

    @cute.jit
    def fill(self, grid: PaddedGrid, index: Int32, lane: Int32, lanes: cutlass.Constexpr[int], tensors: Tensors):
        """Zeros or history for the ``index``-th of them, the lanes together."""
        if cutlass.const_expr(self.layout is Layout.PADDED):
            self.fill_padding(grid, index, lane, lanes, tensors)
        elif cutlass.const_expr(self.layout is Layout.BOTTOM_RIGHT):
            frame, wo = divide(index, grid.out_w + 1)
            self.clear(tensors.output, grid.bottom_right_pixel(frame, grid.out_h, wo), lane, lanes)

    @cute.jit
    def fill_padding(
        self, grid: PaddedGrid, index: Int32, lane: Int32, lanes: cutlass.Constexpr[int], tensors: Tensors
    ):
        """One pixel of a padded output: of a current frame's border, or of the two leading frames."""
        n, rest = divide(index, grid.sample_filler)
        leading_pixels = HALO * grid.frame_pixels
        if rest >= leading_pixels:
            rest -= leading_pixels
            t, inside = divide(rest, grid.frame_border)
            if inside > grid.w:  # past the run at the start of the frame: in that at its end
                inside += grid.border_gap
            self.clear(tensors.output, grid.window(n, HALO + t) + inside, lane, lanes)
        else:
            t, inside = divide(rest, grid.frame_pixels)
            hp, wp = divide(inside, grid.w)
            ho, wo = hp - 1, wp - 1
            frame = t - (HALO - self.history)  # of the earlier frames; a missing one is negative
            interior = (ho >= 0) & (ho < grid.out_h) & (wo >= 0) & (wo < grid.out_w)
            pixel = grid.window(n, t) + inside
            if interior & (frame >= 0):
                if cutlass.const_expr(self.copies_history):
                    self.copy_history(grid, n, frame, ho * grid.out_w + wo, pixel, lane, lanes, tensors)
            else:
                self.clear(tensors.output, pixel, lane, lanes)

    @cute.jit
    def copy_history(
        self,
        grid: PaddedGrid,
        n: Int32,
        frame: Int32,
        inside: Int32,
        pixel: Int32,
        lane: Int32,
        lanes: cutlass.Constexpr[int],
        tensors: Tensors,
    ):
        """A pixel of an earlier frame: into its plane of the output and, while the cache keeps that frame, there."""
        frame_pixels = grid.out_h * grid.out_w
        cached = self.cached_frames(grid)
        slot = frame - self.history + cached - cutlass.min(cached, grid.out_t)
        source = (n * self.history + frame) * frame_pixels + inside
        target = (n * cached + slot) * frame_pixels + inside
        channel = lane * CHUNK_CHANNELS
        fragment = self.load(tensors.previous, source, channel, lanes, self.channels // (lanes * CHUNK_CHANNELS))
        self.put(tensors.output, pixel, channel, lanes, fragment)
        if slot >= 0:
            self.put(tensors.cache_output, target, channel, lanes, fragment)

    def clear(self, tensor: Int64, pixel: Int32, lane: Int32, lanes: int) -> None:
        """Zeros in every channel of a pixel, the lanes together."""
        self.put(tensor, pixel, lane * CHUNK_CHANNELS, lanes, [Int32(0)] * (self.channels // (2 * lanes)))
