"""What the runner has to know about a model and a direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """Encoding or decoding with one kind of VAE.

    Attributes:
        title: what is done, for the report.
        run: all that is compared, computed from a batch of inputs.
        part: the module of a VAE in which the time goes: what ``torch.compile`` is given. It is called once a chunk.
        fuse: replaces that part by fused operations, in place.
        compile_fused: gives what a fused part leaves to PyTorch to ``torch.compile``.
        chunks: how often :attr:`part` is called for these inputs.
    """

    title: str
    run: Callable[[Any, Tensor], Tensor]
    part: Callable[[Any], nn.Module]
    fuse: Callable[[Any], object]
    compile_fused: Callable[[Any], object]
    chunks: Callable[[Tensor], int]
