"""The cache of plans that the functions share: bounded, first in first out, each plan built once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class PlanCache(Generic[Value]):
    """At most ``capacity`` values; the one that was inserted first leaves first, however often it was used.

    A key that several threads ask for at once is built by one of them while the others wait. A build that raises
    leaves nothing behind.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.builds = 0  # values that were ever built
        self._values: dict[Hashable, Value] = {}
        self._building: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable) -> Value | None:
        """The value, or None. Takes no lock: a lookup in a dict is atomic."""
        return self._values.get(key)

    def get_or_build(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of ``key``, from ``build()`` if it is not there."""
        with self._lock:
            turn = self._building.setdefault(key, threading.Lock())
        with turn:
            try:
                value = self._values.get(key)
                if value is None:
                    value = build()
                    with self._lock:
                        self.builds += 1
                        self._values[key] = value
                        while len(self._values) > self.capacity:
                            del self._values[next(iter(self._values))]
                return value
            finally:
                with self._lock:
                    self._building.pop(key, None)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._values.clear()
