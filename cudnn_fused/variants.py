"""Variants of an operation: what one public class and one public function are for, and the signatures of both.

The signatures follow from the operation's table, in which its operands and options are listed once. A variant defines
the functions that have them, so Python itself checks the arguments of a call; ``tools/make_stubs.py`` writes the same
signatures for type checkers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Generic, TypeVar, cast

import torch

from cudnn_fused.operands import Operand, Operation, Option
from cudnn_fused.targets import Target

Tensor = torch.Tensor
Channels = tuple[int, ...]  # a combination: the extents of an operation's channel symbols
Returned = TypeVar("Returned")

SELF = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
STREAM = Parameter("current_stream", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=object)
SAMPLE = "sample_"  # how a constructor's operands begin


@dataclass(frozen=True, eq=False)
class Variant(Generic[Returned]):
    """An operation as public names offer it: on any device, or for one target alone.

    ``result`` is the type of what a function returns: a :class:`~cudnn_fused.results.Result`, or a tensor for the only
    output itself. ``channels`` are the combinations that the names are limited to, if they are. ``omitted`` names the
    operands and options that they do not have.
    """

    operation: Operation
    result: type[Returned]
    target: Target | None = None
    channels: tuple[Channels, ...] | None = None
    omitted: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, str]:
        """The names of the operation and of the target, "" on any device."""
        return self.operation.name, self.target.name if self.target else ""

    def collect(self, outputs: Sequence[Tensor | None]) -> Returned:
        """What a function returns for the operation's outputs, in their order."""
        if self.result is Tensor:
            return cast(Returned, outputs[0])
        return self.result(self.operation.returns, outputs)  # type: ignore[call-arg]

    # --- signatures ------------------------------------------------------------------------------------------------

    def constructor(self) -> Signature:
        """The signature of a class: samples of all operands, and the options."""
        parameters = self._parameters(self.operation.operands, self.operation.options, prefix=SAMPLE)
        return Signature([SELF, *parameters], return_annotation=None)

    def execution(self) -> Signature:
        """The signature of ``execute``: all operands and the stream. It returns the outputs it is given."""
        returned = Tensor if len(self.operation.returns) == 1 else self.result
        return Signature([SELF, *self._parameters(self.operation.operands, stream=True)], return_annotation=returned)

    def function(self) -> Signature:
        """The signature of a function: the inputs, the options, the stream, and what asks for optional outputs."""
        flags = [
            Parameter(operand.asked_by, Parameter.KEYWORD_ONLY, default=False, annotation=bool)
            for operand in self.operation.asked
        ]
        parameters = self._parameters(self.operation.inputs, self.operation.options, stream=True)
        return Signature([*parameters, *flags], return_annotation=self.result)

    def _parameters(
        self, operands: Iterable[Operand], options: Iterable[Option] = (), *, prefix: str = "", stream: bool = False
    ) -> list[Parameter]:
        """What must be given, then options, then what may be left out; behind them, by keyword alone, extensions."""
        operands = [operand for operand in operands if operand.name not in self.omitted]
        options = [option for option in options if option.name not in self.omitted]
        own = [operand for operand in operands if not operand.extension]
        return [
            *(_of_operand(operand, prefix) for operand in own if not operand.optional),
            *(_of_option(option) for option in options if not option.extension),
            *(_of_operand(operand, prefix) for operand in own if operand.optional),
            *([STREAM] if stream else []),
            *(_of_operand(operand, prefix) for operand in operands if operand.extension),
            *(_of_option(option) for option in options if option.extension),
        ]

    # --- what has them ---------------------------------------------------------------------------------------------

    def define_constructor(self) -> Callable[..., None]:
        """``__init__`` of a class; it calls ``self._prepare(samples, options)``, both in table order."""
        samples = self._in_table_order(self.operation.operands, SAMPLE)
        return define("__init__", self.constructor(), f"self._prepare({samples}, {self._options()})")

    def define_execute(self) -> Callable[..., Any]:
        """``execute`` of a class; it returns what ``self._execute(operands, current_stream)`` does."""
        outputs = ", ".join(self.operation.returns)
        operands = self._in_table_order(self.operation.operands)
        single = len(self.operation.returns) == 1 and self.result is not Tensor
        return define(
            "execute",
            self.execution(),
            f"return self._execute({operands}, current_stream){'[0]' if single else ''}",
            f"Fill and return ``{outputs if len(self.operation.returns) == 1 else f'({outputs})'}``.",
        )

    def define_call(self) -> Callable[..., Any]:
        """``__call__`` of a class: ``execute``, behind ``self._make_ready()``."""
        signature = self.execution()
        given = ", ".join(
            f"{name}={name}" if parameter.kind is Parameter.KEYWORD_ONLY else name
            for name, parameter in list(signature.parameters.items())[1:]
        )
        return define(
            "__call__",
            signature,
            f"self._make_ready(); return self.execute({given})",
            ":meth:`execute`, after :meth:`compile` if that has not been done.",
        )

    def define_function(self, name: str, call: Callable[..., Returned]) -> Callable[..., Returned]:
        """A function called ``name`` that returns ``call(variant, inputs, current_stream, options, wanted)``."""
        inputs = self._in_table_order(self.operation.inputs)
        flags = (f"(frozenset(({each.name!r},)) if {each.asked_by} else frozenset())" for each in self.operation.asked)
        wanted = " | ".join(flags) or "frozenset()"
        body = f"return call(variant, {inputs}, current_stream, {self._options()}, {wanted})"
        return define(name, self.function(), body, call=call, variant=self)

    def _in_table_order(self, operands: Iterable[Operand], prefix: str = "") -> str:
        return _tuple("None" if operand.name in self.omitted else prefix + operand.name for operand in operands)

    def _options(self) -> str:
        return _tuple(
            str(option.default) if option.name in self.omitted else option.name for option in self.operation.options
        )


def _of_operand(operand: Operand, prefix: str) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if operand.extension else Parameter.POSITIONAL_OR_KEYWORD
    if operand.optional:
        return Parameter(prefix + operand.name, kind, default=None, annotation=Tensor | None)
    return Parameter(prefix + operand.name, kind, annotation=Tensor)


def _of_option(option: Option) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if option.extension else Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(option.name, kind, default=option.default, annotation=int)


def _tuple(expressions: Iterable[str]) -> str:
    return f"({''.join(f'{expression}, ' for expression in expressions)})"


def define(name: str, signature: Signature, body: str, doc: str | None = None, **names: Any) -> Callable[..., Any]:
    """A function with a signature and a body of one line, which sees ``names``."""
    plain = signature.replace(
        parameters=[parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()],
        return_annotation=Signature.empty,
    )
    exec(compile(f"def {name}{plain}: {body}\n", f"<{name} from an operand table>", "exec"), names)
    function = names[name]
    annotated = {key: parameter.annotation for key, parameter in signature.parameters.items()}
    annotated["return"] = signature.return_annotation
    function.__annotations__ = {key: value for key, value in annotated.items() if value is not inspect.Signature.empty}
    function.__doc__ = doc
    return cast(Callable[..., Any], function)
