"""What executes a problem: the reference, or the kernels of a GPU architecture."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cudnn_fused import reference, streams, targets
from cudnn_fused.errors import DeviceUnavailableError
from cudnn_fused.operands import Operation, Problem
from cudnn_fused.targets import Target

Launch = Callable[[Sequence["torch.Tensor | None"], int], None]
"""Run an operation: its operands in table order (absent ones None) and a stream handle. Checks nothing."""


class Backend(Protocol):
    """One way to execute operations."""

    def supports(self, operation: Operation) -> bool:
        """Whether the operation can be run at all."""

    def compile(self, problem: Problem) -> Launch:
        """Make the problem ready to run on its device."""


class ReferenceBackend:
    """Plain PyTorch, on CPU tensors and on CUDA devices without kernels."""

    def supports(self, operation: Operation) -> bool:
        return True

    def compile(self, problem: Problem) -> Launch:
        device, names = problem.device, [operand.name for operand in problem.operation.operands]

        def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
            with streams.running_on(stream, device), reference.full_precision(device):
                given = {name: tensor for name, tensor in zip(names, operands, strict=True) if tensor is not None}
                problem.operation.computation.reference(problem, given)

        return launch


REFERENCE: Backend = ReferenceBackend()
KERNELS: dict[str, str] = {
    "SM90": "cudnn_fused.kernels.sm90:sm90",
    "SM100": "cudnn_fused.kernels.sm100:sm100",
}
"""Where the backend of each target that has kernels is. Kernels need the DSL, so they are imported when first used."""


@functools.cache
def _load(place: str) -> Backend:
    module, _, name = place.partition(":")
    return WithScratch(getattr(importlib.import_module(module), name)())


class WithScratch:
    """Kernels whose workspace is an operand."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def supports(self, operation: Operation) -> bool:
        return True

    def compile(self, problem: Problem) -> Launch:
        program = self.kernels.compile(problem)
        names = [operand.name for operand in problem.operation.operands]
        place = names.index("scratch") if "scratch" in names else None

        def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
            program(operands, None if place is None else operands[place], stream)

        return launch


def kernels_for(operation: Operation, target: Target) -> Backend | None:
    """The target's kernels for an operation, if there are any. Raises NotImplementedError without a DSL for them."""
    if target.name not in KERNELS:
        return None
    targets.check_dsl()
    kernels = _load(KERNELS[target.name])
    return kernels if kernels.supports(operation) else None


def check_target(target: Target | None) -> None:
    """What can be refused before any operand is looked at: names of one target need the DSL."""
    if target is not None and target.name in KERNELS:
        targets.check_dsl()


def names_that_serve(capability: tuple[int, int]) -> str:
    """Which public names run on a GPU, in words."""
    served = targets.target_of(capability)
    if served is None:
        return "the names without a suffix run the reference on it"
    return f"the {served.name.capitalize()} names, and those without a suffix, serve it"


def select_backend(operation: Operation, target: Target | None, device: torch.device) -> Backend:
    """The backend for ``operation`` on ``device``.

    With ``target`` None (the arch-neutral names) that is the kernels for the device, or the reference where there are
    none. With a target it is that target's kernels or an error.

    Raises:
        DeviceUnavailableError: a target was asked for and there is no CUDA device.
        ValueError: a target was asked for and the tensors are on the CPU.
        NotImplementedError: the GPU is not one the target serves, the DSL is absent or too old, or the target's
            kernel for this operation does not exist.
    """
    if target is None:
        if device.type != "cuda":
            return REFERENCE
        served = targets.target_of(targets.capability_of(device))
        return (kernels_for(operation, served) if served else None) or REFERENCE
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
    kernels = kernels_for(operation, target)
    if kernels is None:
        raise NotImplementedError(f"{operation.name}: there is no {target.name} kernel for this operation yet")
    return kernels
