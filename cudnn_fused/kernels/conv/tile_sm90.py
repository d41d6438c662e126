"""How the Hopper convolution cuts its work into tiles: what a tile may be, and which tile and split suit a problem.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.select import Clusters, Tiling
from cudnn_fused.kernels.conv.spec import ELEMENT_BYTES, K_STEP, ROW_BYTES, SWIZZLE_ROWS, Conv3dSpec

CHUNK_CHANNELS = 8  # of a 16-byte access
WARPGROUP = 128
CONSUMERS = 2  # warpgroups that multiply
M_BLOCK = 64  # rows of one wgmma
MAX_BOX_ROWS = 256  # of a TMA box
MAX_N = 192  # of a wgmma: with 256 columns and four warpgroups ptxas finds too few registers
HALF_BLOCK_CHUNKS = 4  # of a row that one stmatrix stores when a CTA finishes half a block
MAX_ACCUMULATORS = 160  # registers of a consumer thread that leave enough for everything else
SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 8


@dataclass(frozen=True)
class TileConfig:
    """How a CTA's tile is cut up. ``m_blocks`` and ``n_blocks`` are the accumulator blocks of one consumer."""

    m_blocks: int
    n_blocks: int
    n_block: int
    a_stages: int
    b_stages: int

    @property
    def consumer_rows(self) -> int:
        return self.m_blocks * M_BLOCK

    @property
    def tile_m(self) -> int:
        return CONSUMERS * self.consumer_rows

    @property
    def tile_n(self) -> int:
        return self.n_blocks * self.n_block

    @property
    def block_registers(self) -> int:
        """Accumulators that a thread holds of one block."""
        return M_BLOCK * self.n_block // WARPGROUP

    def a_rows(self, spec: Conv3dSpec) -> int:
        """Pixels of a stage: the tile and its halo, in whole swizzle patterns."""
        return math.ceil((self.tile_m + spec.w_taps - 1) / SWIZZLE_ROWS) * SWIZZLE_ROWS

    def a_boxes(self, spec: Conv3dSpec) -> int:
        """TMA loads of a stage of activations: equal boxes that begin where a swizzle pattern does."""
        patterns = self.a_rows(spec) // SWIZZLE_ROWS
        return next(
            boxes
            for boxes in range(1, patterns + 1)
            if patterns % boxes == 0 and self.a_rows(spec) // boxes <= MAX_BOX_ROWS
        )

    def a_stage_bytes(self, spec: Conv3dSpec) -> int:
        return self.a_rows(spec) * ROW_BYTES

    @property
    def b_stage_bytes(self) -> int:
        return self.n_block * ROW_BYTES

    @property
    def staging_bytes(self) -> int:
        return self.tile_m * self.tile_n * ELEMENT_BYTES

    def shared_bytes(self, spec: Conv3dSpec) -> int:
        barriers = BARRIER_BYTES * (2 * (self.a_stages + self.b_stages) + 2 * CONSUMERS * (1 + self.split_levels))
        stages = self.a_stages * self.a_stage_bytes(spec) + self.b_stages * self.b_stage_bytes
        return stages + self.staging_bytes + barriers

    def unit_cycles(self, spec: Conv3dSpec) -> int:
        """Tensor-core cycles of one unit of the reduction: a wgmma of 64 x n x 16 takes n / 2."""
        wgmmas = CONSUMERS * self.m_blocks * self.n_blocks * sum(spec.unit_steps) * spec.w_taps
        return wgmmas * self.n_block // 2

    @property
    def row_chunks(self) -> int:
        """16-byte chunks of a staged row."""
        return self.tile_n // CHUNK_CHANNELS

    @property
    def lanes(self) -> int:
        """Lanes of the epilogue that share a row: they load that many chunks side by side."""
        return math.gcd(self.row_chunks, 8)

    @property
    def split_levels(self) -> int:
        """How often a consumer's rows can be halved among the CTAs of a cluster: by block, then by half a block.

        The rows of half a block are stored four chunks at a time, so that their width has to be a multiple of that.
        """
        return (self.m_blocks == 2) + (self.row_chunks % HALF_BLOCK_CHUNKS == 0)

    @property
    def splits(self) -> tuple[int, ...]:
        return tuple(1 << level for level in range(self.split_levels + 1))

    def can_implement(self, spec: Conv3dSpec) -> str | None:
        """Why this tile cannot serve the operation, or None if it can."""
        if self.m_blocks not in (1, 2):
            return "a consumer holds one or two blocks of 64 rows"
        if self.n_block % K_STEP or not 0 < self.n_block <= MAX_N:
            return f"a wgmma computes a multiple of {K_STEP}, at most {MAX_N}, channels"
        if spec.co % self.tile_n:
            return f"{spec.co} output channels are no multiple of {self.tile_n}"
        if spec.epilogue.statistic and self.tile_n != spec.co:
            return "a fused norm needs a pixel's whole channel row in one CTA"
        if self.m_blocks * self.n_blocks * self.block_registers > MAX_ACCUMULATORS:
            return "the accumulators leave too few registers"
        if min(self.a_stages, self.b_stages) < 2:
            return "a ring needs two stages"
        if self.shared_bytes(spec) > SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory are more than {SHARED_BYTES}"
        return None


# Tiles in order of preference: at equal cost the first is taken.
TILES = (
    TileConfig(m_blocks=2, n_blocks=1, n_block=160, a_stages=2, b_stages=4),
    TileConfig(m_blocks=2, n_blocks=1, n_block=128, a_stages=2, b_stages=5),
    TileConfig(m_blocks=1, n_blocks=2, n_block=160, a_stages=2, b_stages=5),
)

# The cost model, in tensor-core cycles.
TILE_OVERHEAD = 2500  # filling the pipeline, draining it and staging
SPLIT_OVERHEAD = 2500  # one exchange of partial sums
EPILOGUE_TAIL = 4000  # storing the last tile, which nothing hides


@dataclass(frozen=True)
class Sm90Tiling(Tiling[TileConfig]):
    """Which tile and split serve a problem on Hopper."""

    tiles: tuple[TileConfig, ...] = TILES

    def preferred(self, spec: Conv3dSpec, legal: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
        """A tile as wide as the output is best: it reads activations once, and a norm needs it. Where none is, tall
        tiles move less through shared memory, and two widths of them cut most frames into few waves.
        """
        whole = tuple(tile for tile in legal if tile.tile_n == spec.co)
        return whole or tuple(tile for tile in legal if tile.m_blocks > 1) or legal

    def cluster_size(self, split: int) -> int:
        return split

    def cost(self, spec: Conv3dSpec, tile: TileConfig, split: int, grid: PaddedGrid, clusters: Clusters) -> float:
        """Waves of tiles, each as long as its share of the reduction."""
        waves = self.waves(spec, tile, split, grid, clusters)
        cycles = spec.units * tile.unit_cycles(spec) * spec.computed_share(grid.out_t)
        exchange = SPLIT_OVERHEAD * math.log2(split)
        return waves * (cycles / split + TILE_OVERHEAD + exchange) + EPILOGUE_TAIL
