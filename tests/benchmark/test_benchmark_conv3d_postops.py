"""The kernel microbenchmark: its checks, what it refuses to time, and its command line."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark.conv import postops
from benchmark.conv.results_table import table
from cudnn_fused.plan import Plan
from cudnn_fused.testing.cases import BY_NAME, CHANNELS, Case, Operands, Skip

CHECK = ["--check-only", "--device", "cpu"]
SMALL = ["--shape", "1,1,2,3,160,160"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return postops


def corrupting(name: str, index: int | None, bit: int) -> Any:
    """Executes a plan and flips one bit of an element of one output: the one at ``index``, or one that is not zero."""

    def run(plan: Plan, operands: Operands) -> None:
        plan.execute(**operands)  # type: ignore[attr-defined]
        if name in operands:
            values = operands[name].view(torch.int16).view(-1)
            values[values.nonzero()[5] if index is None else index] ^= 1 << bit

    return run


# --- checking ------------------------------------------------------------------------------------------------------


def test_everything_is_right(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    assert benchmark.main([*CHECK, "--json", str(path)]) == 0
    results = json.loads(path.read_text())
    assert {row["variant"] for row in results["rows"]} == set(BY_NAME)
    assert all(row["note"] == "right" and row["faults"] == [] for row in results["rows"])
    assert "0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variant", "output"),
    [(name, output) for name, operation in BY_NAME.items() for output in operation.returns],
)
@pytest.mark.parametrize(("index", "bit"), [(0, 0), (-1, 14), (None, 0)])
def test_one_corrupted_bit_fails(benchmark: ModuleType, variant: str, output: str, index: int | None, bit: int) -> None:
    channels = CHANNELS[variant][0]
    arguments = [*CHECK, "--variant", variant, "--shape", ",".join(map(str, (1, 1, 1, 2, *channels)))]
    if output == "residual_output":
        arguments += ["--residual", "plain"]
    assert benchmark.main(arguments, run=corrupting(output, index, bit)) == 1


def test_corruption_of_any_sample_is_seen(benchmark: ModuleType) -> None:
    arguments = [*CHECK, "--shape", "3,1,1,1,160,160", "--variant", "conv3d_raw"]
    assert benchmark.main(arguments, run=corrupting("output", 160, 0)) == 1


def test_a_touched_history_fails(benchmark: ModuleType) -> None:
    """Frames that the caller owns must survive."""
    arguments = [*CHECK, *SMALL, "--variant", "conv3d_rmsnorm_silu_pad", "--history", "2", "--caller-history"]

    def run(plan: Plan, operands: Operands) -> None:
        plan.execute(**operands)  # type: ignore[attr-defined]
        operands["padded_output"][:, 1, 1, 1, 5] = 0

    assert benchmark.main(arguments) == 0
    assert benchmark.main(arguments, run=run) == 1


def test_an_inaccurate_result_fails(benchmark: ModuleType) -> None:
    """The integers are right, but random numbers are not as exact as BF16 PyTorch makes them."""

    def run(plan: Plan, operands: Operands) -> None:
        plan.execute(**operands)  # type: ignore[attr-defined]
        if operands["input"].frac().any():
            operands["output"].mul_(1.05)

    assert benchmark.main([*CHECK, *SMALL, "--variant", "conv3d_raw"], run=run) == 1


# --- timing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_machine(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yardsticks and a compiler that a CPU is done with quickly."""
    for name, size in (("matmul_contender", 16), ("copy_contender", 1024)):
        monkeypatch.setattr(
            benchmark,
            name,
            functools.partial(getattr(benchmark, name), **{"size" if name == "matmul_contender" else "moved": size}),
        )
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def timing_arguments(device: str = "cpu") -> argparse.Namespace:
    return argparse.Namespace(
        device=torch.device(device), repeats=3, warm_l2=False, check_only=False, skip_compile=False
    )


@pytest.mark.usefixtures("small_machine")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("conv3d_raw", 1, 1, 2, 3, (160, 160)), {"conv_ratio", "cublas_share", "tflops"}),
        (
            Case("conv3d_rmsnorm_silu", 1, 1, 2, 3, (160, 160), skip=Skip.BIASED),
            {"compile_ratio", "conv_ratio", "over_raw", "cublas_share"},
        ),
        (Case("rmsnorm_silu_pad", 1, 1, 2, 3, (160,), history=1), {"compile_ratio", "copy_share", "gbs"}),
        (Case("causal_conv3d_with_cache", 1, 1, 2, 3, (12, 160), history=1), {"compile_ratio", "conv_ratio"}),
    ],
)
def test_figures(benchmark: ModuleType, case: Case, expected: set[str]) -> None:
    entry = benchmark.Entry(case, "test")
    row = benchmark.evaluate(entry, timing_arguments(), benchmark.execute)
    assert not row.faults
    assert not row.compilations
    assert expected <= set(row.figures)
    assert all(value > 0 for name, value in row.figures.items() if name != "spread")
    assert "MISSED" not in benchmark.line(row)


@pytest.mark.usefixtures("small_machine")
def test_what_compiles_while_timed_is_not_timed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(plan: Plan, operands: Operands) -> None:
        plan.execute(**operands)  # type: ignore[attr-defined]
        calls.append(1)
        torch.compile(lambda x: x + len(calls))(torch.zeros(1))

    entry = benchmark.Entry(Case("rmsnorm_silu_pad", 1, 1, 1, 1, (160,)), "test")
    row = benchmark.evaluate(entry, timing_arguments(), run)
    assert row.figures == {}
    assert "graphs compiled" in row.compilations
    assert "NOT TIMED" in benchmark.line(row)
    monkeypatch.setattr(benchmark, "evaluate", lambda *arguments: row)
    assert benchmark.main([*CHECK, *SMALL, "--variant", "conv3d_raw"]) == 1


def test_contenders_alternate(benchmark: ModuleType) -> None:
    made: list[str] = []
    contenders = [benchmark.Contender(name, [functools.partial(made.append, name)]) for name in "abc"]
    timing = benchmark.alternate(contenders, 3, benchmark.HostTurn)
    assert "".join(made) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(rounds) for name, rounds in timing.rounds.items()} == {"a": 3, "b": 3, "c": 3}


def test_compiled_kernels_are_counted(benchmark: ModuleType) -> None:
    cute = pytest.importorskip("cutlass.cute")

    def compile_nothing() -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the DSL says about it
            cute.compile(None)

    timing = benchmark.alternate([benchmark.Contender("a", [compile_nothing])], 2, benchmark.HostTurn)
    assert timing.compilations.kernels == 1  # and no further turn is taken
    assert timing.rounds == {}


# --- cases and command line ----------------------------------------------------------------------------------------


def test_production_covers_an_encode(benchmark: ModuleType) -> None:
    """Every convolution of a 480x832 encode, in each kind of chunk, and every operation."""
    cases = [entry.case for entry in benchmark.production()]
    assert {case.variant for case in cases} == set(BY_NAME)
    raw = {
        (case.result_extents, case.channels, case.leading_zero_frames) for case in cases if case.variant == "conv3d_raw"
    }
    layers = [
        ((4, 240, 416), (160, 160)),
        ((4, 120, 208), (160, 320)),
        ((4, 120, 208), (320, 320)),
        ((2, 60, 104), (320, 640)),
        ((2, 60, 104), (640, 640)),
        ((1, 30, 52), (640, 640)),
    ]
    for (frames, height, width), channels in layers:
        for zeros in (0, 1, 2):
            extents = (1, 1 if zeros == 2 else frames, height, width)
            assert (extents, channels, zeros) in raw
    assert ((32, 4, 320, 240), (160, 160), 0) in raw
    for entry in benchmark.production():  # every case is one that its operation takes, and its bytes can be counted
        assert entry.case.channels in CHANNELS[entry.case.variant]
        assert entry.case.bytes > 0


def test_goals_are_compared(benchmark: ModuleType) -> None:
    goals = (
        benchmark.Goal("conv_ratio", 1.2),
        benchmark.Goal("over_raw", 1.05, at_most=True),
        benchmark.Goal("gbs", 1),
    )
    case = Case("conv3d_raw", 1, 1, 1, 1, (160, 160))
    row = benchmark.Row(benchmark.Entry(case, "test", goals), {"ours_ms": 1.0, "conv_ratio": 1.2, "over_raw": 1.06})
    assert row.goals == [(goals[0], True), (goals[1], False)]
    assert [goal["met"] for goal in row.as_dict()["goals"]] == [True, False]
    assert "conv_ratio >= 1.2: met" in benchmark.line(row)
    assert "over_raw <= 1.05: MISSED (1.060)" in benchmark.line(row)


def test_figures_follow_from_times(benchmark: ModuleType) -> None:
    """Rates and ratios of made-up times."""
    case = Case("conv3d_raw", 1, 2, 10, 10, (160, 160), leading_zero_frames=1)
    flops = 2 * (2 + 3) * 9 * 10 * 10 * 160 * 160  # the first frame has two temporal taps
    assert case.flops == flops
    timing = benchmark.Timing({"ours": [2.0, 1.0, 3.0], "conv": [5.0, 3.0, 1.0], "cublas": [4.0, 4.0, 4.0]})
    found = benchmark.figures(case, timing, "cublas", 8.0 * flops)
    assert found["conv_ratio"] == 1.5
    assert found["tflops"] == pytest.approx(flops / 2e-3 / 1e12)
    assert found["cublas_share"] == pytest.approx((1 / 2) / (8 / 4))
    norm = Case("rmsnorm_silu_pad", 2, 3, 4, 5, (160,), history=1)
    moved = 2 * 160 * (2 * 3 * 4 * 5 + 1 + 2 * 5 * 6 * 7 + 2 * 2 * 4 * 5 + 2 * 1 * 4 * 5)
    assert norm.bytes == moved
    timing = benchmark.Timing({"ours": [1.0], "copy": [1.0]})
    assert benchmark.figures(norm, timing, "copy", 2 * moved)["copy_share"] == pytest.approx(0.5)


def test_goals_are_about_figures_that_exist(benchmark: ModuleType) -> None:
    goals = {goal.figure for entry in benchmark.production() for goal in entry.goals}
    assert goals == {"conv_ratio", "cublas_share", "over_raw", "compile_ratio", "copy_share"}


def test_results_as_markdown(benchmark: ModuleType) -> None:
    """Figures in their columns, those that miss a goal in bold; nothing where there is no figure."""
    case = Case("conv3d_rmsnorm_silu_pad", 1, 4, 8, 9, (160, 320), skip=Skip.BIASED, history=2, leading_zero_frames=0)
    goals = (benchmark.Goal("over_raw", 1.05, at_most=True), benchmark.Goal("compile_ratio", 1.5))
    row = benchmark.Row(benchmark.Entry(case, "", goals), {"ours_ms": 0.12345, "over_raw": 1.061, "compile_ratio": 1.5})
    titles, _, line = table({"rows": [row.as_dict()]}).splitlines()
    named = dict(zip(titles.split(" | "), line.split(" | "), strict=True))
    assert named["channels"] == "160->320"
    assert named["with"] == "history 2, residual, its bias"
    assert (named["ms"], named["over bare"], named["than `torch.compile`"]) == ("0.123", "**1.06**", "1.50")
    assert named["of cuBLAS"] == ""


def test_shape_picks_what_fits(benchmark: ModuleType) -> None:
    def cases(*arguments: str) -> dict[str, Case]:
        return {e.case.variant: e.case for e in benchmark.entries(benchmark.parse([*CHECK, *arguments]))}

    convolutions = cases("--shape", "1,2,3,4,160,320", "--history", "1", "--residual", "bias")
    assert set(convolutions) == {
        "conv3d_raw",
        "conv3d_rmsnorm_silu",
        "conv3d_rmsnorm_silu_pad",
        "conv3d_bias_residual_pad",
    }
    assert convolutions["conv3d_raw"] == Case("conv3d_raw", 1, 2, 3, 4, (160, 320))
    padded = convolutions["conv3d_rmsnorm_silu_pad"]
    assert padded == Case("conv3d_rmsnorm_silu_pad", 1, 2, 3, 4, (160, 320), skip=Skip.BIASED, history=1)
    assert set(cases("--shape", "1,2,3,4,640,640")) == {name for name in BY_NAME if name.startswith("conv3d")}
    assert cases("--shape", "1,2,3,4,640,640")["conv3d_bias_residual_pad"].skip is Skip.PLAIN
    assert set(cases("--shape", "1,2,3,4,640")) == {"rmsnorm_silu_pad"}
    assert set(cases("--shape", "1,2,3,4,12,160")) == {"causal_conv3d_with_cache"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "1,2"],
        ["--shape", "1,2,3,x,5"],
        ["--shape", "0,1,1,1,160,160"],
        ["--variant", "conv"],
        ["--repeats", "0"],
    ],
)
def test_bad_arguments(benchmark: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        benchmark.main([*CHECK, *arguments])
    assert error.value.code == 2


def test_nothing_to_do(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*CHECK, "--shape", "1,1,1,1,128,128"]) == 2
    assert "no operation fits" in capsys.readouterr().err


def test_a_cpu_is_not_timed(benchmark: ModuleType) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--device", "cpu"])


def test_the_entry_point_runs_from_anywhere(tmp_path: Path) -> None:
    """Nothing of the project needs to be installed."""
    script = Path(postops.__file__).parent / "cutedsl" / "benchmark_conv3d_postops.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(script), "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing to time on a CPU" in done.stderr
