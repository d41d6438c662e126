"""Running an operation so that everything it must not do shows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnn_fused.operands import BF16
from cudnn_fused.testing.agreement import against_reference, inaccuracies
from cudnn_fused.testing.cases import (
    Case,
    Operands,
    Skip,
    caller_frames,
    copy_history,
    make_inputs,
    make_outputs,
    make_plan,
)
from tests import cases

ROOT = Path(__file__).parents[2]

GUARD = 4096  # elements on either side of a tensor: further than a tile reaches past its rows
GUARD_BITS = 0x7FD5  # a NaN that nobody computes

TYPICAL = {
    "conv3d_raw": Case("conv3d_raw", 2, 2, 5, 6, (160, 160)),
    "conv3d_rmsnorm_silu": Case("conv3d_rmsnorm_silu", 2, 2, 5, 6, (160, 160), skip=Skip.BIASED),
    "conv3d_rmsnorm_silu_pad": Case("conv3d_rmsnorm_silu_pad", 2, 2, 5, 6, (160, 160), skip=Skip.BIASED, history=1),
    "conv3d_bias_residual_pad": Case("conv3d_bias_residual_pad", 2, 2, 5, 6, (160, 160), skip=Skip.BIASED),
    "causal_conv3d_with_cache": Case("causal_conv3d_with_cache", 2, 2, 5, 6, (12, 160), history=1),
    "rmsnorm_silu_pad": Case(
        "rmsnorm_silu_pad", 2, 2, 5, 6, (160,), skip=Skip.BIASED, history=1, input_bias=True, save_input=True
    ),
}
"""One call of each operation with all its optional operands."""

NAMES = sorted(TYPICAL)
ALL_OPERATIONS = pytest.mark.parametrize("case", [TYPICAL[name] for name in NAMES], ids=NAMES)


class Guards:
    """Copies of tensors in the middle of memory full of NaN, of which it can be asked whether it still is."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def around(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((tensor.numel() + 2 * GUARD,), GUARD_BITS, dtype=torch.int16, device=tensor.device)
        self._buffers[name] = buffer
        inside = buffer[GUARD:-GUARD].view(BF16).view(tensor.shape)
        return inside.copy_(tensor)

    def broken(self) -> list[str]:
        """Names of the tensors next to which something was written."""
        return [
            name
            for name, buffer in self._buffers.items()
            if not bool(((buffer[:GUARD] == GUARD_BITS) & (buffer[-GUARD:] == GUARD_BITS)).all())
        ]


@dataclass
class Prepared:
    """The operands of a case, guarded, and what is needed to judge its results."""

    case: Case
    operands: Operands
    initial: Operands  # the outputs as they are before
    frames: torch.Tensor | None  # history that the caller copied
    guards: Guards

    def refill(self) -> None:
        """Put the outputs back as they were."""
        for name, tensor in self.initial.items():
            self.operands[name].copy_(tensor)

    def outputs(self) -> Operands:
        return {name: self.operands[name].clone() for name in self.case.operation.returns if name in self.operands}

    def assert_right(self) -> None:
        """The results must be those of the reference. For integer operands."""
        faults = against_reference(self.case, self.operands, {n: t.clone() for n, t in self.initial.items()})
        assert not faults, f"{self.case}: {faults}"

    def assert_accurate(self) -> None:
        """The results must be as close to the truth as those of BF16 PyTorch. For random operands."""
        faults = inaccuracies(self.case, self.operands, self.frames)
        assert not faults, f"{self.case}: {faults}"

    def assert_guards(self) -> None:
        assert not self.guards.broken(), f"{self.case}: written beside {self.guards.broken()}"


def prepare(case: Case, device: torch.device, *, integers: bool = True, seed: int = 0) -> Prepared:
    """Operands for ``case`` between guards; outputs are NaN, with the caller's history in them."""
    guards, frames = Guards(), caller_frames(case, device)
    inputs = make_inputs(case, device, integers=integers, seed=seed)
    outputs = make_outputs(case, device)
    copy_history(case, outputs, frames)
    operands = {name: guards.around(name, tensor) for name, tensor in {**inputs, **outputs}.items()}
    return Prepared(case, operands, outputs, frames, guards)


def execute_with_unread_frames(plan: Any, prepared: Prepared) -> None:
    """Execute while the frames of the input that are said to be zero hold NaN: they must not be read."""
    zeros = prepared.operands["input"][:, : prepared.case.leading_zero_frames]
    if prepared.case.leading_zero_frames:
        zeros.fill_(torch.nan)
    plan.execute(**prepared.operands)
    zeros.zero_()


def run(case: Case, device: torch.device, *, integers: bool = True, seed: int = 0) -> Prepared:
    """Prepare, compile and execute a case."""
    prepared = prepare(case, device, integers=integers, seed=seed)
    execute_with_unread_frames(make_plan(case, prepared.operands), prepared)
    return prepared


def call(case: Case, operands: Mapping[str, torch.Tensor], **more: Any) -> Operands:
    """The function of a case on its inputs, its results by name. History of the caller is not copied."""
    if case.save_input:
        more["save_input"] = True
    result = cases.call(case.operation, operands, **case.options, **more)
    results = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return {name: value for name, value in zip(case.operation.returns, results, strict=True) if value is not None}


def assert_equals_reference(case: Case, operands: Operands, results: Operands) -> None:
    """The results of a function on integer operands must be those of the reference."""
    fresh = make_outputs(case, operands["input"].device)
    faults = against_reference(case, {**operands, **results}, fresh)
    assert not faults, f"{case}: {faults}"


def inputs_of(case: Case, operands: Mapping[str, torch.Tensor]) -> Operands:
    return cases.inputs_only(case.operation, operands)


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations of the factors' values that hold every pair of values of any two factors."""

    def pairs(combination: dict[str, Any]) -> set[tuple[Any, Any]]:
        return set(itertools.combinations(combination.items(), 2))

    everything = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    missing = set().union(*map(pairs, everything)) if len(factors) > 1 else set()
    chosen = [] if missing else everything  # a single factor has no pairs
    while missing:
        best = max(everything, key=lambda combination: len(pairs(combination) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
