"""Who waits for whom when kernels are compiled in several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cudnn_fused.kernels.compile_cache import CompileCache

TIMEOUT = 20  # seconds after which a thread that should not have waited has failed
THREADS = 4


@pytest.fixture
def cache() -> CompileCache[str]:
    return CompileCache()


def never() -> str:
    raise AssertionError("it is there already")


def test_a_value_is_made_once(cache: CompileCache[str]) -> None:
    assert cache.get("key", lambda: "value") == "value"
    assert cache.get("key", never) == "value"
    cache.clear()
    assert cache.get("key", lambda: "another") == "another"


def test_none_is_a_value(cache: CompileCache[str | None]) -> None:
    assert cache.get("key", lambda: None) is None
    assert cache.get("key", never) is None


def test_threads_that_need_the_same_value_make_it_once(cache: CompileCache[str]) -> None:
    made: list[str] = []
    start = threading.Barrier(THREADS, timeout=TIMEOUT)

    def make() -> str:
        time.sleep(0.1)
        made.append("value")
        return "value"

    def need(_: int) -> str:
        start.wait()
        return cache.get("key", make)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(need, range(THREADS))) == ["value"] * THREADS
    assert made == ["value"]


def test_a_compilation_holds_up_neither_what_is_ready_nor_what_can_be_loaded(cache: CompileCache[str]) -> None:
    compiling, others_are_done = threading.Event(), threading.Event()

    def compile_it() -> str:
        with cache.compiler:
            compiling.set()
            assert others_are_done.wait(TIMEOUT)
        return "compiled"

    cache.get("ready", lambda: "ready")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(cache.get, "slow", compile_it)
        assert compiling.wait(TIMEOUT)
        assert cache.get("ready", never) == "ready"
        assert cache.get("on disk", lambda: "loaded") == "loaded"
        assert not slow.done()
        others_are_done.set()
        assert slow.result() == "compiled"


def test_the_compiler_runs_once_at_a_time(cache: CompileCache[str]) -> None:
    running: list[int] = []
    most: list[int] = []

    def compile_it() -> str:
        with cache.compiler:
            running.append(1)
            most.append(len(running))
            time.sleep(0.02)
            running.pop()
        return "compiled"

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: cache.get(key, compile_it), range(THREADS)))
    assert most == [1] * THREADS


def test_who_waits_for_what_fails_tries_for_itself(cache: CompileCache[str]) -> None:
    trying, go_on = threading.Event(), threading.Event()

    def fail() -> str:
        trying.set()
        assert go_on.wait(TIMEOUT)
        raise ValueError("no such instruction")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "key", fail)
        assert trying.wait(TIMEOUT)
        second = pool.submit(cache.get, "key", lambda: "value")
        go_on.set()
        with pytest.raises(ValueError, match="no such instruction"):
            first.result()
        assert second.result() == "value"
    assert cache.get("key", never) == "value"
