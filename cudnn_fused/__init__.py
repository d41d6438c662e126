"""Fused Conv3D + bias + residual + RMSNorm + SiLU for video VAEs.

Six operations, each as a plan class and as a function. The arch-neutral names pick the kernels for the device of the
input, or the reference where there are none; the ``Sm90`` and ``Sm100`` names serve one GPU architecture each.
"""

from cudnn_fused import torch_ops as torch_ops
from cudnn_fused.cudnn_names import (
    CausalConv3dWithCacheSm100,
    Conv3dBiasResidualPadSm100,
    Conv3dRawSm100,
    Conv3dRmsNormSiluPadSm100,
    Conv3dRmsNormSiluSm100,
    RmsNormSiluPadSm100,
    causal_conv3d_with_cache_wrapper_sm100,
    conv3d_bias_residual_pad_wrapper_sm100,
    conv3d_raw_wrapper_sm100,
    conv3d_rmsnorm_silu_pad_wrapper_sm100,
    conv3d_rmsnorm_silu_wrapper_sm100,
    pack_causal_conv3d_weight_sm100,
    pack_conv3d_weight_sm100,
    rmsnorm_silu_pad_wrapper_sm100,
)
from cudnn_fused.errors import DeviceUnavailableError, OperandTypeError
from cudnn_fused.ops.causal_conv3d_with_cache import causal_conv3d_with_cache
from cudnn_fused.ops.conv3d_bias_residual_pad import conv3d_bias_residual_pad
from cudnn_fused.ops.conv3d_raw import conv3d_raw
from cudnn_fused.ops.conv3d_rmsnorm_silu import conv3d_rmsnorm_silu
from cudnn_fused.ops.conv3d_rmsnorm_silu_pad import conv3d_rmsnorm_silu_pad
from cudnn_fused.ops.rmsnorm_silu_pad import rmsnorm_silu_pad
from cudnn_fused.plans import (
    CausalConv3dWithCache,
    Conv3dBiasResidualPad,
    Conv3dRaw,
    Conv3dRmsNormSilu,
    Conv3dRmsNormSiluPad,
    RmsNormSiluPad,
)
from cudnn_fused.results import Result
from cudnn_fused.sm90_names import (
    CausalConv3dWithCacheSm90,
    Conv3dBiasResidualPadSm90,
    Conv3dRawSm90,
    Conv3dRmsNormSiluPadSm90,
    Conv3dRmsNormSiluSm90,
    RmsNormSiluPadSm90,
    causal_conv3d_with_cache_wrapper_sm90,
    conv3d_bias_residual_pad_wrapper_sm90,
    conv3d_raw_wrapper_sm90,
    conv3d_rmsnorm_silu_pad_wrapper_sm90,
    conv3d_rmsnorm_silu_wrapper_sm90,
    pack_causal_conv3d_weight_sm90,
    pack_conv3d_weight_sm90,
    rmsnorm_silu_pad_wrapper_sm90,
)
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight

__version__ = "0.1.0"

__all__ = [
    "CausalConv3dWithCache",
    "CausalConv3dWithCacheSm90",
    "CausalConv3dWithCacheSm100",
    "Conv3dBiasResidualPad",
    "Conv3dBiasResidualPadSm90",
    "Conv3dBiasResidualPadSm100",
    "Conv3dRaw",
    "Conv3dRawSm90",
    "Conv3dRawSm100",
    "Conv3dRmsNormSilu",
    "Conv3dRmsNormSiluPad",
    "Conv3dRmsNormSiluPadSm90",
    "Conv3dRmsNormSiluPadSm100",
    "Conv3dRmsNormSiluSm90",
    "Conv3dRmsNormSiluSm100",
    "DeviceUnavailableError",
    "OperandTypeError",
    "Result",
    "RmsNormSiluPad",
    "RmsNormSiluPadSm90",
    "RmsNormSiluPadSm100",
    "__version__",
    "causal_conv3d_with_cache",
    "causal_conv3d_with_cache_wrapper_sm90",
    "causal_conv3d_with_cache_wrapper_sm100",
    "conv3d_bias_residual_pad",
    "conv3d_bias_residual_pad_wrapper_sm90",
    "conv3d_bias_residual_pad_wrapper_sm100",
    "conv3d_raw",
    "conv3d_raw_wrapper_sm90",
    "conv3d_raw_wrapper_sm100",
    "conv3d_rmsnorm_silu",
    "conv3d_rmsnorm_silu_pad",
    "conv3d_rmsnorm_silu_pad_wrapper_sm90",
    "conv3d_rmsnorm_silu_pad_wrapper_sm100",
    "conv3d_rmsnorm_silu_wrapper_sm90",
    "conv3d_rmsnorm_silu_wrapper_sm100",
    "pack_causal_conv3d_weight",
    "pack_causal_conv3d_weight_sm90",
    "pack_causal_conv3d_weight_sm100",
    "pack_conv3d_weight",
    "pack_conv3d_weight_sm90",
    "pack_conv3d_weight_sm100",
    "rmsnorm_silu_pad",
    "rmsnorm_silu_pad_wrapper_sm90",
    "rmsnorm_silu_pad_wrapper_sm100",
]
