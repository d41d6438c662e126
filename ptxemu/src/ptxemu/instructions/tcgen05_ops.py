"""Emitters and handlers of tcgen05 (sm_100a): MMA, commit, and tensor memory.

Accumulation: one K = 16 step is summed in float64 together with the accumulator and rounded once to FP32
(`matrix.multiply_accumulate`). Hardware does not say how it adds inside a step; wherever all partial sums are exact
in FP32 the results agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.errors import DescriptorError, DivergenceError, UnsupportedInstruction
from ptxemu.instructions.barrier_ops import find_mbarrier
from ptxemu.instructions.memory_ops import store
from ptxemu.instructions.tensor_operands import Operand, mac_counter, uniform_operand
from ptxemu.isa import values
from ptxemu.isa.parser import Address, Instruction, Vector
from ptxemu.isa.translate import (
    CTA_SHIFT,
    PENDING,
    Blocking,
    Effect,
    Modifiers,
    Translator,
    aligned,
    emits,
    tuple_source,
)
from ptxemu.isa.values import FULL_MASK, LANES, Value
from ptxemu.machine.memory import WORD
from ptxemu.machine.races import ORDERED, Access, Pipe
from ptxemu.machine.state import Cta, Launch, Strand, Wait
from ptxemu.models import matrix, tensor_memory
from ptxemu.models.matrix import InstructionDescriptor

# tcgen05.mma: issued by one thread; with two CTAs, each holds half of A's rows, half of B's and its own half of D.


_FENCE = "tcgen05.fence::before_thread_sync and ::after_thread_sync"


def _pair(strand: Strand, cta_group: int) -> list[Cta]:
    cta = strand.warp.cta
    if cta_group == 1:
        return [cta]
    cluster = cta.cluster
    if len(cluster.ctas) < 2:
        raise strand.error(DescriptorError, "cta_group::2 in a cluster of one CTA")
    return [cluster.cta(cta.rank & ~1, strand), cluster.cta(cta.rank | 1, strand)]


def tensor_mma(
    strand: Strand,
    mask: int,
    target: Value,
    a: Value,
    b: Value,
    instruction: Value,
    enable: Value,
    disabled: tuple[Value, ...],
    cta_group: int,
    a_in_tensor: bool,
) -> None:
    """tcgen05.mma.kind::f16, dense."""
    warp = strand.warp
    lane = values.lowest_lane(mask)
    if mask & (mask - 1):
        raise strand.error(DivergenceError, "tcgen05.mma by several lanes at once")
    address, descriptor_a, descriptor_b = (values.lane_value(value, lane) for value in (target, a, b))
    if any(values.lane_value(value, lane) for value in disabled):
        raise strand.error(UnsupportedInstruction, "tcgen05.mma with disabled lanes is not modelled")
    accumulate = bool(values.lane_value(enable, lane))
    description = _instruction_descriptor(values.lane_value(instruction, lane), cta_group)
    ctas = _pair(strand, cta_group)
    rows, columns = description.m // cta_group, description.n // cta_group
    right = [Operand(cta, descriptor_b, True, description.b_major, columns) for cta in ctas]
    left = []
    if not a_in_tensor:
        left = [Operand(cta, descriptor_a, True, description.a_major, rows) for cta in ctas]
    placement = tensor_memory.accumulator_placement(description.m, description.n, cta_group)
    regions = [region for region, _ in placement.regions(address)]
    for cta in ctas:
        cta.tensor.require_allocated(address & tensor_memory.FIELD_MASK, placement.column_span, "tcgen05.mma")
    tensor_access = None
    if warp.launch.races:
        access = strand.pipe_access(Pipe.MMA, warp.issued[Pipe.MMA] + 1, asynchronous=True)
        tensor_access = strand.tensor_access(Pipe.MMA, warp.issued[Pipe.MMA] + 1)
        for operand in (*left, *right):
            operand.check_race(strand, access)
        for cta in ctas:
            cta.used_by(strand, access.agent, access.clock)
            for region in regions:
                strand.race(
                    cta.tensor_shadow.write(region, tensor_access), "the tensor core's write of tensor memory", _FENCE
                )
    if a_in_tensor:
        sources = [_tensor_operand(strand, cta, descriptor_a, description, cta_group, tensor_access) for cta in ctas]
    else:
        sources = [operand.reader(description.a_type, description.negate_a) for operand in left]
    count = mac_counter(strand, left, right, description.m, description.n)

    def run() -> None:
        count()
        second = [operand.values(description.b_type, description.negate_b) for operand in right]
        rhs = second[0] if len(second) == 1 else np.concatenate(second)
        for cta, source in zip(ctas, sources, strict=True):
            _accumulate(warp.launch, cta.tensor, placement, address, regions, source(), rhs, accumulate)

    warp.launch.queue.submit(("mma", id(warp)), run, strand.location())


def _accumulate(
    launch: Launch,
    tensor: tensor_memory.TensorMemory,
    placement: tensor_memory.Placement,
    address: int,
    regions: list[tuple[Any, Any]],
    lhs: np.ndarray,
    rhs: np.ndarray,
    accumulate: bool,
) -> None:
    """D = A B + D, or A B, in one CTA."""
    before = None
    if accumulate:
        for region in regions:
            launch.guard(tensor.require_written, region, "the tensor core's accumulation")
        plain = len(regions) == 1
        before = (tensor.data[regions[0]] if plain else placement.read(tensor.data, address)).view(np.float32)
    placement.write(tensor.data, address, matrix.multiply_accumulate(before, lhs, rhs))
    for region in regions:
        tensor.written[region] = True


@lru_cache(maxsize=256)
def _instruction_descriptor(bits: int, cta_group: int) -> InstructionDescriptor:
    description = InstructionDescriptor.from_bits(bits)
    description.check(cta_group)
    if description.d_type != "f32":
        raise UnsupportedInstruction("tcgen05.mma with an accumulator of f16 is not modelled")
    return description


def _tensor_operand(
    strand: Strand, cta: Cta, address: int, description: InstructionDescriptor, cta_group: int, access: Access | None
) -> Callable[[], np.ndarray]:
    """Reads A of one CTA from tensor memory."""
    placement = tensor_memory.a_placement(description.m, cta_group)
    what = "the tensor core's read of A"
    cta.tensor.require_allocated(address & tensor_memory.FIELD_MASK, placement.column_span, what)
    regions = [region for region, _ in placement.regions(address)]
    if access is not None:
        for region in regions:
            strand.race(cta.tensor_shadow.read(region, access), f"{what} in tensor memory", _FENCE)

    def read() -> np.ndarray:
        for region in regions:
            cta.cluster.launch.guard(cta.tensor.require_written, region, what)
        bits = placement.read(cta.tensor.data, address).view(np.uint16)
        return matrix.operand_values(bits, description.a_type, description.negate_a)

    return read


def tensor_commit(strand: Strand, mask: int, address: Value, multicast: Value | None) -> None:
    """tcgen05.commit: arrives once all earlier tcgen05.mma of this thread are done."""
    warp = strand.warp
    lane = values.lowest_lane(mask)
    if mask & (mask - 1):
        raise strand.error(DivergenceError, "tcgen05.commit by several lanes at once")
    place = values.lane_value(address, lane)
    if multicast is None:
        targets = [find_mbarrier(strand, place)]
    else:
        ranks = [rank for rank in range(16) if (values.lane_value(multicast, lane) >> rank) & 1]
        offset = place & ((1 << CTA_SHIFT) - 1)
        targets = [find_mbarrier(strand, (rank << CTA_SHIFT) | offset) for rank in ranks]
    warp.issued[Pipe.MMA] += 1
    clock = None
    if warp.launch.races:
        clock = warp.clock.copy()
        clock[ORDERED][warp.pipes[Pipe.MMA]] = warp.issued[Pipe.MMA]
    for barrier in targets:
        warp.cta.cluster.ctas[barrier.cta].used_by(strand, warp.pipes[Pipe.MMA], warp.issued[Pipe.MMA])

    def run() -> None:
        for barrier in targets:
            barrier.arrive(1, clock)

    warp.launch.queue.submit(("mma", id(warp)), run, strand.location())


# Tensor memory: allocation, loads, stores.


class AllocationWait(Wait):
    def __init__(self, cta: Cta, columns: int):
        self.cta, self.columns = cta, columns
        self.before = dict(cta.tensor.allocations)

    def ready(self) -> bool:
        return self.cta.tensor.allocations != self.before

    def describe(self) -> str:
        return f"{self.columns} free columns of tensor memory; allocated are {self.before}"


def tensor_allocate(strand: Strand, target: Value, columns: Value, cta_group: int) -> Any:
    warp = strand.warp
    if not strand.converged(warp.live):
        return PENDING
    _pair(strand, cta_group)  # the CTAs of a pair write where they allocate into each other's shared memory
    count = uniform_operand(strand, columns, "the number of columns")
    start = warp.cta.tensor.allocate(count)
    if start is None:
        strand.wait = AllocationWait(warp.cta, count)
        return PENDING
    strand.wait = None
    if warp.cta.tensor_shadow is not None:
        warp.cta.tensor_shadow.forget((slice(None), slice(start, start + count)))
    store(strand, strand.mask, "shared", uniform_operand(strand, target, "the address"), (start,), WORD)
    return None


def tensor_free(strand: Strand, address: Value, columns: Value, cta_group: int) -> None:
    place, count = (
        uniform_operand(strand, address, "the address"),
        uniform_operand(strand, columns, "the number of columns"),
    )
    cta = strand.warp.cta
    _pair(strand, cta_group)
    if cta.tensor_shadow is not None:
        region = (slice(None), slice(place & 0xFFFF, (place & 0xFFFF) + count))
        strand.race(cta.tensor_shadow.write(region, strand.access()), "tcgen05.dealloc")
    cta.tensor.free(place, count)
    strand.warp.launch.event()


def tensor_relinquish(strand: Strand) -> None:
    strand.warp.cta.tensor.relinquish_permit()


def _region(strand: Strand, address: int, cells: tensor_memory.Access, what: str) -> tuple[Any, Any]:
    """The cells of a warp's access in tensor memory, checked."""
    if strand.mask != FULL_MASK:
        raise strand.error(DivergenceError, f"{what} by a warp of which not all lanes take part")
    warp = strand.warp
    warp.cta.tensor.require_allocated(address & tensor_memory.FIELD_MASK, cells.column_span, what)
    return cells.region(address, warp.index, relative=warp.launch.relative_lanes)


def tensor_load(
    strand: Strand, address: Value, shape: str, num: int, packed: bool, half_split: int
) -> tuple[np.ndarray, ...]:
    """tcgen05.ld. It is performed at once whatever the schedule: compilers move uses of its results in front of its
    wait (the hardware interlocks the registers). The race check sees the read under way until tcgen05.wait::ld."""
    warp = strand.warp
    cells = tensor_memory.access(shape, num, packed=packed, half_split=half_split)
    index = _region(strand, uniform_operand(strand, address, "the address"), cells, "tcgen05.ld")
    tensor = warp.cta.tensor
    warp.issued[Pipe.TENSOR_LOAD] += 1
    if warp.cta.tensor_shadow is not None:
        access = strand.tensor_access(Pipe.TENSOR_LOAD, warp.issued[Pipe.TENSOR_LOAD])
        strand.race(warp.cta.tensor_shadow.read(index, access), "a read of tensor memory", _FENCE)
    warp.launch.counts.bytes["tensor memory to registers"] += LANES * cells.registers * WORD
    warp.launch.guard(tensor.require_written, index, "tcgen05.ld")
    result = cells.to_registers(tensor.data[index])
    return tuple(result) if cells.registers > 1 else result[0]


def tensor_store(
    strand: Strand, address: Value, sources: tuple[Value, ...], shape: str, num: int, packed: bool, half_split: int
) -> None:
    """tcgen05.st."""
    warp = strand.warp
    tensor = warp.cta.tensor
    cells = tensor_memory.access(shape, num, packed=packed, half_split=half_split)
    index = _region(strand, uniform_operand(strand, address, "the address"), cells, "tcgen05.st")
    warp.issued[Pipe.TENSOR_STORE] += 1
    if warp.cta.tensor_shadow is not None:
        access = strand.tensor_access(Pipe.TENSOR_STORE, warp.issued[Pipe.TENSOR_STORE])
        strand.race(warp.cta.tensor_shadow.write(index, access), "a write of tensor memory", _FENCE)
    warp.launch.counts.bytes["registers to tensor memory"] += LANES * cells.registers * WORD
    registers = np.stack([values.as_lanes(source, 32) for source in sources])

    def run() -> None:
        tensor.data[index] = cells.to_cells(registers)
        tensor.written[index] = True

    warp.tensor_stores.append(warp.launch.queue.submit(("tcgen05.st", id(warp)), run, strand.location()))


def tensor_wait(strand: Strand, loads: bool) -> None:
    """tcgen05.wait::ld and ::st."""
    warp = strand.warp
    if not loads:
        for operation in warp.tensor_stores:
            warp.launch.queue.finish(operation)
        warp.tensor_stores.clear()
    pipe = Pipe.TENSOR_LOAD if loads else Pipe.TENSOR_STORE
    warp.finished(pipe, warp.issued[pipe])


# Emitters.


def _group(m: Modifiers) -> int:
    return int(m.need("cta_group::1", "cta_group::2")[-1])


_COLLECTORS = tuple(f"collector::a::{use}" for use in ("discard", "fill", "use", "lastuse"))


@emits("tcgen05.mma")
def _emit_tensor_mma(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    group = _group(m)
    m.need("kind::f16")
    m.take(*_COLLECTORS)
    target, a, b, description, *rest = i.operands
    disabled = tuple_source(t, rest.pop(0)) if len(rest) > 1 and isinstance(rest[0], Vector) else "()"
    if len(rest) != 1:
        raise UnsupportedInstruction("tcgen05.mma with scale-input-d is not modelled")
    in_tensor = isinstance(a, Address)
    left = t.address(a, 32) if in_tensor else t.source(a, "u64")
    call = (
        f"{t.bind(tensor_mma, 'tensor_mma')}(s, {{mask}}, {t.address(target, 32)}, {left}, {t.source(b, 'u64')}, "
        f"{t.source(description, 'u32')}, {t.source(rest[0], 'pred')}, {disabled}, {group}, {in_tensor})"
    )
    return Effect((), call)


@emits("tcgen05.commit")
def _emit_commit(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _group(m)
    m.need("mbarrier::arrive::one")
    m.take("shared::cluster")
    multicast = m.flag("multicast::cluster")
    m.need("b64")
    cast = t.source(i.operands[1], "u16") if multicast else "None"
    return Effect((), f"{t.bind(tensor_commit, 'tensor_commit')}(s, {{mask}}, {t.address(i.operands[0])}, {cast})")


@emits("tcgen05.alloc", blocking=True)
def _emit_allocate(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    group = _group(m)
    aligned(m)
    m.take("shared::cta")
    m.need("b32")
    address, columns = t.address(i.operands[0]), t.source(i.operands[1], "u32")
    return Blocking((), f"{t.bind(tensor_allocate, 'tensor_allocate')}(s, {address}, {columns}, {group})")


@emits("tcgen05.dealloc")
def _emit_free(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    group = _group(m)
    aligned(m)
    m.need("b32")
    address, columns = (t.source(operand, "u32") for operand in i.operands)
    return Effect((), f"{t.bind(tensor_free, 'tensor_free')}(s, {address}, {columns}, {group})")


@emits("tcgen05.relinquish_alloc_permit")
def _emit_relinquish(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _group(m)
    aligned(m)
    return Effect((), f"{t.bind(tensor_relinquish, 'relinquish')}(s)")


def _shape(m: Modifiers, packing: str) -> tuple[str, int, bool]:
    aligned(m)
    shape = m.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    num = int(m.need(*(f"x{1 << power}" for power in range(8)))[1:])
    packed = m.flag(packing)
    m.need("b32")
    return shape, num, packed


@emits("tcgen05.ld")
def _emit_tensor_load(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    shape, num, packed = _shape(m, "pack::16b")
    split = i.operands[2].value if len(i.operands) > 2 else 0
    address = t.address(i.operands[1], 32)
    return Effect(
        (i.operands[0],), f"{t.bind(tensor_load, 'tensor_load')}(s, {address}, {shape!r}, {num}, {packed}, {split})"
    )


@emits("tcgen05.st")
def _emit_tensor_store(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    shape, num, packed = _shape(m, "unpack::16b")
    split = i.operands[1].value if len(i.operands) > 2 else 0
    sources = tuple_source(t, i.operands[-1])
    call = (
        f"{t.bind(tensor_store, 'tensor_store')}(s, {t.address(i.operands[0], 32)}, {sources}, "
        f"{shape!r}, {num}, {packed}, {split})"
    )
    return Effect((), call)


@emits("tcgen05.wait::ld", "tcgen05.wait::st")
def _emit_tensor_wait(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    aligned(m)
    return Effect((), f"{t.bind(tensor_wait, 'tensor_wait')}(s, {i.parts[1] == 'wait::ld'})")


@emits("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _emit_tensor_fence(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    return Effect((), f"w.fence_tensor_memory({i.parts[1] == 'fence::after_thread_sync'})")
