"""Which tile of a convolution lies where: tile numbers, decoded in a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.device import divide
from cudnn_fused.kernels.padded_grid import TAP_ROWS, TAPS, Extent, PaddedGrid


@dataclass(frozen=True)
class Place:
    """Where a tile lies. Values of a running kernel."""

    n: Int32
    t: Int32
    row: Int32  # first row in its frame
    channel: Int32  # first output channel
    first_unit: Int32  # of the share of the reduction
    end_unit: Int32


@dataclass(frozen=True)
class TileOrder:
    """Tiles of ``tile_m`` rows by ``tile_n`` output channels, numbered in the order in which they are worked on.

    The channels vary fastest, then the frames: the tiles that run at a time read the same input frames, which then
    come from device memory once and not three times.
    """

    spec: Conv3dSpec
    tile_m: int
    tile_n: int

    @property
    def n_tiles(self) -> int:
        return self.spec.co // self.tile_n

    def frame_tiles(self, grid: PaddedGrid) -> Extent:
        return (grid.frame_rows + (self.tile_m - 1)) // self.tile_m

    def count(self, grid: PaddedGrid) -> Extent:
        """All tiles; on the host as well."""
        return grid.n * grid.out_t * self.frame_tiles(grid) * self.n_tiles

    def place(self, tile: Int32, grid: PaddedGrid, share: Int32, shares: Int32) -> Place:
        """Decode a tile number, with share ``share`` of ``shares`` of its reduction."""
        spec = self.spec
        m_tile, n_tile = divide(tile, Int32(self.n_tiles))
        column, t = divide(m_tile, grid.out_t)
        n, first = divide(column, self.frame_tiles(grid))
        units, skipped = TAP_ROWS * spec.tap_row_units, Int32(0)
        if spec.leading_zero_frames:
            # Frames then differ in their work; none shall meet the same CTA in every turn.
            t = divide(t + first, grid.out_t)[1]
            # Tap frames t + dt < leading_zero_frames hold zeros.
            skipped = cutlass.max(spec.leading_zero_frames - t, 0) * (TAPS * spec.tap_row_units)
        remaining = units - skipped
        return Place(
            n=n,
            t=t,
            row=first * self.tile_m,
            channel=n_tile * self.tile_n,
            first_unit=skipped + remaining * share // shares,
            end_unit=skipped + remaining * (share + 1) // shares,
        )
