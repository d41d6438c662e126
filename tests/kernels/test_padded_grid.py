"""The padded linear grid: its arithmetic, against positions counted out one by one."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from cudnn_fused.kernels.conv.padded_grid import MAX_PIXELS, PaddedGrid, too_many_pixels
from cudnn_fused.window import Window

EXTENTS = ((1, 1, 1, 1), (2, 3, 4, 5), (3, 1, 1, 7), (1, 2, 5, 1))
WINDOWS = [
    (Window(), 0),
    (Window(), 1),
    (Window(), 2),
    (Window(1, 3, 3), 0),
    (Window(3, 1, 1), 2),
    (Window(1, 1, 1), 0),
]
GRIDS = [PaddedGrid.around(*extents, window, absent) for extents in EXTENTS for window, absent in WINDOWS]
SPATIAL = [grid for grid in GRIDS if grid.window.kh == 3]
GRID = pytest.mark.parametrize("grid", GRIDS, ids=str)


def pixel(grid: PaddedGrid, n: int, t: int, h: int, w: int) -> int:
    return ((n * grid.t + t) * grid.h + h) * grid.w + w


def outputs(grid: PaddedGrid) -> itertools.product:
    return itertools.product(range(grid.n), range(grid.out_t), range(grid.out_h), range(grid.out_w))


@GRID
def test_every_tap_is_a_constant_shift(grid: PaddedGrid) -> None:
    window = grid.window
    for n, t, ho, wo in outputs(grid):
        row = ho * grid.w + wo
        for dt, r, s in itertools.product(range(window.kt), range(window.kh), range(window.kw)):
            stored = t + dt - grid.absent_frames
            if stored >= 0:
                shifted = grid.frame(n, t) + row + grid.tap_shift(dt, r) + s
                assert shifted == pixel(grid, n, stored, ho + r, wo + s)


@pytest.mark.parametrize("in_runs", [True, False], ids=["runs", "lines"])
@pytest.mark.parametrize("grid", SPATIAL, ids=str)
def test_rows_and_padding_cover_a_padded_output_once(grid: PaddedGrid, in_runs: bool) -> None:
    covered = Counter()
    frames = grid.window.halo[0]
    for n, t in itertools.product(range(grid.n), range(grid.out_t)):
        for row in range(grid.frame_rows):
            ho, wo = divmod(row, grid.w)
            if in_runs or wo < grid.out_w:
                covered[grid.interior_pixel(n, t, ho, wo)] += 1
        for index in range(grid.frame_border(in_runs)):
            line = min((index - grid.w - 1) // 2, grid.out_h - 1)
            later = grid.border_in_runs(index) if in_runs else grid.border_by_lines(index, line)
            covered[grid.frame(n, t + frames) + (index if index <= grid.w else later)] += 1
    for n, t, inside in itertools.product(range(grid.n), range(grid.leading_frames), range(grid.frame_pixels)):
        covered[grid.frame(n, t + grid.absent_frames) + inside] += 1
    assert covered == Counter(range(grid.pixels))
    rows = grid.frame_rows if in_runs else grid.out_h * grid.out_w
    assert grid.n * (grid.sample_padding(in_runs) + grid.out_t * rows) == grid.pixels


@GRID
def test_rows_with_an_output_fall_on_the_interior(grid: PaddedGrid) -> None:
    frames, rows, columns = grid.window.halo
    for n, t, ho, wo in outputs(grid):
        stored = t + frames - grid.absent_frames
        assert grid.interior_pixel(n, t, ho, wo) == pixel(grid, n, stored, ho + rows // 2, wo + columns // 2)


def test_the_following_grid_holds_the_outputs() -> None:
    for grid, window in itertools.product(GRIDS, (Window(), Window(1, 3, 3))):
        following = grid.following(window, absent_frames=0)
        assert (following.n, following.out_t, following.out_h, following.out_w) == (
            grid.n,
            grid.out_t,
            grid.out_h,
            grid.out_w,
        )


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
    assert "split the batch" in reason
