"""Asynchronous operations that are issued and not yet performed, and the order in which a schedule performs them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ptxemu.errors import EmulatorError, Location

FLUSH_PROBABILITY = 0.5  # of a random schedule: that a round performs one more asynchronous operation
SPURIOUS_PROBABILITY = 0.25  # of a random schedule: that a wait which would block returns False instead


@dataclass
class Operation:
    """One asynchronous operation. Operations of one stream are performed in the order of issue."""

    stream: Hashable
    run: Callable[[], None]
    location: Location
    number: int = 0
    done: bool = False


class Order(Enum):
    """When asynchronous operations complete.

    EARLY: as they are issued. LATE: as late as allowed, the oldest first; missing waits show. NEWEST: as late as
    allowed, the newest first; early reuse of buffers shows. RANDOM: any time, and waits may return early.
    """

    EARLY = "early"
    LATE = "late"
    NEWEST = "newest"
    RANDOM = "random"


@dataclass
class Schedule:
    """An order, with the seed of a random one."""

    order: Order = Order.EARLY
    seed: int = 0
    generator: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.order = Order(self.order)
        self.generator = random.Random(self.seed)

    @property
    def immediate(self) -> bool:
        return self.order is Order.EARLY

    def pick(self, heads: list[Operation]) -> Operation:
        if self.order is Order.RANDOM:
            return self.generator.choice(heads)
        return (max if self.order is Order.NEWEST else min)(heads, key=lambda operation: operation.number)

    def spuriously_fails(self) -> bool:
        return self.order is Order.RANDOM and self.generator.random() < SPURIOUS_PROBABILITY

    def flushes(self) -> bool:
        return self.order is Order.RANDOM and self.generator.random() < FLUSH_PROBABILITY

    def arrange(self, warps: list[Any]) -> list[Any]:
        """The warps in the order in which they get their turns."""
        if self.order is Order.RANDOM:
            warps = warps.copy()
            self.generator.shuffle(warps)
        elif self.order is Order.NEWEST:
            warps = warps[::-1]
        return warps


class AsyncQueue:
    """The operations of all clusters. A schedule that completes work early never leaves anything here."""

    def __init__(self, schedule: Schedule, event: Callable[[], None]):
        self.schedule, self.event = schedule, event
        self.streams: dict[Hashable, deque[Operation]] = {}
        self.issued = 0

    def __len__(self) -> int:
        return sum(len(stream) for stream in self.streams.values())

    def submit(self, stream: Hashable | None, run: Callable[[], None], location: Location) -> Operation:
        """Queues an operation; without a stream it is ordered with nothing."""
        self.issued += 1
        operation = Operation(self.issued if stream is None else stream, run, location, self.issued)
        if self.schedule.immediate:
            self._perform(operation)
        else:
            self.streams.setdefault(operation.stream, deque()).append(operation)
        self.event()
        return operation

    def _perform(self, operation: Operation) -> None:
        operation.done = True
        try:
            operation.run()
        except EmulatorError as error:
            error.location = error.location or operation.location
            raise
        self.event()

    def finish(self, operation: Operation) -> None:
        """Performs an operation now, and everything of its stream before it: somebody has waited for it."""
        while not operation.done:
            self._perform_head(operation.stream)

    def _perform_head(self, stream: Hashable) -> None:
        queue = self.streams[stream]
        operation = queue.popleft()
        if not queue:
            del self.streams[stream]
        self._perform(operation)

    def step(self) -> bool:
        """Performs the one operation that the schedule picks; False if there is none."""
        if not self.streams:
            return False
        heads = [queue[0] for queue in self.streams.values()]
        self._perform_head(self.schedule.pick(heads).stream)
        return True
