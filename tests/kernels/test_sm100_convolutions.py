"""The SM100 kernels of the operations without a norm, in the emulator, against the reference."""

from __future__ import annotations

import pytest

from cudnn_fused.testing.cases import Case, Skip
from tests.cases import assert_same_bits
from tests.kernels.emulated import SCHEDULES, check, run, sm100
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
