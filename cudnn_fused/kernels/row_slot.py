"""How a thread that owns a row stores it: through shared memory, in runs of channels.

Stored by its thread, 16 bytes at a time, a row would go out in stores of a warp that touch 32 lines of the cache each.
Instead the thread gathers a block of channels in a *slot* of shared memory, and the TMA unit copies that to every
destination: one run of bytes, since channels are what lies innermost in all outputs. Bulk copies are committed and
waited for by the thread that issued them, so no thread depends on another here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.device import CHUNK_BYTES, GLOBAL, SHARED, chunk_address, chunks, store_shared_chunk
from cudnn_fused.kernels.postops import Fragment
from cudnn_fused.kernels.rows import Destination
from cudnn_fused.operands import ELEMENT_BYTES


@dataclass(frozen=True)
class RowSlot:
    """The slot of a thread: the address of ``block`` channels out of a row of ``channels``."""

    address: Int32
    block: int
    channels: int

    def wait_until_read(self) -> None:
        """Wait until the slot may be written again."""
        prims.cp_async_bulk_wait_group(0, read=True)

    def wait_until_stored(self) -> None:
        """Wait until everything that was sent is in global memory."""
        prims.cp_async_bulk_wait_group(0)

    def put(self, channel: int, fragment: Fragment) -> None:
        """Write some channels of the block."""
        for index, chunk in enumerate(chunks(fragment)):
            store_shared_chunk(self.address + (channel * ELEMENT_BYTES + index * CHUNK_BYTES), chunk)

    @cute.jit
    def send(self, destinations: Sequence[Destination], channel: Int32):
        """Copy the block to wherever it goes; ``channel`` is its first channel in the row."""
        # The copies read through another proxy than the stores into the slot wrote.
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        for destination in destinations:
            if destination.present:
                target = chunk_address(destination.tensor, destination.pixel, self.channels, channel)
                prims.cp_async_bulk_global_shared_cta(
                    cutlass.inttoptr(target, GLOBAL, cutlass.Int8),
                    cutlass.inttoptr(self.address, SHARED, cutlass.Int8),
                    self.block * ELEMENT_BYTES,
                )
        prims.cp_async_bulk_commit_group()
