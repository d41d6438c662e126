"""The Blackwell backend."""

from __future__ import annotations

from cudnn_fused import hardware_quirks
from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.select import Tiling
from cudnn_fused.kernels.conv.sm100 import Conv3dSm100
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling, TileConfig
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.targets import SM100


def tiling_for(device: DeviceSpec) -> Sm100Tiling:
    """The tiles for a model of GPU: taps share their pixels where the doctor has found that right, and nowhere else."""
    return Sm100Tiling.loading(shared_taps=hardware_quirks.shared_taps(device.model) is True)


def sm100(
    device: DeviceSpec | None = None, tiling: Tiling[TileConfig] | None = None, *, all_tiles: bool = True
) -> GpuBackend:
    """The backend of SM100 and SM103 GPUs; the parameters are those of :class:`.gpu.GpuBackend`.

    With ``tiling`` None the tiles follow the model of the GPU.
    """
    tiling_of = tiling_for if tiling is None else lambda device: tiling
    return GpuBackend(SM100, Conv3dSm100, tiling_of, device, all_tiles=all_tiles)
