"""Launches from any thread, with the GPU's part of PyTorch and of the runtime played by fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

launching = pytest.importorskip("cudnn_fused.kernels.launching")

DEVICE = torch.device("cuda", 1)


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
        return (launching.runtime.cudaError_t.cudaSuccess,)

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen.index)
    monkeypatch.setattr(launching.runtime, "cudaSetDevice", set_device)
    monkeypatch.setattr(launching, "_thread", threading.local())
    return calls


def use(times: int) -> None:
    for _ in range(times):
        with torch.cuda.device(DEVICE):
            launching.ensure_context(DEVICE)


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
    failed = launching.runtime.cudaError_t.cudaErrorDevicesUnavailable
    monkeypatch.setattr(launching.runtime, "cudaSetDevice", lambda index: (failed,))
    with pytest.raises(RuntimeError, match="cuda:1 cannot be made current: cudaErrorDevicesUnavailable"):
        use(1)
