"""Which tile and split of the reduction serve a problem: what is alike on all architectures.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

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

Clusters: TypeAlias = Mapping[int, int]
"""How many clusters run on a device at a time, by the CTAs of a cluster."""


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

    def configurations(self, clusters: int = 1) -> Iterator[tuple[str, FixedTiling[TileT]]]:
        """Every tile and split that may be chosen for some convolution, by name, each on so many clusters."""
        for tile in self.tiles:
            for split in tile.splits:
                name = f"{tile.tile_m}x{tile.tile_n}" + (f" in {split}" if split > 1 else "")
                yield name, FixedTiling((tile,), self, split, clusters)

    def candidates(self, spec: Conv3dSpec) -> tuple[TileT, ...]:
        """The tiles to choose from."""
        return self.preferred(spec, self.legal(spec))

    def cluster_size(self, split: int) -> int:
        """CTAs of a cluster whose shares are ``split``."""
        raise NotImplementedError

    def most_shares(self, spec: Conv3dSpec) -> int:
        """The largest split that the convolution admits."""
        return max(split for tile in self.tiles for split in tile.splits)

    def cost(self, spec: Conv3dSpec, tile: TileT, split: int, grid: PaddedGrid, clusters: Clusters) -> float:
        """Estimated cycles of a launch."""
        raise NotImplementedError

    def waves(self, spec: Conv3dSpec, tile: TileT, split: int, grid: PaddedGrid, clusters: Clusters) -> int:
        """How many tiles a cluster works on, one after the other."""
        return math.ceil(spec.tiles(tile.tile_m, tile.tile_n, grid) / clusters[self.cluster_size(split)])

    def choose(self, spec: Conv3dSpec, grid: PaddedGrid, clusters: Clusters) -> Choice:
        """The cheapest tile and split of the reduction, and how many clusters to launch."""
        most = self.most_shares(spec)
        options = [
            (tile, split)
            for tile in self.candidates(spec)
            for split in tile.splits
            if split <= most and self.cluster_size(split) in clusters
        ]
        tile, split = min(options, key=lambda option: self.cost(spec, *option, grid, clusters))
        tiles = spec.tiles(tile.tile_m, tile.tile_n, grid)
        return Choice(tile, split, min(tiles, clusters[self.cluster_size(split)]))


@dataclass(frozen=True)
class FixedTiling(Tiling[TileT]):
    """One tile and split of another tiling for all that they can serve, on at most ``clusters`` clusters."""

    base: Tiling[TileT]
    split: int = 1
    clusters: int = 1

    def can_implement(self, spec: Conv3dSpec) -> str | None:
        (tile,) = self.tiles
        if self.split not in tile.splits or self.split > self.base.most_shares(spec):
            return f"the reduction has no {self.split} shares"
        return super().can_implement(spec)

    def choose(self, spec: Conv3dSpec, grid: PaddedGrid, clusters: Clusters) -> Choice:
        (tile,) = self.tiles
        return Choice(tile, self.split, min(spec.tiles(tile.tile_m, tile.tile_n, grid), self.clusters))
