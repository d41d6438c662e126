"""The host's side of a convolution kernel, alike on all architectures."""

from __future__ import annotations

from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.experimental import cuda

from cudnn_fused.kernels.conv3d_spec import DESCRIPTOR_UNIT, Conv3dSpec
from cudnn_fused.kernels.padded_grid import HALO, PaddedGrid
from cudnn_fused.kernels.rows import Tensors
from cudnn_fused.kernels.schedule import TileOrder
from cudnn_fused.operands import ELEMENT_BYTES


class Tile(Protocol):
    """What every architecture's ``TileConfig`` has."""

    @property
    def tile_m(self) -> int: ...

    @property
    def tile_n(self) -> int: ...

    def problem(self, spec: Conv3dSpec) -> str | None: ...


class Conv3dKernel:
    """A kernel of one operation and tile; N, T, H, W and the split of the reduction are run-time values."""

    def __init__(self, spec: Conv3dSpec, config: Tile) -> None:
        problem = config.problem(spec)
        if problem:
            raise ValueError(f"{config} cannot serve {spec}: {problem}")
        self.spec = spec
        self.order = TileOrder(spec, config.tile_m, config.tile_n)

    @cute.jit
    def __call__(
        self,
        input: Int64,
        weight: Int64,
        bias: Int64,
        gamma: Int64,
        residual: Int64,
        residual_bias: Int64,
        previous: Int64,
        output: Int64,
        cache_output: Int64,
        residual_output: Int64,
        n: Int32,
        t: Int32,
        h: Int32,
        w: Int32,
        split: Int32,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors are device addresses, 0 for those that the operation does not use."""
        tensors = Tensors(bias, gamma, residual, residual_bias, previous, output, cache_output, residual_output)
        self.launch(input, weight, tensors, PaddedGrid(n, t, h, w), split, clusters, stream)

    def launch(
        self,
        input: Int64,
        weight: Int64,
        tensors: Tensors,
        grid: PaddedGrid,
        split: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch ``clusters`` clusters, each of which shares the reduction of a tile out to ``split`` parts."""
        raise NotImplementedError

    def activation_map(
        self, input: Int64, grid: PaddedGrid, channels: int, rows: int, swizzle: cuda.TensorMapSwizzle
    ) -> cuda.TensorMap:
        """Tensor map of boxes of ``rows`` pixels by ``channels``."""
        spec = self.spec
        return cuda.create_tensor_map_tiled(
            global_address=input,
            dtype=BFloat16,
            # A long pixel of joined taps begins at every pixel but the last two.
            global_dims=(spec.gemm_channels, grid.pixels - (HALO if spec.joins_w_taps else 0)),
            global_strides=(spec.ci * ELEMENT_BYTES // DESCRIPTOR_UNIT,),
            box_dims=(channels, rows),
            swizzle=swizzle,
        )

    def weight_map(self, weight: Int64, channels: int, rows: int, swizzle: cuda.TensorMapSwizzle) -> cuda.TensorMap:
        """Tensor map of boxes of ``rows`` output channels by ``channels`` of one tap."""
        spec = self.spec
        return cuda.create_tensor_map_tiled(
            global_address=weight,
            dtype=BFloat16,
            global_dims=(spec.gemm_channels, spec.taps, spec.co),
            global_strides=(
                spec.weight_tap * ELEMENT_BYTES // DESCRIPTOR_UNIT,
                spec.weight_row * ELEMENT_BYTES // DESCRIPTOR_UNIT,
            ),
            box_dims=(channels, 1, rows),
            swizzle=swizzle,
        )
