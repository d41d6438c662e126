"""Emitters and handlers of asynchronous copies: bulk tensor copies (TMA), bulk copies, cp.async, and their groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ptxemu.errors import BarrierMisuse, DescriptorError, Misaligned, UnsupportedInstruction
from ptxemu.instructions.barrier_ops import find_mbarrier, shared_target
from ptxemu.isa import values
from ptxemu.isa.parser import TYPE_BYTES, Address, Instruction, Vector
from ptxemu.isa.translate import CTA_SHIFT, Effect, Modifiers, Translator, emits, tuple_source
from ptxemu.isa.values import Value, lane_indices, lane_value
from ptxemu.machine.async_queue import Operation
from ptxemu.machine.memory import CHUNK, UNKNOWN_SWIZZLE, WORD
from ptxemu.machine.races import ORDERED, Pipe
from ptxemu.machine.state import Cta, Strand
from ptxemu.models.barriers import MBarrier
from ptxemu.models.tensor_map import SWIZZLE_LINE_BYTES, TensorMap, swizzled_chunks

_OFFSET_MASK = (1 << CTA_SHIFT) - 1
_WORDS_PER_CHUNK = CHUNK // WORD
BULK_TENSOR_ALIGNMENT = 128


@dataclass
class BulkGroup:
    """A committed group of bulk stores of one thread. Each store is a read of its source, then a write."""

    lane: int
    number: int
    reads: list[Operation]
    writes: list[Operation]


@dataclass(frozen=True)
class _Destination:
    """Where a bulk load lands in one CTA, and the mbarrier that it completes on."""

    cta: Cta
    offset: int
    barrier: MBarrier


@dataclass(frozen=True)
class _Load:
    """What a bulk load brings: `produce` gives its bytes, `useful` which chunks are not all fill (or True).

    `chunks` are the places of the chunks in shared memory, in order; None if they follow each other.
    """

    size: int
    chunks: np.ndarray | None
    produce: Callable[[], np.ndarray]
    useful: Callable[[], Any]
    swizzle: int = UNKNOWN_SWIZZLE


def _lane(value: Value, lane: int) -> int:
    return lane_value(value, lane)


def _coordinates(coordinates: tuple[Value, ...], lane: int) -> tuple[int, ...]:
    return tuple(values.signed(_lane(value, lane), 32) for value in coordinates)


def _tensor_map(strand: Strand, address: int) -> TensorMap:
    found = strand.warp.launch.tensor_maps.get(address)
    if found is None:
        raise strand.error(DescriptorError, f"there is no tensor map at {address:#x}")
    return found


def _destinations(strand: Strand, target: int, barrier: int, multicast: int | None, pair: bool) -> list[_Destination]:
    """With multicast, the same offset in every CTA of the mask. A 2-CTA copy signals the CTA of each destination's
    pair that has the parity of the barrier's address; any other copy signals the destination itself."""
    cta, offset = shared_target(strand, target, remote=True)
    barrier_rank, barrier_offset = (barrier & 0xFFFFFFFF) >> CTA_SHIFT, barrier & _OFFSET_MASK
    cluster = strand.warp.cta.cluster
    if multicast is None:
        ranks = [cta.rank]
        allowed = (cta.rank & ~1, cta.rank | 1) if pair else (cta.rank,)
        if barrier_rank not in allowed:
            raise strand.error(
                BarrierMisuse, f"a copy to CTA {cta.rank} completes on an mbarrier of CTA {barrier_rank}"
            )
    else:
        ranks = [rank for rank in range(16) if (multicast >> rank) & 1]
        if not ranks:
            raise strand.error(DescriptorError, "a multicast to no CTA")
    found = []
    for rank in ranks:
        signalled = (rank & ~1) | (barrier_rank & 1) if pair else rank
        place = find_mbarrier(strand, (signalled << CTA_SHIFT) | barrier_offset)
        found.append(_Destination(cluster.cta(rank, strand), offset, place))
    return found


def _words(chunks: np.ndarray | None, offset: int, size: int) -> Any:
    """Index of the words of a bulk copy in a shadow: a slice where the copy fills a range."""
    if chunks is None:
        return slice(offset // WORD, (offset + size) // WORD)
    return (chunks[:, None] * _WORDS_PER_CHUNK + np.arange(_WORDS_PER_CHUNK)).reshape(-1)


def _box_chunks(tensor_map: TensorMap, offset: int) -> np.ndarray:
    """The 16-byte chunks of shared memory that a box at `offset` takes, in the order of the dense box."""
    first = offset // SWIZZLE_LINE_BYTES * (SWIZZLE_LINE_BYTES // CHUNK)
    return swizzled_chunks(offset, tensor_map.box_bytes, tensor_map.swizzle) + first


def _chunks_in_bounds(tensor_map: TensorMap, coordinates: tuple[int, ...], offsets: tuple[int, ...]) -> Any:
    """Which chunks of a dense box hold an element of the tensor: True if all of them do."""
    if tensor_map.bytes_in_bounds(coordinates, offsets) == tensor_map.box_bytes:
        return True
    size = tensor_map.data_type.nbytes
    columns = coordinates[0] + np.arange(tensor_map.row_bytes // size)
    inner = ((columns >= 0) & (columns < tensor_map.extents[0])).reshape(-1, CHUNK // size).any(axis=1)
    rows = tensor_map.rows_in_bounds(coordinates, offsets)
    return np.logical_and.outer(rows, inner).reshape(-1)


def _fills_range(offset: int, size: int) -> bool:
    return offset % SWIZZLE_LINE_BYTES == 0 and size % SWIZZLE_LINE_BYTES == 0


def _submit_load(strand: Strand, destinations: list[_Destination], load: _Load) -> None:
    """Queues a bulk load."""
    size, chunks = load.size, load.chunks
    for place in destinations:
        place.cta.shared.check(place.offset, place.offset + size, "bulk copy")
        shadow = place.cta.shared_shadow
        if shadow is not None:
            words = _words(None if _fills_range(place.offset, size) else chunks, place.offset, size)
            warp = strand.warp
            access = strand.pipe_access(Pipe.WARP, place.barrier.phase + 1, asynchronous=True)
            access.agent = place.barrier.agent
            access.knows = warp.clock
            strand.race(shadow.write(words, access), "a bulk copy to shared memory")
    index = (
        chunks
        if chunks is not None
        else slice(destinations[0].offset // CHUNK, (destinations[0].offset + size) // CHUNK)
    )

    def run() -> None:
        data = np.ascontiguousarray(load.produce()).view(np.complex128)
        flags = load.useful()
        for place in destinations:
            shared = place.cta.shared
            shared.chunks[index] = data
            shared.written_chunks[index] = True
            shared.useful_chunks[index] = flags
            shared.swizzles[index] = load.swizzle
            shared.version += 1
            place.barrier.complete(size)

    strand.warp.launch.counts.bytes["written to shared by bulk copies"] += size * len(destinations)
    strand.warp.launch.queue.submit(None, run, strand.location())


def tensor_load(
    strand: Strand,
    mask: int,
    target: Value,
    map_address: Value,
    coordinates: tuple[Value, ...],
    barrier: Value,
    offsets: tuple[Value, ...],
    multicast: Value | None,
    pair: bool,
    im2col: bool,
) -> None:
    """cp.async.bulk.tensor from global to shared memory."""
    launch = strand.warp.launch
    for lane in lane_indices(mask).tolist():
        tensor_map = _tensor_map(strand, _lane(map_address, lane))
        if im2col != (tensor_map.window is not None):
            raise strand.error(DescriptorError, "a tiled copy through an im2col map, or the reverse")
        place = _lane(target, lane)
        where = _coordinates(coordinates, lane)
        shifts = tuple(_lane(value, lane) & 0xFFFF for value in offsets)
        cast = None if multicast is None else _lane(multicast, lane) & 0xFFFF
        destinations = _destinations(strand, place, _lane(barrier, lane), cast, pair)
        offset = destinations[0].offset
        if offset % BULK_TENSOR_ALIGNMENT:
            raise Misaligned(
                f"a bulk tensor copy to shared offset {offset}, which is not a multiple of {BULK_TENSOR_ALIGNMENT}"
            )
        launch.counts.bytes["global to shared"] += tensor_map.bytes_in_bounds(where, shifts)
        load = _Load(
            tensor_map.box_bytes,
            _box_chunks(tensor_map, offset),
            partial(tensor_map.load, where, shifts),
            partial(_chunks_in_bounds, tensor_map, where, shifts),
            int(tensor_map.swizzle),
        )
        _submit_load(strand, destinations, load)


def bulk_load(
    strand: Strand, mask: int, target: Value, source: Value, size: Value, barrier: Value, multicast: Value | None
) -> None:
    """cp.async.bulk from global to shared memory."""
    launch = strand.warp.launch
    for lane in lane_indices(mask).tolist():
        count, origin = _lane(size, lane), _lane(source, lane)
        cast = None if multicast is None else _lane(multicast, lane) & 0xFFFF
        destinations = _destinations(strand, _lane(target, lane), _lane(barrier, lane), cast, False)
        if count % CHUNK or origin % CHUNK or destinations[0].offset % CHUNK:
            raise Misaligned("addresses and size of a bulk copy must be multiples of 16 bytes")
        launch.counts.bytes["global to shared"] += count
        data = launch.memory.bytes(origin, count)
        _submit_load(strand, destinations, _Load(count, None, data.copy, lambda: True))


def _submit_store(
    strand: Strand, lane: int, offset: int, size: int, chunks: np.ndarray | None, consume: Callable[[np.ndarray], None]
) -> None:
    """Queues a bulk store: its read of shared memory, then the write that `consume` does."""
    warp = strand.warp
    shared = warp.cta.shared
    shared.check(offset, offset + size, "bulk store")
    index = chunks if chunks is not None else np.arange(offset // CHUNK, (offset + size) // CHUNK)
    shadow = warp.cta.shared_shadow
    if shadow is not None:
        access = strand.pipe_access(Pipe.BULK, warp.issued[Pipe.BULK] + 1, asynchronous=True)
        words = _words(None if _fills_range(offset, size) else index, offset, size)
        strand.race(shadow.read(words, access), "a bulk store's read of shared memory")
    launch = warp.launch
    held: list[np.ndarray] = []

    def read() -> None:
        launch.guard(shared.require_written, index, CHUNK, "bulk store")
        held.append(shared.chunks[index].view(np.uint8))

    stream = ("bulk store", launch.queue.issued)
    reading = launch.queue.submit(stream, read, strand.location())
    writing = launch.queue.submit(stream, lambda: consume(held[0]), strand.location())
    warp.bulk_open.setdefault(lane, []).append((reading, writing))


def tensor_store(
    strand: Strand,
    mask: int,
    map_address: Value,
    coordinates: tuple[Value, ...],
    source: Value,
    reduction: str | None,
    im2col: bool,
) -> None:
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor from shared to global memory."""
    for lane in lane_indices(mask).tolist():
        tensor_map = _tensor_map(strand, _lane(map_address, lane))
        if im2col != (tensor_map.window is not None):
            raise strand.error(DescriptorError, "a tiled copy through an im2col map, or the reverse")
        where = _coordinates(coordinates, lane)
        _, offset = shared_target(strand, _lane(source, lane), remote=False)
        if offset % BULK_TENSOR_ALIGNMENT:
            raise Misaligned(
                f"a bulk tensor copy from shared offset {offset}, which is not a multiple of {BULK_TENSOR_ALIGNMENT}"
            )
        inside = tensor_map.bytes_in_bounds(where, (0,) * (tensor_map.rank - 2) if im2col else ())
        strand.warp.launch.counts.bytes["shared to global"] += inside
        consume = partial(_reduce, tensor_map, where, reduction) if reduction else partial(tensor_map.store, where)
        _submit_store(strand, lane, offset, tensor_map.box_bytes, _box_chunks(tensor_map, offset), consume)


def _reduce(tensor_map: TensorMap, where: tuple[int, ...], reduction: str, data: np.ndarray) -> None:
    tensor_map.reduce(where, data, reduction)


def bulk_store(strand: Strand, mask: int, target: Value, source: Value, size: Value) -> None:
    """cp.async.bulk from shared to global memory."""
    launch = strand.warp.launch
    for lane in lane_indices(mask).tolist():
        count, place = _lane(size, lane), _lane(target, lane)
        _, offset = shared_target(strand, _lane(source, lane), remote=False)
        if count % CHUNK or place % CHUNK or offset % CHUNK:
            raise Misaligned("addresses and size of a bulk copy must be multiples of 16 bytes")
        launch.counts.bytes["shared to global"] += count
        view = launch.memory.bytes(place, count)
        _submit_store(strand, lane, offset, count, None, partial(np.copyto, view))


def bulk_commit(strand: Strand, mask: int) -> None:
    """Closes the open group of each lane that has ever issued a bulk store."""
    warp = strand.warp
    warp.issued[Pipe.BULK] += 1
    for lane in warp.bulk_open:
        if (mask >> lane) & 1:
            pairs = warp.bulk_open[lane]
            group = BulkGroup(lane, warp.issued[Pipe.BULK], [r for r, _ in pairs], [w for _, w in pairs])
            warp.bulk_groups.append(group)
            warp.bulk_open[lane] = []


def bulk_wait(strand: Strand, mask: int, pending: int, reading: bool) -> None:
    """Waits until at most `pending` groups of each lane are unfinished (with `reading`: still read their sources)."""
    warp = strand.warp
    queue = warp.launch.queue
    for lane in warp.bulk_open:
        if not (mask >> lane) & 1:
            continue
        groups = [group for group in warp.bulk_groups if group.lane == lane]
        for group in groups[: len(groups) - pending]:
            for operation in group.reads if reading else group.writes:
                queue.finish(operation)
            group.reads = []
            if not reading:
                warp.bulk_groups.remove(group)
    if warp.launch.races:
        unread = [group.number for group in warp.bulk_groups if group.reads]
        warp.finished(Pipe.BULK, min(unread, default=warp.issued[Pipe.BULK] + 1) - 1)


# st.async: a store to another CTA that completes on an mbarrier there.


def store_async(
    strand: Strand, mask: int, target: Value, sources: tuple[Value, ...], barrier: Value, width: int
) -> None:
    launch = strand.warp.launch
    for lane in lane_indices(mask).tolist():
        cta, offset = shared_target(strand, _lane(target, lane), remote=True)
        place = find_mbarrier(strand, _lane(barrier, lane))
        if place.cta != cta.rank:
            raise strand.error(BarrierMisuse, "st.async with data and mbarrier in different CTAs")
        data = b"".join(_lane(value, lane).to_bytes(width, "little") for value in sources)
        size = len(data)
        index = cta.shared.index(offset, size, "st.async")
        if cta.shared_shadow is not None and size >= WORD:
            access = strand.pipe_access(Pipe.WARP, place.phase + 1, asynchronous=False)
            access.agent = place.agent
            strand.race(cta.shared_shadow.write(_words(None, offset, size), access), "st.async")
        launch.counts.bytes["shared to shared of other CTAs"] += size

        def run(cta: Cta = cta, index: Any = index, data: bytes = data, place: MBarrier = place) -> None:
            cta.shared.put(index, len(data), np.frombuffer(data, cta.shared.items[len(data)].dtype)[0])
            place.complete(len(data))

        launch.queue.submit(None, run, strand.location())


@emits("st.async")
def _emit_store_async(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    kind = m.type()
    m.take("v2", "v4")
    m.take("weak")
    m.need("shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    target, source, barrier = i.operands
    call = (
        f"{t.bind(store_async, 'store_async')}(s, {{mask}}, {t.address(target)}, {tuple_source(t, source, kind)}, "
        f"{t.address(barrier)}, {TYPE_BYTES[kind]})"
    )
    return Effect((), call)


# cp.async: ordinary copies of a few bytes per thread.


def copy_async(strand: Strand, mask: int, target: Value, source: Value, size: int, source_size: Value | None) -> None:
    warp = strand.warp
    launch, lanes = warp.launch, lane_indices(mask)
    places = values.as_lanes(target, 32)[lanes].astype(np.int64) & _OFFSET_MASK
    origins = values.as_lanes(source, 64)[lanes]
    lengths = np.full(lanes.size, size) if source_size is None else values.as_lanes(source_size, 32)[lanes]
    shared = warp.cta.shared
    index = shared.index(places, size, "cp.async")
    if warp.cta.shared_shadow is not None:
        words = np.add.outer(places // WORD, np.arange(size // WORD))
        access = strand.pipe_access(Pipe.COPY, warp.issued[Pipe.COPY] + 1, asynchronous=False)
        strand.race(warp.cta.shared_shadow.write(words, access), "a cp.async to shared memory")
    launch.counts.bytes["global to shared"] += int(lengths.sum())

    def run() -> None:
        data = np.zeros((lanes.size, size), np.uint8)
        for row, (origin, length) in enumerate(zip(origins.tolist(), lengths.tolist(), strict=True)):
            if length:
                data[row, :length] = launch.memory.bytes(origin, length)
        shared.put(index, size, data.view(shared.items[size].dtype)[:, 0])

    warp.copy_open.append(launch.queue.submit(("cp.async", id(warp)), run, strand.location()))


def copy_commit(strand: Strand) -> None:
    warp = strand.warp
    warp.issued[Pipe.COPY] += 1
    warp.copy_groups.append((warp.issued[Pipe.COPY], warp.copy_open))
    warp.copy_open = []


def copy_wait(strand: Strand, pending: int | None) -> None:
    """wait_group `pending`, or wait_all."""
    warp = strand.warp
    if pending is None:
        copy_commit(strand)
        pending = 0
    while len(warp.copy_groups) > pending:
        number, operations = warp.copy_groups.popleft()
        for operation in operations:
            warp.launch.queue.finish(operation)
        warp.finished(Pipe.COPY, number)


def copy_arrive(strand: Strand, mask: int, address: Value, increments: bool) -> None:
    """cp.async.mbarrier.arrive: the lanes arrive once their earlier cp.async are done."""
    warp = strand.warp
    clock = None
    if warp.launch.races:
        warp.issued[Pipe.COPY] += 1
        clock = warp.clock.copy()
        clock[ORDERED][warp.pipes[Pipe.COPY]] = warp.issued[Pipe.COPY]
    for lane in lane_indices(mask).tolist():
        barrier = find_mbarrier(strand, _lane(address, lane), remote=False)
        if increments:
            barrier.pending += 1
        arrive = lambda barrier=barrier: barrier.arrive(1, clock)  # noqa: E731
        warp.launch.queue.submit(("cp.async", id(warp)), arrive, strand.location())


# Emitters.

_RANKS = ("1d", "2d", "3d", "4d", "5d")
_REDUCTIONS = ("add", "min", "max", "and", "or", "xor")


def _hints(m: Modifiers) -> bool:
    return m.flag("L2::cache_hint")


def _vector_text(t: Translator, items: tuple, kind: str = "b32") -> str:
    return "(" + "".join(t.source(item, kind) + ", " for item in items) + ")"


@emits("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def _emit_tensor_copy(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    rank = int(m.need(*_RANKS)[0])
    mode = m.take("tile", "im2col", "im2col_no_offs") or "tile"
    im2col = mode != "tile"
    hint = _hints(m)
    if m.flag("bulk_group"):
        m.need("global")
        m.need("shared::cta")
        reduction = m.need(*_REDUCTIONS) if i.parts[1] == "reduce" else None
        target, source = i.operands[:2]
        _check_rank(target, rank)
        call = (
            f"{t.bind(tensor_store, 'tensor_store')}(s, {{mask}}, {t.source(target.base, 'u64')}, "
            f"{_vector_text(t, target.coordinates)}, {t.address(source)}, {reduction!r}, {im2col})"
        )
        return Effect((), call)
    m.need("mbarrier::complete_tx::bytes")
    m.need("shared::cluster", "shared::cta")
    m.need("global")
    pair = m.take("cta_group::1", "cta_group::2") == "cta_group::2"
    multicast = m.flag("multicast::cluster")
    target, source, barrier, *rest = i.operands
    _check_rank(source, rank)
    offsets: tuple = ()
    if rest and isinstance(rest[0], Vector):
        offsets = rest.pop(0).items
    elif mode == "im2col":
        raise UnsupportedInstruction("an im2col load without offsets")
    cast = t.source(rest.pop(0), "u16") if multicast else "None"
    if len(rest) != int(hint):
        raise UnsupportedInstruction("the number of operands does not fit the modifiers")
    call = (
        f"{t.bind(tensor_load, 'tensor_load')}(s, {{mask}}, {t.address(target)}, {t.source(source.base, 'u64')}, "
        f"{_vector_text(t, source.coordinates)}, {t.address(barrier)}, {_vector_text(t, offsets, 'u16')}, "
        f"{cast}, {pair}, {im2col})"
    )
    return Effect((), call)


def _check_rank(operand: object, rank: int) -> None:
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise UnsupportedInstruction(f"a copy of rank {rank} with another number of coordinates")


@emits("cp.async.bulk")
def _emit_bulk_copy(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    hint = _hints(m)
    target, source, size, *rest = i.operands
    if m.flag("bulk_group"):
        m.need("global")
        m.need("shared::cta")
        call = (
            f"{t.bind(bulk_store, 'bulk_store')}(s, {{mask}}, {t.address(target)}, "
            f"{t.address(source)}, {t.source(size, 'u32')})"
        )
        return Effect((), call)
    m.need("mbarrier::complete_tx::bytes")
    m.need("shared::cluster", "shared::cta")
    m.need("global")
    barrier = rest.pop(0)
    cast = t.source(rest.pop(0), "u16") if m.flag("multicast::cluster") else "None"
    if len(rest) != int(hint):
        raise UnsupportedInstruction("the number of operands does not fit the modifiers")
    call = (
        f"{t.bind(bulk_load, 'bulk_load')}(s, {{mask}}, {t.address(target)}, "
        f"{t.address(source)}, {t.source(size, 'u32')}, "
        f"{t.address(barrier)}, {cast})"
    )
    return Effect((), call)


@emits("cp.async.bulk.prefetch")
def _emit_bulk_prefetch(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.rest.clear()
    return Effect((), "None")


@emits("cp.async.bulk.commit_group")
def _emit_bulk_commit(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    return Effect((), f"{t.bind(bulk_commit, 'bulk_commit')}(s, {{mask}})")


@emits("cp.async.bulk.wait_group")
def _emit_bulk_wait(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    reading = m.flag("read")
    return Effect((), f"{t.bind(bulk_wait, 'bulk_wait')}(s, {{mask}}, {t.source(i.operands[0], 'u32')}, {reading})")


@emits("cp.async.ca", "cp.async.cg")
def _emit_copy(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.need("shared", "shared::cta")
    m.need("global")
    hint = _hints(m)
    for name in [name for name in m.rest if name.startswith("L2::")]:
        m.take(name)
    target, source, size, *rest = i.operands
    if len(rest) > 1 + hint:
        raise UnsupportedInstruction("cp.async with an ignore-src operand is not modelled")
    source_size = t.source(rest[0], "u32") if len(rest) > hint else "None"
    call = (
        f"{t.bind(copy_async, 'copy_async')}(s, {{mask}}, {t.address(target, 32)}, "
        f"{t.address(source)}, {size.value}, {source_size})"
    )
    return Effect((), call)


@emits("cp.async.commit_group")
def _emit_copy_commit(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    return Effect((), f"{t.bind(copy_commit, 'copy_commit')}(s)")


@emits("cp.async.wait_group", "cp.async.wait_all")
def _emit_copy_wait(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    pending = t.source(i.operands[0], "u32") if i.parts[2] == "wait_group" else "None"
    return Effect((), f"{t.bind(copy_wait, 'copy_wait')}(s, {pending})")


@emits("cp.async.mbarrier.arrive")
def _emit_copy_arrive(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    increments = not m.flag("noinc")
    m.take("shared", "shared::cta")
    m.need("b64")
    return Effect((), f"{t.bind(copy_arrive, 'copy_arrive')}(s, {{mask}}, {t.address(i.operands[0])}, {increments})")
