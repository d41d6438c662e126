"""Valid 3x3x3 convolution with bias and residual, padded at the bottom and right for a strided convolution."""

from __future__ import annotations

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import steps, stores
from cudnn_fused.kernels.lowering import Computation, Convolution
from cudnn_fused.operands import Operand, Operation, Role, Shape
from cudnn_fused.ops import common
from cudnn_fused.results import BottomRightResult
from cudnn_fused.variants import Variant

CONV3D_BIAS_RESIDUAL_PAD = Operation(
    name="conv3d_bias_residual_pad",
    summary="Convolution, bias and residual, with a zero bottom row and right column; no normalization.",
    computation=Computation(Convolution(), (steps.Bias(), steps.Residual()), stores.BottomRight()),
    operands=(
        common.CONV_INPUT,
        common.PACKED_WEIGHT,
        common.BIAS,
        common.CONV_RESIDUAL,
        Operand(
            "padded_output",
            Shape("N, T+Z-2, H-1, W-1, Co"),
            Role.OUTPUT,
            meaning="the sum, with a zero bottom row and right column",
        ),
        common.RESIDUAL_BIAS,
    ),
    returns=("padded_output",),
    channel_symbols=("Ci", "Co"),
    channels=common.CHANNELS,
    minimum=common.VALID_CONV_MINIMUM,
    options=(common.LEADING_ZEROS, common.ABSENT_ZEROS),
)

ANY_DEVICE = Variant(CONV3D_BIAS_RESIDUAL_PAD, BottomRightResult)


def conv3d_bias_residual_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> BottomRightResult:
    """Valid 3x3x3 convolution plus bias plus residual, with a zero bottom row and right column.

    Args:
        input: BF16 ``[N, T, H, W, Ci]``, contiguous; T+Z, H and W at least 3.
        packed_weight: BF16 ``[Co, 3, 3, 3, ceil64(Ci)]`` from :func:`cudnn_fused.pack_conv3d_weight`.
        bias: BF16 ``[Co]``.
        residual: BF16 ``[N, T+Z-2, H-2, W-2, Co]``.
        residual_bias: BF16 ``[Co]``, added to ``residual`` first.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.
        leading_zero_frames: 0, 1 or 2 frames at the front of ``input`` count as zeros and are not read.
        absent_zero_frames: Z, 0, 1 or 2 frames of zeros that stand in front of ``input`` without being in memory.

    Returns:
        ``padded_output``, BF16 ``[N, T+Z-2, H-1, W-1, Co]``.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    inputs = (input, packed_weight, bias, residual, residual_bias)
    return plan.call(ANY_DEVICE, inputs, current_stream, (leading_zero_frames, absent_zero_frames))
