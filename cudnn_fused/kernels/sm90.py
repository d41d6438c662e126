"""The Hopper backend."""

from __future__ import annotations

from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.select import Tiling
from cudnn_fused.kernels.conv.sm90 import Conv3dSm90
from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling, TileConfig
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.targets import SM90

TILING = Sm90Tiling()


def sm90(
    device: DeviceSpec | None = None, tiling: Tiling[TileConfig] = TILING, *, all_tiles: bool = True
) -> GpuBackend:
    """The backend of SM90 GPUs, with the tiles of ``tiling``; the others are those of :class:`.gpu.GpuBackend`."""
    return GpuBackend(SM90, Conv3dSm90, lambda device: tiling, device, all_tiles=all_tiles)
