"""Emitters and handlers of loads, stores, atomics and matrix moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.errors import BarrierMisuse, OutOfBounds, UnsupportedInstruction
from ptxemu.instructions.barrier_ops import shared_target
from ptxemu.isa import values
from ptxemu.isa.parser import TYPE_BYTES, Address, Instruction, Symbol, Vector
from ptxemu.isa.translate import (
    CTA_SHIFT,
    LOCAL_BASE,
    PARAMETER_BASE,
    SHARED_BASE,
    Effect,
    Modifiers,
    Translator,
    emits,
)
from ptxemu.isa.values import LANES, SIGNED, UNSIGNED, Value, lane_indices
from ptxemu.machine.memory import ITEM_TYPES, WORD
from ptxemu.machine.state import Cta, Strand
from ptxemu.models import matrix, numerics

SHARED_SPACES = ("shared", "shared::cta", "shared::cluster")
_OFFSET_MASK = (1 << CTA_SHIFT) - 1
_SHARED_END = SHARED_BASE + (1 << 32)


# Addresses.


def _active(value: Value, mask: int) -> Value:
    """The active lanes of a value; a uniform one stays an int."""
    if not isinstance(value, np.ndarray) or mask == values.FULL_MASK:
        return value
    return value[lane_indices(mask)]


def _is_shared(address: Value) -> bool:
    """Whether generic addresses lie in the shared window; lanes must agree."""
    if not isinstance(address, np.ndarray):
        return SHARED_BASE <= address < _SHARED_END
    inside = (address >= SHARED_BASE) & (address < _SHARED_END)
    if inside.all():
        return True
    if inside.any():
        raise OutOfBounds("one access to shared memory in some lanes and elsewhere in others")
    return False


def _shared_parts(strand: Strand, address: Value, remote: bool) -> list[tuple[Cta, Value, Any]]:
    """(CTA, offsets, selection of lanes) for each CTA that the active lanes name."""
    if not isinstance(address, np.ndarray):
        cta, offset = shared_target(strand, address, remote)
        return [(cta, offset, slice(None))]
    address = address.astype(np.int64)
    if address[0] >= SHARED_BASE:
        address -= SHARED_BASE
    ranks = address >> CTA_SHIFT
    first = int(ranks[0])
    if (ranks == first).all():
        cta, _ = shared_target(strand, first << CTA_SHIFT, remote)
        return [(cta, address & _OFFSET_MASK, slice(None))]
    parts = []
    for rank in np.unique(ranks):
        cta, _ = shared_target(strand, int(rank) << CTA_SHIFT, remote)
        chosen = np.flatnonzero(ranks == rank)
        parts.append((cta, address[chosen] & _OFFSET_MASK, chosen))
    return parts


def _check_shared_race(strand: Strand, cta: Cta, offsets: Value, size: int, write: bool) -> None:
    """Records the access of this warp in the shadow of the CTA's shared memory."""
    shadow = cta.shared_shadow
    if shadow is None:
        return
    access = strand.access()
    cta.used_by(strand, access.agent, access.clock)
    what = f"{'a write' if write else 'a read'} of shared memory"
    if size < WORD:
        strand.race(shadow.narrow(np.atleast_1d(offsets), size, access, write), what)
        return
    words = offsets // WORD
    if size > WORD:
        words = np.add.outer(words, np.arange(size // WORD))
    index = words if isinstance(words, np.ndarray) else slice(words, words + 1)
    strand.race(shadow.write(index, access) if write else shadow.read(index, access), what)


# Moving data. `items` are arrays of whole accesses (1 to 32 bytes each), one per active lane.


def _read(strand: Strand, space: str, address: Value, size: int) -> np.ndarray:
    """The items at the active lanes' addresses: one if the address is uniform."""
    counts = strand.warp.launch.counts
    if space == "generic":
        space = "shared::cluster" if _is_shared(address) else "global"
    lanes = bin(strand.mask).count("1") if not isinstance(address, np.ndarray) else address.shape[0]
    if space == "global":
        if not isinstance(address, np.ndarray) and address >= PARAMETER_BASE:
            data = strand.warp.parameters.data[address - PARAMETER_BASE :][:size]
            return np.frombuffer(data, np.uint8).view(ITEM_TYPES[size])
        counts.bytes["global to registers"] += lanes * size
        parts = strand.warp.launch.memory.items(address, size, "load")
        view, index, _ = parts[0]
        if len(parts) == 1:
            return view[index] if isinstance(index, np.ndarray) else view[index : index + 1]
        items = np.empty(address.shape[0], view.dtype)
        for view, index, chosen in parts:
            items[chosen] = view[index]
        return items
    counts.bytes["shared to registers"] += lanes * size
    parts = _shared_parts(strand, address, space == "shared::cluster")
    items = None
    for cta, offsets, chosen in parts:
        index = cta.shared.index(offsets, size, "load")
        strand.warp.launch.guard(cta.shared.require_written, index, size, "load")
        _check_shared_race(strand, cta, offsets, size, write=False)
        found = cta.shared.items[size][index if isinstance(index, np.ndarray) else slice(index, index + 1)]
        if len(parts) == 1:
            return found
        if items is None:
            items = np.empty(address.shape[0], found.dtype)
        items[chosen] = found
    return items


def _write(strand: Strand, space: str, address: Value, items: np.ndarray) -> None:
    """Stores one item per active lane; of lanes with one address the last wins."""
    size = items.dtype.itemsize
    launch = strand.warp.launch
    if space == "generic":
        space = "shared::cluster" if _is_shared(address) else "global"
    if not isinstance(address, np.ndarray):
        items = items[-1:]
    launch.event()
    if space == "global":
        for view, index, chosen in launch.memory.items(address, size, "store"):
            view[index] = items[chosen] if isinstance(index, np.ndarray) else items[0]
        launch.counts.bytes["registers to global"] += items.shape[0] * size
        return
    launch.counts.bytes["registers to shared"] += items.shape[0] * size
    for cta, offsets, chosen in _shared_parts(strand, address, space == "shared::cluster"):
        index = cta.shared.index(offsets, size, "store")
        _check_barriers_untouched(strand, cta, offsets, size)
        cta.shared.put(index, size, items[chosen] if isinstance(index, np.ndarray) else items[0])
        _check_shared_race(strand, cta, offsets, size, write=True)


def _is_local(space: str, address: Value) -> bool:
    """Whether an access goes to local memory; generic addresses of active lanes must agree."""
    if space != "generic":
        return space == "local"
    return bool(np.max(address) >= LOCAL_BASE) if isinstance(address, np.ndarray) else address >= LOCAL_BASE


def _local_bytes(strand: Strand, mask: int, address: Value, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    lanes = lane_indices(mask)
    offsets = values.as_lanes(address, 64)[lanes].astype(np.int64) - LOCAL_BASE
    return strand.warp.local.index(lanes, offsets, size, what)


def _read_local(strand: Strand, mask: int, address: Value, size: int) -> np.ndarray:
    """The items of the active lanes, each from its own local memory."""
    index = _local_bytes(strand, mask, address, size, "load")
    strand.warp.launch.guard(strand.warp.local.require_written, index)
    strand.warp.launch.counts.bytes["local to registers"] += index[1].size
    return strand.warp.local.data[index].view(ITEM_TYPES[size])[:, 0]


def _write_local(strand: Strand, mask: int, address: Value, items: np.ndarray) -> None:
    size = items.dtype.itemsize
    index = _local_bytes(strand, mask, address, size, "store")
    strand.warp.local.data[index] = items.view(np.uint8).reshape(-1, size)
    strand.warp.local.written[index] = True
    strand.warp.launch.counts.bytes["registers to local"] += index[1].size


def _check_barriers_untouched(strand: Strand, cta: Cta, offsets: Value, size: int) -> None:
    """An ordinary store to a live mbarrier destroys it."""
    if not cta.mbarriers:
        return
    low, high = int(np.min(offsets)), int(np.max(offsets)) + size
    if high <= cta.first_barrier or low >= cta.last_barrier:
        return
    for offset in cta.mbarriers:
        if (
            ((offsets < offset + 8) & (offsets + size > offset)).any()
            if isinstance(offsets, np.ndarray)
            else low < offset + 8 and high > offset
        ):
            raise strand.error(BarrierMisuse, f"a store to the live {cta.mbarriers[offset]}")


def load(
    strand: Strand, mask: int, space: str, address: Value, width: int, count: int, bits: int, is_signed: bool
) -> Any:
    """`count` values of `width` bytes per lane as registers of `bits`: a value, or a tuple of them."""
    active = _active(address, mask)
    local = _is_local(space, active)
    items = _read_local(strand, mask, address, width * count) if local else _read(strand, space, active, width * count)
    table = items.view(UNSIGNED[8 * width]).reshape(-1, count)
    if bits != 8 * width:
        table = (
            table.view(SIGNED[8 * width]).astype(SIGNED[bits]).view(UNSIGNED[bits])
            if is_signed
            else table.astype(UNSIGNED[bits])
        )
    if not isinstance(address, np.ndarray) and not local:
        row = table[0].tolist()
        return row[0] if count == 1 else tuple(row)
    if mask != values.FULL_MASK:
        full = np.zeros((LANES, count), table.dtype)
        full[lane_indices(mask)] = table
        table = full
    columns = np.ascontiguousarray(table.T)
    return columns[0] if count == 1 else tuple(columns)


def store(strand: Strand, mask: int, space: str, address: Value, sources: tuple[Value, ...], width: int) -> None:
    """Stores registers, truncated to `width` bytes each."""
    active = _active(address, mask)
    count = len(sources)
    kind = UNSIGNED[8 * width]
    local = _is_local(space, active)
    uniform = not isinstance(address, np.ndarray) and not local
    table = np.empty((1 if uniform else bin(mask).count("1"), count), kind)
    for column, value in enumerate(sources):
        if not isinstance(value, np.ndarray):
            table[:, column] = value & ((1 << 8 * width) - 1)
        elif uniform:
            table[:, column] = _active(value, mask)[-1]
        else:
            table[:, column] = _active(value, mask)
    items = table.view(ITEM_TYPES[width * count]).reshape(-1)
    _write_local(strand, mask, address, items) if local else _write(strand, space, active, items)


# Atomics: one lane after the other, as hardware may.


def _integer_atomics(bits: int, is_signed: bool) -> dict[str, Callable[..., int]]:
    mask = (1 << bits) - 1

    def order(a: int) -> int:
        return values.signed(a, bits) if is_signed else a

    return {
        "add": lambda old, a: (old + a) & mask,
        "min": lambda old, a: min(old, a, key=order),
        "max": lambda old, a: max(old, a, key=order),
        "and": lambda old, a: old & a,
        "or": lambda old, a: old | a,
        "xor": lambda old, a: old ^ a,
        "exch": lambda old, a: a,
        "inc": lambda old, a: 0 if old >= a else old + 1,
        "dec": lambda old, a: a if old == 0 or old > a else old - 1,
        "cas": lambda old, a, b: b if old == a else old,
    }


def _float_atomic(kind: str) -> Callable[[int, int], int]:
    bits = 8 * TYPE_BYTES[kind]
    view = {"f32": np.float32, "f64": np.float64}.get(kind)

    def add(old: int, a: int) -> int:
        x, y = (np.array([v], UNSIGNED[bits]) for v in (old, a))
        if view:
            x, y = x.view(view), y.view(view)
        return int(np.ascontiguousarray(numerics.add(x, y, kind)).view(UNSIGNED[bits])[0])

    return add


def atomic(
    strand: Strand, mask: int, space: str, address: Value, operands: tuple[Value, ...], function: Any, width: int
) -> Value:
    """Combines each active lane's operands with memory in turn; returns what each lane found there."""
    old = np.zeros(LANES, UNSIGNED[8 * width])
    for lane in lane_indices(mask).tolist():
        place = values.lane_value(address, lane)
        found = int(_read(strand, space, place, width).view(UNSIGNED[8 * width])[0])
        old[lane] = found
        new = function(found, *(values.lane_value(operand, lane) for operand in operands))
        _write(strand, space, place, np.array([new], UNSIGNED[8 * width]))
    return old


def load_matrices(strand: Strand, mask: int, address: Value, count: int, transpose: bool) -> Any:
    """ldmatrix: lanes 8j to 8j+7 give the rows of matrix j."""
    rows = np.ascontiguousarray(values.as_lanes(address, 32)[: 8 * count])
    items = _read(strand, "shared", rows, 16)
    fragment = matrix.matrices_to_fragment(items.view(np.uint16).reshape(count, 8, 8), transpose)
    return fragment[0] if count == 1 else tuple(fragment)


def store_matrices(strand: Strand, mask: int, address: Value, sources: tuple[Value, ...], transpose: bool) -> None:
    """stmatrix, the inverse."""
    count = len(sources)
    fragment = np.stack([values.as_lanes(value, 32) for value in sources])
    rows = np.ascontiguousarray(matrix.fragment_to_matrices(fragment, transpose)).reshape(count * 8, 8)
    _write(
        strand,
        "shared",
        np.ascontiguousarray(values.as_lanes(address, 32)[: 8 * count]),
        rows.view(ITEM_TYPES[16]).reshape(-1),
    )


# Emitters.


def _access_modifiers(t: Translator, m: Modifiers) -> tuple[str, bool]:
    """Consumes what does not change results; returns the state space and whether there is a cache-hint operand."""
    m.take("weak", "volatile", "relaxed", "acquire", "release", "mmio")
    m.take("cta", "cluster", "gpu", "sys")
    m.take("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
    space = m.take(*SHARED_SPACES, "global", "param", "param::entry", "const", "local") or "generic"
    m.take("nc")
    hint = m.flag("L2::cache_hint")
    for name in [name for name in m.rest if name.startswith(("L1::", "L2::"))]:
        m.take(name)
    return ("shared" if space == "shared::cta" else "global" if space == "const" else space), hint


def _vector(operand: object) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


@emits("ld", "ldu")
def _emit_load(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    kind = m.type()
    count = int((m.take("v2", "v4", "v8") or "v1")[1:])
    space, _ = _access_modifiers(t, m)
    width = TYPE_BYTES[kind]
    targets = _vector(i.operands[0])
    if len(targets) != count:
        raise UnsupportedInstruction("the vector's length does not fit")
    bits = next((t.register_bits(target) for target in targets if t.register_bits(target)), 8 * width)
    is_signed = kind[0] == "s"
    address = i.operands[1]
    if space.startswith("param") and isinstance(address, Address) and isinstance(address.base, Symbol):
        return _parameter_load(t, i, address, width, count, bits, is_signed)
    if space.startswith("param"):
        space = "global"
    call = (
        f"{t.bind(load, 'load')}(s, {{mask}}, {space!r}, {t.address(address)}, {width}, {count}, {bits}, {is_signed})"
    )
    return Effect((i.operands[0],), call)


def _parameter_load(
    t: Translator, i: Instruction, address: Address, width: int, count: int, bits: int, is_signed: bool
) -> Effect:
    parameter = t.parameters.get(address.base.name)
    if parameter is None or address.offset + width * count > parameter.size:
        raise UnsupportedInstruction("the access is outside the parameter")
    first = parameter.offset + address.offset
    parts = []
    for position in range(count):
        part = f"w.parameters.load({first + position * width}, {width})"
        if is_signed and bits != 8 * width:
            part = f"{t.bind(values.resize, 'resize')}({part}, {8 * width}, {8 * width}, {bits}, True)"
        parts.append(part)
    return Effect((i.operands[0],), ", ".join(parts) if count > 1 else parts[0])


@emits("st")
def _emit_store(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    kind = m.type()
    m.take("v2", "v4", "v8")
    space, _ = _access_modifiers(t, m)
    sources = "".join(t.source(item, kind) + ", " for item in _vector(i.operands[1]))
    call = (
        f"{t.bind(store, 'store')}(s, {{mask}}, {space!r}, {t.address(i.operands[0])}, ({sources}), {TYPE_BYTES[kind]})"
    )
    return Effect((), call)


@emits("atom", "red")
def _emit_atomic(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    kind = m.rest.pop() if m.rest[-1] in ("f16x2", "bf16x2", "bf16", "f16") else m.type()
    m.flag("noftz")
    if m.take("v2", "v4", "v8"):
        raise UnsupportedInstruction("vector atomics are not modelled")
    space, _ = _access_modifiers(t, m)
    bits = 8 * TYPE_BYTES[kind]
    is_float = kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    name = m.need("add") if is_float else m.need(*_integer_atomics(32, False))
    function = _float_atomic(kind) if is_float else _integer_atomics(bits, kind[0] == "s")[name]
    returns = i.parts[0] == "atom"
    address, *rest = i.operands[1 if returns else 0 :]
    operands = "".join(t.source(operand, kind) + ", " for operand in rest[: 2 if name == "cas" else 1])
    call = (
        f"{t.bind(atomic, 'atomic')}(s, {{mask}}, {space!r}, {t.address(address)}, ({operands}), "
        f"{t.bind(function, 'atomic_function')}, {bits // 8})"
    )
    return Effect(i.operands[:1] if returns else (), call)


def _matrix_modifiers(m: Modifiers) -> tuple[int, bool]:
    m.need("sync")
    m.need("aligned")
    m.need("m8n8")
    count = int(m.need("x1", "x2", "x4")[1:])
    transpose = m.flag("trans")
    m.need("shared", "shared::cta")
    m.need("b16")
    return count, transpose


@emits("ldmatrix")
def _emit_ldmatrix(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    count, transpose = _matrix_modifiers(m)
    call = f"{t.bind(load_matrices, 'ldmatrix')}(s, {{mask}}, {t.address(i.operands[1], 32)}, {count}, {transpose})"
    return Effect((i.operands[0],), call)


@emits("stmatrix")
def _emit_stmatrix(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _, transpose = _matrix_modifiers(m)
    sources = "".join(t.source(item, "b32") + ", " for item in _vector(i.operands[1]))
    call = (
        f"{t.bind(store_matrices, 'stmatrix')}(s, {{mask}}, {t.address(i.operands[0], 32)}, ({sources}), {transpose})"
    )
    return Effect((), call)


@emits("mapa")
def _emit_mapa(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    space = m.take("shared::cluster")
    kind = m.type()
    base = 0 if space else SHARED_BASE
    call = (
        f"{t.bind(map_address, 'mapa')}(s, {t.source(i.operands[1], kind)}, {t.source(i.operands[2], 'u32')}, {base})"
    )
    return Effect(i.operands[:1], call)


def map_address(strand: Strand, address: Value, rank: Value, base: int) -> Value:
    """The same offset in another CTA of the cluster. A rank past the cluster gives an address that nothing may use."""
    if isinstance(rank, np.ndarray):
        kind = address.dtype if isinstance(address, np.ndarray) else UNSIGNED[64 if base else 32]
        rank = rank.astype(kind)
    return ((address - base) & _OFFSET_MASK) + (rank << CTA_SHIFT) + base


@emits("prefetch", "prefetchu")
def _emit_prefetch(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.rest.clear()
    return Effect((), "None")


@emits("createpolicy")
def _emit_policy(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.rest.clear()
    return Effect(i.operands[:1], "0")
