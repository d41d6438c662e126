"""What ptxas makes of the SM100 kernels, and what tiles there may be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cudnn_fused.kernels.compiling import compiled
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.sm100 import Conv3dSm100
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm100 import (
    EPILOGUE_WARPS,
    TILES,
    TMEM_COLUMNS,
    Sm100Tiling,
    TileConfig,
    tap_row_bytes,
)
from cudnn_fused.kernels.cross_compile import targeting
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.steps import Bias, Residual
from cudnn_fused.kernels.epilogue.stores import BottomRight, Padded
from cudnn_fused.kernels.norm import RowsKernel
from cudnn_fused.kernels.occupancy import expected_clusters
from cudnn_fused.kernels.pack import PackC12
from cudnn_fused.ops.common import NORM_STEPS
from ptxemu.tools.cubin import resources

ARCHS = ("sm_100a", "sm_103a")
B200 = expected_clusters(148)
SHARED_LIMIT = 227 * 1024
# The epilogue's threads must leave 65536 registers enough for a CTA of 224 threads.
MOST_REGISTERS = 255


def padded_norm(channels: int) -> Epilogue:
    """An epilogue with everything that there is."""
    return Epilogue(channels, NORM_STEPS, Padded(history=2))


SPECS = {
    "raw-160": Conv3dSpec(160, Epilogue(160)),
    "raw-320": Conv3dSpec(320, Epilogue(320), leading_zero_frames=1),
    "padded-norm-160": Conv3dSpec(160, padded_norm(160)),
    "padded-norm-320": Conv3dSpec(320, padded_norm(320)),
    "corner-640": Conv3dSpec(640, Epilogue(640, (Bias(), Residual()), BottomRight())),
    "causal": Conv3dSpec(16, Epilogue(160), leading_zero_frames=1, joins_w_taps=True),
}
OPERANDS = ("input", "packed_weight")


def tiles_for(spec: Conv3dSpec, *, shared_taps: bool) -> tuple[TileConfig, ...]:
    return Sm100Tiling.loading(shared_taps=shared_taps).legal(spec)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shared_taps", [True, False], ids=["shared", "aligned"])
@pytest.mark.parametrize("name", SPECS)
def test_convolutions_keep_to_registers(arch: str, name: str, shared_taps: bool) -> None:
    spec = SPECS[name]
    with targeting(arch):
        tiles = tiles_for(spec, shared_taps=shared_taps)
        # ptxas has given both archs the same registers so far: one tile each will do for the second.
        for tile in tiles if arch == ARCHS[0] else tiles[:1]:
            launcher = compiled(arch, Conv3dSm100, spec, tile, *OPERANDS)
            check_resources(launcher.__cubin__, arch, launcher.__ptx__)


@pytest.mark.parametrize("arch", ARCHS)
def test_other_kernels_keep_to_registers(arch: str) -> None:
    with targeting(arch):
        for channels in (160, 320, 640) if arch == ARCHS[0] else (640,):
            norm = compiled(arch, RowsKernel, padded_norm(channels), "input")
            check_resources(norm.__cubin__, arch, norm.__ptx__)
        pack = compiled(arch, PackC12, 2, "input", "previous", "padded_input", "cache_output")
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
SHARING = Sm100Tiling.loading(shared_taps=True)


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
    assert reason in (tile.can_implement(SPECS[name]) or "")
    with pytest.raises(ValueError, match=reason):
        Conv3dSm100(SPECS[name], tile, *OPERANDS)


def test_tiles_suit_the_problem() -> None:
    """Large tiles load less; where there are too few of them to go round, small ones are faster."""
    deepest, few, many = (
        PaddedGrid.around(*extents) for extents in ((1, 1, 30, 52), (1, 1, 60, 104), (4, 4, 160, 120))
    )
    for name in ("raw-160", "raw-320"):
        spec = SPECS[name]
        tile, split, _ = SHARING.choose(spec, many, B200)
        assert (tile.blocks, split) == (2, 1)
        assert SHARING.choose(spec, few, B200).tile.blocks == 1
    corner = SPECS["corner-640"]
    tile, split, _ = SHARING.choose(corner, deepest, B200)
    assert (tile.blocks, split) == (1, 2)


@pytest.mark.parametrize(("clusters", "largest"), [({2: 74, 4: 36, 8: 16}, 4), ({2: 74, 4: 36}, 2), ({2: 74}, 1)])
def test_a_split_takes_only_clusters_that_run(clusters: dict[int, int], largest: int) -> None:
    spec = replace(SPECS["corner-640"], ci=640)
    tiling = Sm100Tiling(tuple(tile for tile in tiles_for(spec, shared_taps=False) if tile.max_split > 1))
    assert tiling.choose(spec, PaddedGrid.around(1, 1, 3, 5), clusters).split == largest


def test_every_share_of_a_split_has_work() -> None:
    """Two known zero frames leave three tap rows, one for each share of at most three."""
    spec = replace(SPECS["raw-160"], leading_zero_frames=2)
    assert SHARING.choose(spec, PaddedGrid.around(1, 1, 1, 1), B200).split == 2


def test_two_blocks_load_less() -> None:
    """Bytes into shared memory per row and output channel, against one block."""
    for name, most in (("raw-160", 0.72), ("raw-320", 0.84)):
        two, *_, one = tiles_for(SPECS[name], shared_taps=True)
        each = [tap_row_bytes(SPECS[name], tile) / (tile.tile_m * tile.tile_n) for tile in (two, one)]
        assert each[0] < most * each[1]


# --- fences ----------------------------------------------------------------------------------------------------------

# ptxas makes a MEMBAR.ALL.GPU of each: the thread waits until the whole GPU sees what it has written.
GPU_FENCE = re.compile(
    r"\b(mbarrier\.arrive\.release\.cluster|barrier\.cluster\.arrive(?!\.relaxed)|fence\.(acq_rel|sc)\.(cluster|gpu))"
)


@pytest.mark.parametrize("name", SPECS)
def test_fences_of_the_whole_gpu_are_rare(name: str) -> None:
    """A warp that frees an accumulator does not wait for what it has stored. A CTA does before it leaves its cluster,
    and a warp that exchanges sums with another CTA: once when it has room for them, once when it has sent them."""
    spec = SPECS[name]
    with targeting("sm_100a"):
        for tile in tiles_for(spec, shared_taps=False):
            launcher = compiled("sm_100a", Conv3dSm100, spec, tile, *OPERANDS)
            fences = [found[0] for found in GPU_FENCE.findall(launcher.__ptx__)]
            exchange = ["mbarrier.arrive.release.cluster"] * (2 if tile.max_split > 1 else 0)
            assert sorted(fences) == ["barrier.cluster.arrive", *exchange]
