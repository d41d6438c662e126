"""Exchanges between the lanes of a warp, and conversions between shared and generic addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.errors import DivergenceError, OutOfBounds, UnsupportedInstruction
from ptxemu.isa import values
from ptxemu.isa.parser import Instruction, Register
from ptxemu.isa.translate import PENDING, SHARED_BASE, Blocking, Effect, Modifiers, Translator, emits
from ptxemu.isa.values import FULL_MASK, LANE_IDS, LANES, Value, lane_flags, lane_indices, lowest_lane
from ptxemu.machine.state import Strand

_SHARED_END = SHARED_BASE + (1 << 32)


def shared_to_generic(address: Value) -> Value:
    return address + SHARED_BASE


def generic_to_shared(address: Value) -> Value:
    inside = (address >= SHARED_BASE) & (address < _SHARED_END)
    if not np.all(inside):
        raise OutOfBounds("cvta.to.shared of an address that is not in shared memory")
    return address - SHARED_BASE


def first(pair: Any) -> Any:
    """The first of two results, or PENDING."""
    return pair if pair is PENDING else pair[0]


def _members(strand: Strand, members: Value) -> Value | None:
    """The member masks if all live lanes that they name are here; else None, and the strand waits for them.

    Groups of lanes with a mask of their own may execute one instruction together.
    """
    if isinstance(members, np.ndarray):
        active = members[lane_indices(strand.mask)]
        if (active == active[0]).all():
            members = int(active[0])
        else:
            return members if strand.converged(int(np.bitwise_or.reduce(active))) else None
    if strand.mask & ~members:
        raise strand.error(DivergenceError, f"a lane outside the member mask {members:#010x} takes part")
    return members if strand.converged(members) else None


def _gather(strand: Strand, members: Value) -> bool:
    """Whether all lanes of the one member mask are here; else the strand waits for them."""
    found = _members(strand, members)
    if isinstance(found, np.ndarray):
        raise strand.error(
            UnsupportedInstruction, "different member masks in one warp are modelled for shfl and redux only"
        )
    return found is not None


def _groups(strand: Strand, members: Value) -> list[int]:
    """The distinct groups of active lanes."""
    if not isinstance(members, np.ndarray):
        return [strand.mask]
    return [int(mask) & strand.mask for mask in np.unique(members[lane_indices(strand.mask)])]


def elect(strand: Strand, members: Value) -> Any:
    """The leader's lane, and a predicate that holds in the leader alone (the lowest lane, as GPUs choose)."""
    if not _gather(strand, members):
        return PENDING
    if strand.mask == 1 << (leader := lowest_lane(strand.mask)):
        return leader, True
    return leader, lane_flags(1 << leader)


def warp_sync(strand: Strand, members: Value) -> Any:
    return None if _gather(strand, members) else PENDING


def shuffle(strand: Strand, mode: str, value: Value, lane: Value, clamp: Value, members: Value) -> Any:
    """shfl.sync: the value of another lane of the segment, and whether that lane is inside it."""
    found = _members(strand, members)
    if found is None:
        return PENDING
    if mode == "idx" and not any(isinstance(operand, np.ndarray) for operand in (value, lane, clamp)) and clamp == 31:
        return value, True
    lane = values.as_lanes(lane, 32).astype(np.int64) & 31
    clamp = values.as_lanes(clamp, 32).astype(np.int64)
    segment = (clamp >> 8) & 31
    base = LANE_IDS.astype(np.int64)
    bound, low = (base & segment) | (clamp & 31 & ~segment), base & segment
    if mode == "idx":
        source = low | (lane & ~segment)
    elif mode == "up":
        source = base - lane
    else:
        source = base + lane if mode == "down" else base ^ lane
    inside = source >= bound if mode == "up" else source <= bound
    source = np.where(inside, source, base)
    shuffled = values.as_lanes(value, 32)[source]
    for group in _groups(strand, found):
        flags = lane_flags(group)
        outside = flags & ~flags[source]
        if outside.any():  # a lane that does not take part: undefined, and used by nobody in a correct kernel
            shuffled = np.where(outside, np.uint32(values.POISON[32]), shuffled)
    return shuffled, inside


def vote(strand: Strand, mode: str, predicate: Value, members: Value) -> Any:
    if not _gather(strand, members):
        return PENDING
    holds = values.lane_mask(predicate) & strand.mask
    if mode == "ballot":
        return holds
    if mode == "any":
        return holds != 0
    return holds == strand.mask or (mode == "uni" and holds == 0)


_REDUCE = {
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def redux(strand: Strand, mode: str, is_signed: bool, value: Value, members: Value) -> Any:
    found = _members(strand, members)
    if found is None:
        return PENDING
    result = np.zeros(LANES, np.uint32)
    for group in _groups(strand, found):
        indices = lane_indices(group)
        lanes = values.as_lanes(value, 32)[indices]
        if is_signed:
            lanes = lanes.view(np.int32)
        total = int(lanes.astype(np.int64).sum()) if mode == "add" else int(_REDUCE[mode](lanes))
        result[indices] = total & FULL_MASK
    return result


# Emitters. All of these block until the lanes they name have arrived.


@emits("shfl.sync", blocking=True)
def _emit_shuffle(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    mode = m.need("idx", "up", "down", "bfly")
    m.need("b32")
    value, lane, clamp, members = (t.source(operand, "u32") for operand in i.operands[1:5])
    function = t.bind(shuffle, "shuffle")
    call = f"{function}(s, {mode!r}, {value}, {lane}, {clamp}, {members})"
    if isinstance(i.operands[0], Register):
        return Blocking(i.operands[:1], f"{t.bind(first, 'first')}({call})")
    return Blocking(i.operands[:1], call)


@emits("elect.sync", blocking=True)
def _emit_elect(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    return Blocking(i.operands[:1], f"{t.bind(elect, 'elect')}(s, {t.source(i.operands[1], 'u32')})")


@emits("vote.sync", blocking=True)
def _emit_vote(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    mode = m.need("all", "any", "uni", "ballot")
    m.need("pred", "b32")
    predicate, members = t.source(i.operands[1], "pred"), t.source(i.operands[2], "u32")
    return Blocking(i.operands[:1], f"{t.bind(vote, 'vote')}(s, {mode!r}, {predicate}, {members})")


@emits("redux.sync", blocking=True)
def _emit_redux(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    mode = m.need("add", "min", "max", "and", "or", "xor")
    kind = m.type()
    if kind not in ("b32", "s32", "u32"):
        raise UnsupportedInstruction(f"redux of {kind} is not modelled")
    value, members = t.source(i.operands[1], kind), t.source(i.operands[2], "u32")
    return Blocking(i.operands[:1], f"{t.bind(redux, 'redux')}(s, {mode!r}, {kind[0] == 's'}, {value}, {members})")


@emits("bar.warp.sync", blocking=True)
def _emit_warp_sync(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    return Blocking((), f"{t.bind(warp_sync, 'warp_sync')}(s, {t.source(i.operands[0], 'u32')})")


@emits("activemask")
def _emit_active_mask(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.need("b32")
    return Effect(i.operands[:1], "s.mask")
