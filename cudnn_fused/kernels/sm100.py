"""The Blackwell backend: which tile serves a convolution."""

from __future__ import annotations

from typing import Any

from cudnn_fused import hardware_quirks
from cudnn_fused.kernels.conv3d_sm100 import Conv3dSm100
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import CONV_OPERANDS, Kernels, Machine, compiled
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.schedule import TileOrder
from cudnn_fused.kernels.tiling_sm100 import PAIR, TileConfig, choose, tiles_for
from cudnn_fused.targets import SM100


class Sm100Kernels(Kernels):
    """The backend of SM100 and SM103 GPUs.

    ``shared_taps`` is that of :class:`.tiling_sm100.TileConfig`. None lets taps share their pixels on models of GPUs
    where the doctor has found that right, and on no others.
    """

    target = SM100

    def __init__(self, machine: Machine | None = None, *, shared_taps: bool | None = None) -> None:
        super().__init__(machine)
        self.shared_taps = shared_taps

    def tiles(self, spec: Conv3dSpec, machine: Machine) -> tuple[TileConfig, ...]:
        """The tiles to choose from."""
        shared_taps = hardware_quirks.shared_taps(machine.model) if self.shared_taps is None else self.shared_taps
        return tiles_for(spec, shared_taps=shared_taps is True)

    def convolution(self, spec: Conv3dSpec, grid: PaddedGrid, machine: Machine) -> tuple[Any, tuple[int, ...]]:
        """The launcher of a convolution and its arguments behind the addresses.

        All tiles of an operation are compiled together, so that no later shape has to wait for another.
        """
        tiles = self.tiles(spec, machine)
        launchers = {
            tile: compiled(machine.arch, Conv3dSm100, spec, tile, addresses=len(CONV_OPERANDS), numbers=2)
            for tile in tiles
        }
        tile, split = choose(spec, tiles, grid, machine.clusters)
        count = TileOrder(spec, tile.tile_m, tile.tile_n).count(grid)
        clusters = min(count, machine.clusters[PAIR * split])
        return launchers[tile], (grid.n, grid.t, grid.h, grid.w, split, clusters)
