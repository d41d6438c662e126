"""The SM90 kernels in the emulator, against the reference."""

from __future__ import annotations

import pytest

from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling, TileConfig
from cudnn_fused.testing.cases import Case, Skip
from tests.kernels.emulated import EARLY, LATE, NEWEST, RANDOM, TALL, TALL_128, WIDE, check, fixed, run, sm90, tall

ALL = {"channels": (160, 160), "skip": Skip.BIASED}


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (Case("conv3d_raw", 2, 1, 3, 5, (160, 160)), EARLY),
        (Case("conv3d_raw", 1, 3, 2, 9, (160, 160), leading_zero_frames=2), LATE),
        (Case("conv3d_rmsnorm_silu", 1, 1, 3, 5, **ALL), NEWEST),
        (Case("conv3d_rmsnorm_silu_pad", 1, 2, 3, 5, **ALL, history=2), LATE),
        (Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, (160, 160), history=1, caller_history=True), RANDOM),
        (Case("conv3d_bias_residual_pad", 1, 1, 3, 5, **ALL), LATE),
        (Case("causal_conv3d_with_cache", 1, 2, 3, 5, (12, 160), history=1), LATE),
        (Case("conv3d_rmsnorm_silu_pad", 1, 1, 1, 3, (320, 640), skip=Skip.BIASED, history=1), EARLY),
        (Case("rmsnorm_silu_pad", 1, 2, 3, 5, (640,), skip=Skip.BIASED, history=1, input_bias=True), LATE),
    ],
    ids=lambda value: value.variant if isinstance(value, Case) else value,
)
def test_equals_the_reference(case: Case, schedule: str) -> None:
    check(sm90(), case, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [EARLY, LATE, NEWEST, RANDOM])
def test_rings_wrap(schedule: str) -> None:
    """Six tiles on two CTAs: all rings and the staging tile come round, whatever finishes first."""
    case = Case("conv3d_rmsnorm_silu_pad", 1, 3, 2, 129, (160, 160), skip=Skip.PLAIN, history=1)
    emulation = check(sm90(), case, schedule=schedule)
    assert emulation.launches[0].grid == (2, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "split", "case"),
    [
        (TALL, 2, Case("conv3d_raw", 1, 1, 3, 129, (160, 160))),
        (TALL, 4, Case("conv3d_rmsnorm_silu", 1, 2, 3, 29, (160, 160))),
        (TALL_128, 4, Case("conv3d_raw", 1, 1, 2, 5, (320, 640))),
        (WIDE, 2, Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 29, (160, 320), skip=Skip.BIASED, history=1)),
    ],
    ids=lambda value: getattr(value, "variant", str(value)),
)
@pytest.mark.parametrize("schedule", [EARLY, RANDOM])
def test_split_reductions(tile: TileConfig, split: int, case: Case, schedule: str) -> None:
    """Partial sums meet in shared memory, in tiles one after the other."""
    emulation = check(sm90(split, fixed(Sm90Tiling(), tile, split)), case, schedule=schedule)
    assert emulation.launches[0].cluster == (split, 1, 1)


@pytest.mark.slow
def test_a_split_adds_in_a_fixed_order() -> None:
    case = Case("conv3d_raw", 1, 1, 3, 5, (160, 160))
    results = [
        run(tall(4), case, integers=False, schedule=schedule)[0].operands["output"] for schedule in (EARLY, LATE)
    ]
    assert results[0].equal(results[1])


def test_no_product_is_wasted_on_missing_channels() -> None:
    """C160 is ten K16 steps of every tap, not the twelve of its padded weight; C12 is three of every tap row."""
    tile_macs = 256 * 160 * 16
    raw = check(sm90(), Case("conv3d_raw", 1, 1, 1, 1, (160, 160)))
    assert raw.launches[0].report.counts.macs_issued == 27 * 10 * tile_macs
    causal = check(sm90(), Case("causal_conv3d_with_cache", 1, 1, 1, 1, (12, 160), history=2))
    assert causal.launches[1].report.counts.macs_issued == 9 * 3 * tile_macs


@pytest.mark.parametrize("zeros", [1, 2])
def test_taps_on_zero_frames_are_skipped(zeros: int) -> None:
    case = Case("conv3d_raw", 1, 1, 1, 1, (160, 160), leading_zero_frames=zeros)
    counts = check(sm90(), case).launches[0].report.counts
    assert counts.macs_issued == (3 - zeros) * 9 * 10 * 256 * 160 * 16


def test_a_new_shape_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check(sm90(), Case("conv3d_raw", 1, 1, 1, 1, (160, 160)))
    monkeypatch.setattr("cutlass.cute.compile", None)
    check(sm90(), Case("conv3d_raw", 2, 1, 2, 3, (160, 160)))
