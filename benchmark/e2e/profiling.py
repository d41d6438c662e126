"""What the kernels of a run take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmark.measure import Call

MAX_KERNEL_NAME = 90
ATTEMPTS = 3
"""A profiler that was just started may see no kernel; the next one does."""

ACTIVITIES = {
    "cuda": ([ProfilerActivity.CPU, ProfilerActivity.CUDA], DeviceType.CUDA, "self_device_time_total"),
    "cpu": ([ProfilerActivity.CPU], DeviceType.CPU, "self_cpu_time_total"),
}
"""What is recorded on a kind of device, what of it counts, and the attribute with its microseconds."""

Shares = list[tuple[str, int, float]]
"""Names, calls and microseconds, the longest first."""


def kernel_shares(call: Call, device: torch.device) -> Shares:
    """Profile one execution: kernels on a GPU, operators on a CPU.

    Raises:
        RuntimeError: the profiler saw nothing, several times.
    """
    activities, kind, attribute = ACTIVITIES[device.type]
    for _ in range(ATTEMPTS):
        with profile(activities=activities) as profiler:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        events = [event for event in profiler.key_averages() if event.device_type == kind]
        shares = [(event.key, event.count, getattr(event, attribute)) for event in events]
        if any(microseconds for _, _, microseconds in shares):
            return sorted(shares, key=lambda share: -share[2])
    raise RuntimeError(f"the profiler recorded nothing on {device} in {ATTEMPTS} runs")


def write_kernel_shares(calls: Mapping[str, Call], device: torch.device, path: Path) -> None:
    """Write what each of ``calls`` spends its time on to a Markdown file."""
    lines: list[str] = []
    for name, call in calls.items():
        shares = kernel_shares(call, device)
        total = sum(microseconds for _, _, microseconds in shares)
        lines += [f"## {name}: {total / 1e3:.2f} ms of {device.type.upper()} time", ""]
        lines += ["| share | ms | calls | kernel |", "|---|---|---|---|"]
        lines += [
            f"| {microseconds / total:.1%} | {microseconds / 1e3:.3f} | {count} "
            f"| `{key[:MAX_KERNEL_NAME].replace('|', '/')}` |"
            for key, count, microseconds in shares
        ]
        lines.append("")
    path.write_text("\n".join(lines))
