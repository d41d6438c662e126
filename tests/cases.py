"""Operands of any operation, made from its own declaration, and ways to run it on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import cudnn_fused
from cudnn_fused.operands import BF16, Operand, Operation
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plan import Plan
from cudnn_fused.plans import CLASSES
from cudnn_fused.testing.cases import CHANNELS

Operands = dict[str, torch.Tensor]

EXTENTS = {"N": 2, "T": 4, "H": 5, "W": 6}
BY_NAME = {operation.name: operation for operation in OPERATIONS}
OPERATION_NAMES = sorted(BY_NAME)
OPTIONAL_OPERANDS = [
    (operation.name, operand.name) for operation in OPERATIONS for operand in operation.operands if operand.optional
]
ALL_OPERANDS = [(operation.name, operand.name) for operation in OPERATIONS for operand in operation.operands]
INPUTS = [(operation.name, operand.name) for operation in OPERATIONS for operand in operation.inputs]
WRITTEN = [(operation.name, operand.name) for operation in OPERATIONS for operand in operation.written]


def operand_of(operation: Operation, name: str) -> Operand:
    return next(operand for operand in operation.operands if operand.name == name)


def extents_of(operation: Operation, history: int = 2, **extents: int) -> dict[str, int]:
    """Values of all names in the shape rules."""
    channels = dict(zip(operation.channel_symbols, CHANNELS[operation.name][0], strict=True))
    return {**EXTENTS, **channels, "P": history, **extents}


def small_integers(shape: tuple[int, ...], low: int = -2, high: int = 3) -> torch.Tensor:
    """Integers whose products sum exactly in FP32 in any order."""
    return torch.randint(low, high, shape).to(BF16)


def make_operands(
    operation: Operation,
    *,
    optional: bool = True,
    history: int = 2,
    without: tuple[str, ...] = (),
    **extents: int,
) -> Operands:
    """Valid operands, by name: small integers for inputs, NaN for what is written.

    ``history`` is the number of frames in ``previous`` where the operation takes it.
    """
    values = extents_of(operation, history, **extents)
    has_previous = optional and history > 0 and "previous" not in without
    if not has_previous:
        values["P"] = 0
    made: Operands = {}
    for operand in operation.operands:
        absent = operand.name in without or (operand.name == "previous" and not has_previous)
        if absent or (operand.optional and not optional):
            continue
        shape = operand.shape.evaluate(values)
        made[operand.name] = torch.full(shape, torch.nan, dtype=BF16) if operand.written else small_integers(shape)
    return made


def inputs_only(operation: Operation, operands: Mapping[str, Any]) -> dict[str, Any]:
    written = {operand.name for operand in operation.written}
    return {name: tensor for name, tensor in operands.items() if name not in written}


def make_plan(operation: Operation, samples: Mapping[str, Any], suffix: str = "", **options: Any) -> Plan:
    """The operation's class, constructed with the samples."""
    plan_class = getattr(cudnn_fused, CLASSES[operation.name].__name__ + suffix)
    return plan_class(**{f"sample_{name}": tensor for name, tensor in samples.items()}, **options)


def compiled_plan(operation: Operation, samples: Mapping[str, Any], **options: Any) -> Plan:
    plan = make_plan(operation, samples, **options)
    plan.compile()
    return plan


def call(operation: Operation, operands: Mapping[str, Any], suffix: str = "", **options: Any) -> Any:
    """The operation's function on the inputs among the operands."""
    function = getattr(cudnn_fused, operation.name + suffix)
    return function(**inputs_only(operation, operands), **options)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, NaN and the sign of zero included."""
    assert actual.shape == expected.shape
    differing = (bits(actual) != bits(expected)).sum().item()
    assert differing == 0, f"{differing} of {actual.numel()} elements differ"
