"""What Diffusers does in place of each operation, in plain PyTorch.

In BF16 this is what the fused operations are compared with, in speed through ``torch.compile`` and in accuracy; in FP32
it is the truth that both are measured against. Activations are NTHWC here too, which PyTorch's convolutions take as
``channels_last_3d`` without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from cudnn_fused.kernels.epilogue.stores import CACHED_FRAMES
from cudnn_fused.selfcheck.cases import Case, Operands
from cudnn_fused.weights import unpack_causal_conv3d_weight, unpack_conv3d_weight

Tensor = torch.Tensor


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv3d(input.permute(0, 4, 1, 2, 3), weight, bias).permute(0, 2, 3, 4, 1)


def normalize_and_activate(value: Tensor, gamma: Tensor) -> Tensor:
    normalized = F.normalize(value.float(), dim=-1).to(value.dtype)
    return F.silu(normalized * math.sqrt(value.shape[-1]) * gamma)


def add_residual(main: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    if residual is None:
        return main
    return main + (residual if residual_bias is None else residual + residual_bias)


def pad_and_cache(frames: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
    """The padded input of the next convolution, and the frames it needs again for the next chunk."""
    if previous is not None:
        frames = torch.cat([previous, frames], dim=1)
    missing = CACHED_FRAMES - (0 if previous is None else previous.shape[1])
    return F.pad(frames, (0, 0, 1, 1, 1, 1, missing, 0)), frames[:, -CACHED_FRAMES:].clone()


# --- operations: inputs by the names of the operand tables, outputs too ----------------------------------------------


def conv3d_raw(input: Tensor, weight: Tensor) -> Operands:
    return {"output": convolve(input, weight)}


def conv3d_rmsnorm_silu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
) -> Operands:
    value = add_residual(convolve(input, weight, bias), residual, residual_bias)
    saved = {} if residual is None else {"residual_output": value}
    return {"output": normalize_and_activate(value, gamma), **saved}


def conv3d_rmsnorm_silu_pad(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    previous: Tensor | None = None,
) -> Operands:
    made = conv3d_rmsnorm_silu(input, weight, bias, gamma, residual, residual_bias)
    padded, cache = pad_and_cache(made.pop("output"), previous)
    return {"padded_output": padded, "cache_output": cache, **made}


def conv3d_bias_residual_pad(
    input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, residual_bias: Tensor | None = None
) -> Operands:
    value = add_residual(convolve(input, weight, bias), residual, residual_bias)
    return {"padded_output": F.pad(value, (0, 0, 0, 1, 0, 1))}


def causal_conv3d_with_cache(input: Tensor, weight: Tensor, previous: Tensor | None = None) -> Operands:
    padded, cache = pad_and_cache(input.permute(0, 2, 3, 4, 1), previous)
    return {"output": convolve(padded, weight), "cache_output": cache}


def rmsnorm_silu_pad(
    input: Tensor,
    gamma: Tensor,
    input_bias: Tensor | None = None,
    previous: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    save_input: bool = False,
) -> Operands:
    value = add_residual(input if input_bias is None else input + input_bias, residual, residual_bias)
    padded, cache = pad_and_cache(normalize_and_activate(value, gamma), previous)
    saved = {"residual_output": value} if save_input or residual is not None else {}
    return {"padded_output": padded, "cache_output": cache, **saved}


FUNCTIONS: Mapping[str, Callable[..., Operands]] = {
    function.__name__: function
    for function in (
        conv3d_raw,
        conv3d_rmsnorm_silu,
        conv3d_rmsnorm_silu_pad,
        conv3d_bias_residual_pad,
        causal_conv3d_with_cache,
        rmsnorm_silu_pad,
    )
}


def arguments(
    case: Case, inputs: Operands, previous: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor | bool]:
    """Keyword arguments of the function for ``case``, made from the operation's inputs.

    ``previous`` are the frames that the caller of the operation copies.
    """
    named: dict[str, Tensor | bool] = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    packed = named.pop("packed_weight", None)
    if isinstance(packed, Tensor):
        causal = case.variant == "causal_conv3d_with_cache"
        weight = unpack_causal_conv3d_weight(packed) if causal else unpack_conv3d_weight(packed, case.channels[0])
        named["weight"] = weight.contiguous(memory_format=torch.channels_last_3d)
    if previous is not None:
        named["previous"] = previous.to(dtype)
    if case.save_input:
        named["save_input"] = True
    return named
