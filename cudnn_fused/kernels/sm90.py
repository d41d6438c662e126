"""The Hopper backend: which tile and split of the reduction serve a convolution."""

from __future__ import annotations

from typing import Any

from cudnn_fused.kernels.conv3d_sm90 import Conv3dSm90
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import CONV_OPERANDS, Kernels, Machine, compiled
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.schedule import TileOrder
from cudnn_fused.kernels.tiling_sm90 import choose, tiles_for
from cudnn_fused.targets import SM90


class Sm90Kernels(Kernels):
    """The backend of Hopper GPUs."""

    target = SM90

    def convolution(self, spec: Conv3dSpec, grid: PaddedGrid, machine: Machine) -> tuple[Any, tuple[int, ...]]:
        """The launcher of a convolution and its arguments behind the addresses.

        All tiles of an operation are compiled together, so that no later shape has to wait for another.
        """
        tiles = tiles_for(spec)
        launchers = {
            tile: compiled(machine.arch, Conv3dSm90, spec, tile, addresses=len(CONV_OPERANDS), numbers=2)
            for tile in tiles
        }
        tile, split = choose(spec, tiles, grid, machine.clusters)
        tiles_in_all = TileOrder(spec, tile.tile_m, tile.tile_n).count(grid)
        clusters = min(tiles_in_all, machine.clusters[split])
        return launchers[tile], (grid.n, grid.t, grid.h, grid.w, split, clusters)
