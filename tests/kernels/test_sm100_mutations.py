"""Kernels that are broken on purpose: each fault must show in the cases that the suite runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import cudnn_fused
from tests.kernels.emulated import PROBES, check, kernels_for

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A change of a module of the kernels, and the case of :mod:`tests.kernels.emulated` that shows it."""

    name: str
    module: str
    old: str
    new: str
    probe: str


MUTANTS = (
    Mutant("tap-row-order", "padded_grid", "(dt * self.h + r) * self.w", "(r * self.h + dt) * self.w", "raw"),
    Mutant("tap-column-order", "conv3d_sm100", "first_tap + s,", "first_tap + spec.w_taps - 1 - s,", "raw"),
    Mutant("row-shift", "conv3d_sm100", "row = m * BLOCK_ROWS + s", "row = m * BLOCK_ROWS + 2 * s", "raw"),
    Mutant("tail-skip", "conv3d_spec", "math.ceil(min(K_CHUNK", "math.floor(0.8 * min(K_CHUNK", "raw"),
    Mutant(
        "skipped-frames", "schedule", "spec.leading_zero_frames - t, 0)", "spec.leading_zero_frames - t, 1)", "zeros"
    ),
    Mutant("junk-column-mask", "rows", "else masked(row.real, result)", "else result", "padded"),
    Mutant("junk-rows", "rows", "real = in_frame & (wo < grid.out_w)", "real = in_frame & (wo <= grid.out_w)", "raw"),
    Mutant("border", "padded_grid", "return self.w + self.w", "return self.w + self.w - 1", "padded"),
    Mutant("corner-column", "rows", "row.wo <= grid.out_w", "row.wo < grid.out_w", "corner"),
    Mutant("history-offset", "rows", "frame = t - (HALO - self.history)", "frame = t - self.history + 1", "history"),
    Mutant(
        "cache-frame", "rows", "slot = row.t - grid.out_t + cached", "slot = row.t - grid.out_t + cached - 1", "padded"
    ),
    Mutant(
        "accumulator-reuse", "conv3d_sm100", "(self.acc_empty, PAIR * EPILOGUE_WARPS)", "(self.acc_empty, 1)", "tiles"
    ),
    Mutant(
        "accumulator-fence",
        "conv3d_sm100",
        "                prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)\n                if",
        "                if",
        "tiles",
    ),
    Mutant(
        "started-peer",
        "conv3d_sm100",
        "        prims.barrier_cluster_arrive_relaxed()\n        prims.barrier_cluster_wait()\n        # The",
        "        # The",
        "raw",
    ),
    Mutant(
        "stage-reuse",
        "conv3d_sm100",
        "self.signal(shared.a_empty.subview(a.index), cluster)",
        "prims.mbarrier_arrive(shared.a_empty.subview(a.index))",
        "raw",
    ),
    Mutant("split-order", "conv3d_sm100", "(share - Int32(share > owner)) * share_bytes", "0 * share_bytes", "split"),
    Mutant("split-rows", "conv3d_sm100", "if owner == cluster.share:", "if owner == 0:", "split"),
    Mutant("split-room", "conv3d_sm100", "            wait_cluster(wanted, phase)\n", "", "split-tiles"),
    Mutant("split-arrival", "conv3d_sm100", "            wait_cluster(sent, phase)\n", "", "split"),
    Mutant("saved-sum", "conv3d_sm100", "slots.store(saved, first)", "slots.store(destinations, first)", "padded"),
    Mutant("slot-row", "row_slots", "own_pixel, first + row, WARP - 1", "own_pixel, row, WARP - 1", "tiles"),
    Mutant("slot-piece", "row_slots", "+ chunk * CHUNK_BYTES", "+ 0 * chunk", "raw"),
    Mutant("absent-rows", "row_slots", "if pixel != ABSENT:", "if channel >= 0:", "raw"),
    Mutant(
        "sums-not-cleared",
        "conv3d_sm100",
        "started = unit > place.first_unit",
        "started = unit >= place.first_unit",
        "tiles",
    ),
)

ALWAYS = {"tap-row-order", "tail-skip", "border", "history-offset", "cache-frame", "junk-column-mask"}


def run_probe(package: Path, probe: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.emulated", probe]
    return subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that may be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(Path(cudnn_fused.__file__).parent, tmp_path / "cudnn_fused", ignore=ignored))


def test_the_copy_is_what_runs(package: Path) -> None:
    (package / "kernels" / "sm100.py").write_text("raise RuntimeError('the copy')")
    assert "the copy" in run_probe(package, "raw").stderr


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=() if one.name in ALWAYS else pytest.mark.slow) for one in MUTANTS],
)
def test_mutants_are_caught(package: Path, mutant: Mutant) -> None:
    source = package / "kernels" / f"{mutant.module}.py"
    text = source.read_text()
    assert mutant.old in text, "the mutation no longer applies"
    source.write_text(text.replace(mutant.old, mutant.new))
    result = run_probe(package, mutant.probe)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "differ" in result.stdout or "fault:" in result.stdout or "beside" in result.stdout, result.stderr


@pytest.mark.parametrize("probe", PROBES)
def test_unchanged_kernels_pass(probe: str) -> None:
    check(kernels_for(probe), PROBES[probe])
