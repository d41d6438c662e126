"""What executes a problem: the reference, or the kernels of a GPU architecture."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from cudnn_fused import reference, streams, targets
from cudnn_fused.errors import DeviceUnavailableError
from cudnn_fused.operands import Operation
from cudnn_fused.problem import Problem
from cudnn_fused.targets import Target

WORKSPACE_ALIGNMENT = 16  # bytes, as of operands


class Program(Protocol):
    """A problem made ready to run. Calling it checks nothing."""

    @property
    def workspace_bytes(self) -> int:
        """Memory that a call needs besides the operands."""

    def __call__(self, operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None, stream: int) -> None:
        """Run on ``operands`` in table order, absent ones None, with a workspace if one is needed."""


class Backend(Protocol):
    """One way to execute operations."""

    def can_implement(self, problem: Problem) -> str | None:
        """None if the problem can be compiled, otherwise the reason why not."""

    def compile(self, problem: Problem) -> Program:
        """Make the problem ready to run on its device."""


def allocate_workspace(program: Program, device: torch.device) -> torch.Tensor | None:
    """New memory for calls of ``program``, on the current stream; None if it needs none."""
    if not program.workspace_bytes:
        return None
    return torch.empty(program.workspace_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class ReferenceProgram:
    """The reference of a problem."""

    problem: Problem
    workspace_bytes: int = 0

    def __call__(self, operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None, stream: int) -> None:
        operation, device = self.problem.operation, self.problem.device
        named = zip((operand.name for operand in operation.operands), operands, strict=True)
        given = {name: tensor for name, tensor in named if tensor is not None}
        with streams.running_on(stream, device), reference.full_precision(device):
            operation.computation.reference(self.problem, given)


class ReferenceBackend:
    """Plain PyTorch, on CPU tensors and on CUDA devices without kernels."""

    def can_implement(self, problem: Problem) -> str | None:
        return problem.operation.computation.source.refusal(problem)

    def compile(self, problem: Problem) -> Program:
        return ReferenceProgram(problem)


_in_use: ContextVar[Backend | None] = ContextVar("backend", default=None)


@contextlib.contextmanager
def using(backend: Backend) -> Iterator[Backend]:
    """Plans that are compiled, and functions that are called, inside use ``backend``, whatever their tensors are on.

    Neither the device nor the DSL is looked at. A plan keeps the backend for which it was compiled. This holds for the
    thread, or the task, that entered it.
    """
    token = _in_use.set(backend)
    try:
        yield backend
    finally:
        _in_use.reset(token)


backend_in_use = _in_use.get


REFERENCE: Backend = ReferenceBackend()
KERNELS: dict[str, str] = {
    "SM90": "cudnn_fused.kernels.sm90:sm90",
    "SM100": "cudnn_fused.kernels.sm100:sm100",
}
"""Where the backend of each target that has kernels is. Kernels need the DSL, so they are imported when first used."""


@functools.cache
def _load(place: str) -> Backend:
    module, _, name = place.partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)()
    return backend


def kernels_for(target: Target) -> Backend | None:
    """The target's kernels, if there are any. Raises NotImplementedError without a DSL for them."""
    if target.name not in KERNELS:
        return None
    targets.check_dsl()
    return _load(KERNELS[target.name])


def check_target(target: Target | None) -> None:
    """What can be refused before any operand is looked at: names of one target need the DSL."""
    if target is not None and target.name in KERNELS and _in_use.get() is None:
        targets.check_dsl()


def names_that_serve(capability: tuple[int, int]) -> str:
    """Which public names run on a GPU, in words."""
    served = targets.target_of(capability)
    if served is None:
        return "the names without a suffix run the reference on it"
    return f"the {served.name.capitalize()} names, and those without a suffix, serve it"


def select_backend(operation: Operation, target: Target | None, device: torch.device) -> Backend:
    """The backend for ``operation`` on ``device``: the one that is in use, see :func:`using`, if any. Otherwise:

    With ``target`` None (the arch-neutral names) that is the kernels for the device, or the reference where there are
    none. With a target it is that target's kernels or an error.

    Raises:
        DeviceUnavailableError: a target was asked for and there is no CUDA device.
        ValueError: a target was asked for and the tensors are on the CPU.
        NotImplementedError: the GPU is not one the target serves, the DSL is absent or too old, or the target has no
            kernels.
    """
    chosen = _in_use.get()
    if chosen is not None:
        return chosen
    if target is None:
        if device.type != "cuda":
            return REFERENCE
        served = targets.target_of(targets.capability_of(device))
        return (kernels_for(served) if served else None) or REFERENCE
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(f"{operation.name}: {target.name} needs a CUDA device, and none is available")
    if device.type != "cuda":
        raise ValueError(f"{operation.name}: {target.name} needs CUDA tensors, got tensors on {device}")
    capability = targets.capability_of(device)
    if not target.serves(capability):
        served_by = " or ".join(f"{major}.{minor}" for (major, minor), _ in target.archs)
        raise NotImplementedError(
            f"{operation.name}: {target.name} kernels need compute capability {served_by}; "
            f"{device} ({torch.cuda.get_device_name(device)}) has {capability[0]}.{capability[1]}: "
            f"{names_that_serve(capability)}"
        )
    kernels = kernels_for(target)
    if kernels is None:
        raise NotImplementedError(f"{operation.name}: there are no {target.name} kernels yet")
    return kernels
