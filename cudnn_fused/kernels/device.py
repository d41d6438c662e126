"""Small device-side helpers that every kernel uses: 16-byte accesses, pipeline barriers, reductions over lanes."""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.experimental import primitives as prims

from cudnn_fused.types import ELEMENT_BYTES

CHUNK_BYTES = 16  # the widest access of one lane
CHUNK_CHANNELS = CHUNK_BYTES // ELEMENT_BYTES
CHUNK_REGISTERS = CHUNK_BYTES // 4
WARP = 32
WARPGROUP = 128
ALL_LANES = 0xFFFFFFFF

SHARED = cutlass.AddressSpace.smem
GLOBAL = cutlass.AddressSpace.gmem


def chunk_address(base: Int64, pixel: Int32, channels: int, channel: Int32) -> Int64:
    """Where a channel of a pixel lies in a channels-last tensor. Element offsets need 64 bits, pixel numbers do not."""
    return base + (Int64(pixel) * channels + channel) * ELEMENT_BYTES


def divide(dividend: Int32, divisor: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of numbers that are not negative; unsigned division is half the work of signed."""
    quotient = (Uint32(dividend) // Uint32(divisor)).to(Int32)
    return quotient, dividend - quotient * divisor


def load_chunk(address: Int64 | Int32, space: cutlass.AddressSpace = GLOBAL) -> list[Int32]:
    """Eight BF16 from global or shared memory."""
    values = prims.load_ext(cutlass.inttoptr(address, space, Int32), count=CHUNK_REGISTERS)
    return [values[index] for index in range(CHUNK_REGISTERS)]


def store_chunk(address: Int64 | Int32, registers: Sequence[Int32], space: cutlass.AddressSpace = GLOBAL) -> None:
    """Eight BF16 to global or shared memory."""
    vector = cutlass.Vector.from_elements(tuple(registers), dtype=Int32)
    prims.store_ext(vector, cutlass.inttoptr(address, space, Int32))


def prefetch(address: Int64, size: int) -> None:
    """Bring ``size`` bytes, a multiple of 16, into the L2 cache."""
    prims.cp_async_bulk_prefetch(cutlass.inttoptr(address, GLOBAL, cutlass.Int8), size)


def shared_address(place: cutlass.Array) -> Int32:
    """Where something lies in shared memory."""
    return place.data_ptr().toint().to(Int32)


def shared_pointer(place: cutlass.Array, dtype: type) -> cutlass.Pointer:
    """Shared memory seen as another type."""
    return cutlass.inttoptr(shared_address(place), SHARED, dtype)


def chunks(fragment: Sequence[Int32]) -> list[list[Int32]]:
    """A fragment cut into what one access moves."""
    return [list(fragment[first : first + CHUNK_REGISTERS]) for first in range(0, len(fragment), CHUNK_REGISTERS)]


def masked(keep: Boolean, fragment: Sequence[Int32]) -> list[Int32]:
    """The fragment, or zeros."""
    mask = Int32(cutlass.select_(keep, Int32(-1), Int32(0)))
    return [register & mask for register in fragment]


def sum_over_lanes(lanes: int):
    """A function that sums a value over groups of ``lanes`` neighbouring lanes, a power of two."""

    def reduce(value: Float32) -> Float32:
        distance = 1
        while distance < lanes:
            value = value + prims.shfl_sync(ALL_LANES, value, distance, WARP - 1, "bfly")
            distance *= 2
        return value

    return reduce


def follow_previous_kernel() -> None:
    """Wait until the kernels before this one are done, then let the next one start.

    Launched with ``use_pdl``, a kernel begins while its predecessor is still finishing: all that does not touch global
    memory may come before this call, nothing else.
    """
    prims.griddepcontrol("wait")
    prims.griddepcontrol("launch_dependents")


@cute.jit
def wait(barrier, phase: Int32):
    """Wait until the barrier's phase of this parity is over (PTX ISA, "mbarrier.try_wait")."""
    while not prims.mbarrier_try_wait_parity(barrier, phase):
        pass


@cute.jit
def wait_cluster(barrier, phase: Int32):
    """The same for a barrier on which other CTAs arrive: what they wrote before is visible afterwards."""
    while not prims.mbarrier_try_wait_parity(barrier, phase, scope=prims.MBarrierScope.CLUSTER):
        pass


def meet() -> None:
    """Reconverge the lanes of a warp after a loop that each lane leaves at its own time, such as a wait.

    An instruction that is ``.aligned`` must be executed by all lanes of the warp at once.
    """
    prims.bar_warp_sync(ALL_LANES)


class PipelineState:
    """A place in a ring of pipeline stages, with the parity to wait for there. Advances in place."""

    def __init__(self, stages: int, index: Int32, phase: Int32) -> None:
        self.stages, self.index, self.phase = stages, index, phase

    @classmethod
    def reading(cls, stages: int) -> PipelineState:
        """At the first stage, which becomes full in phase 0."""
        return cls(stages, Int32(0), Int32(0))

    @classmethod
    def writing(cls, stages: int) -> PipelineState:
        """At the first stage, which is empty from the start: the phase before 0 counts as over."""
        return cls(stages, Int32(0), Int32(1))

    def advance(self) -> None:
        following = self.index + 1
        wrapped = following == self.stages
        self.index = Int32(cutlass.select_(wrapped, Int32(0), following))
        self.phase = self.phase ^ Int32(wrapped)

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return PipelineState(self.stages, Int32(values[0]), Int32(values[1]))
