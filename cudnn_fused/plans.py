"""The classes of all operations for the device of their tensors: the kernels for it, or the reference.

Their constructors, ``execute`` and ``__call__`` follow from the operations' tables; ``plans.pyi`` shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_fused.ops import (
    causal_conv3d_with_cache,
    conv3d_bias_residual_pad,
    conv3d_raw,
    conv3d_rmsnorm_silu,
    conv3d_rmsnorm_silu_pad,
    rmsnorm_silu_pad,
)
from cudnn_fused.plan import Plan


class Conv3dRaw(Plan):
    """Valid 3x3x3 convolution of preallocated tensors; operands as in :func:`conv3d_raw`, plus ``output``."""

    variant = conv3d_raw.ANY_DEVICE


class Conv3dRmsNormSilu(Plan):
    """Convolution and post-operations on preallocated tensors; operands as in :func:`conv3d_rmsnorm_silu`."""

    variant = conv3d_rmsnorm_silu.ANY_DEVICE


class Conv3dRmsNormSiluPad(Plan):
    """Convolution and post-operations into preallocated padding; operands as in :func:`conv3d_rmsnorm_silu_pad`.

    With ``history_frames`` the caller fills the history: the interiors of that many leading planes of
    ``padded_output``, and the older frames of ``cache_output``, are left untouched. With ``previous`` they are written.
    """

    variant = conv3d_rmsnorm_silu_pad.ANY_DEVICE


class Conv3dBiasResidualPad(Plan):
    """Convolution, bias and residual on preallocated tensors; operands as in :func:`conv3d_bias_residual_pad`."""

    variant = conv3d_bias_residual_pad.ANY_DEVICE


class CausalConv3dWithCache(Plan):
    """Causal convolution on preallocated tensors; operands as in :func:`causal_conv3d_with_cache`.

    ``padded_input`` is scratch memory, BF16 ``[N, T+2, H+2, W+2, 16]``.
    """

    variant = causal_conv3d_with_cache.ANY_DEVICE


class RmsNormSiluPad(Plan):
    """The post-operations on preallocated tensors; operands as in :func:`rmsnorm_silu_pad`.

    A ``residual_output`` without a residual saves the value before the normalization.
    """

    variant = rmsnorm_silu_pad.ANY_DEVICE


CLASSES: Mapping[str, type[Plan]] = {
    plan_class.operation.name: plan_class
    for plan_class in (
        Conv3dRaw,
        Conv3dRmsNormSilu,
        Conv3dRmsNormSiluPad,
        Conv3dBiasResidualPad,
        CausalConv3dWithCache,
        RmsNormSiluPad,
    )
}
"""The class of every operation, by its name."""
