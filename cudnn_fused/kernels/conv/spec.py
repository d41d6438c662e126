"""What a convolution kernel computes, whatever the architecture: the walk over taps and channels.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.types import ELEMENT_BYTES
from cudnn_fused.window import DENSE_3X3X3, Window

K_STEP = 16  # channels of one matrix instruction
K_CHUNK = 64  # channels of a pipeline stage: one 128-byte swizzled row
ROW_BYTES = K_CHUNK * ELEMENT_BYTES
SWIZZLE_ROWS = 8  # the swizzle pattern repeats every 1024 bytes
SWIZZLE_BYTES = SWIZZLE_ROWS * ROW_BYTES
DESCRIPTOR_UNIT = 16  # addresses in matrix descriptors, and strides in tensor maps, count 16-byte units


def frame_tiles(tile_m: int, grid: PaddedGrid) -> Any:
    """Tiles of ``tile_m`` rows of one frame; on the host or in a kernel."""
    return (grid.frame_rows + (tile_m - 1)) // tile_m


@dataclass(frozen=True)
class Conv3dSpec:
    """What a kernel computes, apart from N, T, H and W."""

    ci: int
    epilogue: Epilogue
    window: Window = DENSE_3X3X3
    leading_zero_frames: int = 0
    absent_frames: int = 0  # of those, how many are not even in memory
    # Pixels of 32 bytes: the taps along W are adjacent in memory, so they are channels of one long pixel.
    joins_w_taps: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.absent_frames <= self.leading_zero_frames <= self.window.history:
            raise ValueError(
                f"a {self.window} window cannot have {self.leading_zero_frames} leading zero frames, "
                f"{self.absent_frames} of them absent"
            )

    @property
    def co(self) -> int:
        return self.epilogue.channels

    def grid(self, n: Any, t: Any, h: Any, w: Any) -> PaddedGrid:
        """The padded linear grid of an input with these extents in memory."""
        return PaddedGrid(n, t, h, w, self.window, self.absent_frames)

    def n_tiles(self, tile_n: int) -> int:
        """Tiles of ``tile_n`` output channels."""
        return -(-self.co // tile_n)

    def tiles(self, tile_m: int, tile_n: int, grid: PaddedGrid) -> Any:
        """All tiles of ``tile_m`` rows of a frame by ``tile_n`` channels; on the host or in a kernel."""
        return grid.n * grid.out_t * frame_tiles(tile_m, grid) * self.n_tiles(tile_n)

    @property
    def gemm_channels(self) -> int:
        """Channels that one tap contributes to the reduction."""
        return self.window.kw * self.ci if self.joins_w_taps else self.ci

    @property
    def w_taps(self) -> int:
        """Taps that read the same pixels, each shifted by a pixel."""
        return 1 if self.joins_w_taps else self.window.kw

    @property
    def taps(self) -> int:
        return self.window.tap_rows * self.w_taps

    @property
    def chunk_steps(self) -> tuple[int, ...]:
        """K16 steps of each 64-channel chunk. Channels that do not exist are not multiplied."""
        return tuple(
            math.ceil(min(K_CHUNK, self.gemm_channels - first) / K_STEP)
            for first in range(0, self.gemm_channels, K_CHUNK)
        )

    @property
    def unit_steps(self) -> tuple[int, ...]:
        """The chunks of one *unit*, the granule in which the reduction is walked and split.

        A unit is one chunk where all chunks are alike, otherwise a whole tap row.
        """
        return self.chunk_steps[:1] if len(set(self.chunk_steps)) == 1 else self.chunk_steps

    @property
    def tap_row_units(self) -> int:
        return len(self.chunk_steps) // len(self.unit_steps)

    @property
    def units(self) -> int:
        """Units of the whole reduction."""
        return self.window.tap_rows * self.tap_row_units

    # Where a unit of the reduction lies: a number, or a value of a running kernel.

    def tap_row(self, unit: Any) -> tuple[Any, Any]:
        """Its taps' place along T and H, ``(dt, r)``."""
        tap_row = unit // self.tap_row_units
        return tap_row // self.window.kh, tap_row % self.window.kh

    def first_tap(self, unit: Any) -> Any:
        """The number of its first tap."""
        return (unit // self.tap_row_units) * self.w_taps

    def first_channel(self, unit: Any) -> Any:
        """Its first input channel."""
        return (unit % self.tap_row_units) * K_CHUNK

    def computed_share(self, out_t: int) -> float:
        """How much of the reduction is left, over ``out_t`` frames, without the taps on frames of zeros."""
        skipped = sum(max(self.leading_zero_frames - t, 0) for t in range(out_t))
        return 1 - skipped / (self.window.kt * out_t)

    def skipped_units(self, zero_frames: Any) -> Any:
        """Units at the front of the reduction that ``zero_frames`` frames of zeros make superfluous."""
        return zero_frames * (self.window.kh * self.tap_row_units)

    @property
    def weight_row(self) -> int:
        """Elements of a packed weight from one output channel to the next."""
        if self.joins_w_taps:
            return (self.window.taps + 1) * self.ci
        return self.taps * self.weight_tap

    @property
    def weight_tap(self) -> int:
        """Elements of a packed weight from one tap to the next."""
        return self.gemm_channels if self.joins_w_taps else len(self.chunk_steps) * K_CHUNK
