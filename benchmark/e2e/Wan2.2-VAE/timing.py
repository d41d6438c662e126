"""GPU latency of several ways to do the same, and what their kernels take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from cudnn_fused.plan import PLANS

Run = Callable[[], object]

MAX_KERNEL_NAME = 90


@dataclass
class Latency:
    """Milliseconds of the runs that compiled nothing, and how many were thrown away because they did."""

    milliseconds: list[float] = field(default_factory=list)
    recompiled: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


def compilations() -> int:
    """A number that grows whenever TorchDynamo compiles a frame or an operation makes a plan."""
    return sum(torch._dynamo.utils.counters["frames"].values()) + PLANS.builds


def measure_alternately(runs: Mapping[str, Run], warmup: int, repeats: int) -> dict[str, Latency]:
    """Time ``runs`` in turn, ``repeats`` times each, reversing the order every time, after ``warmup`` rounds.

    Raises:
        RuntimeError: a run keeps compiling, so that there is nothing to time.
    """
    latencies = {name: Latency() for name in runs}
    for _ in tqdm(range(warmup), desc="warming up", unit="round", leave=False):
        for run in runs.values():
            run()
    order = list(runs)
    for _ in tqdm(range(repeats), desc="timing", unit="round", leave=False):
        for name in order:
            _measure(name, runs[name], latencies[name], repeats)
        order.reverse()
    return latencies


def _measure(name: str, run: Run, latency: Latency, patience: int) -> None:
    """Add one sample, repeating the run as long as something is compiled in it."""
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = compilations()
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if compilations() == before:
            latency.milliseconds.append(start.elapsed_time(end))
            return
        latency.recompiled += 1
        if latency.recompiled > patience:
            raise RuntimeError(f"{name} was still compiling in {latency.recompiled} timed runs")


def write_kernel_shares(runs: Mapping[str, Run], path: Path) -> None:
    """Profile one execution of each of ``runs`` and write their kernels, by share of GPU time, to a Markdown file."""
    lines: list[str] = []
    for name, run in runs.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
        total = sum(event.self_device_time_total for event in kernels) or 1.0
        lines += [f"## {name}: {total / 1e3:.2f} ms of GPU time", ""]
        lines += ["| share | ms | calls | kernel |", "|---|---|---|---|"]
        lines += [
            f"| {event.self_device_time_total / total:.1%} | {event.self_device_time_total / 1e3:.3f} | {event.count} "
            f"| `{event.key[:MAX_KERNEL_NAME].replace('|', '/')}` |"
            for event in sorted(kernels, key=lambda event: -event.self_device_time_total)
        ]
        lines.append("")
    path.write_text("\n".join(lines))
