"""Compare the fused operations with the same computation by torch.compile, and with PyTorch's bare convolution.

    python -m benchmark.conv.postops --production
    python -m benchmark.conv.postops --shape 1,4,240,416,160,160 --variant conv3d_raw
    python -m benchmark.conv.postops --check-only --device cpu

Every result is checked before it is timed. The exit status is 0, or 1 if a result was wrong or something was compiled
while it should have been timed. The README in ``cutedsl`` says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmark.conv.production import Entry, Goal, production, tiny
from benchmark.measure import (
    Contender,
    GraphTurn,
    HostTurn,
    Timing,
    alternate,
    copy_contender,
    environment,
    matmul_contender,
    operand_sets,
    write_json,
)
from benchmark.options import positive
from cudnn_fused.backends import REFERENCE, select_backend
from cudnn_fused.plan import Plan
from cudnn_fused.testing import eager
from cudnn_fused.testing.agreement import against_reference, inaccuracies
from cudnn_fused.testing.cases import (
    BY_NAME,
    CHANNELS,
    Case,
    Operands,
    Skip,
    caller_frames,
    copy_history,
    make_inputs,
    make_outputs,
    make_plan,
    sample_of,
)

Execute = Callable[[Plan, Operands], object]

DEFAULT_ROUNDS = 20
CHECK_MEMORY = 8  # checking and timing need up to this many times the memory of the operands


def execute(plan: Plan, operands: Operands) -> object:
    return plan.execute(**operands)  # type: ignore[attr-defined]


# --- checking ------------------------------------------------------------------------------------------------------


def check(case: Case, device: torch.device, run: Execute) -> list[str]:
    """What is wrong with the results of ``case``: bit for bit on integers, within the bound on random numbers."""
    faults: list[str] = []
    for integers in (True, False):
        operands, frames = fresh_operands(case, device, integers=integers)
        initial = {name: operands[name].clone() for name in written(case)}
        run(make_plan(case, operands), operands)
        for index in range(case.n):  # sample by sample, which bounds the memory of the reference
            one, sample = sample_of(case, operands, index)
            if integers:
                _, before = sample_of(case, initial, index)
                found = against_reference(one, sample, before)
            else:
                found = inaccuracies(one, sample, None if frames is None else frames[index : index + 1])
            faults += [f"sample {index}, {'integers' if integers else 'random'}: {fault}" for fault in found]
    return faults


def written(case: Case) -> list[str]:
    """Names of what the operation writes."""
    return [operand.name for operand in case.operation.written if operand.name in case.present]


def fresh_operands(
    case: Case, device: torch.device, *, integers: bool, seed: int = 0
) -> tuple[Operands, torch.Tensor | None]:
    """All operands, outputs full of NaN with the caller's history in them, and that history."""
    frames = caller_frames(case, device)
    outputs = make_outputs(case, device)
    copy_history(case, outputs, frames)
    return {**make_inputs(case, device, integers=integers, seed=seed), **outputs}, frames


# --- timing --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One line of the table. Figures that do not apply are left out."""

    entry: Entry
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    compilations: str = ""  # what was compiled while it should have been timed
    note: str = ""

    @property
    def goals(self) -> list[tuple[Goal, bool]]:
        """The goals about figures that were taken, and whether each is met."""
        return [(g, g.met(self.figures[g.figure])) for g in self.entry.goals if g.figure in self.figures]

    def as_dict(self) -> dict[str, Any]:
        case = self.entry.case
        return {
            "variant": case.variant,
            "extents": list(case.result_extents),
            "channels": list(case.channels),
            "residual": case.skip.value,
            "history": case.history,
            "caller_history": case.caller_history,
            "leading_zero_frames": case.leading_zero_frames,
            "origin": self.entry.origin,
            "faults": self.faults,
            "compilations": self.compilations,
            "note": self.note,
            "figures": self.figures,
            "goals": [
                {"figure": goal.figure, "bound": goal.bound, "at_most": goal.at_most, "met": met}
                for goal, met in self.goals
            ],
        }


def contenders(case: Case, device: torch.device, run: Execute, sets: int, compile: bool) -> list[Contender]:
    """Everything that is timed for ``case``, on ``sets`` sets of operands; with ``compile`` also torch.compile."""
    operands = [fresh_operands(case, device, integers=False, seed=seed)[0] for seed in range(sets)]
    plan = make_plan(case, operands[0])
    timed = [Contender("ours", [partial(run, plan, each) for each in operands])]
    inputs = [{name: each[name] for name in each if name not in written(case)} for each in operands]
    arguments = [eager.arguments(case, each) for each in inputs]
    function = eager.FUNCTIONS[case.variant]
    if compile and case.variant != "conv3d_raw":  # which is F.conv3d, compiled or not
        torch._dynamo.reset()  # every shape gets a compilation of its own, however many there were
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        timed.append(Contender("compile", [partial(compiled, **each) for each in arguments]))
    if case.variant == "causal_conv3d_with_cache":  # its convolution pads and concatenates
        timed.append(Contender("conv", [partial(function, **each) for each in arguments]))
    elif case.flops:
        bare = [partial(F.conv3d, each["input"].permute(0, 4, 1, 2, 3), each["weight"]) for each in arguments]
        timed.append(Contender("conv", bare))
    if case.flops and case.variant not in ("conv3d_raw", "causal_conv3d_with_cache"):
        bare_case = case.raw()
        raw = [
            {name: each[name] for name in ("input", "packed_weight")} | make_outputs(bare_case, device)
            for each in inputs
        ]
        timed.append(Contender("raw", [partial(run, make_plan(bare_case, raw[0]), each) for each in raw]))
    return timed


def measure(entry: Entry, arguments: argparse.Namespace, run: Execute) -> Row:
    """Time a case."""
    case, row, device = entry.case, Row(entry), arguments.device
    sets = 1 if arguments.warm_l2 else operand_sets(case.bytes, device)
    timed = contenders(case, device, run, sets, not arguments.skip_compile)
    yardstick, amount = matmul_contender(device) if case.flops else copy_contender(device)
    timing = alternate([*timed, yardstick], arguments.repeats, GraphTurn if device.type == "cuda" else HostTurn)
    if timing.compilations:
        row.compilations = str(timing.compilations)
        return row
    row.figures = figures(case, timing, yardstick.name, amount)
    return row


def figures(case: Case, timing: Timing, yardstick: str, amount: float) -> dict[str, float]:
    """The columns of the table: milliseconds, rates, and ratios of times."""
    found = {f"{name}_ms": timing.ms(name) for name in timing.rounds} | {"spread": timing.spread("ours")}
    ours = found["ours_ms"]
    rate = amount / found[f"{yardstick}_ms"]
    if case.flops:
        found |= {"tflops": case.flops / ours / 1e9, "cublas_tflops": rate / 1e9}
        found["cublas_share"] = found["tflops"] / found["cublas_tflops"]
    else:
        found |= {"gbs": case.bytes / ours / 1e6, "copy_gbs": rate / 1e6}
        found["copy_share"] = found["gbs"] / found["copy_gbs"]
    for name in ("compile", "conv"):
        if f"{name}_ms" in found:
            found[f"{name}_ratio"] = found[f"{name}_ms"] / ours
    if "raw_ms" in found:
        found["over_raw"] = ours / found["raw_ms"]
    return found


# --- the table -----------------------------------------------------------------------------------------------------

COLUMNS = (  # title, figure, format
    ("ms", "ours_ms", "8.4f"),
    ("TFLOP/s", "tflops", "8.0f"),
    ("cuBLAS", "cublas_share", "7.2f"),
    ("GB/s", "gbs", "6.0f"),
    ("copy", "copy_share", "5.2f"),
    ("compile", "compile_ms", "8.4f"),
    ("x", "compile_ratio", "5.2f"),
    ("conv3d", "conv_ms", "8.4f"),
    ("x", "conv_ratio", "5.2f"),
    ("/raw", "over_raw", "5.2f"),
)


def width(spec: str) -> int:
    return int(spec.split(".")[0])


def header() -> str:
    columns = " ".join(f"{title:>{width(spec)}}" for title, _, spec in COLUMNS)
    return f"{'variant':25} {'N,T,H,W':>14} {'Ci':>3} {'Co':>3} {'res':>5} {'hist':>4} {'zero':>4} {columns}  goals"


def line(row: Row) -> str:
    case = row.entry.case
    co = str(case.channels[1]) if len(case.channels) > 1 else "-"
    history = f"{case.history}{'*' if case.caller_history else ''}"
    settings = (
        f"{case.variant:25} {','.join(map(str, case.result_extents)):>14} {case.channels[0]:>3} {co:>3} "
        f"{case.skip.value:>5} {history:>4} {case.leading_zero_frames:>4}"
    )
    if row.faults:
        return f"{settings} WRONG: {row.faults[0]}" + (f" (and {len(row.faults) - 1} more)" if row.faults[1:] else "")
    if row.compilations or row.note:
        return f"{settings} {row.note or f'NOT TIMED: {row.compilations} while timing'}"
    cells = [
        format(row.figures[name], spec) if name in row.figures else "-".rjust(width(spec)) for _, name, spec in COLUMNS
    ]
    goals = [
        f"{goal.figure} {'<=' if goal.at_most else '>='} {goal.bound:g}: "
        f"{'met' if met else f'MISSED ({row.figures[goal.figure]:.3f})'}"
        for goal, met in row.goals
    ]
    return f"{settings} {' '.join(cells)}  {'; '.join(goals)}"


# --- command line --------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--production", action="store_true", help="the cases of WAN 2.2 encoding; the default on a GPU")
    which.add_argument(
        "--shape",
        type=shape,
        metavar="N,T,H,W,Ci,Co",
        help="one case: N samples of T frames of HxW, the extents of the result without padding, and the channels; "
        "rmsnorm_silu_pad normalizes over Ci and ignores Co, which may be left out",
    )
    parser.add_argument(
        "--variant", action="append", choices=sorted(BY_NAME), help="only this operation; may be given several times"
    )
    parser.add_argument(
        "--residual", choices=[skip.value for skip in Skip], help="of --shape: the skip (default none, or plain)"
    )
    parser.add_argument("--history", type=int, choices=(0, 1, 2), default=0, help="of --shape: frames of history")
    parser.add_argument(
        "--caller-history",
        action="store_true",
        help="of --shape: conv3d_rmsnorm_silu_pad leaves copying the history to the caller, outside the timing",
    )
    parser.add_argument(
        "--leading-zero-frames", type=int, choices=(0, 1, 2), default=0, help="of --shape: missing history in the input"
    )
    parser.add_argument("--check-only", action="store_true", help="compare the results, time nothing")
    parser.add_argument(
        "--repeats", type=positive, default=DEFAULT_ROUNDS, metavar="N", help="timed rounds (default %(default)s)"
    )
    parser.add_argument("--warm-l2", action="store_true", help="reuse one set of operands, so that L2 may hold it")
    parser.add_argument("--skip-compile", action="store_true", help="leave out torch.compile, which takes most time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    arguments = parser.parse_args(argv)
    arguments.device = torch.device(arguments.device)
    if arguments.device.type == "cpu" and not arguments.check_only:
        parser.error("there is nothing to time on a CPU: use --check-only, or a GPU")
    return arguments


def shape(text: str) -> tuple[int, ...]:
    numbers = tuple(positive(part) for part in text.split(","))
    if len(numbers) not in (5, 6):
        raise argparse.ArgumentTypeError(f"must be N,T,H,W,Ci,Co or, for a norm alone, N,T,H,W,C, got {text!r}")
    return numbers


def entries(arguments: argparse.Namespace) -> Iterator[Entry]:
    """The cases that the command line asks for."""
    if arguments.shape:
        yield from shape_entries(arguments)
        return
    on_gpu = arguments.device.type == "cuda"
    for entry in production() if arguments.production or on_gpu else tiny():
        if not arguments.variant or entry.case.variant in arguments.variant:
            yield entry


def shape_entries(arguments: argparse.Namespace) -> Iterator[Entry]:
    """The operations that have the channels of ``--shape``, with the settings that they know."""
    extents, channels = arguments.shape[:4], arguments.shape[4:]
    for name, operation in BY_NAME.items():
        own = channels[: len(operation.channel_symbols)]
        if own not in CHANNELS[operation.name] or (arguments.variant and name not in arguments.variant):
            continue
        if not arguments.variant and len(own) != len(channels):
            continue  # with Ci and Co, a norm alone only if it is asked for
        operands = {operand.name: operand for operand in operation.operands}
        skip = Skip(arguments.residual or "none") if "residual" in operands else Skip.NONE
        if skip is Skip.NONE and "residual" in operands and not operands["residual"].optional:
            skip = Skip.PLAIN
        yield Entry(
            Case(
                name,
                *extents,
                own,
                skip=skip,
                history=arguments.history if "previous" in operands else 0,
                caller_history=arguments.caller_history and "history_frames" in {o.name for o in operation.options},
                leading_zero_frames=arguments.leading_zero_frames if operation.minimum > 1 else 0,
            ),
            "--shape",
        )


def main(argv: Sequence[str] | None = None, run: Execute = execute) -> int:
    """The program. ``run`` executes a plan on operands."""
    arguments = parse(argv)
    device = arguments.device
    if device.index is not None:
        torch.cuda.set_device(device)
    chosen = list(entries(arguments))
    if not chosen:
        print("error: no operation fits the arguments; see the channels in docs/api.md", file=sys.stderr)
        return 2
    print(describe(arguments))
    print(header())
    rows = []
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for entry in chosen:
            row = evaluate(entry, arguments, run)
            rows.append(row)
            print(line(row), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if arguments.json:
        settings = {"l2": "warm" if arguments.warm_l2 else "cold", "rounds": arguments.repeats}
        write_json(arguments.json, environment(device) | settings, [row.as_dict() for row in rows])
    wrong = sum(bool(row.faults) for row in rows)
    compiled = sum(bool(row.compilations) for row in rows)
    print(f"{len(rows)} cases, {wrong} wrong, {compiled} not timed because something was compiled meanwhile")
    goals = [met for row in rows for _, met in row.goals]
    if goals:
        print(f"{sum(goals)} of {len(goals)} goals met")
    return 1 if wrong or compiled else 0


def evaluate(entry: Entry, arguments: argparse.Namespace, run: Execute) -> Row:
    """Check a case, and time it if that is asked for and it is right."""
    case, device = entry.case, arguments.device
    if device.type == "cuda" and case.bytes * CHECK_MEMORY > torch.cuda.mem_get_info(device)[0]:
        return Row(entry, note=f"left out: needs about {case.bytes * CHECK_MEMORY >> 30} GiB of free GPU memory")
    faults = check(case, device, run)
    if faults:
        return Row(entry, faults=faults)
    if arguments.check_only:
        return Row(entry, note="right")
    return measure(entry, arguments, run)


def describe(arguments: argparse.Namespace) -> str:
    """What runs where."""
    device = arguments.device
    backends = {select_backend(operation, None, device) for operation in BY_NAME.values()}
    by = (
        "the reference"
        if backends == {REFERENCE}
        else "kernels, and the reference"
        if REFERENCE in backends
        else "kernels"
    )
    facts = environment(device)
    name = facts.get("gpu", "CPU")
    text = f"{name}, torch {facts['torch']}, CuTe DSL {facts['cute_dsl']}; operations run on {by}"
    if arguments.check_only:
        return text
    cache = "warm" if arguments.warm_l2 else "cold"
    return (
        f"{text}\nMedian of {arguments.repeats} alternating CUDA Graph replays, L2 {cache}, random data. "
        "compile: the same by torch.compile; conv3d: F.conv3d alone; x: their time over ours; "
        "cuBLAS: share of its rate at 8192^3; copy: share of a device copy's bandwidth; * history copied by the caller."
    )


if __name__ == "__main__":
    sys.exit(main())
