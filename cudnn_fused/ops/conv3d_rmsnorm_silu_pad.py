"""Valid 3x3x3 convolution with post-operations, written with padding and a two-frame cache for the next one."""

from __future__ import annotations

from dataclasses import replace

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import stores
from cudnn_fused.kernels.lowering import Computation, Convolution
from cudnn_fused.operands import Operand, Operation, Role, Shape
from cudnn_fused.ops import common
from cudnn_fused.results import PaddedResult
from cudnn_fused.variants import Variant

CONV3D_RMSNORM_SILU_PAD = Operation(
    name="conv3d_rmsnorm_silu_pad",
    summary="`conv3d_rmsnorm_silu` written inside the padding of the next causal convolution, with its cache.",
    computation=Computation(Convolution(), common.NORM_STEPS, stores.Padded()),
    operands=(
        common.CONV_INPUT,
        common.PACKED_WEIGHT,
        common.BIAS,
        common.GAMMA,
        Operand(
            "padded_output",
            Shape("N, T+Z-O*(2-P), H, W, Co"),
            Role.OUTPUT,
            meaning="two leading planes of history or zeros, then the result, all in a zero border of one pixel",
        ),
        Operand(
            "cache_output",
            Shape("N, min(2, T+Z-2+P), H-2, W-2, Co"),
            Role.OUTPUT,
            meaning="the last activated frames; the current ones are written to its tail",
        ),
        replace(common.CONV_RESIDUAL, optional=True),
        common.RESIDUAL_BIAS,
        common.CONV_RESIDUAL_OUTPUT,
        Operand(
            "previous",
            Shape("N, P, H-2, W-2, Co"),
            optional=True,
            extension=True,
            meaning="the cache of the previous chunk, one or two activated frames; copied into both outputs",
        ),
    ),
    returns=("padded_output", "cache_output", "residual_output"),
    channel_symbols=("Ci", "Co"),
    channels=common.CHANNELS,
    minimum=common.VALID_CONV_MINIMUM,
    options=(common.HISTORY, common.LEADING_ZEROS, common.ABSENT_ZEROS, common.OMITTED_ZEROS),
)

ANY_DEVICE = Variant(CONV3D_RMSNORM_SILU_PAD, PaddedResult)


def conv3d_rmsnorm_silu_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    history_frames: int = 0,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    previous: torch.Tensor | None = None,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
    omit_zero_frames: int = 0,
) -> PaddedResult:
    """As :func:`conv3d_rmsnorm_silu`, stored as the padded input of the next causal convolution.

    Args:
        input: BF16 ``[N, T, H, W, Ci]``, contiguous; T+Z, H and W at least 3.
        packed_weight: BF16 ``[Co, 3, 3, 3, ceil64(Ci)]`` from :func:`cudnn_fused.pack_conv3d_weight`.
        bias: BF16 ``[Co]``.
        gamma: BF16 ``[Co]``.
        history_frames: P, 0 to 2 frames of history that the caller will copy into the uninitialized interiors
            ``padded_output[:, 2-P:2, 1:-1, 1:-1]`` and the head of ``cache_output``.
        residual: BF16 ``[N, T+Z-2, H-2, W-2, Co]``, added before the normalization.
        residual_bias: BF16 ``[Co]``, added to ``residual`` first.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.
        previous: BF16 ``[N, P, H-2, W-2, Co]``, one or two activated frames (the ``cache_output`` of the previous
            chunk), which are copied for the caller; ``history_frames`` may then be left out.
        leading_zero_frames: 0, 1 or 2 frames at the front of ``input`` count as zeros and are not read.
        absent_zero_frames: Z, 0, 1 or 2 frames of zeros that stand in front of ``input`` without being in memory.
        omit_zero_frames: 1 leaves the zero planes of missing history out of ``padded_output``: it then has ``2-P``
            frames less, and is the ``input`` of a convolution with ``absent_zero_frames=2-P``.

    Returns:
        ``padded_output`` ``[N, T+Z, H, W, Co]``, ``cache_output`` ``[N, min(2, T+Z-2+P), H-2, W-2, Co]`` and
        ``residual_output`` ``[N, T+Z-2, H-2, W-2, Co]`` (None without ``residual``), all BF16.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    inputs = (input, packed_weight, bias, gamma, residual, residual_bias, previous)
    options = (history_frames, leading_zero_frames, absent_zero_frames, omit_zero_frames)
    return plan.call(ANY_DEVICE, inputs, current_stream, options)
