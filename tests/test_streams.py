"""The stream of a call, with PyTorch's part of CUDA played by fakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudnn_fused import streams

DEVICE = torch.device("cuda", 0)
CURRENT, OTHER = 7, 9  # handles


@dataclass
class FakeCuda:
    """PyTorch's current device and stream, and what was made current on top of them."""

    device: int = 0
    stack: list[int] = field(default_factory=lambda: [CURRENT])
    entered: list[int] = field(default_factory=list)
    capturing: bool = False


class Recorded:
    """A tensor that remembers the streams it is in use on."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def record_stream(self, stream: Any) -> None:
        self.handles.append(stream.cuda_stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Entered:
        def __init__(self, stream: Any) -> None:
            self.handle = stream.cuda_stream

        def __enter__(self) -> None:
            fake.entered.append(self.handle)
            fake.stack.append(self.handle)

        def __exit__(self, *_: object) -> None:
            fake.stack.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=fake.stack[-1]))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    return fake


def test_the_current_stream_is_not_entered_again(cuda: FakeCuda) -> None:
    tensor: Any = Recorded()
    with streams.running_on(CURRENT, DEVICE):
        pass
    streams.keep_until_done([tensor, None], CURRENT, DEVICE)
    assert cuda.entered == []
    assert tensor.handles == [CURRENT]


@pytest.mark.parametrize(("handle", "device"), [(OTHER, 0), (CURRENT, 1)], ids=["stream", "device"])
def test_another_stream_or_device_is_entered_and_left(cuda: FakeCuda, handle: int, device: int) -> None:
    tensor: Any = Recorded()
    with streams.running_on(handle, torch.device("cuda", device)):
        assert cuda.stack[-1] == handle
    streams.keep_until_done([tensor], handle, torch.device("cuda", device))
    assert cuda.entered == [handle, handle]
    assert cuda.stack == [CURRENT]
    assert tensor.handles == [handle]


@pytest.mark.parametrize("handle", [CURRENT, OTHER])
def test_a_captured_graph_keeps_its_memory_itself(cuda: FakeCuda, handle: int) -> None:
    cuda.capturing = True
    tensor: Any = Recorded()
    streams.keep_until_done([tensor], handle, DEVICE)
    assert tensor.handles == []


def test_the_cpu_has_no_streams(cuda: FakeCuda) -> None:
    tensor: Any = Recorded()
    cpu = torch.device("cpu")
    with streams.running_on(0, cpu):
        streams.keep_until_done([tensor], 0, cpu)
    assert (cuda.entered, tensor.handles) == ([], [])
