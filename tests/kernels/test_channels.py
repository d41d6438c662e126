"""Channels beyond those of one encoder: any multiple of 8 in, and every tile and split that may be chosen for what
comes out."""

from __future__ import annotations

import pytest

from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.select import FixedTiling
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm90 import TILES, Sm90Tiling, TileConfig
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.sm90 import sm90 as backend
from cudnn_fused.selfcheck.cases import Case
from tests.kernels.emulated import LATE, check, fixed, sm90, sm100

NARROW = TileConfig(m_blocks=2, n_blocks=1, n_block=48, a_stages=2, b_stages=8)
MIDDLE = TileConfig(m_blocks=2, n_blocks=1, n_block=144, a_stages=2, b_stages=4)
FLAT = TileConfig(m_blocks=1, n_blocks=1, n_block=192, a_stages=2, b_stages=6)


@pytest.mark.parametrize("channels", [8, 24, 40, 96])
@pytest.mark.parametrize("kernels", [sm90(), sm100()], ids=["sm90", "sm100"])
def test_input_channels_are_any_multiple_of_8(kernels: object, channels: int) -> None:
    check(kernels, Case("conv3d_raw", 1, 1, 2, 5, (channels, 160)), schedule=LATE)  # type: ignore[arg-type]


def test_half_a_block_is_stored_four_chunks_at_a_time() -> None:
    """48 and 144 channels have no whole number of such stores: their rows are split by block alone."""
    assert [tile.splits for tile in (NARROW, MIDDLE, FLAT)] == [(1, 2), (1, 2), (1, 2)]
    assert [tile.splits for tile in TILES] == [(1, 2, 4), (1, 2, 4), (1, 2)]
    spec = Conv3dSpec(64, Epilogue(48))
    assert FixedTiling((NARROW,), Sm90Tiling(), 4).can_implement(spec) == "the reduction has no 4 shares"
    assert FixedTiling((NARROW,), Sm90Tiling(), 2).can_implement(spec) is None


@pytest.mark.parametrize("tile", [NARROW, MIDDLE, FLAT], ids=lambda tile: f"{tile.tile_m}x{tile.tile_n}")
def test_every_split_of_other_tiles_is_right(tile: TileConfig) -> None:
    case = Case("conv3d_raw", 1, 1, 3, 5, (16, tile.tile_n))
    for split in tile.splits:
        tiling = fixed(Sm90Tiling((tile,)), tile, split)
        emulation = check(backend(DeviceSpec("sm_90a", split), tiling), case, schedule=LATE)
        assert emulation.launches[0].cluster == (split, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "split"), [(tile, split) for tile in TILES for split in tile.splits], ids=str)
def test_every_tile_and_split_is_right(tile: TileConfig, split: int) -> None:
    """All that the selector can ever choose on Hopper."""
    case = Case("conv3d_raw", 1, 1, 3, 5, (160, tile.tile_n if tile.tile_n != 128 else 640))
    check(backend(DeviceSpec("sm_90a", split), fixed(Sm90Tiling(), tile, split)), case, schedule=LATE)
