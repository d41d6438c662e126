"""The Blackwell backend: which tile serves a convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cudnn_fused import hardware_quirks
from cudnn_fused.kernels.conv3d_sm100 import Conv3dSm100
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import CONV_OPERANDS, Kernels, Machine, compiled
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.schedule import TileOrder
from cudnn_fused.kernels.tiling_sm100 import PAIR, TILES, TileConfig, choose, least_units, tiles_for
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

    def select(
        self, spec: Conv3dSpec, tiles: tuple[TileConfig, ...], grid: PaddedGrid, machine: Machine
    ) -> tuple[TileConfig, int, int]:
        """The tile, the split of the reduction, and how many clusters are launched at most."""
        tile, split = choose(spec, tiles, grid, machine.clusters)
        return tile, split, machine.clusters[PAIR * split]

    def convolution(self, spec: Conv3dSpec, grid: PaddedGrid, machine: Machine) -> tuple[Any, tuple[int, ...]]:
        """The launcher of a convolution and its arguments behind the addresses.

        All tiles of an operation are compiled together, so that no later shape has to wait for another.
        """
        tiles = self.tiles(spec, machine)
        launchers = {
            tile: compiled(machine.arch, Conv3dSm100, spec, tile, addresses=len(CONV_OPERANDS), numbers=2)
            for tile in tiles
        }
        tile, split, most_clusters = self.select(spec, tiles, grid, machine)
        clusters = min(TileOrder(spec, tile.tile_m, tile.tile_n).count(grid), most_clusters)
        return launchers[tile], (grid.n, grid.t, grid.h, grid.w, split, clusters)


class OneConfiguration(Sm100Kernels):
    """The backend with one tile and split for every convolution, on one cluster, which takes all tiles in turn.

    Compiling raises NotImplementedError for an operation that they cannot serve.
    """

    def __init__(self, tile: TileConfig, split: int, machine: Machine | None = None) -> None:
        super().__init__(machine, shared_taps=tile.shared_taps)
        self.tile, self.split = tile, split

    def tiles(self, spec: Conv3dSpec, machine: Machine) -> tuple[TileConfig, ...]:
        if self.tile.problem(spec) is not None or self.split > least_units(spec):
            raise NotImplementedError(f"{self.tile} in {self.split} cannot serve {spec}")
        return (self.tile,)

    def select(
        self, spec: Conv3dSpec, tiles: tuple[TileConfig, ...], grid: PaddedGrid, machine: Machine
    ) -> tuple[TileConfig, int, int]:
        return self.tile, self.split, 1


def configurations(*, shared_taps: bool, machine: Machine | None = None) -> Iterator[tuple[str, OneConfiguration]]:
    """All that may be chosen for some operation, by name."""
    for tile in TILES:
        for split in tile.splits:
            name = f"{tile.tile_m}x{tile.tile_n}" + (f" in {split}" if split > 1 else "")
            yield name, OneConfiguration(replace(tile, shared_taps=shared_taps), split, machine)
