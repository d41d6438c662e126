"""What an operation returns.

A function with several outputs returns a :class:`Result` whose names and positions type checkers know: attributes,
``result["name"]`` and ``result[0]`` have the type of that output. Outputs that may be absent are ``Tensor | None``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    # A checker takes the items of a dict's iteration for its keys, unless a base says otherwise before the dict does.
    class _Unpacks(Iterable[Any]): ...

    class _UnpacksTensors(Iterable[torch.Tensor]): ...
else:

    class _Unpacks:
        __slots__ = ()

    class _UnpacksTensors:
        __slots__ = ()


class Result(_Unpacks, dict[str, "torch.Tensor | None"]):
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

    if not TYPE_CHECKING:  # a checker knows the outputs of each class below

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getitem__(name)
            except KeyError:
                raise AttributeError(f"the result has no output {name!r}; it has {', '.join(self.keys())}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self.keys()), tuple(self.values()))


class NormResult(Result):
    """A normalized convolution, and the sum before the normalization if there is one."""

    __slots__ = ()

    if TYPE_CHECKING:
        output: torch.Tensor
        residual_output: torch.Tensor | None

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["output", 0, -2]) -> torch.Tensor: ...
        @overload
        def __getitem__(self, key: Literal["residual_output", 1, -1]) -> torch.Tensor | None: ...
        @overload
        def __getitem__(self, key: slice) -> tuple[torch.Tensor | None, ...]: ...
        def __getitem__(self, key: Any) -> Any: ...


class PaddedResult(Result):
    """The padded input of the next convolution, its cache, and the value before the normalization if there is one."""

    __slots__ = ()

    if TYPE_CHECKING:
        padded_output: torch.Tensor
        cache_output: torch.Tensor
        residual_output: torch.Tensor | None

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["padded_output", "cache_output", 0, 1, -2, -3]) -> torch.Tensor: ...
        @overload
        def __getitem__(self, key: Literal["residual_output", 2, -1]) -> torch.Tensor | None: ...
        @overload
        def __getitem__(self, key: slice) -> tuple[torch.Tensor | None, ...]: ...
        def __getitem__(self, key: Any) -> Any: ...


class BottomRightResult(_UnpacksTensors, Result):
    """The padded input of the next strided convolution."""

    __slots__ = ()

    if TYPE_CHECKING:
        padded_output: torch.Tensor

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["padded_output", 0, -1]) -> torch.Tensor: ...
        @overload
        def __getitem__(self, key: slice) -> tuple[torch.Tensor, ...]: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[torch.Tensor]: ...  # type: ignore[override]


class CausalResult(_UnpacksTensors, Result):
    """A convolution, and the cache for the next chunk."""

    __slots__ = ()

    if TYPE_CHECKING:
        output: torch.Tensor
        cache_output: torch.Tensor

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["output", "cache_output", 0, 1, -1, -2]) -> torch.Tensor: ...
        @overload
        def __getitem__(self, key: slice) -> tuple[torch.Tensor, ...]: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[torch.Tensor]: ...  # type: ignore[override]


def _flatten(result: Result) -> tuple[list[Any], tuple[str, ...]]:
    return list(result.values()), tuple(result.keys())


def _flatten_with_keys(result: Result) -> tuple[list[Any], tuple[str, ...]]:
    return [(_pytree.MappingKey(name), value) for name, value in result.items()], tuple(result.keys())


def _register(kind: type[Result]) -> None:
    """Make a kind of result a PyTorch pytree, as dicts are."""

    def unflatten(values: Iterable[Any], names: Iterable[str]) -> Result:
        return kind(names, values)

    _pytree.register_pytree_node(kind, _flatten, unflatten, flatten_with_keys_fn=_flatten_with_keys)


for _kind in (Result, NormResult, PaddedResult, BottomRightResult, CausalResult):
    _register(_kind)
