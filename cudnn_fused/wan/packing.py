"""Parameters in the form that the operations read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cudnn_fused.weights import pack_conv3d_weight

ALIGNMENT = 16  # bytes; what every operand has at least
CHUNK_CHANNELS = 64  # packed weights have a multiple of it
LAYOUT = torch.channels_last_3d

Pack = Callable[[torch.Tensor], torch.Tensor]


class PackedParameters:
    """Parameters as operands: views where the memory of the parameter fits, else copies for one encode.

    No copy outlives the encode that made it. Whatever wrote to a parameter, moved it or replaced it between two encodes
    has therefore taken effect, and nothing but the parameters holds memory between them.
    """

    def __init__(self) -> None:
        self._operands: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def __reduce__(self) -> tuple[type[PackedParameters], tuple[()]]:
        return PackedParameters, ()

    @contextmanager
    def for_one_encode(self) -> Iterator[bool]:
        """Within it, every parameter is packed at most once. Can be nested; yields whether this is the outermost."""
        if self._operands is not None:
            yield False
            return
        self._operands = {}
        try:
            yield True
        finally:
            self._operands = None

    def get(self, parameter: torch.Tensor, pack: Pack) -> torch.Tensor:
        """``pack(parameter)``, where ``pack`` may return a view. To be called within :meth:`for_one_encode`."""
        assert self._operands is not None
        found = self._operands.get(id(parameter))
        if found is None or found[0] is not parameter:
            found = self._operands[id(parameter)] = parameter, pack(parameter)
        return found[1]


def as_weight(weight: torch.Tensor) -> torch.Tensor:
    """``pack_conv3d_weight(weight)``, as a view if the memory of ``weight`` is in that order."""
    fits = weight.shape[1] % CHUNK_CHANNELS == 0 and weight.is_contiguous(memory_format=LAYOUT)
    if fits and weight.data_ptr() % ALIGNMENT == 0:
        return weight.detach().permute(0, 2, 3, 4, 1)
    return pack_conv3d_weight(weight)


def as_vector(parameter: torch.Tensor) -> torch.Tensor:
    """A bias or gamma as an aligned vector (memory-mapped checkpoints need not be aligned)."""
    vector = parameter.detach().flatten()
    return vector if vector.data_ptr() % ALIGNMENT == 0 else vector.clone()
