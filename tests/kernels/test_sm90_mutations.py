"""Hopper kernels that are broken on purpose: each fault must show in the emulator. What all kernels share is broken in
:mod:`tests.kernels.test_sm100_mutations`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cudnn_fused
from tests.kernels.sm90_probe import PROBES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

WAIT_AND_RELEASE = """\
prims.wgmma_wait_group_sync_aligned(1)
                        self.release(shared.b_empty, b_busy, thread)
                        b_busy = b.index
"""
RELEASE_TOO_EARLY = """\
prims.wgmma_wait_group_sync_aligned(1)
                        self.release(shared.b_empty, b.index, thread)
"""
MUTANTS = {
    "row-shift": ("(m * M_BLOCK + s) * row_units", "m * M_BLOCK * row_units", "raw"),
    "narrow-swizzle": ("TensorMapSwizzle.s64b, 2,", "TensorMapSwizzle.s64b, 3,", "raw"),
    "weights-overwritten": (WAIT_AND_RELEASE, RELEASE_TOO_EARLY, "raw"),
    "unfinished-products": ("        prims.wgmma_wait_group_sync_aligned(0)\n", "", "raw"),
    "staging-overwritten": ("            wait(shared.drained.subview(consumer), phase ^ 1)\n", "", "tiles"),
    "last-tile-not-staged": ("            wait(shared.staged.subview(each), phase ^ 1)\n", "            pass\n", "raw"),
    "last-tile-left-over": ("worker = (consumer + 1) * WARPGROUP", "worker = consumer * WARPGROUP", "full"),
    "partner-overwritten": ("            wait_cluster(wanted, phase)\n", "", "split"),
    "sums-not-there-yet": ("            wait_cluster(sent, phase)\n", "", "split"),
    "slots-overwritten": (
        "        prims.barrier_cta_sync(STAGING_BARRIER + consumer, thread_count=WARPGROUP)  # all slots are read\n",
        "",
        "split",
    ),
    "wrong-half-sent": ("keeps_upper, lower[first + i], upper", "keeps_upper, upper[first + i], lower", "split"),
}


def run_probe(package: Path, probe: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.sm90_probe", probe]
    return subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that may be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(Path(cudnn_fused.__file__).parent, tmp_path / "cudnn_fused", ignore=ignored))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(package: Path, name: str) -> None:
    old, new, probe = MUTANTS[name]
    source = package / "kernels" / "conv3d_sm90.py"
    text = source.read_text()
    assert text.count(old) == 1, "the mutation no longer applies"
    source.write_text(text.replace(old, new))
    result = run_probe(package, probe)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "differ" in result.stdout or "fault:" in result.stdout, result.stderr


@pytest.mark.parametrize("probe", PROBES)
def test_unchanged_kernels_pass(package: Path, probe: str) -> None:
    result = run_probe(package, probe)
    assert result.returncode == 0, result.stdout + result.stderr
