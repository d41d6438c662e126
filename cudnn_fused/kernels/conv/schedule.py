"""Which tile of a convolution lies where: tile numbers, decoded in a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.spec import Conv3dSpec, frame_tiles
from cudnn_fused.kernels.device import divide


@dataclass(frozen=True)
class TileCoord:
    """Where a tile lies. Values of a running kernel."""

    n: Int32
    t: Int32
    row: Int32  # first row in its frame
    channel: Int32  # first output channel
    first_unit: Int32  # of the share of the reduction
    end_unit: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Tiles of ``tile_m`` rows by ``tile_n`` output channels, numbered in the order in which they are worked on.

    The channels vary fastest, then the frames: the tiles that run at a time read the same input frames, which then
    come from device memory once and not three times.
    """

    spec: Conv3dSpec
    tile_m: int
    tile_n: int

    def count(self, grid: PaddedGrid) -> Int32:
        """All tiles."""
        return self.spec.tiles(self.tile_m, self.tile_n, grid)

    def place(self, tile: Int32, grid: PaddedGrid, share: Int32, shares: Int32) -> TileCoord:
        """Decode a tile number, with share ``share`` of ``shares`` of its reduction."""
        spec = self.spec
        m_tile, n_tile = divide(tile, Int32(spec.n_tiles(self.tile_n)))
        column, t = divide(m_tile, grid.out_t)
        n, first = divide(column, frame_tiles(self.tile_m, grid))
        skipped = Int32(0)
        if spec.leading_zero_frames:
            # Frames then differ in their work; so a CTA must not get the same frame in every turn.
            t = divide(t + first, grid.out_t)[1]
            # Tap frames t + dt < leading_zero_frames hold zeros.
            skipped = spec.skipped_units(cutlass.max(spec.leading_zero_frames - t, 0))
        remaining = spec.units - skipped
        return TileCoord(
            n=n,
            t=t,
            row=first * self.tile_m,
            channel=n_tile * self.tile_n,
            first_unit=skipped + remaining * share // shares,
            end_unit=skipped + remaining * (share + 1) // shares,
        )
