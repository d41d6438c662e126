"""Devices of the GPU tests.

Tests that take ``device`` run twice: on the CPU, where the reference executes small cases and the tests themselves are
tested, and, marked ``gpu``, on a GPU. Those that take ``gpu`` are about streams, graphs and memory. Both skip where no
kernel serves the GPU. On a GPU machine: ``pytest tests/gpu -m "gpu and not slow" -n 8``, then ``-m "gpu and slow"``.
"""

from __future__ import annotations

import functools

import pytest
import torch

from cudnn_fused.backends import REFERENCE, select_backend
from cudnn_fused.ops import OPERATIONS


@functools.cache
def why_unserved() -> str | None:
    """Why the neutral names do not select kernels here, or None if they do for any operation."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        served = [operation for operation in OPERATIONS if select_backend(operation, None, device) is not REFERENCE]
    except NotImplementedError as error:
        return str(error)
    return None if served else f"no kernel serves {torch.cuda.get_device_name(device)}"


@pytest.fixture
def gpu() -> torch.device:
    """The current CUDA device, idle."""
    reason = why_unserved()
    if reason:
        pytest.skip(reason)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)
    return device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, then the current CUDA device."""
    return torch.device("cpu") if request.param == "cpu" else request.getfixturevalue("gpu")
