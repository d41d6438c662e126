"""The post-operations alone: bias, residual, normalization and SiLU, written with padding, history and a cache."""

from __future__ import annotations

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import steps, stores
from cudnn_fused.kernels.lowering import Computation, Rows
from cudnn_fused.operands import Operand, Operation, Role, Shape
from cudnn_fused.ops import common
from cudnn_fused.results import PaddedResult
from cudnn_fused.variants import Variant

_VALUE = Shape("N, T, H, W, C")

RMSNORM_SILU_PAD = Operation(
    name="rmsnorm_silu_pad",
    summary="Optional bias and residual, normalization and SiLU of a tensor, padded, with history and cache copies.",
    computation=Computation(Rows(), (steps.Bias("input_bias"), *common.NORM_STEPS[1:]), stores.Padded()),
    operands=(
        Operand("input", _VALUE, meaning="the tensor to normalize over C, NTHWC"),
        Operand("gamma", Shape("C"), meaning=common.GAMMA.meaning),
        Operand(
            "padded_output",
            Shape("N, T+2-O*(2-P), H+2, W+2, C"),
            Role.OUTPUT,
            meaning="two leading planes of history or zeros, then the result, all in a zero border of one pixel",
        ),
        Operand(
            "cache_output",
            Shape("N, min(2, T+P), H, W, C"),
            Role.OUTPUT,
            meaning="the last activated frames: `previous` of the next chunk",
        ),
        Operand("input_bias", Shape("C"), optional=True, meaning="bias that `input` still lacks"),
        Operand(
            "previous",
            Shape("N, P, H, W, C"),
            optional=True,
            meaning="the last one or two activated frames before the chunk",
        ),
        Operand("residual", _VALUE, optional=True, meaning=common.CONV_RESIDUAL.meaning),
        Operand("residual_bias", Shape("C"), optional=True, requires="residual", meaning=common.RESIDUAL_BIAS.meaning),
        Operand(
            "residual_output",
            _VALUE,
            Role.OUTPUT,
            optional=True,
            required_by="residual",
            asked_by="save_input",
            meaning="the value before the normalization; allowed without a residual too",
        ),
    ),
    returns=("padded_output", "cache_output", "residual_output"),
    channel_symbols=("C",),
    channels=common.CHANNELS,
    minimum=1,
    options=(common.OMITTED_ZEROS,),
)

ANY_DEVICE = Variant(RMSNORM_SILU_PAD, PaddedResult)
_SAVED = frozenset({"residual_output"})


def rmsnorm_silu_pad(
    input: torch.Tensor,
    gamma: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: object = None,
    *,
    save_input: bool = False,
    omit_zero_frames: int = 0,
) -> PaddedResult:
    """Bias, residual, L2 normalization over C, ``sqrt(C)``, gamma and SiLU, stored padded with its history.

    Args:
        input: BF16 ``[N, T, H, W, C]``, contiguous.
        gamma: BF16 ``[C]``.
        input_bias: BF16 ``[C]``, added to ``input`` first.
        previous: BF16 ``[N, P, H, W, C]``, one or two activated frames (the ``cache_output`` of the previous
            chunk); they are copied, not normalized again.
        residual: BF16 ``[N, T, H, W, C]``, added before the normalization.
        residual_bias: BF16 ``[C]``, added to ``residual`` first.
        current_stream: ``CUstream``, int handle, ``torch.cuda.Stream``, or None for PyTorch's current stream.
        save_input: return the value before the normalization even without ``residual``.
        omit_zero_frames: 1 leaves the zero planes of missing history out of ``padded_output``: it then has ``2-P``
            frames less, and is the ``input`` of a convolution with ``absent_zero_frames=2-P``.

    Returns:
        ``padded_output`` ``[N, T+2, H+2, W+2, C]``, ``cache_output`` ``[N, min(2, T+P), H, W, C]`` and
        ``residual_output`` ``[N, T, H, W, C]`` (None without ``residual`` or ``save_input``), all BF16.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
    """
    inputs = (input, gamma, input_bias, previous, residual, residual_bias)
    wanted = _SAVED if save_input else frozenset()
    return plan.call(ANY_DEVICE, inputs, current_stream, (omit_zero_frames,), wanted)
