"""Settings of the operations, and operands for them on any device, for tests and benchmarks.

All values of ``integers=True`` operands are chosen so that a convolution, the sum of squares behind it and every sum in
between are exact in FP32 in any order: then a result has to match the reference bit for bit.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cudnn_fused import cudnn_names, pack_causal_conv3d_weight, pack_conv3d_weight, reference
from cudnn_fused.operands import Operation, Sample, validate
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plan import Plan
from cudnn_fused.plans import CLASSES
from cudnn_fused.problem import Problem
from cudnn_fused.types import BF16
from cudnn_fused.window import DENSE_3X3X3

Operands = dict[str, torch.Tensor]

BY_NAME = {operation.name: operation for operation in OPERATIONS}
CHANNELS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    **cudnn_names.CHANNELS,
    "conv3d_rmsnorm_silu": cudnn_names.CONV_PAIRS,
    "conv3d_rmsnorm_silu_pad": cudnn_names.CONV_PAIRS,
}
"""The channels of the WAN encoder, for each operation."""
TAPS = DENSE_3X3X3.taps
LONG_REDUCTION = TAPS * 320  # more products than this get smaller factors
RESIDUAL_RANGE = 128  # wide enough for sums past 256, where BF16 stops to hold every integer


class Skip(enum.Enum):
    """What is added before the normalization."""

    NONE = "none"
    PLAIN = "plain"
    BIASED = "bias"  # with a bias of its own


@dataclass(frozen=True)
class Case:
    """One way to call an operation. ``n``, ``t``, ``h`` and ``w`` are the extents of its result without padding.

    ``history`` frames of an earlier chunk come before the current ones. With ``caller_history`` the caller of
    ``conv3d_rmsnorm_silu_pad`` copies them, otherwise the operation does. ``input_bias`` and ``save_input`` are options
    of ``rmsnorm_silu_pad``.
    """

    variant: str
    n: int
    t: int
    h: int
    w: int
    channels: tuple[int, ...]
    skip: Skip = Skip.NONE
    history: int = 0
    caller_history: bool = False
    leading_zero_frames: int = 0
    input_bias: bool = False
    save_input: bool = False
    absent_zero_frames: int = 0
    omit_zero_frames: int = 0

    @property
    def operation(self) -> Operation:
        return BY_NAME[self.variant]

    @property
    def plan_class(self) -> type[Plan]:
        return CLASSES[self.variant]

    @property
    def halo(self) -> int:
        """How much larger T, H and W of ``input`` are than those of the result."""
        return self.operation.minimum - 1

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """Values of the names in the operand table."""
        named = dict(zip(self.operation.channel_symbols, self.channels, strict=True))
        inner = {"T": self.t, "H": self.h, "W": self.w}
        outer = {key: value + self.halo for key, value in inner.items()}
        outer["T"] -= self.absent_zero_frames
        options = {"P": self.history, "Z": self.absent_zero_frames, "O": self.omit_zero_frames}
        return {"N": self.n, **outer, **named, **options}

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of the class, and of the reference."""
        values = {
            "history_frames": self.history if self.caller_history else 0,
            "leading_zero_frames": self.leading_zero_frames,
            "absent_zero_frames": self.absent_zero_frames,
            "omit_zero_frames": self.omit_zero_frames,
        }
        return {option.name: values[option.name] for option in self.operation.options}

    @cached_property
    def present(self) -> frozenset[str]:
        """Names of the operands in use."""
        wanted = {
            "residual": self.skip is not Skip.NONE,
            "residual_bias": self.skip is Skip.BIASED,
            "previous": self.history > 0 and not self.caller_history,
            "input_bias": self.input_bias,
        }
        given = {op.name for op in self.operation.inputs if not op.optional or wanted[op.name]}
        saved = {"residual_output"} if self.save_input else set()
        return self.operation.written_for(given, saved) | given

    @property
    def activated_outputs(self) -> frozenset[str]:
        """Outputs that end in SiLU, whose exponential is the one step that need not be exact."""
        normalizes = any(operand.name == "gamma" for operand in self.operation.operands)
        return frozenset(self.operation.returns) - {"residual_output"} if normalizes else frozenset()

    @property
    def taps(self) -> int:
        """Temporal taps of all frames of a sample, less those on frames that are known to be zero."""
        zeros = self.leading_zero_frames + self.absent_zero_frames
        if self.variant == "causal_conv3d_with_cache":
            zeros = DENSE_3X3X3.history - self.history
        return sum(DENSE_3X3X3.kt - max(zeros - t, 0) for t in range(self.t))

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolution, 0 without one."""
        if len(self.channels) == 1:
            return 0
        ci, co = self.channels
        return 2 * self.n * self.taps * self.h * self.w * (TAPS // DENSE_3X3X3.kt) * ci * co

    @property
    def bytes(self) -> int:
        """What the operands occupy: the least memory traffic of the operation."""
        return sum(
            BF16.itemsize * math.prod(operand.shape.evaluate(self.extents))
            for operand in self.operation.operands
            if operand.name in self.present
        )

    def raw(self) -> Case:
        """The bare convolution of the same shape."""
        return Case("conv3d_raw", *self.result_extents, self.channels, leading_zero_frames=self.leading_zero_frames)

    @property
    def result_extents(self) -> tuple[int, int, int, int]:
        return self.n, self.t, self.h, self.w

    def at(self, n: int, t: int, h: int, w: int) -> Case:
        """The same call at other extents of the result."""
        return replace(self, n=n, t=t, h=h, w=w)


# --- operands ------------------------------------------------------------------------------------------------------


class Values:
    """A source of BF16 tensors: small integers, or normally distributed numbers."""

    def __init__(self, device: torch.device | str, *, integers: bool, seed: int) -> None:
        self.device = torch.device(device)
        self.integers = integers
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def between(self, shape: tuple[int, ...], bound: int, scale: float = 1.0) -> torch.Tensor:
        """Integers from ``-bound`` to ``bound``, or normal numbers of standard deviation ``scale``."""
        if self.integers:
            kind = torch.int8 if bound < 128 else torch.int16
            integers = torch.randint(-bound, bound + 1, shape, dtype=kind, device=self.device, generator=self.generator)
            return integers.to(BF16)
        return torch.randn(shape, dtype=BF16, device=self.device, generator=self.generator).mul_(scale)


def make_inputs(case: Case, device: torch.device | str, *, integers: bool, seed: int = 0) -> Operands:
    """The inputs of ``case`` by name, with weights packed. The ``leading_zero_frames`` are filled with zeros."""
    values = Values(device, integers=integers, seed=seed)
    made: Operands = {}
    for operand in case.operation.inputs:
        if operand.name in case.present:
            made[operand.name] = _make_input(case, operand.name, operand.shape.evaluate(case.extents), values)
    made["input"][:, : case.options.get("leading_zero_frames", 0)] = 0
    return made


def _make_input(case: Case, name: str, shape: tuple[int, ...], values: Values) -> torch.Tensor:
    if name == "packed_weight":
        ci, co = case.channels
        weight = values.between((co, ci, 3, 3, 3), 1, 1 / math.sqrt(TAPS * ci))
        pack = pack_causal_conv3d_weight if case.variant == "causal_conv3d_with_cache" else pack_conv3d_weight
        return pack(weight)
    if name == "gamma":
        return values.between(shape, 8, 0.1) / 4 if values.integers else values.between(shape, 0, 0.1) + 1
    if name in ("bias", "input_bias", "residual_bias"):
        return values.between(shape, 3, 0.1)
    if name == "input" and case.flops:
        return values.between(shape, 2 if TAPS * case.channels[0] <= LONG_REDUCTION else 1)
    return values.between(shape, RESIDUAL_RANGE)


def make_outputs(case: Case, device: torch.device | str) -> Operands:
    """Everything that ``case`` writes, filled with NaN."""
    return {
        operand.name: torch.full(operand.shape.evaluate(case.extents), torch.nan, dtype=BF16, device=device)
        for operand in case.operation.written
        if operand.name in case.present
    }


def caller_frames(case: Case, device: torch.device | str, seed: int = 1) -> torch.Tensor | None:
    """The frames of an earlier chunk that the caller copies, or None where the operation does."""
    if not (case.caller_history and case.history):
        return None
    shape = (case.n, case.history, case.h, case.w, case.channels[-1])
    return Values(device, integers=False, seed=seed).between(shape, 0)


def copy_history(case: Case, outputs: Operands, frames: torch.Tensor | None) -> None:
    """The caller's part of ``caller_history``, before or after the operation."""
    if frames is None:
        return
    padded, cache = outputs["padded_output"], outputs["cache_output"]
    leading = DENSE_3X3X3.history
    padded[:, leading - frames.shape[1] : leading, 1:-1, 1:-1] = frames
    older = cache.shape[1] - min(cache.shape[1], case.t)
    cache[:, :older] = frames[:, frames.shape[1] - older :]


def make_plan(case: Case, operands: Mapping[str, torch.Tensor]) -> Plan:
    """The compiled class for the operands."""
    plan = case.plan_class(**{f"sample_{name}": tensor for name, tensor in operands.items()}, **case.options)
    plan.compile()
    return plan


def make_problem(case: Case, operands: Mapping[str, torch.Tensor]) -> Problem:
    """What a backend compiles for the operands."""
    samples = [Sample.of(operands.get(operand.name)) for operand in case.operation.operands]
    return validate(case.operation, samples, case.options)


def run_reference(case: Case, operands: Mapping[str, torch.Tensor]) -> None:
    """Fill the outputs among ``operands`` by :mod:`cudnn_fused.reference`, on whatever device they are."""
    reference.run(case.operation, operands, **case.options)


def sample_of(case: Case, operands: Mapping[str, torch.Tensor], index: int) -> tuple[Case, Operands]:
    """One sample of a batch alone: the case with N = 1, and views of the operands."""
    batched = {operand.name for operand in case.operation.operands if operand.shape.terms[0] == "N"}
    views = {name: tensor[index : index + 1] if name in batched else tensor for name, tensor in operands.items()}
    return replace(case, n=1), views
