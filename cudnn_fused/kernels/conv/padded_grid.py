"""Index arithmetic of the padded linear grid, on the host and in kernels.

The input of a dense convolution is already padded: ``[N, T, H, W, C]`` with outputs ``[N, T-2, H-2, W-2]`` for a 3x3x3
window, ``[N, T, H-2, W-2]`` for a 1x3x3 one. Number its pixels ``p = ((n*T + t)*H + h)*W + w``. With ``p`` the first
pixel of an output's window,

    out[p] = sum over (dt, r, s) of weight[dt, r, s] . x[p + (dt*H + r)*W + s],

so a tap is a constant shift of the flattened input, and a tile of outputs is a run of consecutive ``p``. One output
frame is the run of *rows* ``0 .. Ho*W - 1`` behind its first pixel. A row splits into ``(ho, wo) = divmod(row, W)``;
those with ``wo >= Wo`` are *halo rows*: their windows wrap around the right edge.

A padded output for a window of the same extents has the grid of the input. There, row ``q`` of frame ``t`` is pixel
``q + W + 1`` of frame ``t + 2``: a constant shift again. The two halo rows at the end of an image line fall on the
right border of that line and the left border of the next, which are zero, so a frame is stored as one contiguous run
with its halo rows masked to zero. What the run leaves over are the first ``W + 1`` and the last ``W - 1`` pixels of the
frame: ``2*W`` pixels of border.

Frames in front that are known to be zero need not be in memory: with ``absent_frames`` frame 0 of the grid is one of
those, and the first frame in memory is frame ``absent_frames``.

Nothing here knows whether an extent is a Python int or a value of a running kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cudnn_fused.kernels.arguments import STATIC, KernelArgument
from cudnn_fused.window import DENSE_3X3X3, Window

MAX_PIXELS = 2**31 - 2**20  # pixel numbers are 32-bit, and loops step past the last; element offsets are 64-bit

Extent = Any  # int on the host, cutlass.Int32 in a kernel


@dataclass(frozen=True)
class PaddedGrid(KernelArgument):
    """The extents of a padded tensor as it is in memory, and where things lie in it."""

    n: Extent
    t: Extent
    h: Extent
    w: Extent
    window: Window = field(default=DENSE_3X3X3, metadata=STATIC)
    absent_frames: int = field(default=0, metadata=STATIC)  # zero frames in front of the first one in memory

    @classmethod
    def around(
        cls, n: Extent, t: Extent, h: Extent, w: Extent, window: Window = DENSE_3X3X3, absent_frames: int = 0
    ) -> PaddedGrid:
        """The grid whose outputs have the extents given."""
        frames, rows, columns = window.halo
        return cls(n, t + (frames - absent_frames), h + rows, w + columns, window, absent_frames)

    def following(self, window: Window, absent_frames: int = 0) -> PaddedGrid:
        """The grid of a padded tensor that holds this one's outputs."""
        if window.halo == self.window.halo and absent_frames == self.absent_frames:
            return self
        return PaddedGrid.around(self.n, self.out_t, self.out_h, self.out_w, window, absent_frames)

    @property
    def out_t(self) -> Extent:
        return self.t - (self.window.halo[0] - self.absent_frames)

    @property
    def out_h(self) -> Extent:
        return self.h - self.window.halo[1]

    @property
    def out_w(self) -> Extent:
        return self.w - self.window.halo[2]

    @property
    def frame_pixels(self) -> Extent:
        return self.h * self.w

    @property
    def pixels(self) -> Extent:
        return self.n * self.t * self.frame_pixels

    @property
    def frame_rows(self) -> Extent:
        """Rows of one output frame, halo rows included."""
        return self.out_h * self.w

    def frame(self, n: Extent, t: Extent) -> Extent:
        """The first pixel of frame ``t`` of sample ``n``, which lies under row 0 of that output frame."""
        return (n * self.t + (t - self.absent_frames if self.absent_frames else t)) * self.frame_pixels

    def tap_shift(self, dt: Extent, r: Extent) -> Extent:
        """How far the pixels of tap ``(dt, r, 0)`` lie behind those of tap ``(0, 0, 0)``."""
        return (dt * self.h + r) * self.w

    # Places of an output pixel. ``frame`` numbers output frames: n*out_t + t.

    def contiguous_pixel(self, frame: Extent, ho: Extent, wo: Extent) -> Extent:
        """In the bare outputs ``[N, To, Ho, Wo]``; of rows that are no halo rows."""
        return (frame * self.out_h + ho) * self.out_w + wo

    def interior_pixel(self, n: Extent, t: Extent, ho: Extent, wo: Extent) -> Extent:
        """In this padded tensor, of frame ``t`` behind the leading ones."""
        frames, rows, columns = self.window.halo
        return self.frame(n, t + frames) + (ho + rows // 2) * self.w + wo + columns // 2

    def bottom_right_pixel(self, frame: Extent, ho: Extent, wo: Extent) -> Extent:
        """In ``[N, To, Ho+1, Wo+1]``; of rows with ``wo <= Wo``, the last of which is the zero column."""
        return (frame * (self.out_h + 1) + ho) * (self.out_w + 1) + wo

    # The padding pixels of this padded tensor, for 3x3 taps in space: leading frames and borders, to which no row is
    # stored. With ``in_runs`` halo rows are stored too, in one run with the others; they cover the left and right
    # columns.

    @property
    def leading_frames(self) -> int:
        """Frames in memory before the first that holds outputs."""
        return self.window.halo[0] - self.absent_frames

    def frame_border(self, in_runs: bool) -> Extent:
        """How many pixels of the border of a frame."""
        return self.w + self.w if in_runs else self.w + self.w + self.out_h + self.out_h

    def border_in_runs(self, index: Extent) -> Extent:
        """The place in its frame of the ``index``-th pixel of the border, of those past the first ``W + 1``."""
        return index + self.frame_rows

    def border_by_lines(self, index: Extent, line: Extent) -> Extent:
        """The same where halo rows are not stored: ``line``, ``(index - W - 1) // 2`` but at most the last, is the line
        of outputs before it. Pixels alternate between the last column of a line and the first of the next.
        """
        return index + (line + 1) * self.out_w

    def sample_padding(self, in_runs: bool) -> Extent:
        """How many pixels of a sample: the leading frames, and the border of each other one."""
        return self.leading_frames * self.frame_pixels + self.out_t * self.frame_border(in_runs)


def too_many_pixels(grid: PaddedGrid) -> str | None:
    """Why the pixels of a padded tensor cannot be numbered in 32 bits, or None if they can."""
    if grid.pixels <= MAX_PIXELS:
        return None
    return (
        f"the padded tensor has {grid.n}x{grid.t}x{grid.h}x{grid.w} = {grid.pixels} pixels, and the kernels number at "
        f"most {MAX_PIXELS}; split the batch"
    )
