"""Settings of all tests of the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts with the same random numbers, and records no gradients."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # most tests need no torch
            import torch

            torch.manual_seed(0)
            stack.enter_context(torch.no_grad())
        yield
