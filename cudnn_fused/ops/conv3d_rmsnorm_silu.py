"""Valid 3x3x3 convolution with bias, residual, normalization and SiLU, contiguous output."""

from __future__ import annotations

from dataclasses import replace

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import stores
from cudnn_fused.kernels.lowering import Computation, Convolution
from cudnn_fused.operands import Operation
from cudnn_fused.ops import common
from cudnn_fused.results import NormResult
from cudnn_fused.variants import Variant

CONV3D_RMSNORM_SILU = Operation(
    name="conv3d_rmsnorm_silu",
    summary="Convolution, bias, optional residual, L2 normalization, sqrt(Co), gamma and SiLU; contiguous output.",
    computation=Computation(Convolution(), common.NORM_STEPS, stores.Contiguous()),
    operands=(
        common.CONV_INPUT,
        common.PACKED_WEIGHT,
        common.BIAS,
        common.GAMMA,
        common.CONV_OUTPUT,
        replace(common.CONV_RESIDUAL, optional=True),
        common.RESIDUAL_BIAS,
        common.CONV_RESIDUAL_OUTPUT,
    ),
    returns=("output", "residual_output"),
    channel_symbols=("Ci", "Co"),
    channels=common.CHANNELS,
    minimum=common.VALID_CONV_MINIMUM,
    options=(common.LEADING_ZEROS, common.ABSENT_ZEROS),
)

ANY_DEVICE = Variant(CONV3D_RMSNORM_SILU, NormResult)


def conv3d_rmsnorm_silu(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> NormResult:
    """Valid 3x3x3 convolution, bias, optional residual, L2 normalization, ``sqrt(Co)``, gamma and SiLU.

    Args:
        input: BF16 ``[N, T, H, W, Ci]``, contiguous; T+Z, H and W at least 3.
        packed_weight: BF16 ``[Co, 3, 3, 3, ceil64(Ci)]`` from :func:`cudnn_fused.pack_conv3d_weight`.
        bias: BF16 ``[Co]``.
        gamma: BF16 ``[Co]``.
        residual: BF16 ``[N, T+Z-2, H-2, W-2, Co]``, added before the normalization.
        residual_bias: BF16 ``[Co]``, added to ``residual`` first.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.
        leading_zero_frames: 0, 1 or 2 frames at the front of ``input`` count as zeros and are not read.
        absent_zero_frames: Z, 0, 1 or 2 frames of zeros that stand in front of ``input`` without being in memory.

    Returns:
        ``output`` and ``residual_output``, BF16 ``[N, T+Z-2, H-2, W-2, Co]``; the latter is the sum before the
        normalization, or None without ``residual``.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    inputs = (input, packed_weight, bias, gamma, residual, residual_bias)
    return plan.call(ANY_DEVICE, inputs, current_stream, (leading_zero_frames, absent_zero_frames))
