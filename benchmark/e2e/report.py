"""What a person reads of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmark.agreement import MAX_ERROR_RATIO

if TYPE_CHECKING:
    from benchmark.e2e.runner import Report, Result

NAME = 42  # width of the column of names


def print_report(report: Report, emulated: bool) -> None:
    if emulated:
        print("This CPU has no BF16 convolution: for eager BF16 it is done in FP32 and rounded once, as others do it.")
    print(f"{report.title} in BF16 on {report.device}")
    _print_agreement(report)
    if report.contenders:
        _print_times(report)


def _print_agreement(report: Report) -> None:
    print(f"\n{'':{NAME}} {'max_abs':>10} {'mean_abs':>10} {'relative_l2':>12}")
    rows = {"eager BF16 vs FP32": report.eager_to_fp32}
    for name, agreement in report.fused.items():
        rows |= {f"{name} vs FP32": agreement.to_fp32, f"{name} vs eager BF16": agreement.to_eager}
    for name, row in rows.items():
        print(f"{name:{NAME}} {row.max_abs:10.3e} {row.mean_abs:10.3e} {row.relative_l2:12.4e}")
    print()
    for name, agreement in report.fused.items():
        inside = "within" if agreement.within_tolerance else "NOT within"
        print(
            f"{name}: {agreement.ratio:.3f} times as far from FP32 as eager BF16 (limit {MAX_ERROR_RATIO}), "
            f"{inside} {agreement.atol:.3g} + {agreement.rtol:g} |eager| of it: "
            f"{'agrees' if agreement.holds else 'DOES NOT AGREE'}"
        )


def _print_times(report: Report) -> None:
    print(f"\n{'':{NAME}} {'median, ms':>10} {'peak, MiB':>10} {'vs FP32':>8}")
    for name, result in report.contenders.items():
        print(f"{name:{NAME}} {_figures(result)}")
    print(f"\nthe strongest baseline is: {report.strongest}")
    print(f"fused is {report.speedup:.2f} times as fast")


def _figures(result: Result) -> str:
    if result.median_ms is None:
        return f"not timed: {result.failure}"
    peak = "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}"
    discarded = f"  {result.discarded} runs that compiled not counted" if result.discarded else ""
    return f"{result.median_ms:10.2f} {peak:>10} {result.ratio:8.3f}{discarded}"
