"""The arithmetic of all operations in plain PyTorch, rounding point by rounding point, on CPU and CUDA tensors.

This is the oracle of every test and what runs where no kernel serves the device. ``B(x)`` below is the conversion of
an FP32 value to BF16 (round to nearest even). A convolution accumulates in FP32 and is rounded once; each sample, and
each frame of a sample, is convolved by a call of its own shape, so that results do not depend on the batch or on how
a clip was cut into chunks. The sum of squares of a norm runs in FP32 over the contiguous channel axis, in the order
of PyTorch's reduction on that device.

The functions take the operands of their operation in the order of its table and fill the outputs in place. They check
nothing: :mod:`cudnn_fused.plan` has done so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F

from cudnn_fused.operands import BF16
from cudnn_fused.weights import unpack_causal_conv3d_weight, unpack_conv3d_weight

Tensor = torch.Tensor

MIN_NORM = 1e-12
TAP_FRAMES = 3
CACHE_FRAMES = TAP_FRAMES - 1


# --- pieces --------------------------------------------------------------------------------------------------------


def B(value: Tensor) -> Tensor:
    """A rounding point: FP32 to BF16."""
    return value.to(BF16)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """FP32 convolutions in FP32, whatever autocast, TF32 or the reduced-precision switches of PyTorch say."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False))
        elif torch.backends.mkldnn.conv.fp32_precision not in ("none", "ieee"):
            asked = torch.backends.mkldnn.conv.fp32_precision
            torch.backends.mkldnn.conv.fp32_precision = "ieee"
            stack.callback(setattr, torch.backends.mkldnn.conv, "fp32_precision", asked)
        yield


def convolve(input: Tensor, weight: Tensor, leading_zero_frames: int = 0) -> Tensor:
    """``B(Conv3D(input, weight))`` without padding: BF16 ``[N, T, H, W, Ci]`` -> ``[N, T-2, H-2, W-2, Co]``.

    ``weight`` is ``[Co, Ci, 3, 3, 3]``. The first ``leading_zero_frames`` frames count as zeros and are not read.
    """
    samples, frames, height, width, _ = input.shape
    output = input.new_empty((samples, frames - 2, height - 2, width - 2, weight.shape[0]))
    kernel = weight.float()
    for n in range(samples):
        for t in range(frames - 2):
            skipped = min(max(leading_zero_frames - t, 0), TAP_FRAMES)
            if skipped == TAP_FRAMES:
                output[n, t] = 0
                continue
            window = input[n, t + skipped : t + TAP_FRAMES].float().permute(3, 0, 1, 2)
            output[n, t] = B(F.conv3d(window[None], kernel[:, :, skipped:])[0, :, 0].permute(1, 2, 0))
    return output


def add(value: Tensor, term: Tensor | None) -> Tensor:
    """``B(float(value) + float(term))``, or ``value`` where there is no term."""
    return value if term is None else B(value.float() + term.float())


def add_residual(main: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    """The pre-normalization value: the skip gets its own bias, and the sum its own rounding."""
    return main if residual is None else add(main, add(residual, residual_bias))


def root(value: Tensor) -> Tensor:
    """The correctly rounded FP32 square root.

    PyTorch's own is not on every CPU (torch 2.13 on AVX2: 19 % of the values in [0.5, 1.5) are an ulp off). The FP64
    root of an FP32 number lies too far from the middle of two FP32 numbers for its own error to matter.
    """
    return value.double().sqrt().float()


def normalize_and_activate(value: Tensor, gamma: Tensor) -> Tensor:
    """L2 normalization over the last axis, ``sqrt(C)``, gamma and SiLU. NaN and infinity pass through."""
    wide = value.float()
    denominator = root(wide.square().sum(dim=-1, keepdim=True)).clamp_min(MIN_NORM)
    normalized = B(wide / denominator)
    scaled = B(normalized.float() * math.sqrt(value.shape[-1]))
    affine = B(scaled.float() * gamma.float()).float()
    return B(affine / (1 + torch.exp(-affine)))


def write_padded(padded_output: Tensor, activated: Tensor, history_frames: int) -> None:
    """Store ``activated`` inside its zero border, behind zero planes for missing history.

    The interiors of the last ``history_frames`` leading planes are left as they are.
    """
    padded_output[:, :, 0] = 0
    padded_output[:, :, -1] = 0
    padded_output[:, :, :, 0] = 0
    padded_output[:, :, :, -1] = 0
    padded_output[:, : CACHE_FRAMES - history_frames] = 0
    padded_output[:, CACHE_FRAMES:, 1:-1, 1:-1] = activated


def write_history(padded_output: Tensor, previous: Tensor) -> None:
    """Copy the frames of earlier chunks, activated already, in front of the current ones."""
    padded_output[:, CACHE_FRAMES - previous.shape[1] : CACHE_FRAMES, 1:-1, 1:-1] = previous


def write_cache(cache_output: Tensor, current: Tensor, previous: Tensor | None) -> None:
    """Keep the last frames: the current ones in the tail, those of ``previous``, where given, before them."""
    newest = min(cache_output.shape[1], current.shape[1])
    oldest = cache_output.shape[1] - newest
    if previous is not None and oldest:
        cache_output[:, :oldest] = previous[:, previous.shape[1] - oldest :]
    cache_output[:, oldest:] = current[:, current.shape[1] - newest :]


# --- operations ----------------------------------------------------------------------------------------------------


def conv3d_raw(input: Tensor, packed_weight: Tensor, output: Tensor, *, leading_zero_frames: int = 0) -> None:
    output.copy_(convolve(input, unpack_conv3d_weight(packed_weight, input.shape[-1]), leading_zero_frames))


def conv3d_rmsnorm_silu(
    input: Tensor,
    packed_weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    output: Tensor,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    residual_output: Tensor | None,
    *,
    leading_zero_frames: int = 0,
) -> None:
    conv = convolve(input, unpack_conv3d_weight(packed_weight, input.shape[-1]), leading_zero_frames)
    value = add_residual(add(conv, bias), residual, residual_bias)
    if residual_output is not None:
        residual_output.copy_(value)
    output.copy_(normalize_and_activate(value, gamma))


def conv3d_rmsnorm_silu_pad(
    input: Tensor,
    packed_weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    padded_output: Tensor,
    cache_output: Tensor,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    residual_output: Tensor | None,
    previous: Tensor | None,
    *,
    history_frames: int = 0,
    leading_zero_frames: int = 0,
) -> None:
    conv = convolve(input, unpack_conv3d_weight(packed_weight, input.shape[-1]), leading_zero_frames)
    value = add_residual(add(conv, bias), residual, residual_bias)
    if residual_output is not None:
        residual_output.copy_(value)
    activated = normalize_and_activate(value, gamma)
    write_padded(padded_output, activated, history_frames if previous is None else previous.shape[1])
    if previous is not None:
        write_history(padded_output, previous)
    write_cache(cache_output, activated, previous)


def conv3d_bias_residual_pad(
    input: Tensor,
    packed_weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    padded_output: Tensor,
    residual_bias: Tensor | None,
    *,
    leading_zero_frames: int = 0,
) -> None:
    conv = convolve(input, unpack_conv3d_weight(packed_weight, input.shape[-1]), leading_zero_frames)
    padded_output[:, :, :-1, :-1] = add_residual(add(conv, bias), residual, residual_bias)
    padded_output[:, :, -1] = 0
    padded_output[:, :, :, -1] = 0


def causal_conv3d_with_cache(
    input: Tensor,
    packed_weight: Tensor,
    padded_input: Tensor,
    cache_output: Tensor,
    output: Tensor,
    previous: Tensor | None,
) -> None:
    chunk = input.permute(0, 2, 3, 4, 1)
    history = 0 if previous is None else previous.shape[1]
    padded_input.zero_()
    pixels = padded_input[..., : chunk.shape[-1]]
    pixels[:, CACHE_FRAMES:, 1:-1, 1:-1] = chunk
    if previous is not None:
        write_history(pixels, previous)
    write_cache(cache_output, chunk, previous)
    output.copy_(convolve(pixels, unpack_causal_conv3d_weight(packed_weight), CACHE_FRAMES - history))


def rmsnorm_silu_pad(
    input: Tensor,
    gamma: Tensor,
    padded_output: Tensor,
    cache_output: Tensor,
    input_bias: Tensor | None,
    previous: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    residual_output: Tensor | None,
) -> None:
    value = add_residual(add(input, input_bias), residual, residual_bias)
    if residual_output is not None:
        residual_output.copy_(value)
    activated = normalize_and_activate(value, gamma)
    write_padded(padded_output, activated, 0 if previous is None else previous.shape[1])
    if previous is not None:
        write_history(padded_output, previous)
    write_cache(cache_output, activated, previous)
