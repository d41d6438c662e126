"""The type of all operands, and what follows from it for their layouts."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16
ELEMENT_BYTES = 2  # BF16
CHANNEL_ALIGNMENT = 64  # a packed weight row holds whole 128-byte chunks of input channels


def ceil64(channels: int) -> int:
    """Round up to the channel count of a packed weight row."""
    return -(-channels // CHANNEL_ALIGNMENT) * CHANNEL_ALIGNMENT
