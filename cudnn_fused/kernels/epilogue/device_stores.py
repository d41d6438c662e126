"""The stores of :mod:`.stores` in kernels: where each row goes, and what the padding pixels hold."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_fused.kernels.arguments import Addresses
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.device import CHUNK_CHANNELS, divide, masked
from cudnn_fused.kernels.epilogue.arithmetic import Fragment
from cudnn_fused.kernels.epilogue.rows import Destination, Row, load_pixel, store_pixel
from cudnn_fused.kernels.epilogue.stores import CACHED_FRAMES, BottomRight, Contiguous, Padded


class DeviceStore:
    """What a store does in a kernel. By default rows stand side by side and nothing lies between them."""

    def masked(self, row: Row, fragment: Fragment) -> Fragment:
        """The finished channels of a row as they are stored."""
        return fragment

    def destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        """The pixels where a row goes."""
        raise NotImplementedError

    def padding_pixels(self, grid: PaddedGrid) -> Int32:
        """How many pixels of the output no row is stored to."""
        return Int32(0)

    def pad(
        self,
        grid: PaddedGrid,
        index: Int32,
        lane: Int32,
        channels: cutlass.Constexpr[int],
        lanes: cutlass.Constexpr[int],
        tensors: Addresses,
    ):
        """Fill the ``index``-th of them, the lanes together."""


class ContiguousRows(DeviceStore):
    def __init__(self, store: Contiguous) -> None:
        self.declared = store

    def destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        return [Destination(tensors[self.declared.output], row.pixel, row.real)]


class BottomRightRows(DeviceStore):
    """The first halo row of a line falls on the zero column."""

    def __init__(self, store: BottomRight) -> None:
        self.declared = store

    def masked(self, row: Row, fragment: Fragment) -> Fragment:
        return masked(row.real, fragment)

    def destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        grid = row.grid
        target = grid.bottom_right_pixel(row.frame, row.ho, row.wo)
        return [Destination(tensors[self.declared.output], target, row.in_frame & (row.wo <= grid.out_w))]

    def padding_pixels(self, grid: PaddedGrid) -> Int32:
        return grid.n * grid.out_t * (grid.out_w + 1)

    @cute.jit
    def pad(
        self,
        grid: PaddedGrid,
        index: Int32,
        lane: Int32,
        channels: cutlass.Constexpr[int],
        lanes: cutlass.Constexpr[int],
        tensors: Addresses,
    ):
        frame, wo = divide(index, grid.out_w + 1)
        clear(tensors[self.declared.output], grid.bottom_right_pixel(frame, grid.out_h, wo), lane, channels, lanes)


class PaddedRows(DeviceStore):
    """Where the windows of both convolutions are as wide, halo rows fall on the border: they are stored as zeros."""

    def __init__(self, store: Padded) -> None:
        self.declared = store

    def target(self, grid: PaddedGrid) -> PaddedGrid:
        """The grid of the output."""
        return grid.following(self.declared.window, self.declared.absent_frames)

    def in_runs(self, grid: PaddedGrid) -> bool:
        """Whether halo rows are stored, too."""
        return grid.window.halo[2] == self.declared.window.halo[2]

    def masked(self, row: Row, fragment: Fragment) -> Fragment:
        return masked(row.real, fragment) if self.in_runs(row.grid) else fragment

    def destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        grid, target = row.grid, self.target(row.grid)
        cached = self.cached_frames(grid)
        slot = row.t - grid.out_t + cached
        kept = ((row.n * cached + slot) * grid.out_h + row.ho) * grid.out_w + row.wo
        stored = row.in_frame if self.in_runs(grid) else row.real
        return [
            Destination(tensors[self.declared.output], target.interior_pixel(row.n, row.t, row.ho, row.wo), stored),
            Destination(tensors[self.declared.cache], kept, row.real & (slot >= 0)),
        ]

    def cached_frames(self, grid: PaddedGrid) -> Int32:
        """Frames of the cache: the last two of all there are, earlier ones included."""
        return cutlass.min(grid.out_t + self.declared.history, CACHED_FRAMES)

    def padding_pixels(self, grid: PaddedGrid) -> Int32:
        return grid.n * self.target(grid).sample_padding(self.in_runs(grid))

    @cute.jit
    def pad(
        self,
        grid: PaddedGrid,
        index: Int32,
        lane: Int32,
        channels: cutlass.Constexpr[int],
        lanes: cutlass.Constexpr[int],
        tensors: Addresses,
    ):
        """One pixel: of a current frame's border, or of a leading frame."""
        target = self.target(grid)
        output = tensors[self.declared.output]
        n, rest = divide(index, target.sample_padding(self.in_runs(grid)))
        leading_pixels = target.leading_frames * target.frame_pixels
        if rest >= leading_pixels:
            rest -= leading_pixels
            t, inside = divide(rest, target.frame_border(self.in_runs(grid)))
            if inside > target.w:  # past the run at the start of the frame
                if cutlass.const_expr(self.in_runs(grid)):
                    inside = target.border_in_runs(inside)
                else:
                    line = cutlass.min((inside - target.w - 1) // 2, target.out_h - 1)
                    inside = target.border_by_lines(inside, line)
            clear(output, target.frame(n, target.window.halo[0] + t) + inside, lane, channels, lanes)
        else:
            t, inside = divide(rest, target.frame_pixels)
            hp, wp = divide(inside, target.w)
            ho, wo = hp - 1, wp - 1
            # Of the earlier frames; a missing one is negative.
            frame = t - (target.leading_frames - self.declared.history)
            interior = (ho >= 0) & (ho < target.out_h) & (wo >= 0) & (wo < target.out_w)
            pixel = target.frame(n, t + target.absent_frames) + inside
            if interior & (frame >= 0):
                if cutlass.const_expr(self.declared.previous is not None):
                    self.copy_history(grid, n, frame, ho * target.out_w + wo, pixel, lane, channels, lanes, tensors)
            else:
                clear(output, pixel, lane, channels, lanes)

    @cute.jit
    def copy_history(
        self,
        grid: PaddedGrid,
        n: Int32,
        frame: Int32,
        inside: Int32,
        pixel: Int32,
        lane: Int32,
        channels: cutlass.Constexpr[int],
        lanes: cutlass.Constexpr[int],
        tensors: Addresses,
    ):
        """A pixel of an earlier frame: into its plane of the output and, while the cache keeps that frame, there."""
        declared = self.declared
        frame_pixels = grid.out_h * grid.out_w
        cached = self.cached_frames(grid)
        slot = frame - declared.history + cached - cutlass.min(cached, grid.out_t)
        source = (n * declared.history + frame) * frame_pixels + inside
        kept = (n * cached + slot) * frame_pixels + inside
        channel = lane * CHUNK_CHANNELS
        size = channels // (lanes * CHUNK_CHANNELS)
        fragment = load_pixel(tensors[declared.previous], source, channels, channel, lanes, size)
        store_pixel(tensors[declared.output], pixel, channels, channel, lanes, fragment)
        if slot >= 0:
            store_pixel(tensors[declared.cache], kept, channels, channel, lanes, fragment)


def clear(tensor: Int64, pixel: Int32, lane: Int32, channels: int, lanes: int) -> None:
    """Zeros in every channel of a pixel, the lanes together."""
    store_pixel(tensor, pixel, channels, lane * CHUNK_CHANNELS, lanes, [Int32(0)] * (channels // (2 * lanes)))
