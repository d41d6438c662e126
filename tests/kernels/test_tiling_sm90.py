"""Tiles of the Hopper convolution: which are legal, how they lie in shared memory, which is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudnn_fused.cudnn_names import CONV_PAIRS, NORM_PAIRS
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.sm90 import Conv3dSm90
from cudnn_fused.kernels.conv.spec import SWIZZLE_ROWS, Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm90 import MAX_BOX_ROWS, TILES, Sm90Tiling, TileConfig
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.stores import Padded
from cudnn_fused.kernels.occupancy import expected_clusters
from cudnn_fused.ops.common import NORM_STEPS

TILING = Sm90Tiling()
H200 = expected_clusters(132)
BANKS, BANK_BYTES, CHUNK_BYTES = 32, 4, 16


def spec_of(ci: int, co: int, *, norm: bool = False) -> Conv3dSpec:
    return Conv3dSpec(ci, Epilogue(co, NORM_STEPS if norm else ()))


@pytest.mark.parametrize(("ci", "co"), CONV_PAIRS)
def test_every_channel_pair_has_a_tile(ci: int, co: int) -> None:
    assert TILING.candidates(spec_of(ci, co))


@pytest.mark.parametrize(("ci", "co"), NORM_PAIRS)
def test_a_norm_has_one_tile_as_wide_as_the_output(ci: int, co: int) -> None:
    (tile,) = TILING.candidates(spec_of(ci, co, norm=True))
    assert tile.tile_n == co


@pytest.mark.parametrize(
    ("change", "co", "reason"),
    [
        ({"m_blocks": 3}, 160, "one or two blocks"),
        ({"n_block": 168}, 160, "multiple of 16"),
        ({"n_block": 256}, 256, "at most 192"),
        ({}, 240, "240 output channels are no multiple of 160"),
        ({"n_blocks": 2}, 320, "too few registers"),
        ({"a_stages": 1}, 160, "two stages"),
        ({"b_stages": 8}, 160, "bytes of shared memory"),
    ],
)
def test_illegal_tiles_say_why(change: dict[str, int], co: int, reason: str) -> None:
    tile = replace(TILES[0], **change)
    assert reason in (tile.can_implement(spec_of(160, co)) or "")
    with pytest.raises(ValueError, match=reason):
        Conv3dSm90(spec_of(160, co), tile, "input", "packed_weight")


def test_a_norm_across_tiles_is_illegal() -> None:
    assert "whole channel row" in (TILES[0].can_implement(spec_of(160, 320, norm=True)) or "")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_boxes_of_activations_are_whole_swizzle_patterns(tile: TileConfig) -> None:
    spec = spec_of(160, 640)
    rows = tile.a_rows(spec) // tile.a_boxes(spec)
    assert rows * tile.a_boxes(spec) == tile.a_rows(spec) >= tile.tile_m + spec.window.halo[2]
    assert rows % SWIZZLE_ROWS == 0
    assert rows <= MAX_BOX_ROWS


@pytest.mark.parametrize(("tile", "co"), [(TILES[0], 160), (TILES[1], 640), (TILES[2], 320)], ids=str)
def test_staging_is_dense_and_free_of_bank_conflicts(tile: TileConfig, co: int) -> None:
    kernel = Conv3dSm90(spec_of(160, co), tile, "input", "packed_weight")

    def banks(places: list[tuple[int, int]]) -> list[int]:
        """First bank of each 16-byte access."""
        return [kernel.staging_offset(row, chunk) // BANK_BYTES % BANKS for row, chunk in places]

    offsets = [kernel.staging_offset(row, chunk) for row in range(tile.tile_m) for chunk in range(tile.row_chunks)]
    assert sorted(offsets) == list(range(0, tile.staging_bytes, CHUNK_BYTES))
    for row in range(0, tile.tile_m, 8):
        for chunk in range(tile.row_chunks):  # eight rows that one matrix of stmatrix writes
            assert len(set(banks([(row + i, chunk) for i in range(8)]))) == 8
        for chunk in range(0, tile.row_chunks, tile.lanes):  # eight lanes that read side by side
            rows = 8 // tile.lanes
            for first in range(row, row + 8, rows):
                places = [(first + i, chunk + lane) for i in range(rows) for lane in range(tile.lanes)]
                assert len(set(banks(places))) == 8


def test_shares_of_a_split_are_all_rows_once() -> None:
    for tile in TILES:
        kernel = Conv3dSm90(spec_of(160, 640 if tile.n_block == 128 else tile.tile_n), tile, "input", "packed_weight")
        for levels in range(tile.split_levels + 1):
            split = 1 << levels
            owned = [
                kernel.owned_row(index, rank, split)
                for rank in range(split)
                for index in range(tile.consumer_rows // split)
            ]
            assert sorted(owned) == list(range(tile.consumer_rows))


def choice(ci: int, co: int, *extents: int) -> tuple[TileConfig, int]:
    spec = spec_of(ci, co)
    return TILING.choose(spec, PaddedGrid.around(*extents), H200)[:2]


def test_many_tiles_are_not_split() -> None:
    assert choice(160, 160, 1, 4, 240, 416) == (TILES[0], 1)
    assert choice(320, 320, 4, 4, 160, 120) == (TILES[2], 1)


def test_few_tiles_are_split() -> None:
    assert choice(640, 640, 1, 1, 30, 52) == (TILES[0], 4)
    assert choice(320, 320, 1, 1, 120, 208) == (TILES[2], 2)


def test_the_width_that_fills_the_waves_is_chosen() -> None:
    """25 tiles along M: 100 of 160 channels leave a quarter of the GPU idle, 125 of 128 do not. And the reverse."""
    assert choice(640, 640, 1, 1, 60, 104) == (TILES[1], 1)
    assert choice(640, 640, 4, 2, 80, 60) == (TILES[0], 1)


def test_known_zero_frames_cost_less() -> None:
    grid = PaddedGrid.around(1, 1, 240, 416)
    whole = TILING.cost(spec_of(160, 160), TILES[0], 1, grid, H200)
    first_chunk = TILING.cost(replace(spec_of(160, 160), leading_zero_frames=2), TILES[0], 1, grid, H200)
    assert first_chunk < whole / 2


def test_clusters_fit_the_multiprocessors() -> None:
    clusters = expected_clusters(2)
    assert TILING.choose(spec_of(640, 640), PaddedGrid.around(1, 1, 3, 5), clusters).split <= 2


def test_layouts_do_not_change_the_tile() -> None:
    padded = Conv3dSpec(160, Epilogue(160, NORM_STEPS, Padded(history=1)))
    assert TILING.candidates(padded) == TILING.candidates(spec_of(160, 160, norm=True))
