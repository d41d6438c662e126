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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from cudnn_fused import streams
from cudnn_fused.backends import (
    WORKSPACE_ALIGNMENT,
    Backend,
    Program,
    allocate_workspace,
    backend_in_use,
    check_target,
    select_backend,
)
from cudnn_fused.errors import OperandTypeError
from cudnn_fused.operands import (
    Operand,
    Operation,
    Role,
    Sample,
    Shape,
    byte_span,
    misaligned,
    negated,
    signature,
    transformed,
    validate,
)
from cudnn_fused.plan_cache import PlanCache
from cudnn_fused.problem import Problem
from cudnn_fused.targets import Target
from cudnn_fused.types import BF16
from cudnn_fused.variants import Channels, Variant

Tensor = torch.Tensor
Returned = TypeVar("Returned")

PLAN_CAPACITY = 128


class Executable:
    """A problem compiled by a backend."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self.problem = problem
        self.program: Program = backend.compile(problem)
        self._shapes = tuple(
            problem.shape(operand) if operand.written and operand.name in problem.present else None
            for operand in problem.operation.operands
        )

    def allocate(self, inputs: Sequence[Tensor | None], stream: int) -> tuple[list[Tensor | None], Tensor | None]:
        """All operands in table order, and the workspace: ``inputs``, and new memory, on ``stream``, for the rest."""
        device, given = self.problem.device, iter(inputs)
        with streams.running_on(stream, device):
            operands = [
                None
                if operand.written and shape is None
                else torch.empty(shape, dtype=BF16, device=device)
                if shape is not None
                else next(given)
                for operand, shape in zip(self.problem.operation.operands, self._shapes, strict=True)
            ]
            return operands, allocate_workspace(self.program, device)

    def run(
        self,
        operands: Sequence[Tensor | None],
        workspace: Tensor | None,
        stream: int,
        foreign: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Launch, and return the operation's outputs in the order of its results.

        ``foreign`` are the operands that may have been allocated on another stream.
        """
        self.program(operands, workspace, stream)
        streams.keep_until_done(foreign, stream, self.problem.device)
        return [operands[position] for position in self.problem.operation.return_positions]


PLANS: PlanCache[Executable] = PlanCache(PLAN_CAPACITY)
"""The plans of all functions."""

OPERATORS: dict[str, Callable[..., list[Tensor]]] = {}
"""The custom operator of every operation, by its name; :mod:`cudnn_fused.torch_ops` fills it."""


def inference_only(operation: Operation, operand: Operand) -> str:
    """The message about an operand that requires grad while grad mode is on."""
    return (
        f"{operation.name} is inference-only, but {operand.name} requires grad; "
        "call it under torch.no_grad() or torch.inference_mode()"
    )


def check_call(operation: Operation, operands: Sequence[Operand], tensors: Sequence[Tensor | None]) -> None:
    """The checks that no plan can make once and for all: gradients, and where the data lies."""
    differentiating = torch.is_grad_enabled()
    for operand, tensor in zip(operands, tensors, strict=True):
        if tensor is None:
            continue
        if differentiating and tensor.requires_grad:
            raise RuntimeError(inference_only(operation, operand))
        if tensor.is_neg():
            raise ValueError(negated(operation, operand))
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            raise OperandTypeError(transformed(operation, operand)) from None
        if address % operand.alignment:
            raise ValueError(misaligned(operation, operand, address))


WORKSPACE = Operand("workspace", Shape("B"), Role.SCRATCH)


def check_overlap(operation: Operation, tensors: Sequence[Tensor | None], workspace: Tensor | None = None) -> None:
    """Raise ValueError if something that is written, the workspace too, shares memory with any other operand."""
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + byte_span(tensor), operand)
        for operand, tensor in zip(operation.operands, tensors, strict=True)
        if tensor is not None
    ]
    if workspace is not None:
        spans.append((workspace.data_ptr(), workspace.data_ptr() + workspace.nbytes, WORKSPACE))
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

    A subclass names its ``variant``, from which its constructor, ``execute`` and ``__call__`` are made.
    """

    variant: ClassVar[Variant[Any]]

    # Parts of the variant.
    operation: ClassVar[Operation]
    target: ClassVar[Target | None]
    channels: ClassVar[tuple[Channels, ...] | None]

    if TYPE_CHECKING:

        def __init__(self, *samples: Any, **more: Any) -> None: ...
        def execute(self, *operands: Any, **more: Any) -> Any: ...
        def __call__(self, *operands: Any, **more: Any) -> Any: ...

    def __init_subclass__(cls) -> None:
        if "variant" not in vars(cls):
            return  # derived from a class that has them
        variant = cls.variant
        cls.operation, cls.target, cls.channels = variant.operation, variant.target, variant.channels
        made = {
            "__init__": variant.define_constructor(),
            "execute": variant.define_execute(),
            "__call__": variant.define_call(),
        }
        for name, method in made.items():
            method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
            setattr(cls, name, method)

    def _prepare(self, samples: Sequence[Tensor | None], options: tuple[Any, ...]) -> None:
        """What constructors do with samples and options in table order."""
        self._samples = tuple(map(Sample.of, samples))
        self._options = options
        self._executable: Executable | None = None
        self._workspace: Tensor | None = None
        self._ready = False
        self._lock = threading.Lock()

    def _make_ready(self) -> None:
        if not self._ready:
            self.compile()

    def __getstate__(self) -> dict[str, Any]:
        """A pickle holds the samples' metadata and the options; what comes out of it has to be compiled."""
        return {**self.__dict__, "_executable": None, "_workspace": None, "_ready": False, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """A copy that is compiled if this plan is. What was compiled serves both; the copy's workspace is its own."""
        twin = copy.copy(self)
        twin._executable = self._executable
        if self._ready:
            twin.compile()
        memo[id(self)] = twin
        return twin

    def check_support(self) -> bool:
        """Check the samples and the device. Returns True.

        Raises:
            TypeError: a sample is not a BF16 tensor.
            ValueError: channels, a shape, strides, a device, an alignment or a combination does not fit.
            RuntimeError: there is no CUDA device for a plan that needs one.
            NotImplementedError: the GPU or the installed CuTe DSL cannot run it.

        What this accepts can be compiled.
        """
        self._problem_and_backend()
        return True

    @property
    def workspace_bytes(self) -> int:
        """The memory that :meth:`execute` needs besides its operands. Compiles what has not been compiled."""
        with self._lock:
            return self._compiled().program.workspace_bytes

    def compile(self, workspace: Tensor | None = None) -> None:
        """Make the plan ready to execute. Raises what :meth:`check_support` raises.

        ``workspace`` is a contiguous tensor of at least ``workspace_bytes`` bytes on the device of the input, aligned
        to 16 bytes, which each execution overwrites; executions that may run at once, of one plan or of several, must
        not share one. Without it the plan allocates its own, once.
        """
        with self._lock:
            executable = self._compiled()
            if workspace is not None:
                check_workspace(executable, workspace)
                self._workspace = workspace
            elif self._workspace is None:
                self._workspace = allocate_workspace(executable.program, executable.problem.device)
            self._ready = True

    def _compiled(self) -> Executable:
        if self._executable is None:
            self._executable = Executable(*self._problem_and_backend())
        return self._executable

    def _problem_and_backend(self) -> tuple[Problem, Backend]:
        return resolve(self.variant, self._samples, self._options)

    def _execute(self, operands: tuple[Tensor | None, ...], current_stream: object) -> Any:
        """Check ``operands``, in table order, run the plan on them, and return its result."""
        executable, workspace = self._executable, self._workspace
        if executable is None or not self._ready:
            raise RuntimeError(f"{type(self).__name__}.execute() was called before compile()")
        operation = self.operation
        for operand, tensor, sample in zip(operation.operands, operands, self._samples, strict=True):
            check_against_sample(operation, operand, tensor, sample)
        check_call(operation, operation.operands, operands)
        check_overlap(operation, operands, workspace)
        stream = streams.stream_handle(current_stream, executable.problem.device)
        return self.variant.collect(executable.run(operands, workspace, stream, foreign=(*operands, workspace)))


def find_executable(
    variant: Variant[Returned],
    inputs: tuple[Tensor | None, ...],
    options: tuple[int, ...] = (),
    wanted: frozenset[str] = frozenset(),
) -> Executable:
    """The cached plan for a function call, made if it is not there, with the call's operands checked.

    Args:
        variant: the operation, and for what target.
        inputs: the operation's inputs in table order, absent ones None.
        options: the values of the operation's options, in its order.
        wanted: the optional outputs to make although no operand asks for them.
    """
    operation = variant.operation
    options = normalized(operation, options)
    key = (variant, backend_in_use(), options, wanted, *map(signature, inputs))
    executable = PLANS.get(key)
    if executable is not None:
        check_call(operation, operation.inputs, inputs)
        return executable
    given = given_inputs(operation, inputs)
    samples = [Sample.of(given.get(operand.name)) for operand in operation.operands]
    problem, backend = resolve(variant, samples, options, wanted)
    check_call(operation, operation.inputs, inputs)  # before anything is compiled for a call that cannot run
    return PLANS.get_or_build(key, functools.partial(Executable, problem, backend))


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


def resolve(
    variant: Variant[Any],
    samples: Sequence[Sample | None],
    options: tuple[Any, ...],
    wanted: frozenset[str] | None = None,
) -> tuple[Problem, Backend]:
    """The problem that samples in table order pose, and the backend for it, after all checks that need no data."""
    operation = variant.operation
    check_target(variant.target)
    values = {
        option.name: option.normalize(operation.name, value)
        for option, value in zip(operation.options, options, strict=True)
    }
    problem = validate(operation, samples, values, channels=variant.channels, wanted=wanted)
    backend = select_backend(operation, variant.target, problem.device)
    reason = backend.can_implement(problem)
    if reason is not None:
        raise ValueError(f"{operation.name}: {reason}")
    return problem, backend


def check_workspace(executable: Executable, workspace: object) -> None:
    """Raise unless ``workspace`` can be the one of a plan."""
    name = f"{executable.problem.operation.name}: workspace"
    needed, device = executable.program.workspace_bytes, executable.problem.device
    if not isinstance(workspace, Tensor):
        raise OperandTypeError(f"{name} must be a torch.Tensor, got {type(workspace).__qualname__}")
    if workspace.device != device:
        raise ValueError(f"{name} must be on {device}, but is on {workspace.device}")
    if not workspace.is_contiguous() or workspace.nbytes < needed:
        raise ValueError(f"{name} must hold {needed} contiguous bytes, got {workspace.nbytes}")
    if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise ValueError(f"{name} must be {WORKSPACE_ALIGNMENT}-byte aligned, got {workspace.data_ptr():#x}")


def call(
    variant: Variant[Returned],
    inputs: tuple[Tensor | None, ...],
    current_stream: object,
    options: tuple[int, ...] = (),
    wanted: frozenset[str] = frozenset(),
) -> Returned:
    """Run an operation on ``inputs`` with a cached plan and newly allocated outputs; see :func:`find_executable`."""
    if torch.compiler.is_compiling():
        return _call_in_graph(variant, inputs, current_stream, options, wanted)
    executable = find_executable(variant, inputs, options, wanted)
    stream = streams.stream_handle(current_stream, executable.problem.device)
    operands, workspace = executable.allocate(inputs, stream)
    return variant.collect(executable.run(operands, workspace, stream, foreign=inputs))


def _call_in_graph(
    variant: Variant[Returned],
    inputs: tuple[Tensor | None, ...],
    current_stream: object,
    options: tuple[int, ...],
    wanted: frozenset[str],
) -> Returned:
    """A call that ``torch.compile`` traces: the custom operator of :mod:`cudnn_fused.torch_ops`."""
    operation = variant.operation
    if current_stream is not None:
        raise ValueError(f"{operation.name}: current_stream must be None under torch.compile, which chooses the stream")
    options = normalized(operation, options)
    name, target = variant.key
    made = OPERATORS[name](*inputs, *options, bool(wanted), target)
    present = operation.written_for(given_inputs(operation, inputs), wanted)
    there = [name for name in operation.returns if name in present]
    found = dict(zip(there, made, strict=True))
    return variant.collect([found.get(name) for name in operation.returns])


# --- names for one target -------------------------------------------------------------------------------------------


def for_target(
    plan_class: type[Plan],
    function: Callable[..., Any],
    target: Target,
    module: str,
    channels: tuple[Channels, ...] | None = None,
    omitted: frozenset[str] = frozenset(),
) -> tuple[type[Plan], Callable[..., Any]]:
    """A class and a function like these, for one GPU architecture alone and named after it, for ``module`` to define.

    ``channels`` and ``omitted`` are those of :class:`~cudnn_fused.variants.Variant`.
    """
    variant = replace(plan_class.variant, target=target, channels=channels, omitted=omitted)
    doc = f"{plan_class.__name__} on {target.name} GPUs alone.\n\n{inspect.getdoc(plan_class)}"
    members = {"variant": variant, "__doc__": doc, "__module__": module}
    wrapper = variant.define_function(f"{function.__name__}_wrapper_{target.name.lower()}", call)
    wrapper.__doc__, wrapper.__module__ = function.__doc__, module
    return type(f"{plan_class.__name__}{target.name.capitalize()}", (Plan,), members), wrapper
