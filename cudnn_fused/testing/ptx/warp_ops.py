"""Exchanges between the lanes of a warp, and conversions between shared and generic addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import values
from .errors import OutOfBounds
from .translate import PENDING, SHARED_BASE
from .values import FULL_MASK, LANE_IDS, LANES, Value, lane_flags, lane_indices, lowest_lane

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


def _gather(strand: Any, members: Value) -> bool:
    """Whether all live lanes of `members` are here; else the strand waits for them."""
    mask = values.uniform(members, strand.mask)
    if mask is None:
        raise strand.error("DivergenceError", "lanes of one warp name different member masks")
    return strand.converged(mask)


def elect(strand: Any, members: Value) -> Any:
    """The leader's lane, and a predicate that holds in the leader alone (the lowest lane, as GPUs choose)."""
    if not _gather(strand, members):
        return PENDING
    if strand.mask == 1 << (leader := lowest_lane(strand.mask)):
        return leader, True
    return leader, lane_flags(1 << leader)


def warp_sync(strand: Any, members: Value) -> Any:
    return None if _gather(strand, members) else PENDING


def shuffle(strand: Any, mode: str, value: Value, lane: Value, clamp: Value, members: Value) -> Any:
    """shfl.sync: the value of another lane of the segment, and whether that lane is inside it."""
    if not _gather(strand, members):
        return PENDING
    if mode == "idx" and not isinstance(value, np.ndarray):
        if not isinstance(lane, np.ndarray) and not isinstance(clamp, np.ndarray) and (clamp & 0x1F00) == 0:
            return value, lane & 31 <= clamp & 31
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
    active = lane_flags(strand.mask)
    if not active[source[active]].all():
        raise strand.error("DivergenceError", "shfl reads a lane that does not take part")
    return values.as_lanes(value, 32)[source], inside


def vote(strand: Any, mode: str, predicate: Value, members: Value) -> Any:
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


def redux(strand: Any, mode: str, is_signed: bool, value: Value, members: Value) -> Any:
    if not _gather(strand, members):
        return PENDING
    lanes = values.as_lanes(value, 32)[lane_indices(strand.mask)]
    if is_signed:
        lanes = lanes.view(np.int32)
    result = int(lanes.astype(np.int64).sum()) if mode == "add" else int(_REDUCE[mode](lanes))
    return result & FULL_MASK


def special_registers(tid: tuple[np.ndarray, ...]) -> dict[str, Value]:
    """The special registers that depend on the lane alone, and the thread index of each lane."""
    one = np.uint32(1)
    below = (one << LANE_IDS) - one
    return {
        "%laneid": LANE_IDS,
        "%lanemask_eq": one << LANE_IDS,
        "%lanemask_lt": below,
        "%lanemask_le": below | (one << LANE_IDS),
        "%lanemask_gt": ~(below | (one << LANE_IDS)),
        "%lanemask_ge": ~below,
        **{f"%tid.{axis}": _uniform_or_lanes(ids) for axis, ids in zip("xyz", tid, strict=True)},
    }


def _uniform_or_lanes(ids: np.ndarray) -> Value:
    return int(ids[0]) if ids.shape == (LANES,) and (ids == ids[0]).all() else ids
