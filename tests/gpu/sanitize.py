"""Small cases of every operation under compute-sanitizer.

    python -m tests.gpu.sanitize                          # memcheck, racecheck and initcheck, one after the other
    python -m tests.gpu.sanitize --tool memcheck --variant conv3d_raw
    compute-sanitizer --tool memcheck python -m tests.gpu.sanitize --run     # what it does

Operands are made, and results compared with the reference, on the CPU, so that only our kernels and copies run under
the tool. PyTorch's caching allocator is off: a tensor is an allocation of its own, which memcheck watches the ends of.
The exit status is 0 if every tool found nothing and every result was right.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from cudnn_fused.backends import REFERENCE, select_backend
from cudnn_fused.testing.agreement import against_reference
from cudnn_fused.testing.cases import BY_NAME, CHANNELS, Case, Skip, make_inputs, make_outputs, make_plan
from tests.gpu.harness import ROOT, TYPICAL

TOOLS = ("memcheck", "racecheck", "initcheck")
FAILURE = 86  # the exit status of a program in which a tool found something
# One pixel; several tiles with a tail; rows that end just past a tile of 128.
EXTENTS = ((1, 1, 1, 1), (2, 2, 9, 21), (1, 1, 2, 129))


def cases(variants: Sequence[str]) -> Iterator[Case]:
    """Every operation with all its optional operands and with none, and its largest channels."""
    for name in variants:
        operation, typical = BY_NAME[name], TYPICAL[name]
        optional = {operand.name for operand in operation.operands if operand.optional}
        plain = Case(name, 1, 1, 1, 1, typical.channels, skip=Skip.NONE if "residual" in optional else typical.skip)
        for case in dict.fromkeys((typical, plain, replace(plain, channels=CHANNELS[operation.name][-1]))):
            for extents in EXTENTS:
                yield case.at(*extents)


def run(device: torch.device, variants: Sequence[str]) -> int:
    """Execute the cases on ``device``. Returns how many were wrong."""
    wrong = 0
    for case in cases(variants):
        if device.type == "cuda" and select_backend(case.operation, None, device) is REFERENCE:
            raise SystemExit(f"no kernel of {case.variant} serves {torch.cuda.get_device_name(device)}")
        start = time.perf_counter()
        outputs = make_outputs(case, "cpu")
        operands = {**make_inputs(case, "cpu", integers=True), **outputs}
        there = {name: tensor.to(device, copy=True) for name, tensor in operands.items()}
        make_plan(case, there).execute(**there)  # type: ignore[attr-defined]
        back = {name: tensor.cpu() for name, tensor in there.items()}
        faults = against_reference(case, {**operands, **back}, outputs)
        wrong += bool(faults)
        print(f"{time.perf_counter() - start:6.1f} s  {case.variant} {case.channels} {case.result_extents}", *faults)
        sys.stdout.flush()
    return wrong


def sanitize(tool: str, variants: Sequence[str]) -> bool:
    """Run the cases under a tool. Returns whether all was clean and right."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAILURE)]
    if tool == "memcheck":
        # The driver is asked for functions that it may lack, which is no error of ours.
        command += ["--leak-check", "no", "--report-api-errors", "no"]
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--run"]
    command += [argument for name in variants for argument in ("--variant", name)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"{tool}: {'clean' if status == 0 else f'FAILED with status {status}'}", flush=True)
    return status == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this tool; may be given several times")
    parser.add_argument("--variant", action="append", choices=sorted(BY_NAME), help="only this operation; likewise")
    parser.add_argument("--run", action="store_true", help="run the cases in this process, without a tool")
    parser.add_argument("--device", default="cuda", help="with --run: cuda, or cpu to try this program")
    arguments = parser.parse_args(argv)
    variants = arguments.variant or sorted(BY_NAME)
    if arguments.run:
        with torch.no_grad():
            return min(run(torch.device(arguments.device, 0 if arguments.device == "cuda" else None), variants), 1)
    results = [sanitize(tool, variants) for tool in arguments.tool or TOOLS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
