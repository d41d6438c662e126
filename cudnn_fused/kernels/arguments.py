"""Several run-time values as one argument of a kernel. Nothing here needs the DSL."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class KernelArgument:
    """A base of dataclasses whose fields are run-time values: the DSL takes them apart and puts them together again."""

    def __extract_mlir_values__(self) -> list[Any]:
        return [getattr(self, field.name).ir_value() for field in fields(self)]  # type: ignore[arg-type]

    def __new_from_mlir_values__(self, values: list[Any]) -> KernelArgument:
        named = zip(fields(self), values, strict=True)  # type: ignore[arg-type]
        return type(self)(*(type(getattr(self, field.name))(value) for field, value in named))
