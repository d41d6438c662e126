"""What a caller may pass as ``current_stream``, and running PyTorch work on it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

LEGACY_DEFAULT = (0, 1)  # null stream and cudaStreamLegacy: one and the same stream
PER_THREAD_DEFAULT = 2  # cudaStreamPerThread: PyTorch's allocator cannot follow it


def stream_handle(current_stream: object, device: torch.device) -> int:
    """The driver handle of ``current_stream`` on ``device``; 0 for CPU tensors, whose work needs no stream.

    Args:
        current_stream: a ``cuda.bindings.driver.CUstream``, an int handle, a ``torch.cuda.Stream``, or None for
            PyTorch's current stream on ``device``.

    Raises:
        TypeError: it is none of these.
        ValueError: it is ``cudaStreamPerThread``, negative, or a stream of another device.
    """
    if current_stream is None:
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else LEGACY_DEFAULT[0]
    if isinstance(current_stream, torch.cuda.Stream):
        if current_stream.device != device:
            raise ValueError(f"current_stream is on {current_stream.device}, the tensors are on {device}")
        handle = current_stream.cuda_stream
    elif isinstance(current_stream, int) and not isinstance(current_stream, bool):
        handle = current_stream
    elif type(current_stream).__name__ == "CUstream":  # named, not imported: this must work without cuda-python
        handle = int(current_stream)  # type: ignore[call-overload]
    else:
        raise TypeError(
            "current_stream must be a CUstream, an int handle, a torch.cuda.Stream or None, "
            f"got {type(current_stream).__qualname__}"
        )
    if handle == PER_THREAD_DEFAULT:
        raise ValueError("current_stream must not be cudaStreamPerThread (handle 2); pass an explicit stream")
    if handle < 0:
        raise ValueError(f"current_stream must not be negative, got {handle}")
    return LEGACY_DEFAULT[0] if handle in LEGACY_DEFAULT else handle


def torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """PyTorch's view of a driver stream."""
    if handle == LEGACY_DEFAULT[0]:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def is_current(handle: int, device: torch.device) -> bool:
    """Whether the stream is PyTorch's current one, of the current device; always true for the CPU."""
    if device.type != "cuda":
        return True
    return device.index == torch.cuda.current_device() and torch.cuda.current_stream(device).cuda_stream == handle


def running_on(handle: int, device: torch.device) -> AbstractContextManager[object]:
    """Make the stream, and its device, PyTorch's current ones; nothing is to be done if they are, or for the CPU."""
    return nullcontext() if is_current(handle, device) else torch.cuda.stream(torch_stream(handle, device))


def keep_until_done(tensors: Iterable[torch.Tensor | None], handle: int, device: torch.device) -> None:
    """Tell the allocator that ``tensors`` are in use on the stream, so that freed memory waits for it.

    The allocator ignores this for the stream a tensor was allocated on. A graph that is being captured keeps its
    memory by itself. Does nothing for the CPU.
    """
    if device.type != "cuda":
        return
    with running_on(handle, device):
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
