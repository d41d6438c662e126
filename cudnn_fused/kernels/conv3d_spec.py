"""What a convolution kernel computes, whatever the architecture: the walk over taps and channels.

Nothing here needs a GPU or the DSL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudnn_fused.kernels.padded_grid import TAP_ROWS, TAPS
from cudnn_fused.operands import ELEMENT_BYTES

if TYPE_CHECKING:
    from cudnn_fused.kernels.rows import RowFinish

K_STEP = 16  # channels of one matrix instruction
K_CHUNK = 64  # channels of a pipeline stage: one 128-byte swizzled row
ROW_BYTES = K_CHUNK * ELEMENT_BYTES
SWIZZLE_ROWS = 8  # the swizzle pattern repeats every 1024 bytes
SWIZZLE_BYTES = SWIZZLE_ROWS * ROW_BYTES
DESCRIPTOR_UNIT = 16  # addresses in matrix descriptors, and strides in tensor maps, count 16-byte units


@dataclass(frozen=True)
class Conv3dSpec:
    """What a kernel computes, apart from N, T, H and W."""

    ci: int
    finish: RowFinish
    leading_zero_frames: int = 0
    # Pixels of 32 bytes: the three taps along W are adjacent in memory, so they are channels of one long pixel.
    joins_w_taps: bool = False

    @property
    def co(self) -> int:
        return self.finish.channels

    @property
    def gemm_channels(self) -> int:
        """Channels that one tap contributes to the reduction."""
        return TAPS * self.ci if self.joins_w_taps else self.ci

    @property
    def w_taps(self) -> int:
        """Taps that read the same pixels, each shifted by a pixel."""
        return 1 if self.joins_w_taps else TAPS

    @property
    def taps(self) -> int:
        return TAP_ROWS * self.w_taps

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
    def weight_row(self) -> int:
        """Elements of a packed weight from one output channel to the next."""
        if self.joins_w_taps:
            return (TAP_ROWS * TAPS + 1) * self.ci
        return self.taps * self.weight_tap

    @property
    def weight_tap(self) -> int:
        """Elements of a packed weight from one tap to the next."""
        return self.gemm_channels if self.joins_w_taps else len(self.chunk_steps) * K_CHUNK
