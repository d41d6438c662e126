"""The backend of a GPU architecture: compiled kernels, their arguments, and launches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from cuda.bindings import driver, runtime

from cudnn_fused.kernels.compiling import DeviceSpec, compiled
from cudnn_fused.kernels.conv.host import Conv3dKernel
from cudnn_fused.kernels.conv.select import Tiling
from cudnn_fused.kernels.lowering import WORKSPACE, Call, ConvCall, Lowered, RowsCall
from cudnn_fused.kernels.norm import RowsKernel
from cudnn_fused.kernels.occupancy import resident_clusters
from cudnn_fused.kernels.pack import PackC12
from cudnn_fused.problem import Problem
from cudnn_fused.targets import Target

Tensors: TypeAlias = Sequence["torch.Tensor | None"]

_thread = threading.local()


def ensure_context(device: torch.device) -> None:
    """Make sure that this thread has a CUDA context on ``device``, its current device. Launchers need one.

    A thread that has not used CUDA has no context, and PyTorch's guard creates none for the device that is current.
    """
    if getattr(_thread, "has_context", False):
        return
    (status,) = runtime.cudaSetDevice(torch.cuda.current_device())
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{device} cannot be made current: {status.name}")
    _thread.has_context = True


@functools.cache
def device_spec(target: Target, device: torch.device) -> DeviceSpec:
    """The properties of a GPU. They do not change, so the driver is asked once."""
    with torch.cuda.device(device):
        ensure_context(device)
        properties = torch.cuda.get_device_properties(device)
        clusters = resident_clusters(properties.multi_processor_count)
    arch = target.arch((properties.major, properties.minor))
    return DeviceSpec(arch, properties.multi_processor_count, properties.name, clusters)


class Program:
    """A problem made ready to run: launchers with the places of their tensors and their numbers."""

    def __init__(self, problem: Problem, workspace_bytes: int, launches: Sequence[Launch], *, guard: bool) -> None:
        self.device, self.workspace_bytes = problem.device, workspace_bytes
        self.launches, self.guard = tuple(launches), guard

    def __call__(self, operands: Tensors, workspace: torch.Tensor | None, stream: int) -> None:
        """Run on operands in table order, absent ones None. Checks nothing."""
        if not self.guard:
            self.launch(operands, workspace, stream)
            return
        with torch.cuda.device(self.device):
            ensure_context(self.device)
            self.launch(operands, workspace, stream)

    def launch(self, operands: Tensors, workspace: torch.Tensor | None, stream: int) -> None:
        handle = driver.CUstream(stream)
        for launch in self.launches:
            launch(handle, (*operands, workspace))


class Launch:
    """One kernel call: its launcher, the places of its tensors among the operands, and its numbers."""

    def __init__(self, launcher: Any, places: Sequence[int | None], numbers: Sequence[int]) -> None:
        self.launcher, self.places, self.numbers = launcher, tuple(places), tuple(numbers)

    def __call__(self, stream: Any, tensors: Tensors) -> None:
        self.launcher(stream, *self.addresses(tensors), *self.numbers)

    def addresses(self, tensors: Tensors) -> list[int]:
        chosen = [None if place is None else tensors[place] for place in self.places]
        return [0 if tensor is None else tensor.data_ptr() for tensor in chosen]


class StridedLaunch(Launch):
    """A call that takes the strides of its first tensor, too, before its last number."""

    def __call__(self, stream: Any, tensors: Tensors) -> None:
        strides = tensors[self.places[0]].stride()  # type: ignore[index, union-attr]
        self.launcher(stream, *self.addresses(tensors), *self.numbers[:-1], *strides, self.numbers[-1])


class GpuBackend:
    """Runs operations on the kernels of one architecture.

    ``convolution`` is its kernel class, ``tiling_of`` says which tiles there are for a device. ``device`` stands in for
    the GPU of a problem: kernels are then compiled for it and called on whatever tensors come, which is how an emulator
    runs them. With ``all_tiles`` every tile that another shape may choose is compiled along with the one that is
    needed, so that no later shape has to wait.
    """

    def __init__(
        self,
        target: Target,
        convolution: type[Conv3dKernel],
        tiling_of: Callable[[DeviceSpec], Tiling[Any]],
        device: DeviceSpec | None = None,
        *,
        all_tiles: bool = True,
    ) -> None:
        self.target, self.convolution, self.tiling_of, self.device = target, convolution, tiling_of, device
        self.all_tiles = all_tiles

    def can_implement(self, problem: Problem) -> str | None:
        """Why the kernels cannot serve a problem, or None if they can."""
        refusal = problem.operation.computation.source.refusal(problem)
        if refusal:
            return refusal
        tiling, lowered = self.lower(problem)
        reasons = (self.reason(call, tiling) for call in lowered.calls)
        return lowered.can_implement() or next(filter(None, reasons), None)

    def lower(self, problem: Problem) -> tuple[Tiling[Any], Lowered]:
        """The tiles of the problem's device, and the kernel calls that they admit."""
        tiling = self.tiling_of(self.device_of(problem.device))
        return tiling, problem.operation.computation.lower(problem, tiling.can_implement)

    def reason(self, call: Call, tiling: Tiling[Any]) -> str | None:
        """Why no kernel serves a call, or None if one does."""
        if isinstance(call, ConvCall):
            return tiling.can_implement(call.spec)
        return RowsKernel.can_implement(call.epilogue) if isinstance(call, RowsCall) else None

    def compile(self, problem: Problem) -> Program:
        """Compile what the problem needs, unless that has been done. Raises ValueError for what cannot be served."""
        reason = self.can_implement(problem)
        if reason:
            raise ValueError(f"{problem.operation.name}: {reason}")
        tiling, lowered = self.lower(problem)
        device = self.device_of(problem.device)
        places = {operand.name: place for place, operand in enumerate(problem.operation.operands)}
        places[WORKSPACE] = len(places)
        launches = [self.launch_of(call, tiling, device, places) for call in lowered.calls]
        return Program(problem, lowered.workspace_bytes, launches, guard=self.device is None)

    def device_of(self, device: torch.device) -> DeviceSpec:
        return device_spec(self.target, device) if self.device is None else self.device

    def launch_of(self, call: Call, tiling: Tiling[Any], device: DeviceSpec, places: dict[str, int]) -> Launch:
        """A kernel call with its compiled launcher."""
        grid = call.grid
        extents = (grid.n, grid.t, grid.h, grid.w)
        if isinstance(call, ConvCall):
            for tile in tiling.candidates(call.spec) if self.all_tiles else ():
                compiled(device.arch, self.convolution, call.spec, tile, call.input, call.weight)
            tile, split, clusters = tiling.choose(call.spec, grid, device.clusters)
            key = (self.convolution, call.spec, tile, call.input, call.weight)
            return self.bound(device, key, places, (*extents, split, clusters))
        if isinstance(call, RowsCall):
            key = (RowsKernel, call.epilogue, call.input, grid.window, grid.absent_frames)
            return self.bound(device, key, places, (*extents, RowsKernel(*key[1:]).blocks(grid)))
        key = (PackC12, call.history, call.input, call.previous, call.padded, call.cache)
        return self.bound(device, key, places, (*extents, device.multiprocessors), StridedLaunch)

    def bound(
        self,
        device: DeviceSpec,
        key: tuple[Any, ...],
        places: dict[str, int],
        numbers: tuple[int, ...],
        launch: type[Launch] = Launch,
    ) -> Launch:
        kernel, *arguments = key
        launcher = compiled(device.arch, kernel, *arguments)
        tensors = kernel(*arguments).signature.tensors
        return launch(launcher, [places.get(name) for name in tensors], numbers)
