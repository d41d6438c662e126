"""The post-operations alone: bias, residual, normalization and SiLU, written with padding, history and a cache."""

from __future__ import annotations

import torch

from cudnn_fused import plan
from cudnn_fused.kernels.epilogue import steps, stores
from cudnn_fused.kernels.lowering import Computation, Rows
from cudnn_fused.operands import Operand, Operation, Role, Shape
from cudnn_fused.ops import common
from cudnn_fused.targets import SM90, SM100

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
            meaning="the value before the normalization; allowed without a residual too",
        ),
    ),
    returns=("padded_output", "cache_output", "residual_output"),
    channel_symbols=("C",),
    channels=common.CHANNELS,
    minimum=1,
    options=(common.OMITTED_ZEROS,),
)

_SAVED = frozenset({"residual_output"})


class RmsNormSiluPad(plan.Plan):
    """The post-operations on preallocated tensors; operands as in :func:`rmsnorm_silu_pad`.

    A ``residual_output`` without a residual saves the value before the normalization.
    """

    operation = RMSNORM_SILU_PAD

    def __init__(
        self,
        sample_input: torch.Tensor,
        sample_gamma: torch.Tensor,
        sample_padded_output: torch.Tensor,
        sample_cache_output: torch.Tensor,
        sample_input_bias: torch.Tensor | None = None,
        sample_previous: torch.Tensor | None = None,
        sample_residual: torch.Tensor | None = None,
        sample_residual_bias: torch.Tensor | None = None,
        sample_residual_output: torch.Tensor | None = None,
        *,
        omit_zero_frames: int = 0,
    ) -> None:
        super().__init__(
            (
                sample_input,
                sample_gamma,
                sample_padded_output,
                sample_cache_output,
                sample_input_bias,
                sample_previous,
                sample_residual,
                sample_residual_bias,
                sample_residual_output,
            ),
            omit_zero_frames=omit_zero_frames,
        )

    def execute(
        self,
        input: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Fill and return ``(padded_output, cache_output, residual_output)``."""
        return self._execute(
            (
                input,
                gamma,
                padded_output,
                cache_output,
                input_bias,
                previous,
                residual,
                residual_bias,
                residual_output,
            ),
            current_stream,
        )

    @classmethod
    def call(
        cls,
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
            omit_zero_frames: 1 leaves the zero planes of missing history out of ``padded_output``: it then has
                ``2-P`` frames less, and is the ``input`` of a convolution with ``absent_zero_frames=2-P``.

        Returns:
            ``padded_output`` ``[N, T+2, H+2, W+2, C]``, ``cache_output`` ``[N, min(2, T+P), H, W, C]`` and
            ``residual_output`` ``[N, T, H, W, C]`` (None without ``residual`` or ``save_input``), all BF16.

        Raises:
            TypeError, ValueError, RuntimeError, NotImplementedError: as listed in ``docs/api.md``.
        """
        inputs = (input, gamma, input_bias, previous, residual, residual_bias)
        wanted = _SAVED if save_input else frozenset()
        return plan.call(cls, inputs, current_stream, (omit_zero_frames,), wanted)


RmsNormSiluPadSm90 = plan.for_target(RmsNormSiluPad, SM90)
RmsNormSiluPadSm100 = plan.for_target(RmsNormSiluPad, SM100)

rmsnorm_silu_pad = plan.function_of(RmsNormSiluPad.call, "rmsnorm_silu_pad")
rmsnorm_silu_pad_wrapper_sm90 = plan.function_of(RmsNormSiluPadSm90.call, "rmsnorm_silu_pad_wrapper_sm90")
rmsnorm_silu_pad_wrapper_sm100 = plan.function_of(RmsNormSiluPadSm100.call, "rmsnorm_silu_pad_wrapper_sm100")
