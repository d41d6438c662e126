"""Valid 3x3x3 convolution without bias."""

from __future__ import annotations

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import stores
from cudnn_fused.kernels.lowering import Computation, Convolution
from cudnn_fused.operands import Operation
from cudnn_fused.ops import common
from cudnn_fused.variants import Variant

CONV3D_RAW = Operation(
    name="conv3d_raw",
    summary="Valid 3x3x3 convolution, FP32 accumulation, one rounding to BF16, no bias.",
    computation=Computation(Convolution(), (), stores.Contiguous()),
    operands=(common.CONV_INPUT, common.PACKED_WEIGHT, common.CONV_OUTPUT),
    returns=("output",),
    channel_symbols=("Ci", "Co"),
    channels=common.CHANNELS,
    minimum=common.VALID_CONV_MINIMUM,
    options=(common.LEADING_ZEROS, common.ABSENT_ZEROS),
)

ANY_DEVICE = Variant(CONV3D_RAW, torch.Tensor)


def conv3d_raw(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    current_stream: object = None,
    *,
    leading_zero_frames: int = 0,
    absent_zero_frames: int = 0,
) -> torch.Tensor:
    """Valid 3x3x3 convolution without bias: FP32 accumulation, one rounding to BF16.

    Args:
        input: BF16 ``[N, T, H, W, Ci]``, contiguous; T+Z, H and W at least 3.
        packed_weight: BF16 ``[Co, 3, 3, 3, ceil64(Ci)]`` from :func:`cudnn_fused.pack_conv3d_weight`.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.
        leading_zero_frames: 0, 1 or 2 frames at the front of ``input`` count as zeros and are not read.
        absent_zero_frames: Z, 0, 1 or 2 frames of zeros that stand in front of ``input`` without being in memory.

    Returns:
        BF16 ``[N, T+Z-2, H-2, W-2, Co]``.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    return plan.call(ANY_DEVICE, (input, packed_weight), current_stream, (leading_zero_frames, absent_zero_frames))
