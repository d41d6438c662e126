"""Host time of a warm function call before anything is launched: finding the plan and checking the operands.

    python -m benchmark.host_overhead [--repeats 5000]

Prints microseconds per operation, with and without its optional operands. No kernel runs: what a launch costs is not
part of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from cudnn_fused import plan
from cudnn_fused.operands import BF16, Operation
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plans import CLASSES
from cudnn_fused.testing.cases import CHANNELS
from cudnn_fused.variants import Variant

EXTENTS = {"N": 1, "T": 3, "H": 4, "W": 5, "P": 2}
BUDGET_US = 25.0


def inputs_of(operation: Operation, with_optional: bool) -> tuple[torch.Tensor | None, ...]:
    """Zero-filled inputs for the operation's first channel combination."""
    extents = {**EXTENTS, **dict(zip(operation.channel_symbols, CHANNELS[operation.name][0], strict=True))}
    return tuple(
        torch.zeros(operand.shape.evaluate(extents), dtype=BF16) if with_optional or not operand.optional else None
        for operand in operation.inputs
    )


def least_us(function: Callable[[], object], repeats: int, rounds: int = 15) -> float:
    """Least over ``rounds`` of the mean time of ``repeats`` calls, in microseconds: other load only ever adds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5000)
    arguments = parser.parse_args()
    print(f"{'operation':28} {'operands':>9} {'us':>7}   (budget {BUDGET_US:g})")
    for operation in OPERATIONS:
        variant = CLASSES[operation.name].variant
        options = tuple(option.default for option in operation.options)
        for with_optional in (False, True):
            inputs = inputs_of(operation, with_optional)

            def find(
                variant: Variant[Any] = variant,
                inputs: tuple[torch.Tensor | None, ...] = inputs,
                options: tuple[int, ...] = options,
            ) -> object:
                return plan.find_executable(variant, inputs, options)

            find()
            given = sum(tensor is not None for tensor in inputs)
            print(f"{operation.name:28} {given:9} {least_us(find, arguments.repeats):7.2f}")


if __name__ == "__main__":
    main()
