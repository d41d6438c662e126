"""Copies of a module's parameters in the form that the operations read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

Pack = Callable[[torch.Tensor], torch.Tensor]


class _Packed(NamedTuple):
    source: StorageWeakRef
    address: int
    strides: tuple[int, ...]
    version: int
    tensor: torch.Tensor


class PackedParameters:
    """Packs each parameter once, and again after it was written in place or given other data.

    A write through ``parameter.data`` leaves no trace in PyTorch: call :meth:`clear` after one. Inference tensors
    count no writes at all, so they are packed at every use.
    """

    def __init__(self) -> None:
        self._packed = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[PackedParameters], tuple[()]]:
        return PackedParameters, ()  # a copy, or what is unpickled, packs for itself

    def clear(self) -> None:
        """Forget all copies."""
        self._packed.clear()

    def get(self, parameter: torch.Tensor, pack: Pack) -> torch.Tensor:
        """``pack(parameter)``, from memory while the parameter is unchanged."""
        if parameter.is_inference():
            return pack(parameter)
        packed = self._packed.get(parameter)
        # While the storage that was packed is alive its memory is not reused, so that an equal address is that storage.
        if (
            packed is None
            or packed.version != parameter._version
            or packed.address != parameter.data_ptr()
            or packed.strides != parameter.stride()
            or packed.source.expired()
        ):
            packed = _Packed(
                StorageWeakRef(parameter.untyped_storage()),
                parameter.data_ptr(),
                parameter.stride(),
                parameter._version,
                pack(parameter),
            )
            self._packed[parameter] = packed
        return packed.tensor


def as_vector(parameter: torch.Tensor) -> torch.Tensor:
    """A bias or gamma as an aligned vector (memory-mapped checkpoints need not be aligned)."""
    return parameter.detach().flatten().clone()
