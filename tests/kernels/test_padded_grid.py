"""The padded linear grid: its arithmetic, against positions counted out one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from cudnn_fused.kernels.padded_grid import HALO, MAX_PIXELS, TAPS, PaddedGrid, too_many_pixels

GRIDS = [PaddedGrid.around(*extents) for extents in ((1, 1, 1, 1), (2, 3, 4, 5), (3, 1, 1, 7), (1, 2, 5, 1))]
GRID = pytest.mark.parametrize("grid", GRIDS, ids=str)


def pixel(grid: PaddedGrid, n: int, t: int, h: int, w: int) -> int:
    return ((n * grid.t + t) * grid.h + h) * grid.w + w


def outputs(grid: PaddedGrid) -> itertools.product:
    return itertools.product(range(grid.n), range(grid.out_t), range(grid.out_h), range(grid.out_w))


@GRID
def test_every_tap_is_a_constant_shift(grid: PaddedGrid) -> None:
    for n, t, ho, wo in outputs(grid):
        row = ho * grid.w + wo
        for dt, r, s in itertools.product(range(TAPS), repeat=3):
            shifted = grid.window(n, t) + row + grid.tap_shift(dt, r) + s
            assert shifted == pixel(grid, n, t + dt, ho + r, wo + s)


@GRID
def test_rows_and_filler_cover_a_padded_output_once(grid: PaddedGrid) -> None:
    covered = Counter()
    for n, t in itertools.product(range(grid.n), range(grid.out_t)):
        for row in range(grid.frame_rows):
            ho, wo = divmod(row, grid.w)
            covered[grid.padded_pixel(n, t, ho, wo)] += 1
        for index in range(grid.frame_border):
            inside = index if index <= grid.w else index + grid.border_gap
            covered[grid.window(n, t + HALO) + inside] += 1
    for n, t, inside in itertools.product(range(grid.n), range(HALO), range(grid.frame_pixels)):
        covered[grid.window(n, t) + inside] += 1
    assert covered == Counter(range(grid.pixels))
    assert grid.n * (grid.sample_filler + grid.out_t * grid.frame_rows) == grid.pixels


@GRID
def test_rows_with_an_output_fall_on_the_interior(grid: PaddedGrid) -> None:
    for n, t, ho, wo in outputs(grid):
        assert grid.padded_pixel(n, t, ho, wo) == pixel(grid, n, t + HALO, ho + 1, wo + 1)


@GRID
def test_contiguous_and_bottom_right_pixels_count_up(grid: PaddedGrid) -> None:
    frames = range(grid.n * grid.out_t)
    contiguous = [
        grid.contiguous_pixel(*place) for place in itertools.product(frames, range(grid.out_h), range(grid.out_w))
    ]
    assert contiguous == list(range(grid.n * grid.out_t * grid.out_h * grid.out_w))
    padded = [
        grid.bottom_right_pixel(*place)
        for place in itertools.product(frames, range(grid.out_h + 1), range(grid.out_w + 1))
    ]
    assert padded == list(range(len(padded)))


def test_too_many_pixels_are_refused() -> None:
    assert too_many_pixels(PaddedGrid(1, 1, 1, MAX_PIXELS)) is None
    reason = too_many_pixels(PaddedGrid(1, 1, 1, MAX_PIXELS + 1))
    assert reason is not None
    assert "1x1x1x2146435073" in reason
    assert reason.endswith("split the batch")
