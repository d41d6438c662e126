"""Compiled launchers of this process: each is made once, by the first thread that asks for it.

Threads that ask for the same launcher wait for that thread. Nobody else waits: a launcher that is ready, or that is
loaded from the disk, is returned while another one is being compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")

COMPILER_LOCK = threading.RLock()
"""To be held while the compiler runs or exports: it is not re-entrant across threads."""


class CompileCache(Generic[Value]):
    """Values by key. A value whose construction raises is not kept: the error goes to all who wait for it."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, Future[Value]] = {}
        self._lock = threading.Lock()  # of the dictionary; never held while a value is made

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, from ``make()`` if no thread has asked for it before."""
        future = self._futures.get(key)
        if future is None:
            with self._lock:
                future = self._futures.get(key)
                is_first = future is None
                if future is None:
                    future = self._futures[key] = Future()
            if is_first:
                self._fulfil(key, future, make)
        return future.result()

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._futures.clear()

    def _fulfil(self, key: Hashable, future: Future[Value], make: Callable[[], Value]) -> None:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                if self._futures.get(key) is future:
                    del self._futures[key]
            future.set_exception(error)
        else:
            future.set_result(value)
