"""Run a VAE as Diffusers does, as ``torch.compile`` makes it, and fused: compare the results, time them all.

The runner knows no model: a :class:`benchmark.e2e.task.Task` describes one.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch

from benchmark.agreement import Agreement, Difference, judge
from benchmark.e2e.baselines import BASELINES
from benchmark.e2e.profiling import write_kernel_shares
from benchmark.e2e.progress import Progress
from benchmark.e2e.report import print_report
from benchmark.e2e.task import Task
from benchmark.measure import Call, Contender, EventTurn, HostTurn, Timing, alternate
from benchmark.options import check_writable, positive
from cudnn_fused.reference import full_precision
from cudnn_fused.wan.fp32_convolutions import Fp32Convolutions, cpu_convolves_bf16

AGREES, DISAGREES, CANNOT_RUN = 0, 1, 2  # exit statuses
TELLING = (OSError, ValueError, TypeError, torch.OutOfMemoryError)  # errors whose message alone says what is wrong
FUSED = "fused"
OURS = "fused, compiled"
VARIANTS = 64
"""How many variants of a function TorchDynamo may compile: every baseline and kind of chunk has its own. Past its
default of 8 it would run the others eagerly."""


# --- command line --------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that do not depend on the model."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="untimed rounds (default 3)")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="timed rounds (default 10)")
    parser.add_argument("--atol", type=float, help="absolute tolerance to eager (default 0.2 of the result's RMS)")
    parser.add_argument("--rtol", type=float, default=0.02, help="relative tolerance to eager (default 0.02)")
    parser.add_argument("--profile-path", type=Path, metavar="FILE", help="write the kernels' shares of the time here")
    parser.add_argument(
        "--check-only",
        action=argparse.BooleanOptionalAction,
        help="compare the results, time nothing; the default on a CPU",
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")


def finish_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Fill in what depends on the device, and refuse what does not go together."""
    kind = arguments.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, got {arguments.device}")
    if arguments.check_only is None:
        arguments.check_only = kind == "cpu"
    if arguments.profile_path and arguments.check_only:
        parser.error("--profile-path is about what is timed: on a CPU give --no-check-only, too")


def usable_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name} is not a device") from error
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise ValueError(f"there is no device {name}: PyTorch sees {found} CUDA GPUs")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def exit_status(program: Callable[[], bool]) -> int:
    """The status of a program that returns whether the results agree. What stopped it is printed."""
    try:
        return AGREES if program() else DISAGREES
    except Exception as error:
        if not isinstance(error, TELLING):
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        return CANNOT_RUN


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- the program ---------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What became of one contender: its times, or why there are none."""

    milliseconds: list[float] = field(default_factory=list)
    median_ms: float | None = None
    discarded: int = 0  # turns in which something was compiled
    peak_bytes: int | None = None  # above what was allocated before the call; None on a CPU
    ratio: float | None = None  # distance to FP32 over that of the eager run that results are judged by
    failure: str | None = None


@dataclass
class Report:
    """Everything that is known after a run."""

    title: str
    inputs: list[int]
    device: str
    versions: dict[str, str]
    eager_to_fp32: Difference
    fused: dict[str, Agreement]
    contenders: dict[str, Result] = field(default_factory=dict)
    strongest: str | None = None
    speedup: float | None = None

    @property
    def agrees(self) -> bool:
        return all(agreement.holds for agreement in self.fused.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fused": {name: agreement.as_dict() for name, agreement in self.fused.items()}}


class Runner:
    """One task on one model and one batch of inputs."""

    def __init__(self, task: Task, model: Any, inputs: torch.Tensor, arguments: argparse.Namespace) -> None:
        self.task, self.model, self.inputs, self.arguments = task, model, inputs, arguments
        self.device = inputs.device
        self.progress = Progress(len(inputs) * task.chunks(inputs), len(inputs))

    def run(self) -> Report:
        """Compare the results and, unless only that is asked for or they disagree, time everything.

        Raises:
            RuntimeError: nothing could be timed.
        """
        timed = not self.arguments.check_only
        contenders = 1 + len(BASELINES)
        turns = contenders * (2 + self.arguments.warmup + self.arguments.repeats)
        with self.progress.over(3 + (1 + turns if timed else 0)), torch.no_grad(), cudnn_autotuning():
            fused = copy.deepcopy(self.model)
            self.task.fuse(fused)
            results = {FUSED: self._observed(fused, FUSED)}  # first: it refuses what does not fit
            eager, fp32 = self._eager(), self._fp32()
            if timed:
                self.task.compile_fused(fused)
                results[OURS] = self._observed(fused, OURS)
            report = self._report(eager, fp32, results)
            if timed and report.agrees:
                self._time(report, fused, fp32)
        return report

    # --- results -----------------------------------------------------------------------------------------------------

    def _observed(self, model: Any, name: str) -> torch.Tensor:
        with self.progress.during(name, self.task.part(model)):
            return self.task.run(model, self.inputs)

    def _eager(self) -> torch.Tensor:
        with as_eager(self.device):
            return self._observed(self.model, "eager BF16")

    def _fp32(self) -> torch.Tensor:
        exact = copy.deepcopy(self.model).float()
        with self.progress.during("FP32", self.task.part(exact)):
            return in_fp32(self.task, exact, self.inputs)

    def _report(self, eager: torch.Tensor, fp32: torch.Tensor, results: dict[str, torch.Tensor]) -> Report:
        tolerance = self.arguments.atol, self.arguments.rtol
        return Report(
            title=self.task.title,
            inputs=list(self.inputs.shape),
            device=device_name(self.device),
            versions={"torch": torch.__version__, "diffusers": diffusers.__version__},
            eager_to_fp32=Difference.between(eager, fp32),
            fused={name: judge(result, eager, fp32, *tolerance) for name, result in results.items()},
        )

    # --- times -------------------------------------------------------------------------------------------------------

    def _time(self, report: Report, fused: Any, fp32: torch.Tensor) -> None:
        calls: dict[str, Call] = {}
        with torch._dynamo.config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
            for baseline in BASELINES:
                report.contenders[baseline.name] = self._attempt(
                    baseline.name, lambda b=baseline: b.build(self.task, self.model, self.inputs), calls, report, fp32
                )
            ours = self._attempt(OURS, lambda: lambda: self.task.run(fused, self.inputs), calls, report, fp32)
            report.contenders[OURS] = ours
            if ours.failure:
                raise RuntimeError(f"{OURS}: {ours.failure}")
            timing = self._alternate(calls)
            conclude(report, timing)
            if self.arguments.profile_path:
                profiled = {name: calls[name] for name in (report.strongest, OURS)}
                with as_eager(self.device):
                    write_kernel_shares(profiled, self.device, self.arguments.profile_path)

    def _attempt(
        self, name: str, build: Callable[[], Call], calls: dict[str, Call], report: Report, fp32: torch.Tensor
    ) -> Result:
        """Build a contender, and call it twice: to compile and compare it, and for its memory. A failure is kept."""
        result = Result()
        try:
            call = build()
            with self.progress.during(f"preparing {name}"), as_eager(self.device):
                difference = Difference.between(call(), fp32)
            result.ratio = difference.relative_l2 / report.eager_to_fp32.relative_l2
            with self.progress.during(f"preparing {name}"), as_eager(self.device):
                result.peak_bytes = peak_bytes(call, self.device)
            calls[name] = call
        except Exception as error:  # whatever a compiler or an allocator throws: the others are still worth timing
            result.failure = one_line(error)
        return result

    def _alternate(self, calls: dict[str, Call]) -> Timing:
        contenders = [Contender(name, [call]) for name, call in calls.items()]
        with as_eager(self.device):
            return alternate(
                contenders,
                self.arguments.repeats,
                EventTurn if self.device.type == "cuda" else HostTurn,
                warm_up=self.arguments.warmup,
                retries=self.arguments.repeats,
                on_turn=lambda: self.progress.turn("timing"),
            )


def conclude(report: Report, timing: Timing) -> None:
    """Enter the times into ``report``, and compare with the fastest baseline.

    Raises:
        RuntimeError: there is nothing to compare.
    """
    for name, discarded in timing.discarded.items():
        result = report.contenders[name]
        result.discarded = discarded
        if name in timing.rounds:
            result.milliseconds, result.median_ms = timing.rounds[name], timing.ms(name)
        else:
            result.failure = f"was still compiling in {discarded} timed runs"
    medians = {name: result.median_ms for name, result in report.contenders.items() if result.median_ms is not None}
    if OURS not in medians:
        raise RuntimeError(f"{OURS} {report.contenders[OURS].failure}")
    ours = medians.pop(OURS)
    if not medians:
        raise RuntimeError(
            "no baseline could be timed: " + "; ".join(str(r.failure) for r in report.contenders.values())
        )
    report.strongest = min(medians, key=medians.__getitem__)
    report.speedup = medians[report.strongest] / ours


def execute(task: Task, model: Any, inputs: torch.Tensor, arguments: argparse.Namespace) -> bool:
    """Run, print, and write what is asked for. Returns whether the results agree."""
    report = Runner(task, model, inputs, arguments).run()
    print_report(report, emulated=emulates_bf16(inputs.device))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return report.agrees


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise OSError unless the files that are to be written can be."""
    for path in filter(None, (arguments.json, arguments.profile_path)):
        check_writable(path)


# --- ways to run ---------------------------------------------------------------------------------------------------


def emulates_bf16(device: torch.device) -> bool:
    """Whether a CPU has no BF16 convolution, for which FP32 ones stand in."""
    return device.type == "cpu" and not cpu_convolves_bf16()


def as_eager(device: torch.device) -> Any:
    """In this context Diffusers runs as PyTorch runs it, except on CPUs without BF16 convolutions."""
    return Fp32Convolutions() if emulates_bf16(device) else nullcontext()


def in_fp32(task: Task, exact: Any, inputs: torch.Tensor) -> torch.Tensor:
    """FP32 arithmetic on a model in FP32, one sample at a time, which takes less memory."""
    with full_precision(inputs.device):
        return torch.cat([task.run(exact, one.float()) for one in inputs.split(1)])


@contextmanager
def cudnn_autotuning() -> Iterator[None]:
    """``torch.backends.cudnn.benchmark``, for all contenders alike."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Memory that a call takes at its peak beyond what is allocated before it."""
    if device.type != "cuda":
        call()
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
