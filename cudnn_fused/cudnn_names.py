"""The names that mirror cuDNN's API: classes, functions, and its lists of channels. They run on SM100 GPUs alone.

They have the parameters that cuDNN's have, so they lack what an operation's table calls an extension;
``cudnn_names.pyi`` shows their signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cudnn_fused import weights
from cudnn_fused.ops.causal_conv3d_with_cache import causal_conv3d_with_cache
from cudnn_fused.ops.conv3d_bias_residual_pad import conv3d_bias_residual_pad
from cudnn_fused.ops.conv3d_raw import conv3d_raw
from cudnn_fused.ops.conv3d_rmsnorm_silu import conv3d_rmsnorm_silu
from cudnn_fused.ops.conv3d_rmsnorm_silu_pad import conv3d_rmsnorm_silu_pad
from cudnn_fused.ops.rmsnorm_silu_pad import rmsnorm_silu_pad
from cudnn_fused.plan import Plan, for_target
from cudnn_fused.plans import (
    CausalConv3dWithCache,
    Conv3dBiasResidualPad,
    Conv3dRaw,
    Conv3dRmsNormSilu,
    Conv3dRmsNormSiluPad,
    RmsNormSiluPad,
)
from cudnn_fused.targets import SM100
from cudnn_fused.variants import Channels

NORM_PAIRS: tuple[Channels, ...] = ((160, 160), (160, 320), (320, 320))
CONV_PAIRS: tuple[Channels, ...] = (*NORM_PAIRS, (320, 640), (640, 640))

CHANNELS: Mapping[str, tuple[Channels, ...]] = {
    "conv3d_raw": CONV_PAIRS,
    "conv3d_rmsnorm_silu": NORM_PAIRS,
    "conv3d_rmsnorm_silu_pad": NORM_PAIRS,
    "conv3d_bias_residual_pad": CONV_PAIRS,
    "causal_conv3d_with_cache": (weights.CAUSAL_CHANNELS,),
    "rmsnorm_silu_pad": ((160,), (320,), (640,)),
}
"""The channels that cuDNN lists for each operation: Ci and Co, or C."""


def _mirrored(plan_class: type[Plan], function: Callable[..., Any]) -> tuple[type[Plan], Callable[..., Any]]:
    operation = plan_class.operation
    return for_target(plan_class, function, SM100, __name__, CHANNELS[operation.name], operation.extensions)


Conv3dRawSm100, conv3d_raw_wrapper_sm100 = _mirrored(Conv3dRaw, conv3d_raw)
Conv3dRmsNormSiluSm100, conv3d_rmsnorm_silu_wrapper_sm100 = _mirrored(Conv3dRmsNormSilu, conv3d_rmsnorm_silu)
Conv3dRmsNormSiluPadSm100, conv3d_rmsnorm_silu_pad_wrapper_sm100 = _mirrored(
    Conv3dRmsNormSiluPad, conv3d_rmsnorm_silu_pad
)
Conv3dBiasResidualPadSm100, conv3d_bias_residual_pad_wrapper_sm100 = _mirrored(
    Conv3dBiasResidualPad, conv3d_bias_residual_pad
)
CausalConv3dWithCacheSm100, causal_conv3d_with_cache_wrapper_sm100 = _mirrored(
    CausalConv3dWithCache, causal_conv3d_with_cache
)
RmsNormSiluPadSm100, rmsnorm_silu_pad_wrapper_sm100 = _mirrored(RmsNormSiluPad, rmsnorm_silu_pad)

CLASSES: Mapping[str, type[Plan]] = {
    plan_class.operation.name: plan_class
    for plan_class in (
        Conv3dRawSm100,
        Conv3dRmsNormSiluSm100,
        Conv3dRmsNormSiluPadSm100,
        Conv3dBiasResidualPadSm100,
        CausalConv3dWithCacheSm100,
        RmsNormSiluPadSm100,
    )
}
"""The class of every operation, by its name."""


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
