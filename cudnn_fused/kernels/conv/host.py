"""The host's side of a convolution kernel, alike on all architectures."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.experimental import cuda

from cudnn_fused.kernels.arguments import Addresses, Signature
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.schedule import TileScheduler
from cudnn_fused.kernels.conv.select import Tile
from cudnn_fused.kernels.conv.spec import DESCRIPTOR_UNIT, Conv3dSpec
from cudnn_fused.kernels.epilogue.rows import RowFinisher
from cudnn_fused.types import ELEMENT_BYTES


class Conv3dKernel:
    """A kernel of one operation and tile; N, T, H, W and the split of the reduction are run-time values."""

    def __init__(self, spec: Conv3dSpec, config: Tile, input: str, weight: str) -> None:
        reason = config.can_implement(spec)
        if reason:
            raise ValueError(f"{config} cannot serve {spec}: {reason}")
        self.spec, self.input, self.weight = spec, input, weight
        self.scheduler = TileScheduler(spec, config.tile_m, config.tile_n)
        numbers = dict.fromkeys(("n", "t", "h", "w", "split", "clusters"), Int32)
        self.signature = Signature((input, weight, *spec.epilogue.operands), numbers)

    @cute.jit
    def __call__(self, stream: Any, *values: Any):
        """Launch with the values of ``signature``. ``n, t, h, w`` are the extents of the input in memory."""
        tensors, numbers = self.signature.bind(values)
        grid = self.spec.grid(numbers["n"], numbers["t"], numbers["h"], numbers["w"])
        self.launch(
            tensors[self.input], tensors[self.weight], tensors, grid, numbers["split"], numbers["clusters"], stream
        )

    @property
    def finisher(self) -> RowFinisher:
        """The device side of the epilogue."""
        return RowFinisher(self.spec.epilogue)

    def launch(
        self,
        input: Int64,
        weight: Int64,
        tensors: Addresses,
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
            # A long pixel of joined taps begins at every pixel but the last ones.
            global_dims=(spec.gemm_channels, grid.pixels - (spec.window.halo[2] if spec.joins_w_taps else 0)),
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
