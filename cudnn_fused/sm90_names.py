"""The names that run on SM90 GPUs alone; ``sm90_names.pyi`` shows their signatures."""

from __future__ import annotations

import functools
from collections.abc import Mapping

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
from cudnn_fused.targets import SM90
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight

_on_sm90 = functools.partial(for_target, target=SM90, module=__name__)

Conv3dRawSm90, conv3d_raw_wrapper_sm90 = _on_sm90(Conv3dRaw, conv3d_raw)
Conv3dRmsNormSiluSm90, conv3d_rmsnorm_silu_wrapper_sm90 = _on_sm90(Conv3dRmsNormSilu, conv3d_rmsnorm_silu)
Conv3dRmsNormSiluPadSm90, conv3d_rmsnorm_silu_pad_wrapper_sm90 = _on_sm90(Conv3dRmsNormSiluPad, conv3d_rmsnorm_silu_pad)
Conv3dBiasResidualPadSm90, conv3d_bias_residual_pad_wrapper_sm90 = _on_sm90(
    Conv3dBiasResidualPad, conv3d_bias_residual_pad
)
CausalConv3dWithCacheSm90, causal_conv3d_with_cache_wrapper_sm90 = _on_sm90(
    CausalConv3dWithCache, causal_conv3d_with_cache
)
RmsNormSiluPadSm90, rmsnorm_silu_pad_wrapper_sm90 = _on_sm90(RmsNormSiluPad, rmsnorm_silu_pad)

pack_conv3d_weight_sm90 = pack_conv3d_weight
pack_causal_conv3d_weight_sm90 = pack_causal_conv3d_weight

CLASSES: Mapping[str, type[Plan]] = {
    plan_class.operation.name: plan_class
    for plan_class in (
        Conv3dRawSm90,
        Conv3dRmsNormSiluSm90,
        Conv3dRmsNormSiluPadSm90,
        Conv3dBiasResidualPadSm90,
        CausalConv3dWithCacheSm90,
        RmsNormSiluPadSm90,
    )
}
"""The class of every operation, by its name."""
