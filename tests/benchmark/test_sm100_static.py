"""The arithmetic of the static comparison of SM100 convolutions; what the emulator counts is tested where it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.padded_grid import TAP_ROWS
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import RowFinish
from cudnn_fused.kernels.tiling_sm100 import TILES, tap_row_bytes

SCRIPT = Path(__file__).parents[2] / "benchmark" / "sm100_static.py"


@pytest.fixture(scope="module")
def static() -> ModuleType:
    specification = importlib.util.spec_from_file_location("sm100_static", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["sm100_static"] = module
    specification.loader.exec_module(module)
    return module


def test_counts_are_those_of_the_cost_model(static: ModuleType) -> None:
    """A tile in the emulator multiplies and loads what the model that chooses tiles takes it to."""
    spec = Conv3dSpec(160, RowFinish(PostOps(160)))
    wide, small = static.ours((160, 160))
    for counts, tile in ((wide, TILES[1]), (small, TILES[2])):
        assert counts.cycles["products"] == TAP_ROWS * 3 * sum(spec.chunk_steps) * tile.blocks * 80
        assert counts.global_to_shared == pytest.approx(2 * TAP_ROWS * tap_row_bytes(spec, tile), rel=0.05)


def test_estimate(static: ModuleType) -> None:
    """Two waves of tiles that are bound by their products."""
    counts = static.TileCounts("some", 256, 160, 2 * 4096 * 10**6, 2 * 64 * 900, 0, 0, 0)
    shape = (1, 1, 74, 254)  # 74 lines of 256 rows
    one = static.estimate(counts, 1, (160, 160), shape)
    assert (one.waves, one.last_wave, one.bound) == (1, 1.0, "products")
    assert one.milliseconds == pytest.approx(10**6 / static.CLOCK * 1e3)
    assert one.useful_share == pytest.approx(254 * 160 * 27 * 160 / counts.products)
    assert static.estimate(counts, 1, (160, 160), (1, 1, 75, 254)).waves == 2


def test_tiles_of_flat_kernels_run_over_frames(static: ModuleType) -> None:
    flat = static.TileCounts("flat", 256, 160, 1, 1, 1, 1, 1, flat=True)
    assert flat.tiles(2, 2, 8, 8, 320) == 2
    assert static.TileCounts("rows", 256, 160, 1, 1, 1, 1, 1).tiles(2, 2, 8, 8, 320) == 8
