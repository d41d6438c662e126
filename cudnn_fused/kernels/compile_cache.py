"""What a process has compiled: ready values without waiting, each compiled once, by one compiler at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class CompileCache(Generic[Value]):
    """Values by key, made by whichever thread needs one first while the others that need the same one wait.

    Nobody else waits: a value that is there is returned without a lock, and what is not there is looked for beside
    a compilation of another. ``compiler`` is for the part of the work that must not run twice at a time.
    """

    def __init__(self) -> None:
        self.compiler = threading.Lock()
        self._values: dict[Hashable, Value] = {}
        self._turns: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, from ``make()`` if it is not there.

        ``make`` looks in slower places first, and holds ``compiler`` only while it compiles. If it raises, nothing is
        kept, and who waits for the same value tries for itself.
        """
        try:
            return self._values[key]  # a lookup in a dict is atomic
        except KeyError:
            pass
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            try:
                value = self._values[key]
            except KeyError:
                value = self._values[key] = make()
        with self._lock:  # not before the value is there, so that who comes meanwhile takes the same turn
            self._turns.pop(key, None)
        return value

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
