"""The declaration of an operation: its operands, channels and options, and the checks that follow from them.

Every operation is one :class:`Operation`. Validation, cache keys, output allocation, the order of arguments and the
tables in ``docs/api.md`` are derived from it; nothing about an operand is said anywhere else.
"""

from __future__ import annotations

import ast
import enum
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from cudnn_fused.errors import OperandTypeError
from cudnn_fused.problem import Problem
from cudnn_fused.types import BF16, ELEMENT_BYTES, ceil64

if TYPE_CHECKING:
    from cudnn_fused.kernels.lowering import Computation

NO_OPTIONS = {"P": 0, "Z": 0, "O": 0}  # extents that options set: history, absent zero frames, omitted zero planes
HISTORY_FRAMES = (0, 1, 2)  # a 3x3x3 causal convolution looks back two frames


class Role(enum.Enum):
    """What an operation does with an operand."""

    INPUT = "in"
    OUTPUT = "out"
    SCRATCH = "scratch"


class Shape:
    """A shape rule such as ``"N, min(2, T+P), H, W, C"``: a tuple expression over named extents."""

    _FUNCTIONS: Mapping[str, Any] = {"__builtins__": {}, "min": min, "ceil64": ceil64}

    def __init__(self, rule: str) -> None:
        elements = ast.parse(f"({rule},)", mode="eval").body.elts  # type: ignore[attr-defined]
        self.terms: tuple[str, ...] = tuple(ast.unparse(element).replace(" ", "") for element in elements)
        self.symbols: tuple[tuple[int, str], ...] = tuple(
            (axis, element.id) for axis, element in enumerate(elements) if isinstance(element, ast.Name)
        )
        self._code: CodeType = compile(f"({rule},)", f"<shape {rule}>", "eval")

    @property
    def rank(self) -> int:
        return len(self.terms)

    def __str__(self) -> str:
        return f"[{', '.join(term.replace(',', ', ') for term in self.terms)}]"

    def evaluate(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape, given a value for every name in the rule; those that options set are 0 unless given."""
        shape: tuple[int, ...] = eval(self._code, dict(self._FUNCTIONS), {**NO_OPTIONS, **extents})
        return shape


@dataclass(frozen=True)
class Operand:
    """One tensor of an operation. All are BF16.

    ``requires`` names an operand without which this one is refused; ``required_by`` names one that makes this one
    mandatory; ``asked_by`` is the flag of a function that asks for an optional output. ``alignment`` is that of the
    data pointer in bytes. A ``strided`` operand may have any strides, all others are contiguous (the stride of an axis
    of extent 1 is free). An ``extension`` goes beyond the API that the ``Sm100`` names mirror, which therefore do not
    have it; it is given by keyword alone.
    """

    name: str
    shape: Shape
    role: Role = Role.INPUT
    optional: bool = False
    alignment: int = 16
    strided: bool = False
    requires: str | None = None
    required_by: str | None = None
    asked_by: str = ""
    extension: bool = False
    hint: str = ""
    meaning: str = ""

    @property
    def written(self) -> bool:
        return self.role is not Role.INPUT


@dataclass(frozen=True)
class Option:
    """A whole-number parameter of an operation that is fixed when a plan is made."""

    name: str
    choices: tuple[int, ...]
    default: int = 0
    extension: bool = False
    meaning: str = ""
    symbol: str = ""  # the name of its value in shape rules

    def normalize(self, operation: str, value: object) -> int:
        """``value`` as an int: anything with ``__index__`` that is one of the choices, but no bool.

        Raises OperandTypeError, which is a ValueError too, for what is no whole number, and ValueError for a wrong one.
        """
        allowed = ", ".join(map(str, self.choices))
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype is torch.bool):
            raise OperandTypeError(f"{operation}: {self.name} must be one of {allowed}, got {value!r}")
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise OperandTypeError(f"{operation}: {self.name} must be one of {allowed}, got {value!r}") from None
        if number not in self.choices:
            raise ValueError(f"{operation}: {self.name} must be one of {allowed}, got {value!r}")
        return number


@dataclass(frozen=True)
class ChannelRule:
    """Which channels an operation is defined for: those in ``multiples``, or ``exactly`` one combination.

    What can be run of them is for a backend to say.
    """

    multiple: int = 1
    exactly: tuple[int, ...] = ()

    def __str__(self) -> str:
        return arrows(self.exactly) if self.exactly else f"multiples of {self.multiple}"

    def allows(self, channels: tuple[int, ...]) -> bool:
        if self.exactly:
            return channels == self.exactly
        return all(extent % self.multiple == 0 for extent in channels)


@dataclass(frozen=True)
class Operation:
    """An operation: ``operands`` in the order in which ``execute`` takes them.

    ``returns`` names the outputs in the order in which a caller gets them back. ``channel_symbols`` are the extents
    that ``channels`` is the rule for. ``minimum`` is the smallest T, H and W of the input.
    """

    name: str
    summary: str
    computation: Computation
    operands: tuple[Operand, ...]
    returns: tuple[str, ...]
    channel_symbols: tuple[str, ...]
    channels: ChannelRule
    minimum: int
    options: tuple[Option, ...] = ()

    # What follows from the table. Computed at once: torch.compile cannot trace a property that is made when first used.
    inputs: tuple[Operand, ...] = field(init=False, repr=False, compare=False)
    written: tuple[Operand, ...] = field(init=False, repr=False, compare=False)  # outputs and scratch
    asked: tuple[Operand, ...] = field(init=False, repr=False, compare=False)  # optional outputs that a flag asks for
    return_positions: tuple[int, ...] = field(init=False, repr=False, compare=False)
    extensions: frozenset[str] = field(init=False, repr=False, compare=False)  # parameters the mirrored API lacks

    def __post_init__(self) -> None:
        names = [operand.name for operand in self.operands]
        parameters: tuple[Operand | Option, ...] = (*self.operands, *self.options)
        derived = {
            "inputs": tuple(operand for operand in self.operands if not operand.written),
            "written": tuple(operand for operand in self.operands if operand.written),
            "asked": tuple(operand for operand in self.operands if operand.asked_by),
            "return_positions": tuple(map(names.index, self.returns)),
            "extensions": frozenset(item.name for item in parameters if item.extension),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the way to fill a frozen dataclass

    def written_for(self, given: Collection[str], wanted: Collection[str] = ()) -> frozenset[str]:
        """Names of the outputs and scratch that go with the ``given`` inputs, and the optional ones ``wanted``."""
        return frozenset(
            operand.name
            for operand in self.written
            if not operand.optional or operand.name in wanted or operand.required_by in given
        )


# --- what is known of a tensor -------------------------------------------------------------------------------------


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


class Transformed:
    """Stands for the type of a tensor that has no memory of its own, as under ``torch.vmap``."""


def canonical_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, with those of extent-1 axes, which mean nothing, set to 0."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def signature(tensor: Any) -> tuple[Any, ...] | None:
    """What a plan depends on: two tensors with one signature may stand for each other. Absent operands give None.

    That is the shape, the strides (None if contiguous), the dtype and the device; or, alone, the type of what is no
    plain tensor or the layout of one that is not strided.
    """
    if tensor is None:
        return None
    if type(tensor) not in _TENSOR_TYPES:
        return (type(tensor),)
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    stride = None if tensor.is_contiguous() else canonical_stride(tensor)
    return (tensor.shape, stride, tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Sample:
    """The metadata of a tensor, or of something that is none. Keeps no reference to storage."""

    signature: tuple[Any, ...]
    stride: tuple[int, ...] = ()
    address: int = 0
    negated: bool = False

    @classmethod
    def of(cls, tensor: object) -> Sample | None:
        facts = signature(tensor)
        if facts is None:
            return None
        if len(facts) == 1 or facts[3].type == "meta":
            return cls(facts)
        assert isinstance(tensor, torch.Tensor)
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return cls((Transformed,))
        return cls(facts, tensor.stride(), address, tensor.is_neg())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.signature[0])

    @property
    def contiguous(self) -> bool:
        return self.signature[1] is None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.signature[3]
        return device


# --- checks --------------------------------------------------------------------------------------------------------


def validate(
    operation: Operation,
    samples: Sequence[Sample | None],
    options: Mapping[str, int],
    *,
    channels: Collection[tuple[int, ...]] | None = None,
    wanted: frozenset[str] | None = None,
) -> Problem:
    """Check the operands of ``operation`` against its declaration.

    Args:
        operation: the declaration.
        samples: the operands in table order, absent ones None.
        options: the value of every option, by name, normalized.
        channels: the combinations to which a name is limited, or None for all that the operation's rule allows.
        wanted: None if the caller brings what is written. Otherwise that will be made for it, and these are the
            optional outputs it asks for.

    Raises OperandTypeError, a TypeError and a ValueError, for what is not a BF16 tensor, and ValueError for everything
    else that does not fit.
    """
    given = {
        operand.name: sample for operand, sample in zip(operation.operands, samples, strict=True) if sample is not None
    }
    _check_presence(
        operation, frozenset(given) | (operation.written_for(given, wanted) if wanted is not None else set())
    )
    for operand in operation.operands:
        if operand.name in given:
            _check_tensor(operation, operand, given[operand.name])
    extents = bind_extents(operation, given, options)
    _check_extents(operation, extents, channels)
    _check_history(operation, given, extents, options)
    for operand in operation.operands:
        if operand.name in given:
            _check_placement(operation, operand, given, operand.shape.evaluate(extents))
    present = frozenset(given) | (operation.written_for(given, wanted) if wanted is not None else set())
    return Problem(operation, extents, present, dict(options), given[operation.operands[0].name].device)


def _check_presence(operation: Operation, present: frozenset[str]) -> None:
    for operand in operation.operands:
        if operand.name in present:
            if operand.requires and operand.requires not in present:
                raise ValueError(f"{operation.name}: {operand.name} was given without {operand.requires}")
        elif operand.required_by in present:
            raise ValueError(f"{operation.name}: {operand.required_by} needs {operand.name}, which was not given")
        elif not operand.optional:
            raise OperandTypeError(f"{operation.name}: {operand.name} must be a torch.Tensor, got None")


def arrows(channels: tuple[int, ...]) -> str:
    """A combination of channels as it is written: 160->320."""
    return "->".join(map(str, channels))


def _check_tensor(operation: Operation, operand: Operand, sample: Sample) -> None:
    name = f"{operation.name}: {operand.name}"
    if len(sample.signature) == 1:
        kind = sample.signature[0]
        if isinstance(kind, torch.layout):
            raise ValueError(f"{name} must be a dense strided tensor, got layout {kind}")
        if kind is Transformed:
            raise OperandTypeError(transformed(operation, operand))
        raise OperandTypeError(f"{name} must be a plain torch.Tensor, got {kind.__module__}.{kind.__qualname__}")
    _, _, dtype, device = sample.signature
    if dtype is not BF16:
        raise OperandTypeError(f"{name} must have dtype torch.bfloat16, got {dtype}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must hold data on a CPU or CUDA device, got device {device}")
    if sample.negated:
        raise ValueError(negated(operation, operand))
    if len(sample.shape) != operand.shape.rank:
        raise ValueError(
            f"{name} must have {operand.shape.rank} dimensions {operand.shape}, got shape {list(sample.shape)}"
            f"{operand.hint and '; ' + operand.hint}"
        )


def bind_extents(operation: Operation, given: Mapping[str, Any], options: Mapping[str, int]) -> dict[str, int]:
    """The value of every extent name: the first of the ``given`` operands that shows a bare name decides it.

    ``given`` maps operand names to anything with a ``shape``.
    """
    extents: dict[str, int] = {}
    for operand in operation.operands:
        if operand.name in given:
            for axis, symbol in operand.shape.symbols:
                extents.setdefault(symbol, given[operand.name].shape[axis])
    for option in operation.options:
        if option.symbol:
            extents.setdefault(option.symbol, options[option.name])
    return {**NO_OPTIONS, **extents}


def _check_extents(
    operation: Operation, extents: Mapping[str, int], supported: Collection[tuple[int, ...]] | None
) -> None:
    for symbol, extent in extents.items():
        least = operation.minimum if symbol in "THW" else 0 if symbol in NO_OPTIONS else 1
        if symbol == "T":
            least = max(least - extents["Z"], 1)
        if extent < least:
            raise ValueError(f"{operation.name}: input extent {symbol} must be at least {least}, got {extent}")
    channels = tuple(extents[symbol] for symbol in operation.channel_symbols)
    if not operation.channels.allows(channels) or (supported is not None and channels not in supported):
        listed = str(operation.channels) if supported is None else ", ".join(map(arrows, supported))
        raise ValueError(f"{operation.name}: channels {arrows(channels)} are not supported; supported are {listed}")


def _check_history(
    operation: Operation, given: Mapping[str, Sample], extents: Mapping[str, int], options: Mapping[str, int]
) -> None:
    if "previous" not in given:
        return
    frames = extents["P"]
    if frames not in HISTORY_FRAMES[1:]:
        raise ValueError(f"{operation.name}: previous must contain one or two frames, got {frames}")
    if options.get("history_frames", 0) not in (0, frames):
        raise ValueError(
            f"{operation.name}: previous holds {frames} frames but history_frames is {options['history_frames']}"
        )


def _check_placement(
    operation: Operation, operand: Operand, given: Mapping[str, Sample], expected: tuple[int, ...]
) -> None:
    sample, first = given[operand.name], operation.operands[0]
    name = f"{operation.name}: {operand.name}"
    if sample.shape != expected:
        raise ValueError(
            f"{name} shape mismatch: it must have shape {list(expected)} = {operand.shape}, got {list(sample.shape)}"
            f"{operand.hint and '; ' + operand.hint}"
        )
    if not operand.strided and not sample.contiguous:
        raise ValueError(f"{name} must be contiguous, got strides {list(sample.stride)} for shape {list(expected)}")
    if sample.device != given[first.name].device:
        raise ValueError(
            f"{name} must be on {given[first.name].device}, where {first.name} is, but is on {sample.device}"
        )
    if sample.address % operand.alignment:
        raise ValueError(misaligned(operation, operand, sample.address))


def negated(operation: Operation, operand: Operand) -> str:
    """The message about a view whose sign PyTorch has not applied yet."""
    return f"{operation.name}: {operand.name} is a lazily negated view; pass {operand.name}.resolve_neg()"


def transformed(operation: Operation, operand: Operand) -> str:
    """The message about a tensor that a function transform has wrapped."""
    return (
        f"{operation.name}: {operand.name} has no memory of its own: the operation cannot run under torch.vmap or "
        "another torch.func transform; give it the whole batch as N"
    )


def misaligned(operation: Operation, operand: Operand, address: int) -> str:
    """The message about a data pointer that is not aligned as the operand asks."""
    return (
        f"{operation.name}: the data pointer of {operand.name} must be {operand.alignment}-byte aligned, "
        f"got {address:#x}"
    )


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from the first to past the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * ELEMENT_BYTES
