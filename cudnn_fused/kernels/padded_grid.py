"""Index arithmetic of the padded linear grid, on the host and in kernels.

The input of a valid 3x3x3 convolution is already padded: ``[N, T, H, W, C]`` with outputs ``[N, T-2, H-2, W-2]``.
Number its pixels ``p = ((n*T + t)*H + h)*W + w``. With ``p`` the first pixel of an output's window,

    out[p] = sum over (dt, r, s) of weight[dt, r, s] . x[p + (dt*H + r)*W + s],

so a tap is a constant shift of the flattened input, and a tile of outputs is a run of consecutive ``p``. One output
frame is the run of *rows* ``0 .. (H-2)*W - 1`` behind its first pixel. A row splits into ``(ho, wo) = divmod(row, W)``;
those with ``wo >= W-2`` are *junk*: their windows wrap around the right edge.

A padded output has the grid of the input. There, row ``q`` of frame ``t`` is pixel ``q + W + 1`` of frame ``t + 2``: a
constant shift again. The two junk rows at the end of an image line fall on the right border of that line and the left
border of the next, which are zero, so a frame is stored as one contiguous run with its junk rows masked to zero. What
the run leaves over are the first ``W + 1`` and the last ``W - 1`` pixels of the frame: ``2*W`` pixels of border.

Nothing here knows whether an extent is a Python int or a value of a running kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudnn_fused.kernels.arguments import KernelArgument

TAPS = 3  # in each direction
HALO = TAPS - 1  # how many pixels or frames a padded extent has more than an output's
TAP_ROWS = TAPS * TAPS  # (dt, r): the taps along W are shifts of one shared-memory tile
MAX_PIXELS = 2**31 - 2**20  # pixel numbers are 32-bit, and loops step past the last; element offsets are 64-bit

Extent = Any  # int on the host, cutlass.Int32 in a kernel


@dataclass(frozen=True)
class PaddedGrid(KernelArgument):
    """The extents of a padded tensor, and where things lie in it."""

    n: Extent
    t: Extent
    h: Extent
    w: Extent

    @classmethod
    def around(cls, n: Extent, t: Extent, h: Extent, w: Extent) -> PaddedGrid:
        """The grid whose outputs have the extents given."""
        return cls(n, t + HALO, h + HALO, w + HALO)

    @property
    def out_t(self) -> Extent:
        return self.t - HALO

    @property
    def out_h(self) -> Extent:
        return self.h - HALO

    @property
    def out_w(self) -> Extent:
        return self.w - HALO

    @property
    def frame_pixels(self) -> Extent:
        return self.h * self.w

    @property
    def pixels(self) -> Extent:
        return self.n * self.t * self.frame_pixels

    @property
    def frame_rows(self) -> Extent:
        """Rows of one output frame, junk included."""
        return self.out_h * self.w

    def window(self, n: Extent, t: Extent) -> Extent:
        """The first pixel of frame ``t`` of sample ``n``, which lies under row 0 of that output frame."""
        return (n * self.t + t) * self.frame_pixels

    def tap_shift(self, dt: Extent, r: Extent) -> Extent:
        """How far the pixels of tap ``(dt, r, 0)`` lie behind those of tap ``(0, 0, 0)``."""
        return (dt * self.h + r) * self.w

    # Places of a row in the output layouts. ``frame`` numbers output frames: n*(T-2) + t.

    def contiguous_pixel(self, frame: Extent, ho: Extent, wo: Extent) -> Extent:
        """In ``[N, T-2, H-2, W-2]``; of rows that are not junk."""
        return (frame * self.out_h + ho) * self.out_w + wo

    def padded_pixel(self, n: Extent, t: Extent, ho: Extent, wo: Extent) -> Extent:
        """In ``[N, T, H, W]``; of every row, so that rows side by side stay side by side."""
        return self.window(n, t + HALO) + (ho + 1) * self.w + wo + 1

    def bottom_right_pixel(self, frame: Extent, ho: Extent, wo: Extent) -> Extent:
        """In ``[N, T-2, H-1, W-1]``; of rows with ``wo <= W-2``, the last of which is the zero column."""
        return (frame * (self.out_h + 1) + ho) * (self.out_w + 1) + wo

    # What the rows of a padded output leave over.

    @property
    def frame_border(self) -> Extent:
        """Pixels of a current frame that no row falls on."""
        return self.w + self.w

    @property
    def border_gap(self) -> Extent:
        """How many pixels lie between the border at a frame's start, 0..W, and that at its end."""
        return self.frame_rows

    @property
    def sample_filler(self) -> Extent:
        """Pixels of a sample that no row falls on: the two leading frames, and the border of each current one."""
        return HALO * self.frame_pixels + self.out_t * self.frame_border


def too_many_pixels(grid: PaddedGrid) -> str | None:
    """Why the pixels of a padded tensor cannot be numbered in 32 bits; None if they can."""
    if grid.pixels <= MAX_PIXELS:
        return None
    return (
        f"the padded tensor has {grid.n}x{grid.t}x{grid.h}x{grid.w} = {grid.pixels} pixels, and the kernels number at "
        f"most {MAX_PIXELS}; split the batch"
    )
