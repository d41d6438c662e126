"""The operations as PyTorch custom operators, so that ``torch.compile`` keeps a function call in its graph.

There is one operator per operation, ``torch.ops.cudnn_fused.<name>``, with a schema derived from the operand table:
the inputs, the options, whether the optional outputs are wanted, and the target's name ("" for the arch-neutral
functions). It returns the outputs that exist. Outside a graph the functions do not go through here: a dispatcher call
costs more than finding a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from cudnn_fused import cudnn_names, plans, sm90_names
from cudnn_fused.errors import OperandTypeError
from cudnn_fused.operands import Operation, bind_extents, negated, transformed
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plan import OPERATORS, call, given_inputs, inference_only

Tensor = torch.Tensor

NAMESPACE = "cudnn_fused"


def make_library() -> torch.library.Library:
    """A library in a namespace of its own: ``cudnn_fused``, or ``cudnn_fused_2`` and so on.

    A namespace belongs to one library of a process. When the package is imported again after its modules were dropped,
    functions of the first import may still be in use, and their operators stay theirs.
    """
    for count in itertools.count(1):
        namespace = NAMESPACE if count == 1 else f"{NAMESPACE}_{count}"
        try:
            return torch.library.Library(namespace, "DEF")
        except RuntimeError as error:
            if "Only a single TORCH_LIBRARY" not in str(error):
                raise
    raise AssertionError("unreachable")


LIBRARY = make_library()


VARIANTS = {
    plan_class.variant.key: plan_class.variant
    for module in (plans, sm90_names, cudnn_names)
    for plan_class in module.CLASSES.values()
}
"""All variants of all operations, by the operation's name and the target's."""


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
        result = call(VARIANTS[operation.name, target], inputs, None, options, wanted)
        outputs = (result,) if isinstance(result, Tensor) else result
        return [tensor for tensor in outputs if tensor is not None]

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


def without_gradients(operation: Operation, operator: Any) -> Callable[..., Any]:
    """The operator in front of PyTorch's autograd: refuses what asks for gradients, as a call outside a graph does."""

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            for operand, tensor in zip(operation.inputs, split(operation, arguments)[0], strict=True):
                if tensor is not None and tensor.requires_grad:
                    raise RuntimeError(inference_only(operation, operand))
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return run


def refuse_negated(operation: Operation) -> Callable[..., NoReturn]:
    """The operator for lazily negated views, whose sign compilers are known to lose."""

    def run(*arguments: Any) -> NoReturn:
        inputs = zip(operation.inputs, split(operation, arguments)[0], strict=True)
        raise ValueError(
            next(negated(operation, operand) for operand, tensor in inputs if tensor is not None and tensor.is_neg())
        )

    return run


def refuse_batches(operation: Operation) -> Callable[..., NoReturn]:
    """The operator under ``torch.vmap``."""

    def run(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        raise OperandTypeError(transformed(operation, operation.inputs[0]))

    return run


for _operation in OPERATIONS:
    # The kernels want the strides that the operand table says, not those that a compiler finds convenient.
    LIBRARY.define(schema(_operation), tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _operator = getattr(getattr(torch.ops, LIBRARY.ns), _operation.name).default
    LIBRARY.impl(_operation.name, implementation(_operation), "CompositeExplicitAutograd")
    LIBRARY.impl(_operation.name, without_gradients(_operation, _operator), "Autograd")
    LIBRARY.impl(_operation.name, refuse_negated(_operation), "Negative")
    torch.library.register_fake(f"{LIBRARY.ns}::{_operation.name}", shapes_only(_operation), lib=LIBRARY)
    torch.library.register_vmap(f"{LIBRARY.ns}::{_operation.name}", refuse_batches(_operation), lib=LIBRARY)
    OPERATORS[_operation.name] = _operator
