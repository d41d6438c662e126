"""When kernels are compiled, by whom, and calls inside ``torch.compile``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.measure import counting_compilations
from cudnn_fused.plan import PLAN_CAPACITY, PLANS
from cudnn_fused.testing.cases import Case, Operands, Skip, make_inputs
from cudnn_fused.user_cache import DIRECTORY_VARIABLE
from tests.cases import assert_same_bits
from tests.gpu.harness import ALL_OPERATIONS, ROOT, TYPICAL, assert_equals_reference, call, inputs_of

pytestmark = pytest.mark.gpu

PROCESSES = 3
READ_ONLY, WRITABLE = 0o500, 0o700
PATIENCE = 240  # seconds for a cold process


def start(scenario: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A process of its own for a scenario of ``cold_process``, without a disk cache unless the environment has one."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.cold_process", scenario],
        cwd=ROOT,
        env={**os.environ, DIRECTORY_VARIABLE: "", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> int:
    """Wait for the process, which must succeed. Returns how many kernels it compiled."""
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"still running after {PATIENCE} s: {errors[-2000:]}")
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])["kernels"]


# --- cold processes ------------------------------------------------------------------------------------------------


def test_threads_share_a_compilation(gpu: torch.device) -> None:
    """Four threads with the same new call compile what one does."""
    alone, together = start("one_call"), start("threads_one_key")
    assert finish(together) == finish(alone) > 0


@pytest.mark.parametrize("scenario", ["threads_many_classes", "cold_capture", "green_context"])
def test_cold(gpu: torch.device, scenario: str) -> None:
    assert finish(start(scenario)) > 0


@pytest.mark.slow
def test_processes_share_a_disk_cache(gpu: torch.device, tmp_path: Path) -> None:
    """Several at once on an empty cache, a full one, a damaged one, one that cannot be written, and on none."""
    cache = tmp_path / "cache"

    def compiled(place: Path) -> int:
        processes = [start("one_call", {DIRECTORY_VARIABLE: str(place)}) for _ in range(PROCESSES)]
        return sum(map(finish, processes))

    alone = finish(start("one_call"))
    assert compiled(cache) == alone
    assert compiled(cache) == 0
    for path in cache.rglob("*"):
        if path.is_file():
            path.write_bytes(b"broken")
    assert compiled(cache) == alone
    directories = [path for path in cache.rglob("*") if path.is_dir()]
    for path in directories:
        path.chmod(READ_ONLY)
    assert compiled(cache) == 0
    for path in directories:
        path.chmod(WRITABLE)
    assert compiled(Path("/proc/no_such_place")) == PROCESSES * alone


# --- one process ---------------------------------------------------------------------------------------------------


@ALL_OPERATIONS
def test_new_shapes_compile_nothing(gpu: torch.device, case: Case) -> None:
    call(case, make_inputs(case, gpu, integers=True))
    with counting_compilations() as compilations:
        for extents in ((1, 1, 1, 1), (1, 3, 2, 150), (3, 2, 31, 17), (1, 1, 30, 52), (2, 4, 60, 104)):
            sized = case.at(*extents)
            operands = make_inputs(sized, gpu, integers=True)
            assert_equals_reference(sized, operands, call(sized, operands))
    assert compilations.kernels == 0


def test_evicted_plans_compile_nothing(gpu: torch.device) -> None:
    """More shapes than the cache holds plans, in turn, give right answers without compiling again."""
    cases = [Case("rmsnorm_silu_pad", 1, 1, 1, width, (160,)) for width in range(1, PLAN_CAPACITY + 2)]
    call(cases[0], make_inputs(cases[0], gpu, integers=True))
    with counting_compilations() as compilations:
        for case in cases + cases:
            operands = make_inputs(case, gpu, integers=True)
            assert_equals_reference(case, operands, call(case, operands))
            assert len(PLANS) <= PLAN_CAPACITY
    assert compilations.kernels == 0


def test_options_interleaved_at_one_shape(gpu: torch.device) -> None:
    cases = [
        Case("conv3d_rmsnorm_silu_pad", 1, 2, 4, 5, (160, 160), skip=skip, history=history, leading_zero_frames=zeros)
        for skip, history, zeros in (
            (Skip.NONE, 0, 0),
            (Skip.NONE, 2, 0),
            (Skip.PLAIN, 0, 0),
            (Skip.BIASED, 0, 1),
            (Skip.NONE, 0, 2),
        )
    ]
    for _ in range(2):
        for case in cases:
            operands = make_inputs(case, gpu, integers=True)
            assert_equals_reference(case, operands, call(case, operands))


# --- torch.compile -------------------------------------------------------------------------------------------------


def around(case: Case) -> Any:
    """A function with other work before and after the operation."""

    def function(operands: Operands) -> dict[str, torch.Tensor]:
        results = call(case, {**operands, "input": operands["input"] * 2})
        return {name: tensor + 1 for name, tensor in results.items()}

    return function


@ALL_OPERATIONS
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inside_torch_compile(gpu: torch.device, case: Case, backend: str) -> None:
    torch._dynamo.reset()
    operands = inputs_of(case, make_inputs(case, gpu, integers=True))
    expected = around(case)(operands)
    compiled = torch.compile(around(case), fullgraph=True, backend=backend)
    for name, tensor in compiled(operands).items():
        assert_same_bits(tensor, expected[name])


@pytest.mark.slow
def test_cuda_graphs_of_torch_compile(gpu: torch.device) -> None:
    """``reduce-overhead`` captures the operation."""
    torch._dynamo.reset()
    case = TYPICAL["conv3d_rmsnorm_silu"]
    operands = inputs_of(case, make_inputs(case, gpu, integers=True))
    expected = around(case)(operands)
    compiled = torch.compile(around(case), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        results = {name: tensor.clone() for name, tensor in compiled(operands).items()}
    for name, tensor in results.items():
        assert_same_bits(tensor, expected[name])
