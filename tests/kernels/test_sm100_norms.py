"""The SM100 kernels of the operations with a norm, in the emulator, against the reference."""

from __future__ import annotations

import pytest

from cudnn_fused.testing.cases import Case, Skip
from tests.kernels.emulated import check, run, sm100
from tests.kernels.sm100_cases import Entry, few

FEW = list(few("conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad", "rmsnorm_silu_pad"))


@pytest.mark.parametrize("entry", FEW, ids=str)
def test_equals_the_reference(entry: Entry) -> None:
    kernels = sm100(shared_taps=entry.shared_taps, turn=entry.tile, multiprocessors=entry.multiprocessors)
    check(kernels, entry.case, schedule=entry.schedule)


@pytest.mark.parametrize("channels", [(160, 160), (160, 320)], ids=["one-block", "two-blocks"])
def test_random_numbers(channels: tuple[int, int]) -> None:
    case = Case("conv3d_rmsnorm_silu_pad", 1, 1, 6, 8, channels, skip=Skip.BIASED, history=1)
    prepared, _ = run(sm100(), case, integers=False)
    prepared.assert_accurate()
