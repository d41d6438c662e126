"""The SM100 kernels of the operations without a norm, in the emulator, against the reference."""

from __future__ import annotations

import pytest

from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.sm100 import sm100 as backend
from cudnn_fused.testing.cases import Case, Skip
from tests.cases import assert_same_bits
from tests.kernels.emulated import LATE, NEWEST, SCHEDULES, check, fixed, run, sm100
from tests.kernels.sm100_cases import Entry, few

SMALLEST = 1  # of the tiles for 160 output channels: one block
FEW = list(few("conv3d_raw", "conv3d_bias_residual_pad", "causal_conv3d_with_cache"))


@pytest.mark.parametrize("entry", FEW, ids=str)
def test_equals_the_reference(entry: Entry) -> None:
    kernels = sm100(shared_taps=entry.shared_taps, turn=entry.tile, multiprocessors=entry.multiprocessors)
    check(kernels, entry.case, schedule=entry.schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("shared_taps", [True, False], ids=["shared", "aligned"])
def test_rings_wrap(schedule: str, tile: int, shared_taps: bool) -> None:
    """Three tiles of 512 rows, or six of 256, on one pair of CTAs: all rings come round, whatever finishes first."""
    case = Case("conv3d_raw", 1, 3, 2, 129, (160, 160))
    emulation = check(sm100(shared_taps=shared_taps, turn=tile), case, schedule=schedule)
    assert emulation.launches[0].grid == (2, 1, 1)


SPLIT = {
    "raw": Case("conv3d_raw", 1, 1, 3, 5, (160, 160)),
    "norm": Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, (160, 160), skip=Skip.BIASED, history=1),
    "zeros": Case("conv3d_raw", 1, 1, 3, 5, (160, 160), leading_zero_frames=2),
}


@pytest.mark.parametrize(
    ("name", "multiprocessors", "pairs", "schedule"),
    [("raw", 4, 2, "late"), ("raw", 8, 4, "random"), ("norm", 8, 4, "newest"), ("zeros", 4, 2, "random")],
)
def test_the_reduction_is_split(name: str, multiprocessors: int, pairs: int, schedule: str) -> None:
    """Between the pairs of a cluster, where there are more of them than tiles."""
    emulation = check(sm100(turn=SMALLEST, multiprocessors=multiprocessors), SPLIT[name], schedule=schedule)
    assert emulation.launches[0].cluster == (2 * pairs, 1, 1)


@pytest.mark.parametrize("schedule", [LATE, NEWEST])
def test_tiles_follow_each_other_on_a_split_pair(schedule: str) -> None:
    """The next tile's sums arrive where the last one's rows leave from, and neighbouring warps are not in step."""
    tiling = Sm100Tiling.loading(shared_taps=True)
    case = Case("conv3d_raw", 1, 1, 3, 43, (160, 320))
    kernels = backend(DeviceSpec("sm_100a", 4), fixed(tiling, tiling.tiles[-1], 2))
    emulation = check(kernels, case, schedule=schedule)
    assert (emulation.launches[0].grid, emulation.launches[0].cluster) == ((4, 1, 1), (4, 1, 1))


def test_a_split_does_not_depend_on_who_comes_first() -> None:
    """Random numbers, which add up differently in another order."""
    outputs = []
    for schedule, seed in (("early", 0), ("random", 1), ("random", 2)):
        kernels = sm100(turn=SMALLEST, multiprocessors=8)
        prepared, _ = run(kernels, SPLIT["raw"], integers=False, schedule=schedule, schedule_seed=seed)
        outputs.append(prepared.operands["output"])
    for other in outputs[1:]:
        assert_same_bits(other, outputs[0])


def test_tiles_are_spread_over_pairs() -> None:
    """Three pairs share six tiles, and the filling of what no row falls on."""
    case = Case("conv3d_bias_residual_pad", 1, 3, 2, 129, (160, 160), skip=Skip.PLAIN)
    emulation = check(sm100(multiprocessors=7, turn=SMALLEST), case)
    assert emulation.launches[0].grid == (6, 1, 1)


@pytest.mark.parametrize(
    "case",
    [
        Case("conv3d_raw", 1, 1, 6, 8, (160, 160)),
        Case("causal_conv3d_with_cache", 1, 2, 5, 8, (12, 160), history=1),
    ],
    ids=lambda case: case.variant,
)
def test_random_numbers(case: Case) -> None:
    prepared, _ = run(sm100(), case, integers=False)
    prepared.assert_accurate()


@pytest.mark.parametrize("shared_taps", [True, False], ids=["shared", "aligned"])
def test_shared_memory_is_accounted_for(shared_taps: bool) -> None:
    """To the byte: what a tile says that it needs decides whether it may be used."""
    spec = Conv3dSpec(160, Epilogue(160))
    for turn, tile in enumerate(Sm100Tiling.loading(shared_taps=shared_taps).legal(spec)):
        emulation = check(sm100(turn=turn, shared_taps=shared_taps), Case("conv3d_raw", 1, 1, 1, 1, (160, 160)))
        assert emulation.launches[0].shared_bytes == tile.shared_bytes(spec)


def test_no_product_is_wasted_on_missing_channels() -> None:
    """C160 is ten K16 steps of every tap, not the twelve of its padded weight; C12 is three of every tap row."""
    tile_macs = 256 * 160 * 16
    raw = check(sm100(turn=SMALLEST), Case("conv3d_raw", 1, 1, 1, 1, (160, 160)))
    assert raw.launches[0].report.counts.macs_issued == 27 * 10 * tile_macs
    causal = check(sm100(turn=SMALLEST), Case("causal_conv3d_with_cache", 1, 1, 1, 1, (12, 160), history=2))
    assert causal.launches[1].report.counts.macs_issued == 9 * 3 * tile_macs


@pytest.mark.parametrize("zeros", [1, 2])
def test_taps_on_zero_frames_are_skipped(zeros: int) -> None:
    emulation = check(sm100(turn=SMALLEST), Case("conv3d_raw", 1, 1, 1, 1, (160, 160), leading_zero_frames=zeros))
    assert emulation.launches[0].report.counts.macs_issued == (3 - zeros) * 9 * 10 * 256 * 160 * 16
