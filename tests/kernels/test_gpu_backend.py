"""Launches from any thread, with the GPU's part of PyTorch and of the runtime played by fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from cudnn_fused.kernels.arguments import Signature

gpu = pytest.importorskip("cudnn_fused.kernels.gpu")
compiling = pytest.importorskip("cudnn_fused.kernels.compiling")

DEVICE = torch.device("cuda", 1)
PATIENCE = 10.0  # seconds for another thread to get where it should


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(thread, device) of every call that makes a context current."""
    calls: list[tuple[int, int]] = []
    chosen = threading.local()

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        chosen.index = device.index
        yield

    def set_device(index: int) -> tuple[object]:
        calls.append((threading.get_ident(), index))
        return (gpu.runtime.cudaError_t.cudaSuccess,)

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.index)
    monkeypatch.setattr(gpu.runtime, "cudaSetDevice", set_device)
    monkeypatch.setattr(gpu, "_thread", threading.local())
    return calls


def use(times: int) -> None:
    for _ in range(times):
        with torch.cuda.device(DEVICE):
            gpu.ensure_context(DEVICE)


def test_every_thread_gets_a_context_once(made_current: list[tuple[int, int]]) -> None:
    use(3)
    others = [threading.Thread(target=use, args=(2,)) for _ in range(2)]
    for other in others:
        other.start()
        other.join()
    assert [index for _, index in made_current] == [1, 1, 1]
    assert made_current[0][0] == threading.get_ident()


def test_a_device_that_cannot_be_used_is_named(
    made_current: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = gpu.runtime.cudaError_t.cudaErrorDevicesUnavailable
    monkeypatch.setattr(gpu.runtime, "cudaSetDevice", lambda index: (failed,))
    with pytest.raises(RuntimeError, match="cuda:1 cannot be made current: cudaErrorDevicesUnavailable"):
        use(1)


class Named:
    """In place of a kernel: what it is called, and no parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.signature = Signature((), {})


def test_a_ready_launcher_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    started, released = threading.Event(), threading.Event()

    def compile_it(kernel: Named, *_: object, **__: object) -> str:
        if kernel.name == "slow":
            started.set()
            assert released.wait(PATIENCE)
        return f"launcher of {kernel.name}"

    monkeypatch.setattr(compiling.cute, "compile", compile_it)
    monkeypatch.setenv("CUDNN_FUSED_CACHE_DIR", "")

    def get(kernel: str) -> str:
        return compiling.compiled("sm_90a", Named, kernel)

    assert get("ready") == "launcher of ready"
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(get, "slow")
        try:
            assert started.wait(PATIENCE)
            assert pool.submit(get, "ready").result(PATIENCE) == "launcher of ready"
        finally:
            released.set()
        assert slow.result(PATIENCE) == "launcher of slow"
