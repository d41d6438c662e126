"""What ptxas makes of the SM100 kernels, and what tiles there may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudnn_fused.kernels.conv3d_sm100 import Conv3dSm100
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.cross_compile import targeting
from cudnn_fused.kernels.launching import CONV_OPERANDS, NORM_OPERANDS, PACK_OPERANDS, compiled
from cudnn_fused.kernels.norm_silu_pad import NormSiluPad
from cudnn_fused.kernels.pack_c12 import PackC12
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import Layout, RowFinish
from cudnn_fused.kernels.tiling_sm100 import (
    EPILOGUE_WARPS,
    TILES,
    TMEM_COLUMNS,
    TileConfig,
    choose,
    tap_row_bytes,
    tiles_for,
)
from ptxemu.tools.cubin import resources

ARCHS = ("sm_100a", "sm_103a")
MULTIPROCESSORS = 148
SHARED_LIMIT = 227 * 1024
# The epilogue's threads must leave 65536 registers enough for a CTA of 224 threads.
MOST_REGISTERS = 255


def padded_norm(channels: int) -> RowFinish:
    """An epilogue with everything that there is."""
    everything = PostOps(channels, bias=True, residual=True, residual_bias=True, norm=True)
    return RowFinish(everything, Layout.PADDED, saves_value=True, history=2, copies_history=True)


SPECS = {
    "raw-160": Conv3dSpec(160, RowFinish(PostOps(160))),
    "raw-320": Conv3dSpec(320, RowFinish(PostOps(320)), leading_zero_frames=1),
    "padded-norm-160": Conv3dSpec(160, padded_norm(160)),
    "padded-norm-320": Conv3dSpec(320, padded_norm(320)),
    "corner-640": Conv3dSpec(
        640, RowFinish(PostOps(640, bias=True, residual=True, residual_bias=True), Layout.BOTTOM_RIGHT)
    ),
    "causal": Conv3dSpec(16, RowFinish(PostOps(160)), leading_zero_frames=1, joins_w_taps=True),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_convolutions_keep_to_registers(arch: str, name: str) -> None:
    spec = SPECS[name]
    with targeting(arch):
        tiles = tiles_for(spec, shared_taps=True)
        # ptxas has given both archs the same registers so far: one tile each will do for the second.
        for tile in tiles if arch == ARCHS[0] else tiles[:1]:
            launcher = compiled(arch, Conv3dSm100, spec, tile, addresses=len(CONV_OPERANDS), numbers=2)
            check_resources(launcher.__cubin__, arch, launcher.__ptx__)


@pytest.mark.parametrize("arch", ARCHS)
def test_other_kernels_keep_to_registers(arch: str) -> None:
    with targeting(arch):
        for channels in (160, 320, 640) if arch == ARCHS[0] else (640,):
            norm = compiled(arch, NormSiluPad, padded_norm(channels), addresses=len(NORM_OPERANDS), numbers=1)
            check_resources(norm.__cubin__, arch, norm.__ptx__)
        pack = compiled(arch, PackC12, 2, addresses=len(PACK_OPERANDS), numbers=1, strides=5)
        check_resources(pack.__cubin__, arch, pack.__ptx__)


def check_resources(cubin: bytes, arch: str, ptx: str) -> None:
    assert f".target {arch}" in ptx
    needs = resources(cubin)
    assert len(needs) == 1
    for kernel, need in needs.items():
        assert need.stack_bytes == 0, f"{kernel} spills, or keeps variables on the stack"
        assert 0 < need.registers <= MOST_REGISTERS


def test_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="ELF"):
        resources(b"PTX")


# --- tiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_taps", [True, False], ids=["shared", "aligned"])
@pytest.mark.parametrize("name", SPECS)
def test_every_operation_has_a_tile(name: str, shared_taps: bool) -> None:
    tiles = tiles_for(SPECS[name], shared_taps=shared_taps)
    assert tiles
    for tile in tiles:
        assert tile.shared_bytes(SPECS[name]) <= SHARED_LIMIT
        assert tile.accumulators * tile.n_block + tile.blocks * tile.staged_columns <= TMEM_COLUMNS


@pytest.mark.parametrize("max_split", [1, 2, 4])
def test_a_warp_has_room_for_its_slots_and_for_what_others_send(max_split: int) -> None:
    tile = TileConfig(1, 1, 160, 2, 2, max_split=max_split)
    for split in tile.splits:
        part = tile.exchange_bytes * split // EPILOGUE_WARPS
        assert part >= 32 * tile.slot_bytes
        assert part >= (split - 1) * 32 * tile.n_block * 4


WIDE = TILES[0]


@pytest.mark.parametrize(
    ("name", "tile", "reason"),
    [
        ("raw-320", TileConfig(1, 1, 80, 2, 2), "multiple of 32"),
        ("raw-320", TileConfig(1, 1, 320, 2, 2), "at most 256"),
        ("raw-160", TileConfig(1, 1, 192, 2, 2), "no multiple of 192"),
        ("padded-norm-320", TileConfig(1, 1, 160, 2, 2), "whole channel row"),
        ("corner-640", TileConfig(1, 4, 160, 2, 2), "do not fit in tensor memory"),
        ("raw-320", replace(WIDE, m_blocks=2), "do not fit in tensor memory"),
        ("raw-320", replace(WIDE, max_split=3), "shared out evenly"),
        ("raw-320", replace(WIDE, a_stages=1), "needs two stages"),
        ("raw-320", replace(WIDE, b_stages=40), "bytes of shared memory"),
    ],
)
def test_impossible_tiles_are_refused(name: str, tile: TileConfig, reason: str) -> None:
    assert reason in (tile.problem(SPECS[name]) or "")
    with pytest.raises(ValueError, match=reason):
        Conv3dSm100(SPECS[name], tile)


def test_tiles_suit_the_problem() -> None:
    """Large tiles load less; where there are too few of them to go round, small ones are faster."""
    deepest, few, many = (
        PaddedGrid.around(*extents) for extents in ((1, 1, 30, 52), (1, 1, 60, 104), (4, 4, 160, 120))
    )
    for name in ("raw-160", "raw-320"):
        spec = SPECS[name]
        tiles = tiles_for(spec, shared_taps=True)
        tile, split = choose(spec, tiles, many, MULTIPROCESSORS)
        assert (tile.blocks, split) == (2, 1)
        assert choose(spec, tiles, few, MULTIPROCESSORS)[0].blocks == 1
    corner = SPECS["corner-640"]
    tile, split = choose(corner, tiles_for(corner, shared_taps=True), deepest, MULTIPROCESSORS)
    assert (tile.blocks, split) == (1, 2)


def test_every_share_of_a_split_has_work() -> None:
    """Two known zero frames leave three tap rows, one for each share of at most three."""
    spec = replace(SPECS["raw-160"], leading_zero_frames=2)
    _, split = choose(spec, tiles_for(spec, shared_taps=True), PaddedGrid.around(1, 1, 1, 1), MULTIPROCESSORS)
    assert split == 2


def test_two_blocks_load_less() -> None:
    """Bytes into shared memory per row and output channel, against one block."""
    for name, most in (("raw-160", 0.72), ("raw-320", 0.84)):
        two, *_, one = tiles_for(SPECS[name], shared_taps=True)
        each = [tap_row_bytes(SPECS[name], tile) / (tile.tile_m * tile.tile_n) for tile in (two, one)]
        assert each[0] < most * each[1]
