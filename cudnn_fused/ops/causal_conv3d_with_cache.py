"""Streaming causal 3x3x3 convolution of 12-channel video chunks."""

from __future__ import annotations

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import stores
from cudnn_fused.kernels.lowering import CausalConvolution, Computation
from cudnn_fused.operands import ChannelRule, Operand, Operation, Role, Shape
from cudnn_fused.results import CausalResult
from cudnn_fused.variants import Variant
from cudnn_fused.weights import CAUSAL_CHANNELS, CAUSAL_ROW

CAUSAL_CONV3D_WITH_CACHE = Operation(
    name="causal_conv3d_with_cache",
    summary="Causal 3x3x3 convolution of a raw chunk behind its history, with zero padding, without bias.",
    computation=Computation(CausalConvolution(), (), stores.Contiguous()),
    operands=(
        Operand(
            "input",
            Shape("N, Ci, T, H, W"),
            alignment=2,
            strided=True,
            meaning="a chunk of raw frames, NCTHW, any strides",
        ),
        Operand(
            "packed_weight",
            Shape(f"Co, {CAUSAL_ROW}"),
            hint="pack checkpoint weights with pack_causal_conv3d_weight",
            meaning="weight from `pack_causal_conv3d_weight`",
        ),
        Operand(
            "padded_input",
            Shape("N, T+2, H+2, W+2, 16"),
            Role.SCRATCH,
            meaning="the packed chunk; its contents afterwards are not part of the contract",
        ),
        Operand(
            "cache_output",
            Shape("N, min(2, T+P), H, W, Ci"),
            Role.OUTPUT,
            meaning="the last raw frames, NTHWC: `previous` of the next chunk",
        ),
        Operand("output", Shape("N, T, H, W, Co"), Role.OUTPUT, meaning="result, NTHWC"),
        Operand(
            "previous",
            Shape("N, P, H, W, Ci"),
            optional=True,
            alignment=8,
            meaning="the last one or two raw frames before the chunk, NTHWC",
        ),
    ),
    returns=("output", "cache_output"),
    channel_symbols=("Ci", "Co"),
    channels=ChannelRule(exactly=CAUSAL_CHANNELS),
    minimum=1,
)

ANY_DEVICE = Variant(CAUSAL_CONV3D_WITH_CACHE, CausalResult)


def causal_conv3d_with_cache(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    previous: torch.Tensor | None = None,
    current_stream: object = None,
) -> CausalResult:
    """Causal 3x3x3 convolution of one chunk of raw frames, without bias.

    Args:
        input: BF16 ``[N, 12, T, H, W]``, any strides.
        packed_weight: BF16 ``[160, 448]`` from :func:`cudnn_fused.pack_causal_conv3d_weight`.
        previous: BF16 ``[N, P, H, W, 12]``, the ``cache_output`` of the previous chunk: one or two frames. Frames
            that are missing count as zeros.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.

    Returns:
        ``output`` ``[N, T, H, W, 160]`` and ``cache_output`` ``[N, min(2, T+P), H, W, 12]``, BF16, contiguous.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    return plan.call(ANY_DEVICE, (input, packed_weight, previous), current_stream)
