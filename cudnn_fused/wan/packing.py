"""Parameters laid out in memory as the operations read them.

A parameter is not copied: it becomes a view of its packed form, as ``module.to(memory_format=...)`` would have it. So
whatever is written into it is in the packed form at once, whatever moves or frees it takes the packed form along, and
no second copy of a weight exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cudnn_fused.operands import Operand, ceil64
from cudnn_fused.weights import (
    pack_causal_conv3d_weight,
    pack_conv3d_weight,
    unpack_causal_conv3d_weight,
    unpack_conv3d_weight,
)


class Form(NamedTuple):
    """How an operation reads a parameter."""

    pack: Callable[[Tensor], Tensor]
    """A packed copy."""
    unpack: Callable[[Tensor, Tensor], Tensor]
    """The view of a packed tensor that holds the values of a parameter."""
    as_it_is: Callable[[Tensor], Tensor | None]
    """The parameter's own memory as a packed tensor, if its layout alone says that it is one."""


def _channels_last(weight: Tensor) -> Tensor | None:
    """A weight whose channels need no padding: its packed form is PyTorch's ``channels_last_3d``."""
    taps = weight.permute(0, 2, 3, 4, 1)
    return taps if ceil64(weight.shape[1]) == weight.shape[1] and _readable(taps) else None


def _flat(parameter: Tensor) -> Tensor | None:
    return parameter.flatten() if _readable(parameter) else None


def _readable(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % Operand.alignment == 0


CONV3D = Form(pack_conv3d_weight, lambda packed, weight: unpack_conv3d_weight(packed, weight.shape[1]), _channels_last)
CAUSAL_CONV3D = Form(pack_causal_conv3d_weight, lambda packed, _: unpack_causal_conv3d_weight(packed), lambda _: None)
VECTOR = Form(lambda vector: vector.flatten().clone(), lambda packed, vector: packed.view(vector.shape), _flat)


class PackedParameters:
    """Sees to it that parameters are laid out as the operations read them, and reads them.

    A parameter that was given other memory since (moved, loaded, assigned) is laid out again at its next use. Inference
    tensors cannot be given other memory: they are copied at every use.
    """

    def __init__(self) -> None:
        self._packed: dict[StorageWeakRef, torch.Size] = {}  # memory that was laid out here: its padding is zero

    def __reduce__(self) -> tuple[type[PackedParameters], tuple[()]]:
        return PackedParameters, ()  # a copy has its own memory

    def get(self, parameter: Tensor, form: Form) -> Tensor:
        """The packed form of ``parameter``, which afterwards is a view of it."""
        data = parameter.detach()
        packed = form.as_it_is(data)
        if packed is None:
            packed = self._known(data, form)
        if packed is None and parameter.is_inference():
            return form.pack(data)
        if packed is None:
            with torch.inference_mode(False):  # what is made here outlives the encode
                packed = form.pack(data)
                parameter.data = form.unpack(packed, data)
            alive = {memory: shape for memory, shape in self._packed.items() if not memory.expired()}
            self._packed = {**alive, StorageWeakRef(packed.untyped_storage()): packed.shape}
        return packed

    def _known(self, data: Tensor, form: Form) -> Tensor | None:
        shape = self._packed.get(StorageWeakRef(data.untyped_storage()))
        if shape is None:
            return None
        packed = torch.empty(0, dtype=data.dtype, device=data.device)
        packed.set_(data.untyped_storage(), 0, shape)
        values = form.unpack(packed, data)
        same = values.stride() == data.stride() and values.storage_offset() == data.storage_offset()
        return packed if same and values.shape == data.shape else None
