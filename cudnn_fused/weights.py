"""Packing of checkpoint weights into the layout that the kernels read."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cudnn_fused.errors import OperandTypeError
from cudnn_fused.types import BF16, ceil64

CAUSAL_CHANNELS = (12, 160)  # Ci, Co of the causal convolution
CAUSAL_PIXEL = 16  # its 12 channels are padded to 16: one pixel is 32 bytes
TAPS = 27
CAUSAL_ROW = (TAPS + 1) * CAUSAL_PIXEL  # an all-zero 28th position makes the row a whole number of 64-channel chunks


def pack_conv3d_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack a checkpoint weight, once, outside inference.

    Args:
        weight: BF16 ``[Co, Ci, 3, 3, 3]`` (OITRS), any strides. A weight that requires grad is detached.

    Returns:
        Contiguous BF16 ``[Co, 3, 3, 3, ceil64(Ci)]`` (OTRSI); the channels past Ci are zero. It does not follow later
        changes of ``weight``.

    Raises:
        OperandTypeError: ``weight`` is not a BF16 tensor; a TypeError and a ValueError.
        ValueError: its shape is not that of a 3x3x3 convolution.
    """
    return pack_conv3d(weight, "pack_conv3d_weight")


def pack_conv3d(weight: torch.Tensor, name: str) -> torch.Tensor:
    """:func:`pack_conv3d_weight` called ``name`` in messages."""
    weight = _checked(name, weight)
    channels = weight.shape[1]
    return F.pad(weight.permute(0, 2, 3, 4, 1), (0, ceil64(channels) - channels)).contiguous()


def pack_causal_conv3d_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack the weight of the causal 12->160 convolution, once, outside inference.

    Args:
        weight: BF16 ``[160, 12, 3, 3, 3]`` (OITRS), any strides. A weight that requires grad is detached.

    Returns:
        Contiguous BF16 ``[160, 448]``: 16 channels, the last four zero, for each of the 27 filter positions, then
        16 zeros.

    Raises:
        OperandTypeError: ``weight`` is not a BF16 tensor; a TypeError and a ValueError.
        ValueError: its shape is not ``[160, 12, 3, 3, 3]``.
    """
    return pack_causal_conv3d(weight, "pack_causal_conv3d_weight")


def pack_causal_conv3d(weight: torch.Tensor, name: str) -> torch.Tensor:
    """:func:`pack_causal_conv3d_weight` called ``name`` in messages."""
    weight = _checked(name, weight)
    inputs, outputs = CAUSAL_CHANNELS
    if tuple(weight.shape[:2]) != (outputs, inputs):
        raise ValueError(f"{name}: weight must have shape [{outputs}, {inputs}, 3, 3, 3], got {list(weight.shape)}")
    taps = F.pad(weight.permute(0, 2, 3, 4, 1), (0, CAUSAL_PIXEL - inputs))
    return F.pad(taps.reshape(outputs, -1), (0, CAUSAL_ROW - TAPS * CAUSAL_PIXEL)).contiguous()


def unpack_conv3d_weight(packed_weight: torch.Tensor, channels: int) -> torch.Tensor:
    """The ``[Co, channels, 3, 3, 3]`` view of a weight packed by :func:`pack_conv3d_weight`."""
    return packed_weight[..., :channels].permute(0, 4, 1, 2, 3)


def unpack_causal_conv3d_weight(packed_weight: torch.Tensor) -> torch.Tensor:
    """The ``[160, 12, 3, 3, 3]`` view of a weight packed by :func:`pack_causal_conv3d_weight`."""
    inputs, outputs = CAUSAL_CHANNELS
    taps: torch.Tensor = packed_weight[:, : TAPS * CAUSAL_PIXEL].unflatten(1, (3, 3, 3, CAUSAL_PIXEL))
    assert taps.shape[0] == outputs
    return taps[..., :inputs].permute(0, 4, 1, 2, 3)


def _checked(function: str, weight: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor):
        raise OperandTypeError(f"{function}: weight must be a torch.Tensor, got {type(weight).__qualname__}")
    if weight.dtype is not BF16:
        raise OperandTypeError(f"{function}: weight must have dtype torch.bfloat16, got {weight.dtype}")
    if weight.dim() != 5 or tuple(weight.shape[2:]) != (3, 3, 3) or 0 in weight.shape:
        raise ValueError(f"{function}: weight must have shape [Co, Ci, 3, 3, 3], got {list(weight.shape)}")
    return weight.detach()
