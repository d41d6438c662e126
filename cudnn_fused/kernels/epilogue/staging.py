"""How a warp stores rows that its threads own: through shared memory, in runs of channels.

Stored by its thread, 16 bytes at a time, a row would go out in stores of a warp that touch 32 lines of the cache each.
Instead a thread gathers a block of channels in a *slot* of shared memory, and the warp stores the slots together:
neighbouring lanes take neighbouring pieces of 16 bytes of a row, which lie side by side in all outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.device import (
    ALL_LANES,
    CHUNK_BYTES,
    CHUNK_CHANNELS,
    SHARED,
    WARP,
    chunk_address,
    chunks,
    divide,
    load_chunk,
    store_chunk,
)
from cudnn_fused.kernels.epilogue.arithmetic import Fragment
from cudnn_fused.kernels.epilogue.rows import Destination
from cudnn_fused.types import ELEMENT_BYTES

ABSENT = -1  # in place of a pixel number


@dataclass(frozen=True)
class StagingSlots:
    """The slots of a warp, one for each lane, ``pitch`` bytes apart: ``block`` channels of a row of ``channels``."""

    address: Int32
    lane: Int32
    pitch: int
    block: int
    channels: int

    def put(self, channel: int, fragment: Fragment) -> None:
        """Write some channels of this lane's block."""
        own = self.address + self.lane * self.pitch + channel * ELEMENT_BYTES
        for index, chunk in enumerate(chunks(fragment)):
            store_chunk(own + index * CHUNK_BYTES, chunk, SHARED)

    @cute.jit
    def store(self, destinations: Sequence[Destination], channel: Int32):
        """Store all lanes' blocks wherever their rows go; ``channel`` is the first of a block. Frees the slots."""
        row_chunks = self.block // CHUNK_CHANNELS
        # Which piece of which row a lane takes repeats after so many accesses of the warp, so many rows further down.
        period = math.lcm(WARP, row_chunks) // WARP
        period_rows = WARP * period // row_chunks
        pixels = [Int32(cutlass.select_(one.present, one.pixel, Int32(ABSENT))) for one in destinations]
        prims.bar_warp_sync(ALL_LANES)  # all slots are full
        for first in cutlass.range(0, WARP, period_rows, unroll=1):
            for access in cutlass.range_constexpr(period):
                row, chunk = divide(self.lane + access * WARP, Int32(row_chunks))
                data = load_chunk(self.address + (first + row) * self.pitch + chunk * CHUNK_BYTES, SHARED)
                for destination, own_pixel in zip(destinations, pixels, strict=True):
                    pixel = prims.shfl_sync(ALL_LANES, own_pixel, first + row, WARP - 1, "idx")
                    self.store_if_present(destination, pixel, channel + chunk * CHUNK_CHANNELS, data)
        prims.bar_warp_sync(ALL_LANES)  # all slots are read

    @cute.jit
    def store_if_present(self, destination: Destination, pixel: Int32, channel: Int32, data: list):
        if pixel != ABSENT:
            store_chunk(chunk_address(destination.tensor, pixel, self.channels, channel), data)
