"""Happens-before checks by vector clocks, over shared and tensor memory.

Agents are the warps and the asynchronous pipes they feed: a warp's tensor-core pipe, its bulk-store groups, its
cp.async groups, its tensor-memory loads and stores, and every mbarrier (for the bulk copies that complete on it, by
phase). One counter
per agent says how many of its operations an observer may rely on: the observer's *clock* of that agent.
Clocks travel with barrier arrivals, commits and completed transactions, and are joined by waits.

A clock has two rows. Row ORDERED holds what happened before; row PUBLISHED what of it a `fence.proxy.async` has made
visible to the async proxy. An asynchronous access must find earlier ordinary (generic-proxy) writes in the second row.

Two accesses race if one writes, they touch the same 4-byte word, and the clock of the later one does not contain the
earlier. A warp counts as one agent, so exchanges inside a warp are not checked; accesses narrower than a word are
checked only against writes of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from ptxemu.machine.memory import WORD
from ptxemu.models import tensor_memory

ORDERED, PUBLISHED = 0, 1
CLUSTER = 0  # an agent that accesses nothing: 1 in the clock of who knows that all CTAs of the cluster have started
_AGENT_SHIFT, _CLOCK_SHIFT = 44, 20
_CLOCK_MASK = (1 << (_AGENT_SHIFT - _CLOCK_SHIFT)) - 1
_LINE_MASK = (1 << _CLOCK_SHIFT) - 1
_EVERYTHING = 1 << 62
MBARRIERS_PER_CTA = 160


class Pipe(IntEnum):
    """The agents of one warp."""

    WARP = 0
    MMA = 1
    BULK = 2
    COPY = 3
    TENSOR_LOAD = 4
    TENSOR_STORE = 5


_PIPE_NAMES = {
    Pipe.WARP: "",
    Pipe.MMA: "the tensor core, fed by ",
    Pipe.BULK: "a bulk copy of ",
    Pipe.COPY: "a cp.async of ",
    Pipe.TENSOR_LOAD: "a tcgen05.ld of ",
    Pipe.TENSOR_STORE: "a tcgen05.st of ",
}
_GENERIC_PIPES = {Pipe.WARP, Pipe.COPY}


@dataclass
class Access:
    """Who accesses: an agent and the value its counter has while the operation is under way, the clock it may rely
    on, the instruction, and whether the access goes through the async proxy."""

    agent: int
    clock: int
    knows: np.ndarray
    at: int
    asynchronous: bool

    @property
    def key(self) -> int:
        return (self.agent << _AGENT_SHIFT) | (self.clock << _CLOCK_SHIFT) | self.at


@dataclass
class Conflict:
    """The earlier access of a race."""

    agent: int
    clock: int
    at: int
    wrote: bool


@dataclass
class Agents:
    """Numbers the agents of one cluster. The one that wrote what nobody wrote is the cluster."""

    ctas: int
    warps: int
    barriers: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = self.first_barrier = 1 + self.ctas * self.warps * len(Pipe)
        self.capacity = self.count + self.ctas * MBARRIERS_PER_CTA
        self.generic = np.zeros(self.capacity, bool)
        for pipe in _GENERIC_PIPES:
            self.generic[1 + pipe : self.count : len(Pipe)] = True

    def clock(self) -> np.ndarray:
        return np.zeros((2, self.capacity), np.int64)

    def pipe(self, cta: int, warp: int, pipe: Pipe) -> int:
        return 1 + (cta * self.warps + warp) * len(Pipe) + pipe

    def barrier(self, cta: int, offset: int) -> int:
        """The agent of the bulk copies that complete on one mbarrier."""
        if (cta, offset) not in self.barriers:
            if self.count == self.capacity:
                raise MemoryError(f"more than {MBARRIERS_PER_CTA} mbarriers per CTA")
            self.barriers[cta, offset] = self.count
            self.count += 1
        return self.barriers[cta, offset]

    def describe(self, agent: int) -> str:
        for (cta, offset), number in self.barriers.items():
            if number == agent:
                return f"a bulk copy that completes on the mbarrier at offset {offset} of the cluster's CTA {cta}"
        warp, pipe = divmod(agent - 1, len(Pipe))
        return f"{_PIPE_NAMES[Pipe(pipe)]}warp {warp % self.warps} of the cluster's CTA {warp // self.warps}"

    def visible(self, access: Access, writes: bool) -> np.ndarray:
        """For each agent, up to where the access may rely on its writes (or on its reads being over)."""
        knows = access.knows
        published = writes and access.asynchronous
        visible = np.where(self.generic, knows[PUBLISHED], knows[ORDERED]) if published else knows[ORDERED].copy()
        if self.in_order(access.agent):
            visible[access.agent] = _EVERYTHING
        return visible

    def in_order(self, agent: int) -> bool:
        """Whether the operations of an agent follow each other; bulk copies of one mbarrier do not."""
        return agent < self.first_barrier

    def relies_on(self, access: Access, key: int, writes: bool) -> bool:
        """Whether one earlier access is ordered before `access`."""
        agent = key >> _AGENT_SHIFT
        if agent == access.agent and self.in_order(agent):
            return True
        row = PUBLISHED if writes and access.asynchronous and self.generic[agent] else ORDERED
        return bool((key >> _CLOCK_SHIFT) & _CLOCK_MASK <= access.knows[row, agent])


class Shadow:
    """Last writer and readers of every cell of a memory. Cells are addressed by any NumPy index of `shape`.

    `reader` holds the last reader. Only where readers are not ordered among each other the earlier ones are kept,
    too, in `more_readers` (by agent).
    """

    def __init__(self, agents: Agents, shape: tuple[int, ...]):
        self.agents = agents
        self.shape = shape
        self.writer = np.zeros(shape, np.int64)
        self.reader = np.zeros(shape, np.int64)
        self.more_readers: dict[int, np.ndarray] = {}

    def _unordered(self, keys: np.ndarray, access: Access, writes: bool) -> np.ndarray | None:
        """Which of the earlier accesses (by their keys) are not ordered before this one; None if all are."""
        first = int(keys.flat[0])
        if (keys == first).all():
            return None if self.agents.relies_on(access, first, writes) else np.ones(keys.shape, bool)
        visible = self.agents.visible(access, writes)
        bad = (keys >> _CLOCK_SHIFT) & _CLOCK_MASK > visible[keys >> _AGENT_SHIFT]
        return bad if bad.any() else None

    @staticmethod
    def _conflict(keys: np.ndarray, bad: np.ndarray | None, wrote: bool) -> Conflict | None:
        if bad is None:
            return None
        key = int(keys[bad].flat[0])
        return Conflict(key >> _AGENT_SHIFT, (key >> _CLOCK_SHIFT) & _CLOCK_MASK, key & _LINE_MASK, wrote)

    def read(self, index: Any, access: Access) -> Conflict | None:
        """Records a read; the conflict if an unordered write precedes it."""
        keys = self.writer[index]
        conflict = self._conflict(keys, self._unordered(keys, access, True), wrote=True)
        keys = self.reader[index]
        concurrent = self._unordered(keys, access, False)
        if concurrent is not None:
            for agent in np.unique(keys[concurrent] >> _AGENT_SHIFT).tolist():
                kept = self.more_readers.setdefault(agent, np.zeros(self.shape, np.int64))
                kept[index] = np.where(concurrent & (keys >> _AGENT_SHIFT == agent), keys, kept[index])
        self.reader[index] = access.key
        return conflict

    def write(self, index: Any, access: Access) -> Conflict | None:
        """Records a write; the conflict if an unordered write or read precedes it."""
        keys = self.writer[index]
        conflict = self._conflict(keys, self._unordered(keys, access, True), wrote=True)
        if conflict is None:
            conflict = self._unordered_read(index, access)
        self.writer[index] = access.key
        return conflict

    def _unordered_read(self, index: Any, access: Access) -> Conflict | None:
        keys = self.reader[index]
        conflict = self._conflict(keys, self._unordered(keys, access, False), wrote=False)
        if conflict is not None:
            return conflict
        for kept in self.more_readers.values():
            keys = kept[index]
            if keys.any():
                conflict = self._conflict(keys, self._unordered(keys, access, False), wrote=False)
                if conflict is not None:
                    return conflict
        return None

    def forget(self, index: Any) -> None:
        """Makes cells as if nobody had touched them (newly allocated tensor memory)."""
        for keys in (self.writer, self.reader, *self.more_readers.values()):
            keys[index] = 0


class SharedShadow(Shadow):
    """Shared memory in words. Narrower accesses are compared byte by byte with the last write."""

    def __init__(self, agents: Agents, size: int):
        super().__init__(agents, (size // WORD,))
        self.bytes_written = np.full(size // WORD, 0xF, np.uint8)

    def narrow(self, offsets: np.ndarray, width: int, access: Access, write: bool) -> Conflict | None:
        """An access of 1 or 2 bytes at each of `offsets`."""
        words = offsets // WORD
        touched = (((1 << width) - 1) << (offsets % WORD)).astype(np.uint8)
        keys = self.writer[words]
        bad = self._unordered(keys, access, True)
        if bad is not None:
            bad &= (self.bytes_written[words] & touched) != 0
            if not bad.any():
                bad = None
        conflict = self._conflict(keys, bad, wrote=True)
        if write:
            same = keys == access.key
            self.bytes_written[words[~same]] = 0
            np.bitwise_or.at(self.bytes_written, words, touched)
            self.writer[words] = access.key
        return conflict

    def write(self, index: Any, access: Access) -> Conflict | None:
        self.bytes_written[index] = 0xF
        return super().write(index, access)


class TensorShadow(Shadow):
    """Tensor memory, indexed [lane, column].

    A chain of products writes one accumulator again and again. `chain` holds what one agent has written since anybody
    else came; writing that again within the same group finds and changes nothing.
    """

    def __init__(self, agents: Agents):
        super().__init__(agents, (tensor_memory.LANES, tensor_memory.COLUMNS))
        self.chain: set[tuple[int, ...]] = set()

    def write(self, index: tuple[Any, Any], access: Access) -> Conflict | None:
        lanes, columns = index
        if not isinstance(lanes, slice) or not isinstance(columns, slice):
            self.chain.clear()
            return super().write(index, access)
        link = (access.agent, access.clock, lanes.start, lanes.stop, columns.start, columns.stop)
        if link in self.chain:
            return None
        if any(other[0] != access.agent for other in self.chain):
            self.chain.clear()
        self.chain.add(link)
        return super().write(index, access)

    def read(self, index: tuple[Any, Any], access: Access) -> Conflict | None:
        self.chain.clear()
        return super().read(index, access)

    def forget(self, index: tuple[Any, Any]) -> None:
        self.chain.clear()
        super().forget(index)
