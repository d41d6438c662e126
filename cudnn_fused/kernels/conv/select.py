"""Which tile and split of the reduction serve a problem: what is alike on all architectures.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.spec import Conv3dSpec


class Tile(Protocol):
    """How a kernel cuts its work: what every architecture's ``TileConfig`` has."""

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""

    @property
    def tile_n(self) -> int:
        """Output channels of a tile."""

    @property
    def splits(self) -> tuple[int, ...]:
        """Into how many shares the reduction of a tile may be split."""

    def can_implement(self, spec: Conv3dSpec) -> str | None:
        """Why this tile cannot serve the convolution, or None if it can."""


TileT = TypeVar("TileT", bound=Tile)


class Choice(NamedTuple):
    """How a problem is run."""

    tile: Tile
    split: int
    clusters: int


@dataclass(frozen=True)
class Tiling(Generic[TileT]):
    """The tiles of an architecture, in order of preference: at equal cost the first is taken."""

    tiles: tuple[TileT, ...]

    def can_implement(self, spec: Conv3dSpec) -> str | None:
        """Why no tile can serve the convolution, or None if one can."""
        if not spec.window.is_dense:
            return f"the padded linear grid has no windows {spec.window}"
        if self.legal(spec):
            return None
        return "; ".join(dict.fromkeys(filter(None, (tile.can_implement(spec) for tile in self.tiles))))

    def legal(self, spec: Conv3dSpec) -> tuple[TileT, ...]:
        """The tiles that can serve the convolution."""
        return tuple(tile for tile in self.tiles if tile.can_implement(spec) is None)

    def preferred(self, spec: Conv3dSpec, legal: tuple[TileT, ...]) -> tuple[TileT, ...]:
        """Those of them that are worth compiling."""
        return legal

    def candidates(self, spec: Conv3dSpec) -> tuple[TileT, ...]:
        """The tiles to choose from."""
        return self.preferred(spec, self.legal(spec))

    def resident_clusters(self, split: int, multiprocessors: int) -> int:
        """Clusters of ``split`` shares that run at a time, one CTA to a multiprocessor."""
        raise NotImplementedError

    def most_shares(self, spec: Conv3dSpec, multiprocessors: int) -> int:
        """The largest split that the convolution and the device admit."""
        raise NotImplementedError

    def cost(self, spec: Conv3dSpec, tile: TileT, split: int, grid: PaddedGrid, multiprocessors: int) -> float:
        """Estimated cycles of a launch."""
        raise NotImplementedError

    def count(self, spec: Conv3dSpec, tile: TileT, grid: PaddedGrid) -> int:
        """Tiles of a launch."""
        return spec.tiles(tile.tile_m, tile.tile_n, grid)

    def waves(self, spec: Conv3dSpec, tile: TileT, split: int, grid: PaddedGrid, multiprocessors: int) -> int:
        """How many tiles a cluster works on, one after the other."""
        return math.ceil(self.count(spec, tile, grid) / self.resident_clusters(split, multiprocessors))

    def choose(self, spec: Conv3dSpec, grid: PaddedGrid, multiprocessors: int) -> Choice:
        """The cheapest tile and split of the reduction, and how many clusters to launch."""
        most = self.most_shares(spec, multiprocessors)
        options = [(tile, split) for tile in self.candidates(spec) for split in tile.splits if split <= most]
        tile, split = min(options, key=lambda option: self.cost(spec, *option, grid, multiprocessors))
        clusters = min(self.count(spec, tile, grid), self.resident_clusters(split, multiprocessors))
        return Choice(tile, split, clusters)
