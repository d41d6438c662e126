"""What an operation returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree


class Result(dict[str, "torch.Tensor | None"]):
    """The outputs of an operation, in its order: a dict by name that also unpacks and indexes like a tuple.

    ``padded, cache, value = result``, ``result[0]``, ``result["cache_output"]`` and ``result.cache_output`` all work.
    Iteration goes over the values, as unpacking needs; ``keys()``, ``items()``, ``in``, ``dict(result)`` and
    ``**result`` go by name.
    """

    __slots__ = ()

    def __init__(self, names: Iterable[str], values: Iterable[torch.Tensor | None]) -> None:
        super().__init__(zip(names, values, strict=True))

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(self.keys())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"the result has no output {name!r}; it has {', '.join(self.keys())}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self.keys()), tuple(self.values()))


def _flatten(result: Result) -> tuple[list[Any], tuple[str, ...]]:
    return list(result.values()), tuple(result.keys())


def _flatten_with_keys(result: Result) -> tuple[list[Any], tuple[str, ...]]:
    return [(_pytree.MappingKey(name), value) for name, value in result.items()], tuple(result.keys())


def _unflatten(values: Iterable[Any], names: Iterable[str]) -> Result:
    return Result(names, values)


_pytree.register_pytree_node(Result, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
