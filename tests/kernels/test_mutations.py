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
from tests.kernels.emulated import PROBES, check

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A change of a module of the kernels, and the case of :mod:`tests.kernels.emulated` that shows it."""

    name: str
    module: str
    old: str
    new: str
    probe: str


WAIT_AND_RELEASE = """\
prims.wgmma_wait_group_sync_aligned(1)
                        self.release(shared.b_empty, b_busy, thread)
                        b_busy = b.index
"""
RELEASE_TOO_EARLY = """\
prims.wgmma_wait_group_sync_aligned(1)
                        self.release(shared.b_empty, b.index, thread)
"""
MUTANTS = (
    Mutant(
        "tap-row-order",
        "conv/padded_grid",
        "(dt * self.h + r) * self.w",
        "(r * self.h + dt) * self.w",
        "raw",
    ),
    Mutant(
        "tap-column-order",
        "conv/sm100",
        "first_tap + s,",
        "first_tap + spec.w_taps - 1 - s,",
        "raw",
    ),
    Mutant(
        "row-shift",
        "conv/sm100",
        "row = m * BLOCK_ROWS + s",
        "row = m * BLOCK_ROWS + 2 * s",
        "raw",
    ),
    Mutant(
        "tail-skip",
        "conv/spec",
        "math.ceil(min(K_CHUNK",
        "math.floor(0.8 * min(K_CHUNK",
        "raw",
    ),
    Mutant(
        "skipped-frames",
        "conv/schedule",
        "spec.leading_zero_frames - t, 0))",
        "spec.leading_zero_frames - t, 1))",
        "zeros",
    ),
    Mutant(
        "junk-column-mask",
        "epilogue/device_stores",
        "return masked(row.real, fragment) if self.in_runs(row.grid) else fragment",
        "return fragment",
        "padded",
    ),
    Mutant(
        "junk-rows",
        "epilogue/rows",
        "real = in_frame & (wo < grid.out_w)",
        "real = in_frame & (wo <= grid.out_w)",
        "raw",
    ),
    Mutant(
        "border",
        "conv/padded_grid",
        "return self.w + self.w if in_runs",
        "return self.w + self.w - 1 if in_runs",
        "padded",
    ),
    Mutant(
        "corner-column",
        "epilogue/device_stores",
        "row.wo <= grid.out_w",
        "row.wo < grid.out_w",
        "corner",
    ),
    Mutant(
        "history-offset",
        "epilogue/device_stores",
        "frame = t - (target.leading_frames - self.declared.history)",
        "frame = t - self.declared.history + 1",
        "history",
    ),
    Mutant(
        "cache-frame",
        "epilogue/device_stores",
        "slot = row.t - grid.out_t + cached",
        "slot = row.t - grid.out_t + cached - 1",
        "padded",
    ),
    Mutant(
        "accumulator-reuse",
        "conv/sm100",
        "(self.acc_empty, PAIR * EPILOGUE_WARPS)",
        "(self.acc_empty, 1)",
        "tiles",
    ),
    Mutant(
        "accumulator-fence",
        "conv/sm100",
        "                prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)\n                if",
        "                if",
        "tiles",
    ),
    Mutant(
        "started-peer",
        "conv/sm100",
        "        prims.barrier_cluster_arrive_relaxed()\n        prims.barrier_cluster_wait()\n        # The",
        "        # The",
        "raw",
    ),
    Mutant(
        "stage-reuse",
        "conv/sm100",
        "self.signal(shared.a_empty.subview(a.index), cluster)",
        "prims.mbarrier_arrive(shared.a_empty.subview(a.index))",
        "raw",
    ),
    Mutant(
        "split-order",
        "conv/sm100",
        "(share - Int32(share > owner)) * share_bytes",
        "0 * share_bytes",
        "split",
    ),
    Mutant(
        "split-rows",
        "conv/sm100",
        "if owner == cluster.share:",
        "if owner == 0:",
        "split",
    ),
    Mutant(
        "split-room",
        "conv/sm100",
        "            wait_cluster(empty, phase)\n",
        "",
        "split-tiles",
    ),
    Mutant(
        "split-arrival",
        "conv/sm100",
        "            wait_cluster(full, phase)\n",
        "",
        "split",
    ),
    Mutant(
        "saved-sum",
        "conv/sm100",
        "slots.store(saved, first)",
        "slots.store(destinations, first)",
        "padded",
    ),
    Mutant(
        "slot-row",
        "epilogue/staging",
        "own_pixel, first + row, WARP - 1",
        "own_pixel, row, WARP - 1",
        "tiles",
    ),
    Mutant(
        "slot-piece",
        "epilogue/staging",
        "+ chunk * CHUNK_BYTES",
        "+ 0 * chunk",
        "raw",
    ),
    Mutant(
        "absent-rows",
        "epilogue/staging",
        "if pixel != ABSENT:",
        "if channel >= 0:",
        "raw",
    ),
    Mutant(
        "sums-not-cleared",
        "conv/sm100",
        "started = unit > place.first_unit",
        "started = unit >= place.first_unit",
        "tiles",
    ),
    Mutant(
        "sm90-row-shift",
        "conv/sm90",
        "(m * M_BLOCK + s) * row_units",
        "m * M_BLOCK * row_units",
        "sm90-raw",
    ),
    Mutant(
        "sm90-narrow-swizzle",
        "conv/sm90",
        "TensorMapSwizzle.s64b, 2,",
        "TensorMapSwizzle.s64b, 3,",
        "sm90-raw",
    ),
    Mutant(
        "sm90-weights-overwritten",
        "conv/sm90",
        WAIT_AND_RELEASE,
        RELEASE_TOO_EARLY,
        "sm90-raw",
    ),
    Mutant(
        "sm90-unfinished-products",
        "conv/sm90",
        "        prims.wgmma_wait_group_sync_aligned(0)\n",
        "",
        "sm90-raw",
    ),
    Mutant(
        "sm90-staging-overwritten",
        "conv/sm90",
        "            wait(shared.drained.subview(consumer), phase ^ 1)\n",
        "",
        "sm90-tiles",
    ),
    Mutant(
        "sm90-last-tile-not-staged",
        "conv/sm90",
        "            wait(shared.staged.subview(each), phase ^ 1)\n",
        "            pass\n",
        "sm90-raw",
    ),
    Mutant(
        "sm90-last-tile-left-over",
        "conv/sm90",
        "worker = (consumer + 1) * WARPGROUP",
        "worker = consumer * WARPGROUP",
        "sm90-full",
    ),
    Mutant(
        "sm90-partner-overwritten",
        "conv/sm90",
        "            wait_cluster(empty, phase)\n",
        "",
        "sm90-split",
    ),
    Mutant(
        "sm90-sums-not-there-yet",
        "conv/sm90",
        "            wait_cluster(full, phase)\n",
        "",
        "sm90-split",
    ),
    Mutant(
        "sm90-slots-overwritten",
        "conv/sm90",
        "        prims.barrier_cta_sync(STAGING_BARRIER + consumer, thread_count=WARPGROUP)  # all slots are read\n",
        "",
        "sm90-split",
    ),
    Mutant(
        "sm90-wrong-half-sent",
        "conv/sm90",
        "keeps_upper, lower[first + i], upper",
        "keeps_upper, upper[first + i], lower",
        "sm90-split",
    ),
)

ALWAYS = {"tap-row-order", "tail-skip", "border", "history-offset", "cache-frame", "junk-column-mask"}


def run_probe(package: Path, probe: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (package.parent, ROOT / "ptxemu" / "src", ROOT))),
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
    (package / "kernels" / "gpu.py").write_text("raise RuntimeError('the copy')")
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
    one = PROBES[probe]
    check(one.kernels, one.case, schedule=one.schedule)
