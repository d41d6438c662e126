"""Asynchronous operations that are issued and not yet performed, and the order in which a schedule performs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import Location, diagnosis

if TYPE_CHECKING:
    from .scheduler import Schedule


@dataclass
class Operation:
    """One asynchronous operation. Operations of one stream are performed in the order of issue."""

    stream: Hashable
    run: Callable[[], None]
    location: Location
    number: int = 0
    done: bool = False


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
        except Exception as error:
            found = diagnosis(error)
            if found is None:
                raise
            found.location = found.location or operation.location
            raise found from error.__cause__
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
