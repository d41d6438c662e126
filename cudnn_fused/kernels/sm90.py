"""The Hopper backend: which kernel serves a problem, compiled once, and how it is launched.

A kernel depends on channels, options and the operands present; N, T, H and W are passed at launch. Launchers are
called through TVM-FFI with addresses and numbers only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cudnn_fused.backends import Launch
from cudnn_fused.kernels.conv3d_sm90 import Conv3dSm90, Conv3dSpec
from cudnn_fused.kernels.norm_silu_pad import NormSiluPad
from cudnn_fused.kernels.pack_c12 import PackC12
from cudnn_fused.kernels.padded_grid import PaddedGrid, check_pixels
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import Layout, RowFinish
from cudnn_fused.kernels.tiling_sm90 import choose, resident_clusters, tiles_for
from cudnn_fused.operands import Operation, Problem
from cudnn_fused.weights import CAUSAL_PIXEL

ARCH = "sm_90a"
OPTIONS = f"--enable-tvm-ffi --gpu-arch {ARCH}"

# Operands in the order in which the kernels take their addresses.
CONV_OPERANDS = (
    "input",
    "packed_weight",
    "bias",
    "gamma",
    "residual",
    "residual_bias",
    "previous",
    "output",
    "cache_output",
    "residual_output",
)
NORM_OPERANDS = (
    "input",
    "input_bias",
    "gamma",
    "residual",
    "residual_bias",
    "previous",
    "output",
    "cache_output",
    "residual_output",
)
PACK_OPERANDS = ("input", "previous", "padded_input", "cache_output")

_compiling = threading.Lock()


@functools.cache
def _compile(build: Callable[..., Any], key: tuple[Any, ...], addresses: int, numbers: int, strides: int) -> Any:
    arguments = [Int64(0)] * addresses + [Int32(1)] * 4 + [Int64(1)] * strides + [Int32(1)] * numbers
    stream = make_fake_stream(use_tvm_ffi_env_stream=False)
    return cute.compile(build(*key), *arguments, stream, options=OPTIONS)


def compiled(build: Callable[..., Any], *key: Any, addresses: int, numbers: int, strides: int = 0) -> Any:
    """The launcher of the kernel ``build(*key)``, compiled by whichever thread needs it first.

    It takes ``addresses`` device addresses, the four extents of the padded grid, ``strides`` strides and ``numbers``
    more numbers, then the stream.
    """
    with _compiling:  # the compiler is not re-entrant
        return _compile(build, key, addresses, numbers, strides)


def conv3d(spec: Conv3dSpec, grid: PaddedGrid, multiprocessors: int) -> tuple[Any, tuple[int, ...]]:
    """The launcher of a convolution and its arguments behind the addresses.

    All tiles of an operation are compiled together, so that no later shape has to wait for another.
    """
    tiles = tiles_for(spec)
    launchers = {tile: compiled(Conv3dSm90, spec, tile, addresses=len(CONV_OPERANDS), numbers=2) for tile in tiles}
    tile, split = choose(spec, tiles, grid, multiprocessors)
    clusters = min(Conv3dSm90.tile_count(spec, tile, grid), resident_clusters(split, multiprocessors))
    return launchers[tile], (grid.n, grid.t, grid.h, grid.w, split, clusters)


def row_finish(problem: Problem) -> RowFinish:
    """What an operation does with its rows, read off its operands."""
    present, names = problem.present, {operand.name for operand in problem.operation.operands}
    if "cache_output" in names and "gamma" in names:
        layout = Layout.PADDED
    elif "padded_output" in names:
        layout = Layout.BOTTOM_RIGHT
    else:
        layout = Layout.CONTIGUOUS
    return RowFinish(
        PostOps(
            problem.channels[-1],
            bias=bool({"bias", "input_bias"} & present),
            residual="residual" in present,
            residual_bias="residual_bias" in present,
            norm="gamma" in present,
        ),
        layout,
        saves_value="residual_output" in present,
        history=problem.extents["P"] if layout is Layout.PADDED else 0,
        copies_history="previous" in present and layout is Layout.PADDED,
    )


class Addresses:
    """Picks the operands that a kernel takes, in its order, out of those of an operation."""

    def __init__(self, operation: Operation, names: Sequence[str]) -> None:
        positions = {operand.name: index for index, operand in enumerate(operation.operands)}
        if "output" not in positions:
            positions["output"] = positions["padded_output"]
        self.positions = tuple(positions.get(name) for name in names)

    def __call__(self, operands: Sequence[torch.Tensor | None]) -> list[int]:
        chosen = [None if position is None else operands[position] for position in self.positions]
        return [0 if tensor is None else tensor.data_ptr() for tensor in chosen]


class Sm90Kernels:
    """The backend of Hopper GPUs."""

    def supports(self, operation: Operation) -> bool:
        return operation.name in _BUILDERS

    def compile(self, problem: Problem) -> Launch:
        """Compile what the problem needs, unless that has been done.

        Raises ValueError if its padded tensor has more pixels than the kernels can number.
        """
        return _BUILDERS[problem.operation.name](problem)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(device: torch.device, launcher: Any, arguments: Sequence[int], stream: int) -> None:
    with torch.cuda.device(device):
        launcher(*arguments, driver.CUstream(stream))


def _build_conv(problem: Problem) -> Launch:
    extents, device = problem.extents, problem.device
    grid = PaddedGrid(extents["N"], extents["T"], extents["H"], extents["W"])
    check_pixels(grid, problem.operation.name)
    spec = Conv3dSpec(
        extents["Ci"], row_finish(problem), leading_zero_frames=problem.options.get("leading_zero_frames", 0)
    )
    launcher, numbers = conv3d(spec, grid, _multiprocessors(device))
    addresses = Addresses(problem.operation, CONV_OPERANDS)

    def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
        _launch(device, launcher, (*addresses(operands), *numbers), stream)

    return launch


def _build_norm(problem: Problem) -> Launch:
    extents, device = problem.extents, problem.device
    grid = PaddedGrid.around(extents["N"], extents["T"], extents["H"], extents["W"])
    check_pixels(grid, problem.operation.name)
    launcher = compiled(NormSiluPad, row_finish(problem), addresses=len(NORM_OPERANDS), numbers=1)
    numbers = (grid.n, grid.t, grid.h, grid.w, _multiprocessors(device))
    addresses = Addresses(problem.operation, NORM_OPERANDS)

    def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
        _launch(device, launcher, (*addresses(operands), *numbers), stream)

    return launch


def _build_causal(problem: Problem) -> Launch:
    extents, device, operation = problem.extents, problem.device, problem.operation
    grid = PaddedGrid.around(extents["N"], extents["T"], extents["H"], extents["W"])
    check_pixels(grid, operation.name)
    history, multiprocessors = extents["P"], _multiprocessors(device)
    pack = compiled(PackC12, history, addresses=len(PACK_OPERANDS), numbers=1, strides=5)
    spec = Conv3dSpec(
        CAUSAL_PIXEL,
        RowFinish(PostOps(problem.channels[-1])),
        leading_zero_frames=2 - history,
        joins_w_taps=True,
    )
    convolve, numbers = conv3d(spec, grid, multiprocessors)
    pack_addresses = Addresses(operation, PACK_OPERANDS)
    names = ("padded_input", *CONV_OPERANDS[1:])
    conv_addresses = Addresses(operation, [name if name != "previous" else "" for name in names])
    extent_numbers = (grid.n, grid.t, grid.h, grid.w)

    def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
        strides = operands[0].stride()  # type: ignore[union-attr]
        _launch(device, pack, (*pack_addresses(operands), *extent_numbers, *strides, multiprocessors), stream)
        _launch(device, convolve, (*conv_addresses(operands), *numbers), stream)

    return launch


_BUILDERS: dict[str, Callable[[Problem], Launch]] = {
    "conv3d_raw": _build_conv,
    "conv3d_rmsnorm_silu": _build_conv,
    "conv3d_rmsnorm_silu_pad": _build_conv,
    "conv3d_bias_residual_pad": _build_conv,
    "causal_conv3d_with_cache": _build_causal,
    "rmsnorm_silu_pad": _build_norm,
}
