"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cudnn_fused.plan import PLANS


@pytest.fixture(autouse=True)
def _seeded_and_cold() -> Iterator[None]:
    """Every test starts with the same random numbers and with no plans."""
    torch.manual_seed(0)
    PLANS.clear()
    with torch.no_grad():
        yield
