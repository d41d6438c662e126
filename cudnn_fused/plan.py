"""Plans: an operation made ready for one set of shapes, and the calls that run it.

A class of :mod:`cudnn_fused.ops` is a plan that its caller keeps: construct it with sample tensors, then
``check_support()``, ``compile()`` and ``execute()``. A function keeps its plans in a shared cache and allocates the
outputs. Both stand on :class:`Executable`, and everything they check comes from the operation's operand table.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from cudnn_fused import streams
from cudnn_fused.backends import Backend, Launch, check_target, select_backend
from cudnn_fused.errors import OperandTypeError
from cudnn_fused.operands import (
    BF16,
    Operand,
    Operation,
    Problem,
    Sample,
    byte_span,
    misaligned,
    negated,
    signature,
    transformed,
    validate,
)
from cudnn_fused.plan_cache import PlanCache
from cudnn_fused.results import Result
from cudnn_fused.targets import SM100, Target

Tensor = torch.Tensor

PLAN_CAPACITY = 128


class Executable:
    """A problem compiled by a backend."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self.problem = problem
        self.launch: Launch = backend.compile(problem)
        self._shapes = tuple(
            problem.shape(operand) if operand.written and operand.name in problem.present else None
            for operand in problem.operation.operands
        )

    def allocate(self, inputs: Sequence[Tensor | None], stream: int) -> list[Tensor | None]:
        """All operands in table order: ``inputs``, and new tensors, allocated on ``stream``, for what is written."""
        device, given = self.problem.device, iter(inputs)
        with streams.running_on(stream, device):
            return [
                None
                if operand.written and shape is None
                else torch.empty(shape, dtype=BF16, device=device)
                if shape is not None
                else next(given)
                for operand, shape in zip(self.problem.operation.operands, self._shapes, strict=True)
            ]

    def run(self, operands: Sequence[Tensor | None], stream: int, foreign: Sequence[Tensor | None]) -> Result:
        """Launch, and return the operation's results.

        ``foreign`` are the operands that may have been allocated on another stream.
        """
        self.launch(operands, stream)
        streams.keep_until_done(foreign, stream, self.problem.device)
        operation = self.problem.operation
        return Result(operation.returns, [operands[position] for position in operation.return_positions])


PLANS: PlanCache[Executable] = PlanCache(PLAN_CAPACITY)
"""The plans of all functions."""

PLAN_CLASSES: dict[tuple[str, str], type[Plan]] = {}
"""The class of every operation and target, by their names; the arch-neutral ones have no target's name."""


OPERATORS: dict[str, Callable[..., list[Tensor]]] = {}
"""The custom operator of every operation, by its name; :mod:`cudnn_fused.torch_ops` fills it."""


def check_gradients(operation: Operation, operands: Sequence[Operand], tensors: Sequence[Tensor | None]) -> None:
    """Raise RuntimeError if grad mode is on and one of ``tensors`` requires grad."""
    if torch.is_grad_enabled():
        for operand, tensor in zip(operands, tensors, strict=True):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{operation.name} is inference-only, but {operand.name} requires grad; "
                    "call it under torch.no_grad() or torch.inference_mode()"
                )


def check_call(operation: Operation, operands: Sequence[Operand], tensors: Sequence[Tensor | None]) -> None:
    """The checks that no plan can make once and for all: gradients, and where the data lies."""
    check_gradients(operation, operands, tensors)
    for operand, tensor in zip(operands, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.is_neg():
            raise ValueError(negated(operation, operand))
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            raise OperandTypeError(transformed(operation, operand)) from None
        if address % operand.alignment:
            raise ValueError(misaligned(operation, operand, address))


def check_overlap(operation: Operation, tensors: Sequence[Tensor | None]) -> None:
    """Raise ValueError if something that is written shares memory with any other operand."""
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + byte_span(tensor), operand)
        for operand, tensor in zip(operation.operands, tensors, strict=True)
        if tensor is not None
    ]
    spans.sort(key=lambda span: span[0])
    # In order of their starts, a written span meets another if and only if it ends after, or begins before, that one;
    # remembering the furthest end so far of all spans, and of the written ones, finds any such pair in one pass.
    furthest: tuple[int, Operand] | None = None
    furthest_written: tuple[int, Operand] | None = None
    for start, end, operand in spans:
        reaching = furthest if operand.written else furthest_written
        if reaching is not None and start < reaching[0]:
            first, second = (operand, reaching[1]) if operand.written else (reaching[1], operand)
            raise ValueError(f"{operation.name}: {first.name} must not overlap {second.name}")
        if furthest is None or end > furthest[0]:
            furthest = (end, operand)
        if operand.written and (furthest_written is None or end > furthest_written[0]):
            furthest_written = (end, operand)


def check_against_sample(operation: Operation, operand: Operand, tensor: object, sample: Sample | None) -> None:
    """Raise if ``tensor`` could not have been the sample, saying in what it differs."""
    name = f"{operation.name}: {operand.name}"
    facts = signature(tensor)
    if facts == (sample.signature if sample else None):
        return
    if facts is None or sample is None:
        had, got = ("given", "absent") if facts is None else ("absent", "given")
        raise ValueError(
            f"{name} presence must match its sample's: it was {had} when the plan was made and is {got} now"
        )
    if len(facts) == 1:
        raise OperandTypeError(f"{name} must be a plain dense torch.Tensor, got {facts[0]}")
    shape, _, dtype, device = facts
    if dtype is not BF16:
        raise OperandTypeError(f"{name} must have dtype torch.bfloat16, got {dtype}")
    if shape != sample.shape:
        raise ValueError(
            f"{name} shape mismatch: it must have its sample's shape {list(sample.shape)}, got {list(shape)}"
        )
    if device != sample.device:
        raise ValueError(f"{name} must be on {sample.device} like its sample, but is on {device}")
    raise ValueError(
        f"{name} must have its sample's strides {list(sample.stride)}, got {list(tensor.stride())}"  # type: ignore[attr-defined]
    )


class Plan:
    """An operation for the shapes of sample tensors, of which only the metadata is kept.

    Subclasses give the constructor and ``execute`` their signatures and pass the operands on in table order.
    """

    operation: ClassVar[Operation]
    target: ClassVar[Target | None] = None

    def __init_subclass__(cls) -> None:
        # A class that a user derives comes later, and does not replace the one that functions and torch.compile call.
        PLAN_CLASSES.setdefault((cls.operation.name, cls.target.name if cls.target else ""), cls)

    def __init__(self, samples: Sequence[Tensor | None], **options: int) -> None:
        self._samples = tuple(map(Sample.of, samples))
        self._options: Mapping[str, Any] = options
        self._executable: Executable | None = None
        self._lock = threading.Lock()

    def __call__(self, *operands: Any, **named: Any) -> Any:
        """:meth:`execute`, after :meth:`compile` if that has not been done."""
        if self._executable is None:
            self.compile()
        return self.execute(*operands, **named)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """A pickle holds the samples' metadata and the options; what comes out of it has to be compiled."""
        return {**self.__dict__, "_executable": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A copy that is compiled if this plan is: what was compiled does not change and serves both."""
        twin = copy.copy(self)
        twin._executable = self._executable
        memo[id(self)] = twin
        return twin

    @classmethod
    def supported_channels(cls) -> tuple[tuple[int, ...], ...]:
        """The combinations of channels that the class takes, in the order of its operation's ``channel_symbols``."""
        extensions = cls.operation.extension_channels if cls.target is SM100 else ()
        return tuple(channels for channels in cls.operation.channels if channels not in extensions)

    def check_support(self) -> bool:
        """Check the samples and the device. Returns True.

        Raises:
            TypeError: a sample is not a BF16 tensor.
            ValueError: channels, a shape, strides, a device, an alignment or a combination does not fit.
            RuntimeError: there is no CUDA device for a plan that needs one.
            NotImplementedError: the GPU or the installed CuTe DSL cannot run it.
        """
        self._problem_and_backend()
        return True

    def compile(self) -> None:
        """Make the plan ready to execute. Raises what :meth:`check_support` raises."""
        with self._lock:
            if self._executable is None:
                self._executable = Executable(*self._problem_and_backend())

    def _problem_and_backend(self) -> tuple[Problem, Backend]:
        check_target(self.target)
        options = {
            option.name: option.normalize(self.operation.name, self._options[option.name])
            for option in self.operation.options
        }
        problem = validate(self.operation, self._samples, options, self.supported_channels())
        return problem, select_backend(self.operation, self.target, problem.device)

    def _execute(self, operands: tuple[Tensor | None, ...], current_stream: object) -> Any:
        """Check ``operands``, in table order, run the plan on them, and return its result."""
        executable = self._executable
        if executable is None:
            raise RuntimeError(f"{type(self).__name__}.execute() was called before compile()")
        operation = self.operation
        for operand, tensor, sample in zip(operation.operands, operands, self._samples, strict=True):
            check_against_sample(operation, operand, tensor, sample)
        check_call(operation, operation.operands, operands)
        check_overlap(operation, operands)
        stream = streams.stream_handle(current_stream, executable.problem.device)
        return executable.run(operands, stream, foreign=operands)


def find_executable(
    plan_class: type[Plan],
    inputs: tuple[Tensor | None, ...],
    options: tuple[int, ...] = (),
    wanted: frozenset[str] = frozenset(),
) -> Executable:
    """The cached plan for a function call, made if it is not there, with the call's operands checked.

    Args:
        plan_class: the class whose operation and target are meant.
        inputs: the operation's inputs in table order, absent ones None.
        options: the values of the operation's options, in its order.
        wanted: the optional outputs to make although no operand asks for them.
    """
    operation = plan_class.operation
    options = normalized(operation, options)
    key = (plan_class, options, wanted, *map(signature, inputs))
    executable = PLANS.get(key)
    if executable is None:
        executable = PLANS.get_or_build(key, functools.partial(_build, plan_class, inputs, options, wanted))
    check_call(operation, operation.inputs, inputs)
    return executable


def given_inputs(operation: Operation, inputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The inputs that are there, by name."""
    named = zip(operation.inputs, inputs, strict=True)
    return {operand.name: tensor for operand, tensor in named if tensor is not None}


def normalized(operation: Operation, options: tuple[Any, ...]) -> tuple[int, ...]:
    """Option values as plain ints: a key must not take True or 1.0 for 1. Plans are made for legal ones alone."""
    if all(type(value) is int for value in options):
        return options
    return tuple(
        option.normalize(operation.name, value) for option, value in zip(operation.options, options, strict=True)
    )


def _build(
    plan_class: type[Plan], inputs: tuple[Tensor | None, ...], options: tuple[int, ...], wanted: frozenset[str]
) -> Executable:
    operation = plan_class.operation
    check_target(plan_class.target)
    given = given_inputs(operation, inputs)
    problem = validate(
        operation,
        [Sample.of(given.get(operand.name)) for operand in operation.operands],
        {
            option.name: option.normalize(operation.name, value)
            for option, value in zip(operation.options, options, strict=True)
        },
        plan_class.supported_channels(),
        wanted,
    )
    check_call(operation, operation.inputs, inputs)  # before anything is compiled for a call that cannot run
    return Executable(problem, select_backend(operation, plan_class.target, problem.device))


def call(
    plan_class: type[Plan],
    inputs: tuple[Tensor | None, ...],
    current_stream: object,
    options: tuple[int, ...] = (),
    wanted: frozenset[str] = frozenset(),
) -> Any:
    """Run an operation on ``inputs`` with a cached plan and newly allocated outputs; see :func:`find_executable`."""
    if torch.compiler.is_compiling():
        return _call_in_graph(plan_class, inputs, current_stream, options, wanted)
    executable = find_executable(plan_class, inputs, options, wanted)
    stream = streams.stream_handle(current_stream, executable.problem.device)
    return executable.run(executable.allocate(inputs, stream), stream, foreign=inputs)


def _call_in_graph(
    plan_class: type[Plan],
    inputs: tuple[Tensor | None, ...],
    current_stream: object,
    options: tuple[int, ...],
    wanted: frozenset[str],
) -> Any:
    """A call that ``torch.compile`` traces: the custom operator of :mod:`cudnn_fused.torch_ops`."""
    operation = plan_class.operation
    if current_stream is not None:
        raise ValueError(f"{operation.name}: current_stream must be None under torch.compile, which chooses the stream")
    options = normalized(operation, options)
    made = OPERATORS[operation.name](
        *inputs, *options, bool(wanted), plan_class.target.name if plan_class.target else ""
    )
    present = operation.written_for(given_inputs(operation, inputs), wanted)
    there = [name for name in operation.returns if name in present]
    found = dict(zip(there, made, strict=True))
    return Result(operation.returns, [found.get(name) for name in operation.returns])


# --- one implementation, three names -------------------------------------------------------------------------------

PlanType = TypeVar("PlanType", bound=Plan)
Function = TypeVar("Function", bound=Callable[..., Any])


def for_target(plan_class: type[PlanType], target: Target) -> type[PlanType]:
    """The same class for one GPU architecture alone, named after it.

    The SM100 names mirror an existing API, so they lack what the operation's table calls an extension.
    """
    name = f"{plan_class.__name__}{target.name.capitalize()}"
    extensions = plan_class.operation.extensions if target is SM100 else frozenset()
    members = {
        "target": target,
        "__doc__": f"{plan_class.__name__} on {target.name} GPUs alone.\n\n{inspect.getdoc(plan_class)}",
        "__module__": plan_class.__module__,
        "__init__": _without(extensions, plan_class.__init__),
        "execute": _without(extensions, plan_class.execute),  # type: ignore[attr-defined]
        "call": classmethod(_without(extensions, plan_class.call.__func__)),  # type: ignore[attr-defined]
    }
    return type(name, (plan_class,), members)  # type: ignore[return-value]


def function_of(plan_class: type[Plan], name: str) -> Callable[..., Any]:
    """``plan_class.call`` as a function called ``name``."""
    method = plan_class.call  # type: ignore[attr-defined]

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return function


def _without(extensions: frozenset[str], function: Function) -> Function:
    """``function`` with the keyword-only parameters of ``extensions`` taken from its signature."""
    full = inspect.signature(function)
    removed = {name for name in full.parameters if name.removeprefix("sample_") in extensions}
    if not removed:
        return function

    @functools.wraps(function)
    def narrowed(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in removed:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
        return function(*args, **kwargs)

    kept = [parameter for name, parameter in full.parameters.items() if name not in removed]
    narrowed.__signature__ = full.replace(parameters=kept)  # type: ignore[attr-defined]
    return narrowed  # type: ignore[return-value]
