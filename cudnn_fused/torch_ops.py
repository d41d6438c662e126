"""The operations as PyTorch custom operators, so that ``torch.compile`` keeps a function call in its graph.

There is one operator per operation, ``torch.ops.cudnn_fused.<name>``, with a schema derived from the operand table:
the inputs, the options, whether the optional outputs are wanted, and the target's name ("" for the arch-neutral
functions). It returns the outputs that exist. Outside a graph the functions do not go through here: a dispatcher call
costs more than finding a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudnn_fused.operands import Operation, bind_extents
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plan import PLAN_CLASSES, call, given_inputs

Tensor = torch.Tensor

LIBRARY = torch.library.Library("cudnn_fused", "DEF")


def schema(operation: Operation) -> str:
    """The operator's schema in PyTorch's notation."""
    inputs = [f"Tensor{'?' * operand.optional} {operand.name}" for operand in operation.inputs]
    options = [f"int {option.name}" for option in operation.options]
    return f"{operation.name}({', '.join([*inputs, *options])}, bool save, str target) -> Tensor[]"


def split(
    operation: Operation, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], frozenset[str], str]:
    """An operator's arguments as inputs, options, wanted outputs, and target."""
    *operands, save, target = arguments
    count = len(operation.inputs)
    wanted = frozenset(operand.name for operand in operation.written if operand.optional) if save else frozenset()
    return tuple(operands[:count]), tuple(operands[count:]), wanted, target


def implementation(operation: Operation) -> Callable[..., list[Tensor]]:
    def run(*arguments: Any) -> list[Tensor]:
        inputs, options, wanted, target = split(operation, arguments)
        result = call(PLAN_CLASSES[operation.name, target], inputs, None, options, wanted)
        return [tensor for tensor in result if tensor is not None]

    return run


def shapes_only(operation: Operation) -> Callable[..., list[Tensor]]:
    """The operator on tensors without data: new tensors of the shapes that the table gives."""

    def run(*arguments: Any) -> list[Tensor]:
        inputs, options, wanted, _ = split(operation, arguments)
        given = given_inputs(operation, inputs)
        named_options = dict(zip((option.name for option in operation.options), options, strict=True))
        extents = bind_extents(operation, given, named_options)
        present = operation.written_for(given, wanted)
        first = next(iter(given.values()))
        return [
            first.new_empty(operation.operands[position].shape.evaluate(extents))
            for name, position in zip(operation.returns, operation.return_positions, strict=True)
            if name in present
        ]

    return run


for _operation in OPERATIONS:
    # The kernels want the strides that the operand table says, not those that a compiler finds convenient.
    LIBRARY.define(schema(_operation), tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    LIBRARY.impl(_operation.name, implementation(_operation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"cudnn_fused::{_operation.name}", shapes_only(_operation), lib=LIBRARY)
