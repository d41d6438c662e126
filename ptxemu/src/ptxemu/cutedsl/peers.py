"""Kernels that others wrote and that are right on hardware, compiled for the emulator on any machine.

They come with the `peers` extra. Nothing of them is copied here: their launchers are imported and compiled. Two things
that they expect are supplied on the host side only: the im2col tensor maps that newer versions of CuTe DSL can make
(the driver call itself exists in 4.8.1's dialect), and the device queries of quack's host code.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cutlass
import torch
from cuda.bindings import driver
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cuda as cuda_dialect
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import cuda
from cutlass.experimental.cuda import tensor_map

from ptxemu.cutedsl.host import cross_compile, targeting

STREAM = driver.CUstream(0)
SM90, SM100 = "sm_90a", "sm_100a"


def peer(module: str) -> Any:
    """A module of the `peers` extra. Raises ImportError without it."""
    os.environ.setdefault("QUACK_CACHE_ENABLED", "0")
    return importlib.import_module(module)


def fake(*shape: int, dtype: Any = BFloat16, align: int = 16) -> Any:
    """A row-major sample for compilation."""
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=align)


def fake_like(tensor: torch.Tensor | None) -> Any:
    """The sample of a contiguous BF16 tensor."""
    return None if tensor is None else fake(*tensor.shape)


def fake_stream() -> Any:
    return make_fake_stream(use_tvm_ffi_env_stream=False)


# --- im2col tensor maps ----------------------------------------------------------------------------------------------


def _pointer_to(element: Any, values: Sequence[Any]) -> Any:
    """A host array of `values`, as the generic pointer that the dialect's driver calls take."""
    array = cutlass.Array(element, len(values), space=cutlass.AddressSpace.rmem)
    for position, value in enumerate(values):
        array[position] = element(value)
    return _generic_pointer(llvm.ptrtoint(ir.IntegerType.get_signless(64), array.ir_value()))


def _generic_pointer(address: Any) -> Any:
    return cuda_dialect.cast(ir.Type.parse("!ptr.ptr<#ptr.generic_space>"), address)


def create_tensor_map_im2col(
    *,
    global_address: Any,
    dtype: Any,
    global_dims: Sequence[Any],
    global_strides: Sequence[Any],
    lower_corner: Sequence[int],
    upper_corner: Sequence[int],
    channels_per_pixel: int,
    pixels_per_column: int,
    traversal_strides: Sequence[int] | None = None,
    swizzle: cuda.TensorMapSwizzle = cuda.TensorMapSwizzle.none,
) -> cuda.TensorMap:
    """Host code that makes an im2col map: dimensions innermost first, strides in units of 16 bytes."""
    rank = len(global_dims)
    tma_format, encoding = tensor_map._derive_tensormap_encoding(dtype)

    def number(value: int) -> Any:
        return Int32(value).ir_value()

    status, encoded = cuda_dialect.driver_tensor_map_encode_im2col(
        number(int(encoding)),
        number(rank),
        _generic_pointer(Int64(global_address).ir_value()),
        _pointer_to(Int64, global_dims),
        _pointer_to(Int64, [Int64(stride) * 16 for stride in global_strides]),
        _pointer_to(Int32, lower_corner),
        _pointer_to(Int32, upper_corner),
        number(channels_per_pixel),
        number(pixels_per_column),
        _pointer_to(Int32, traversal_strides or [1] * rank),
        number(0),
        number(int(swizzle)),
        number(0),
        number(0),
        results=[cuda_dialect.ResultType.get(), cuda.TensorMap._get_mlir_type()],
    )
    cuda_dialect.result_assert_success(status)
    box = (channels_per_pixel, pixels_per_column)
    return cuda.TensorMap(encoded, swizzle=swizzle, dtype=dtype, tma_format=tma_format, box_dims=box)


def create_tensor_map_im2col_from_view(tensor: Any, *, stride_order: Sequence[int], **options: Any) -> cuda.TensorMap:
    """The same from a tensor; `stride_order` lists its modes innermost first."""
    dtype = tensor.element_type
    strides = [tensor_map._stride_to_tma_units(tensor.stride[mode], dtype) for mode in stride_order[1:]]
    return create_tensor_map_im2col(
        global_address=tensor.iterator.toint(),
        dtype=dtype,
        global_dims=[tensor.shape[mode] for mode in stride_order],
        global_strides=strides,
        **options,
    )


@contextlib.contextmanager
def im2col_maps() -> Iterator[None]:
    """Gives CuTe DSL the two functions where it has none of its own."""
    with contextlib.ExitStack() as stack:
        for function in (create_tensor_map_im2col, create_tensor_map_im2col_from_view):
            if not hasattr(cuda, function.__name__):
                stack.enter_context(mock.patch.object(cuda, function.__name__, function, create=True))
        yield


# --- cuDNN's fused convolutions (sm_100a) ----------------------------------------------------------------------------


def cudnn_conv3d(
    mode: str,
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    output: torch.Tensor,
    *,
    clusters: int = 1,
    history_frames: int | None = None,
    cache: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    residual_output: torch.Tensor | None = None,
) -> Callable[[], None]:
    """cuDNN's Conv3D in one of its modes ("raw", "norm", "pad", "spatial") as a call on these operands.

    `clusters` is the number of CTA pairs of the persistent grid.
    """
    kernel = peer("cudnn.conv.cutedsl.conv3d_postops.kernel")
    config = kernel.Conv3dConfig(*input.shape, packed_weight.shape[0], clusters)
    launcher = kernel.Conv3dPostOpsLaunch(
        config,
        fuse_norm=mode in ("norm", "pad"),
        prepare_output=mode == "pad",
        previous_frames=history_frames,
        has_residual=residual is not None,
        has_residual_bias=residual_bias is not None,
        spatial_output=mode == "spatial",
    )
    operands = (bias, gamma, output, cache, residual, residual_bias, residual_output)
    samples = [fake_like(tensor) for tensor in (input, packed_weight, output)]
    with im2col_maps():
        compiled = cross_compile(
            launcher,
            *samples,
            fake_stream(),
            *map(fake_like, operands),
            arch=SM100,
            options="--generate-line-info",
        )
    return lambda: compiled(input, packed_weight, output, STREAM, *operands)


def cudnn_causal_pack(
    input: torch.Tensor, padded: torch.Tensor, cache: torch.Tensor, previous: torch.Tensor | None
) -> Callable[[], None]:
    """cuDNN's packing of C12 chunks into padded C16, as a call on these operands."""
    causal = peer("cudnn.conv.cutedsl.conv3d_postops.causal")
    frames = 0 if previous is None else previous.shape[1]
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(input.shape, input.stride(), strict=True))
    flat = input.as_strided((span,), (1,))
    launcher = causal.CausalConv3dPackLaunch(tuple(input.shape), tuple(input.stride()), frames)
    history = None if previous is None else previous.view(-1)
    sample_history = None if previous is None else fake(previous.numel(), align=8)
    samples = (fake(span, align=2), fake(padded.numel()), fake(cache.numel()), fake_stream(), sample_history)
    compiled = cross_compile(launcher, *samples, arch=SM100)
    return lambda: compiled(flat, padded.view(-1), cache.view(-1), STREAM, history)


def cudnn_causal_conv(padded: torch.Tensor, packed_weight: torch.Tensor, output: torch.Tensor) -> Callable[[], None]:
    """cuDNN's 12->160 convolution on the packed input, with two persistent CTAs."""
    causal = peer("cudnn.conv.cutedsl.conv3d_postops.causal")
    launcher = causal.CausalConv3dLaunch(causal.CausalConv3dConfig(*padded.shape[:4], 2))
    with im2col_maps():
        compiled = cross_compile(
            launcher, fake_like(padded), fake_like(packed_weight), fake_like(output), fake_stream(), arch=SM100
        )
    return lambda: compiled(padded, packed_weight, output, STREAM)


def cudnn_rmsnorm_silu_pad(
    input: torch.Tensor,
    gamma: torch.Tensor,
    padded: torch.Tensor,
    cache: torch.Tensor,
    *,
    input_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    residual_output: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> Callable[[], None]:
    """cuDNN's standalone normalization, as a call on these operands."""
    module = peer("cudnn.conv.cutedsl.conv3d_postops.rmsnorm_silu_pad")
    launcher = module.RmsNormSiluPadLaunch(
        tuple(input.shape),
        0 if previous is None else previous.shape[1],
        input_bias is not None,
        residual is not None,
        residual_bias is not None,
    )
    required = (input, gamma, padded, cache)
    optional = (input_bias, residual, residual_bias, residual_output, previous)
    compiled = cross_compile(launcher, *map(fake_like, required), fake_stream(), *map(fake_like, optional), arch=SM100)
    return lambda: compiled(*required, STREAM, *optional)


def cudnn_fprop(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    tile: tuple[int, int, int],
    padding: int = 0,
    stride: int = 1,
    dilation: int = 1,
) -> tuple[Callable[[], None], torch.Tensor]:
    """cuDNN's general SM100 convolution: the call and the output it fills.

    `input` is NDHWC, `weight` KTRSC, `tile` (rows of a CTA, columns of a CTA, CTAs of an MMA).
    """
    module = peer("cudnn.conv.frost.templates.sm100_conv")
    config = peer("cudnn.conv.frost.tile_config").ConvTileConfig(tile[0], tile[1], 128, tile[2])
    spatial = [
        (extent + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        for extent, taps in zip(input.shape[1:4], weight.shape[1:4], strict=True)
    ]
    output = torch.full((input.shape[0], *spatial, weight.shape[0]), torch.nan, dtype=torch.bfloat16)
    launcher = module._FpropKernel(
        acc_dtype=Float32,
        tile_config=config,
        filter_trs=tuple(weight.shape[1:4]),
        upper_padding_dhw=(padding,) * 3,
        lower_padding_dhw=(padding,) * 3,
        stride_dhw=(stride,) * 3,
        dilation_dhw=(dilation,) * 3,
    )
    samples = [fake_like(tensor) for tensor in (input, weight, output)]
    with im2col_maps():
        compiled = cross_compile(launcher, *samples, 1, fake_stream(), lambda value: value, arch=SM100)
    return lambda: compiled(input, weight, output, STREAM), output


# --- quack (sm_90a and sm_100a) --------------------------------------------------------------------------------------


@contextlib.contextmanager
def quack_gemm_on(arch: str, clusters: int = 1) -> Iterator[Callable[..., None]]:
    """quack's `gemm`, with its host code told that the device is of `arch` and runs `clusters` clusters at once.

    To be used inside `emulate(arch)`, for the call compiles, too.
    """
    gemm = peer("quack.gemm")
    capability = {SM90: (9, 0), SM100: (10, 0)}[arch]
    with contextlib.ExitStack() as stack:
        for name, value in (("get_device_capacity", capability), ("get_max_active_clusters", clusters)):
            stack.enter_context(mock.patch.object(gemm, name, lambda *_, _value=value, **__: _value))
        stack.enter_context(mock.patch.dict(gemm._gemm_plan_cache, clear=True))
        uncached = getattr(gemm._compile_gemm, "__wrapped__", gemm._compile_gemm)
        stack.enter_context(mock.patch.object(gemm, "_compile_gemm", uncached))
        yield gemm.gemm


def quack_rmsnorm(channels: int, *, residual: bool) -> Callable[..., None]:
    """quack's RMSNorm forward for BF16 rows and FP32 weights, compiled for sm_90a.

    The call takes x, weight, bias, residual, out, residual_out, rstd, mean, eps.
    """
    module = peer("quack.rmsnorm")
    kernel = module.RMSNorm(BFloat16, channels)
    rows = cutlass.cute.sym_int()
    matrix = fake(rows, channels)
    optional = matrix if residual else None
    return cross_compile(
        kernel,
        matrix,
        fake(channels, dtype=Float32),
        None,
        optional,
        matrix,
        optional,
        fake(rows, dtype=Float32, align=4),
        None,
        Float32(0),
        fake_stream(),
        arch=SM90,
    )


def quack_softmax(channels: int) -> Callable[..., None]:
    """quack's softmax forward over BF16 rows, compiled for sm_90a; the call takes x, out, stream."""
    module = peer("quack.softmax")
    rows = cutlass.cute.sym_int()
    matrix = fake(rows, channels)
    return cross_compile(module.Softmax(BFloat16, channels), matrix, matrix, fake_stream(), arch=SM90)


# --- FlashAttention 4 (sm_90a) ---------------------------------------------------------------------------------------


def flash_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """FlashAttention's SM90 forward on `[batch, length, heads, channels]`: the call, the output and the log-sum-exp."""
    module = peer("flash_attn.cute.flash_fwd_sm90")
    channels = query.shape[-1]
    output = torch.full_like(query, torch.nan)
    batch, length, heads, _ = query.shape
    log_sum_exp = torch.full((batch, heads, length), torch.nan)
    options = {"pack_gqa": False, "num_stages": 2, "num_threads": 384}
    with targeting(SM90):  # the constructor asks for the architecture
        kernel = module.FlashAttentionForwardSm90(BFloat16, channels, channels, 1, **options)
    samples = [fake_like(tensor) for tensor in (query, key, value, output)]
    scale = Float32(1 / math.sqrt(channels))
    rest = [None] * 9
    compiled = cross_compile(
        kernel,
        *samples,
        fake(batch, heads, length, dtype=Float32),
        scale,
        *rest,
        stream=fake_stream(),
        arch=SM90,
    )
    return (
        lambda: compiled(query, key, value, output, log_sum_exp, scale, *rest, stream=STREAM),
        output,
        log_sum_exp,
    )
