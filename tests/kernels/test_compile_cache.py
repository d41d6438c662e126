"""Who makes a launcher, and who waits for whom."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cudnn_fused.kernels.compile_cache import CompileCache

PATIENCE = 30.0  # seconds for another thread to get where it should
THREADS = 4


class Blocked:
    """A construction that lasts until it is released."""

    def __init__(self) -> None:
        self.started, self.released, self.count = threading.Event(), threading.Event(), 0

    def __call__(self) -> str:
        self.count += 1
        self.started.set()
        assert self.released.wait(PATIENCE)
        return "made"


def test_a_key_is_made_once_and_others_wait_for_it() -> None:
    cache, make = CompileCache[str](), Blocked()
    with ThreadPoolExecutor(THREADS) as pool:
        results = [pool.submit(cache.get, "key", make) for _ in range(THREADS)]
        assert make.started.wait(PATIENCE)
        assert not any(result.done() for result in results)
        make.released.set()
        assert {result.result(PATIENCE) for result in results} == {"made"}
    assert make.count == 1


def test_ready_and_new_keys_do_not_wait() -> None:
    cache, make = CompileCache[str](), Blocked()
    cache.get("ready", lambda: "ready")
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(cache.get, "slow", make)
        try:
            assert make.started.wait(PATIENCE)
            assert pool.submit(cache.get, "ready", make).result(PATIENCE) == "ready"
            assert pool.submit(cache.get, "new", lambda: "new").result(PATIENCE) == "new"
            assert not slow.done()
        finally:
            make.released.set()
    assert make.count == 1


def test_a_failure_reaches_who_waits_and_is_not_kept() -> None:
    cache, started, released = CompileCache[str](), threading.Event(), threading.Event()

    def fail() -> str:
        started.set()
        assert released.wait(PATIENCE)
        raise ValueError("no such instruction")

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(cache.get, "key", fail) for _ in range(2)]
        assert started.wait(PATIENCE)
        released.set()
        for result in results:
            with pytest.raises(ValueError, match="no such instruction"):
                result.result(PATIENCE)
    assert cache.get("key", lambda: "made") == "made"


def test_cleared_values_are_made_again() -> None:
    cache = CompileCache[int]()
    assert cache.get("key", lambda: 1) == 1
    cache.clear()
    assert cache.get("key", lambda: 2) == 2
