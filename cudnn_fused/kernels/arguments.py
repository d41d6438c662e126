"""Several run-time values as one argument of a kernel. Nothing here needs the DSL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

STATIC = {"static": True}
"""Metadata of a field of a :class:`KernelArgument` whose value is fixed when a kernel is compiled."""


class KernelArgument:
    """A base of dataclasses whose fields are run-time values: the DSL takes them apart and puts them together again."""

    def __extract_mlir_values__(self) -> list[Any]:
        return [getattr(self, name).ir_value() for name in self._dynamic()]

    def __new_from_mlir_values__(self, values: list[Any]) -> KernelArgument:
        made = {name: getattr(self, name) for name in self._static()}
        for name, value in zip(self._dynamic(), values, strict=True):
            made[name] = type(getattr(self, name))(value)
        return type(self)(**made)

    @classmethod
    def _dynamic(cls) -> list[str]:
        return [one.name for one in fields(cls) if not one.metadata]  # type: ignore[arg-type]

    @classmethod
    def _static(cls) -> list[str]:
        return [one.name for one in fields(cls) if one.metadata]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Addresses:
    """Device addresses of tensors, by operand name. Values of a running kernel."""

    names: tuple[str, ...]
    values: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        return self.values[self.names.index(name)]

    def __extract_mlir_values__(self) -> list[Any]:
        return [value.ir_value() for value in self.values]

    def __new_from_mlir_values__(self, values: list[Any]) -> Addresses:
        rebuilt = (type(old)(new) for old, new in zip(self.values, values, strict=True))
        return Addresses(self.names, tuple(rebuilt))


@dataclass(frozen=True)
class Signature:
    """The parameters of a launcher: device addresses of ``tensors``, then ``numbers`` with their types, by name.

    The one order in which the host passes values and the kernel's side takes them.
    """

    tensors: tuple[str, ...]
    numbers: Mapping[str, type] = field(hash=False)

    def placeholders(self, address: type) -> list[Any]:
        """Values of the right types to compile for."""
        return [address(0) for _ in self.tensors] + [number(1) for number in self.numbers.values()]

    def bind(self, values: Sequence[Any]) -> tuple[Addresses, dict[str, Any]]:
        """The values that a launcher was called with, by name."""
        count = len(self.tensors)
        addresses = Addresses(self.tensors, tuple(values[:count]))
        return addresses, dict(zip(self.numbers, values[count:], strict=True))
