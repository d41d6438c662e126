"""How the Blackwell convolution cuts its work into tiles: what a tile may be, and which one suits a problem.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_fused.kernels.conv3d_spec import ROW_BYTES, SWIZZLE_ROWS, Conv3dSpec
from cudnn_fused.kernels.padded_grid import HALO, TAP_ROWS, PaddedGrid

PAIR = 2  # CTAs that multiply together
CTA_ROWS = 128  # rows of the tile that one CTA of the pair holds: the lanes of its tensor memory
TILE_M = PAIR * CTA_ROWS
N_GRANULE = 32  # channels of a matrix instruction of a pair come in multiples of this
MAX_N = 256
TMEM_COLUMNS = 512
BARRIER_BYTES = 8
SHARED_BYTES = 227 * 1024 - 1024  # of a CTA, less what the compiler reserves and aligns


@dataclass(frozen=True)
class TileConfig:
    """How a pair's tile of 256 rows is cut up.

    ``n_blocks`` blocks of ``n_block`` output channels are accumulated from one load of the activations. With
    ``shared_taps`` the three taps along W read one tile of pixels at a distance of a row each; otherwise every tap
    has a tile of its own, which begins where a swizzle pattern does.
    """

    n_blocks: int
    n_block: int
    a_stages: int
    b_stages: int
    shared_taps: bool = True

    @property
    def tile_n(self) -> int:
        return self.n_blocks * self.n_block

    def shares_taps(self, spec: Conv3dSpec) -> bool:
        """Whether several taps read one tile of pixels."""
        return self.shared_taps and spec.w_taps > 1

    def a_loads(self, spec: Conv3dSpec) -> int:
        """Tiles of pixels per chunk of channels and tap row."""
        return 1 if self.shares_taps(spec) else spec.w_taps

    def a_rows(self, spec: Conv3dSpec) -> int:
        """Pixels of a stage of activations."""
        return CTA_ROWS + (HALO if self.shares_taps(spec) else 0)

    def a_stage_bytes(self, spec: Conv3dSpec) -> int:
        """Room for a stage: whole swizzle patterns."""
        return math.ceil(self.a_rows(spec) / SWIZZLE_ROWS) * SWIZZLE_ROWS * ROW_BYTES

    @property
    def b_rows(self) -> int:
        """Output channels of a stage of weights: each CTA of the pair holds half of a block."""
        return self.n_block // PAIR

    @property
    def b_stage_bytes(self) -> int:
        return self.b_rows * ROW_BYTES

    @property
    def staged_columns(self) -> int:
        """Columns of tensor memory for a block that was rounded to BF16: two channels in each."""
        return self.n_block // 2

    @property
    def accumulators(self) -> int:
        """Blocks that tensor memory holds beside the rounded ones of a tile."""
        return (TMEM_COLUMNS - self.n_blocks * self.staged_columns) // self.n_block

    def shared_bytes(self, spec: Conv3dSpec) -> int:
        barriers = 2 * BARRIER_BYTES * (self.a_stages + self.b_stages + self.accumulators)
        return self.a_stages * self.a_stage_bytes(spec) + self.b_stages * self.b_stage_bytes + barriers

    def problem(self, spec: Conv3dSpec) -> str | None:
        """Why this tile cannot serve the operation, or None if it can."""
        if self.n_block % N_GRANULE or not 0 < self.n_block <= MAX_N:
            return f"a matrix instruction computes a multiple of {N_GRANULE}, at most {MAX_N}, channels"
        if self.b_rows % SWIZZLE_ROWS:
            return "half a block of weights is no whole number of swizzle patterns"
        if spec.co % self.tile_n:
            return f"{spec.co} output channels are no multiple of {self.tile_n}"
        if spec.finish.post.norm and self.tile_n != spec.co:
            return "a fused norm needs a pixel's whole channel row in one CTA"
        if self.accumulators < max(self.n_blocks, 2):
            return f"{self.n_blocks} blocks of {self.n_block} columns do not fit in tensor memory, and twice if one"
        if min(self.a_stages, self.b_stages) < 2:
            return "a ring needs two stages"
        if self.shared_bytes(spec) > SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory are more than {SHARED_BYTES}"
        return None


# Tiles in order of preference: at equal cost the first is taken.
TILES = (
    TileConfig(n_blocks=2, n_block=160, a_stages=4, b_stages=14),
    TileConfig(n_blocks=1, n_block=160, a_stages=5, b_stages=12),
)

# The cost model, in tensor-core cycles.
STEP_CYCLES_PER_CHANNEL = 0.5  # a 256 x n x 16 product of a pair
TILE_OVERHEAD = 600  # from the last product of a tile to the first of the next
LAUNCH_OVERHEAD = 6000  # filling the pipeline, and storing the last tile, which nothing hides


def tiles_for(spec: Conv3dSpec, *, shared_taps: bool) -> tuple[TileConfig, ...]:
    """The tiles that can serve an operation."""
    ways = [TileConfig(tile.n_blocks, tile.n_block, tile.a_stages, tile.b_stages, shared_taps) for tile in TILES]
    return tuple(tile for tile in ways if tile.problem(spec) is None)


def resident_pairs(multiprocessors: int) -> int:
    """Pairs that run at a time, one CTA to a multiprocessor."""
    return max(1, multiprocessors // PAIR)


def cost(spec: Conv3dSpec, tile: TileConfig, grid: PaddedGrid, multiprocessors: int) -> float:
    """Estimated cycles of a launch: waves of tiles, each as long as its products."""
    tiles = grid.n * grid.out_t * math.ceil(grid.frame_rows / TILE_M) * (spec.co // tile.tile_n)
    waves = math.ceil(tiles / resident_pairs(multiprocessors))
    skipped = sum(max(spec.leading_zero_frames - t, 0) for t in range(grid.out_t)) / (3 * grid.out_t)
    steps = TAP_ROWS * spec.w_taps * sum(spec.chunk_steps) * (1 - skipped)
    return waves * (steps * tile.tile_n * STEP_CYCLES_PER_CHANNEL + TILE_OVERHEAD) + LAUNCH_OVERHEAD


def choose(spec: Conv3dSpec, tiles: Sequence[TileConfig], grid: PaddedGrid, multiprocessors: int) -> TileConfig:
    """The cheapest tile."""
    return min(tiles, key=lambda tile: cost(spec, tile, grid, multiprocessors))
