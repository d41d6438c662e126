"""What only the names that mirror cuDNN's API have: its lists of channels, as data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cudnn_fused import weights

NORM_PAIRS = ((160, 160), (160, 320), (320, 320))
CONV_PAIRS = (*NORM_PAIRS, (320, 640), (640, 640))

CHANNELS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "conv3d_raw": CONV_PAIRS,
    "conv3d_rmsnorm_silu": NORM_PAIRS,
    "conv3d_rmsnorm_silu_pad": NORM_PAIRS,
    "conv3d_bias_residual_pad": CONV_PAIRS,
    "causal_conv3d_with_cache": (weights.CAUSAL_CHANNELS,),
    "rmsnorm_silu_pad": ((160,), (320,), (640,)),
}
"""The channels that cuDNN lists for each operation: Ci and Co, or C."""


def pack_conv3d_weight_sm100(weight: torch.Tensor) -> torch.Tensor:
    """:func:`cudnn_fused.pack_conv3d_weight` for the channels that cuDNN lists; ValueError for others."""
    packed = weights.pack_conv3d(weight, "pack_conv3d_weight_sm100")
    channels = (weight.shape[1], weight.shape[0])
    if channels not in CONV_PAIRS:
        listed = ", ".join(f"{inputs}->{outputs}" for inputs, outputs in CONV_PAIRS)
        raise ValueError(
            f"pack_conv3d_weight_sm100: channels {channels[0]}->{channels[1]} are not supported; supported are {listed}"
        )
    return packed


def pack_causal_conv3d_weight_sm100(weight: torch.Tensor) -> torch.Tensor:
    """:func:`cudnn_fused.pack_causal_conv3d_weight`, under the name that cuDNN gives it."""
    return weights.pack_causal_conv3d(weight, "pack_causal_conv3d_weight_sm100")
