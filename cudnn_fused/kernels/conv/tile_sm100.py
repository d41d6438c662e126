"""How the Blackwell convolution cuts its work into tiles: what a tile may be, and which one suits a problem.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.select import Clusters, Tiling
from cudnn_fused.kernels.conv.spec import ELEMENT_BYTES, ROW_BYTES, SWIZZLE_ROWS, Conv3dSpec

PAIR = 2  # CTAs that multiply together
BLOCK_ROWS = 128  # rows of a block in each CTA of the pair: the lanes of its tensor memory
BLOCK_M = PAIR * BLOCK_ROWS
N_GRANULE = 32  # channels of a matrix instruction of a pair come in multiples of this
MAX_N = 256
MAX_BOX_ROWS = 256  # of a TMA box
TMEM_COLUMNS = 512
BARRIER_BYTES = 8
FP32_BYTES = 4
TMEM_POINTER_BYTES = 4
WARP = 32
EPILOGUE_WARPS = BLOCK_ROWS // WARP
SLOT_GAP = 16  # bytes behind a slot: then 16-byte stores of eight neighbouring lanes meet every bank once
SHARED_BYTES = 227 * 1024 - 1024  # of a CTA, less what the compiler reserves and aligns


@dataclass(frozen=True)
class TileConfig:
    """How a pair's tile is cut up: ``m_blocks`` by ``n_blocks`` blocks of 256 rows by ``n_block`` output channels.

    Blocks side by side are accumulated from one load of the activations, blocks below each other from one load of the
    weights. With ``shared_taps`` the three taps along W read one tile of pixels at a distance of a row each; otherwise
    every tap has a tile of its own, which begins where a swizzle pattern does.
    """

    m_blocks: int
    n_blocks: int
    n_block: int
    a_stages: int
    b_stages: int
    shared_taps: bool = False
    max_split: int = 1  # pairs of a cluster that may share the reduction of a tile

    @property
    def blocks(self) -> int:
        return self.m_blocks * self.n_blocks

    @property
    def cta_rows(self) -> int:
        """Rows of the tile that belong to one CTA of the pair."""
        return self.m_blocks * BLOCK_ROWS

    @property
    def tile_m(self) -> int:
        return PAIR * self.cta_rows

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
        return self.cta_rows + (spec.w_taps - 1 if self.shares_taps(spec) else 0)

    def a_boxes(self, spec: Conv3dSpec) -> int:
        """TMA loads of a stage of activations, one below the other."""
        return math.ceil(self.a_rows(spec) / MAX_BOX_ROWS)

    def a_box_rows(self, spec: Conv3dSpec) -> int:
        """Pixels of one of them. A box that another one follows ends where a swizzle pattern does."""
        boxes, rows = self.a_boxes(spec), self.a_rows(spec)
        return rows if boxes == 1 else math.ceil(rows / boxes / SWIZZLE_ROWS) * SWIZZLE_ROWS

    def a_stage_bytes(self, spec: Conv3dSpec) -> int:
        """Room for a stage: whole swizzle patterns."""
        rows = self.a_boxes(spec) * self.a_box_rows(spec)
        return math.ceil(rows / SWIZZLE_ROWS) * SWIZZLE_ROWS * ROW_BYTES

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
        return (TMEM_COLUMNS - self.blocks * self.staged_columns) // self.n_block

    @property
    def splits(self) -> tuple[int, ...]:
        """Into how many shares the reduction may be split: each gets whole warps' rows to finish."""
        return tuple(split for split in (1, 2, 4) if split <= self.max_split)

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next: a thread's block of finished channels, and a gap."""
        return self.n_block * ELEMENT_BYTES + SLOT_GAP

    @property
    def exchange_bytes(self) -> int:
        """Shared memory of the epilogue, in equal parts for the warps that finish rows in a CTA.

        A part has the slots of a warp and, in the same place, what the other shares have summed of its rows, one block
        at a time. Half as many warps in twice as many shares have parts of twice the size, so the most shares need the
        most room.
        """
        sums = (self.max_split - 1) * (BLOCK_ROWS // self.max_split) * self.n_block * FP32_BYTES
        return max(BLOCK_ROWS * self.slot_bytes, sums)

    def shared_bytes(self, spec: Conv3dSpec) -> int:
        barriers = 2 * BARRIER_BYTES * (self.a_stages + self.b_stages + self.accumulators + EPILOGUE_WARPS)
        stages = self.a_stages * self.a_stage_bytes(spec) + self.b_stages * self.b_stage_bytes
        return stages + self.exchange_bytes + barriers + TMEM_POINTER_BYTES

    def has_tail(self, spec: Conv3dSpec) -> bool:
        """Whether the tile is one block that is wider than the output, by less than an instruction's granule.

        The weights' map fills what it lacks with zeros; the epilogue leaves it alone.
        """
        return self.n_blocks == 1 and 0 < self.n_block - spec.co < N_GRANULE

    def block_channels(self, spec: Conv3dSpec) -> int:
        """Output channels of a block that exist."""
        return min(self.n_block, spec.co)

    def can_implement(self, spec: Conv3dSpec) -> str | None:
        """Why this tile cannot serve the operation, or None if it can."""
        if self.n_block % N_GRANULE or not 0 < self.n_block <= MAX_N:
            return f"a matrix instruction computes a multiple of {N_GRANULE}, at most {MAX_N}, channels"
        if self.b_rows % SWIZZLE_ROWS:
            return "half a block of weights is no whole number of swizzle patterns"
        if spec.co % self.tile_n and not self.has_tail(spec):
            return f"{spec.co} output channels are no multiple of {self.tile_n}"
        if spec.epilogue.statistic and not (self.tile_n == spec.co or self.has_tail(spec)):
            return "a fused norm needs a pixel's whole channel row in one CTA"
        if self.accumulators < max(self.blocks, 2):
            return f"{self.blocks} blocks of {self.n_block} columns do not fit in tensor memory, and twice if one"
        if self.max_split not in (1, 2, EPILOGUE_WARPS):
            return "the warps of an epilogue cannot be shared out evenly"
        if min(self.a_stages, self.b_stages) < 2:
            return "a ring needs two stages"
        if self.shared_bytes(spec) > SHARED_BYTES:
            return f"{self.shared_bytes(spec)} bytes of shared memory are more than {SHARED_BYTES}"
        return None


# Tiles in order of preference: at equal cost the first is taken.
TILES = (
    TileConfig(m_blocks=1, n_blocks=2, n_block=160, a_stages=4, b_stages=11),
    TileConfig(m_blocks=2, n_blocks=1, n_block=160, a_stages=3, b_stages=8),
    TileConfig(m_blocks=1, n_blocks=1, n_block=160, a_stages=4, b_stages=9, max_split=4),
)

# The cost model, in cycles of a multiprocessor. The products take a pair half a cycle for each channel of a step; what
# they read comes out of the L2 cache at the rate below. Both are nominal figures: no card has been timed.
STEP_CYCLES_PER_CHANNEL = 0.5
L2_BYTES_PER_CYCLE = 40
TILE_OVERHEAD = 800  # draining the accumulators, if a tile takes them all
SPLIT_OVERHEAD = 2500  # exchanging what the shares of a tile have summed
LAUNCH_OVERHEAD = 6000  # filling the pipeline, and storing the last tile, which nothing hides


def tap_row_bytes(spec: Conv3dSpec, tile: TileConfig) -> int:
    """What a CTA loads for one tap row of a tile."""
    pixels = tile.a_loads(spec) * tile.a_rows(spec)
    weights = spec.w_taps * tile.n_blocks * tile.b_rows
    return (pixels + weights) * spec.gemm_channels * ELEMENT_BYTES


def tap_row_cycles(spec: Conv3dSpec, tile: TileConfig) -> float:
    """How long one tap row of a tile takes: its products, or its loads if these take longer."""
    products = spec.w_taps * sum(spec.chunk_steps) * tile.blocks * tile.n_block * STEP_CYCLES_PER_CHANNEL
    return max(products, tap_row_bytes(spec, tile) / L2_BYTES_PER_CYCLE)


@dataclass(frozen=True)
class Sm100Tiling(Tiling[TileConfig]):
    """Which tile and split serve a problem on Blackwell."""

    tiles: tuple[TileConfig, ...] = TILES

    @classmethod
    def loading(cls, *, shared_taps: bool) -> Sm100Tiling:
        """All tiles with this way of loading taps."""
        return cls(tuple(replace(tile, shared_taps=shared_taps) for tile in TILES))

    def cluster_size(self, split: int) -> int:
        return PAIR * split

    def most_shares(self, spec: Conv3dSpec) -> int:
        """Every share needs a unit of the reduction, also in the frame that skips as many taps as any does."""
        return spec.units - spec.skipped_units(spec.leading_zero_frames)

    def cost(self, spec: Conv3dSpec, tile: TileConfig, split: int, grid: PaddedGrid, clusters: Clusters) -> float:
        """Waves of tiles, each as long as its share of the tap rows."""
        waves = self.waves(spec, tile, split, grid, clusters)
        share = spec.window.tap_rows * spec.computed_share(grid.out_t) / split
        tap_rows = math.ceil(share * spec.tap_row_units) / spec.tap_row_units
        between = TILE_OVERHEAD * tile.blocks / tile.accumulators + SPLIT_OVERHEAD * (split > 1)
        return waves * (tap_rows * tap_row_cycles(spec, tile) + between) + LAUNCH_OVERHEAD
