"""Settings of the operations and operands for them: :mod:`cudnn_fused.selfcheck.cases`, for tests and benchmarks."""

from __future__ import annotations

from cudnn_fused.selfcheck.cases import (
    BY_NAME,
    CHANNELS,
    TAPS,
    Case,
    Operands,
    Skip,
    Values,
    caller_frames,
    copy_history,
    make_inputs,
    make_outputs,
    make_plan,
    make_problem,
    run_reference,
    sample_of,
)

__all__ = [
    "BY_NAME",
    "CHANNELS",
    "TAPS",
    "Case",
    "Operands",
    "Skip",
    "Values",
    "caller_frames",
    "copy_history",
    "make_inputs",
    "make_outputs",
    "make_plan",
    "make_problem",
    "run_reference",
    "sample_of",
]
