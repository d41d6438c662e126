"""What the backends of all architectures share: from a problem to compiled kernels, their arguments and a launch.

A kernel depends on channels, options and the operands present; N, T, H and W are passed at launch. Launchers are
called through TVM-FFI with addresses and numbers only.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from cuda.bindings import driver, runtime
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cudnn_fused.kernels import disk_cache
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.norm_silu_pad import NormSiluPad
from cudnn_fused.kernels.pack_c12 import PackC12
from cudnn_fused.kernels.padded_grid import HALO, PaddedGrid, too_many_pixels
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import Layout, RowFinish
from cudnn_fused.operands import ELEMENT_BYTES, Operation, Problem, arrows
from cudnn_fused.targets import Target
from cudnn_fused.weights import CAUSAL_CHANNELS, CAUSAL_PIXEL

# Operands in the order in which the kernels take their addresses.
CONV_OPERANDS = (
    "input",
    "packed_weight",
    "bias",
    "gamma",
    "residual",
    "residual_bias",
    "previous",
    "output",
    "cache_output",
    "residual_output",
)
NORM_OPERANDS = (
    "input",
    "input_bias",
    "gamma",
    "residual",
    "residual_bias",
    "previous",
    "output",
    "cache_output",
    "residual_output",
)
PACK_OPERANDS = ("input", "previous", "padded_input", "cache_output")


NORM_PAIRS = ((160, 160), (160, 320), (320, 320))
# A row of 640 channels is more than one CTA's accumulators hold: a norm behind these runs as a second kernel.
WIDE_PAIRS = ((320, 640), (640, 640))
CHANNELS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        ("conv3d_raw", "conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad", "conv3d_bias_residual_pad"),
        (*NORM_PAIRS, *WIDE_PAIRS),
    ),
    "causal_conv3d_with_cache": (CAUSAL_CHANNELS,),
    "rmsnorm_silu_pad": ((160,), (320,), (640,)),
}
"""The channels that the kernels serve."""

Launch = Callable[[Sequence["torch.Tensor | None"], int], None]
"""Run kernels on operands in table order, behind them the workspace, on a stream."""


@dataclass(frozen=True)
class KernelProgram:
    """Kernels ready to run a problem."""

    launch: Launch
    workspace_bytes: int

    def __call__(self, operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None, stream: int) -> None:
        self.launch((*operands, workspace), stream)


@dataclass(frozen=True)
class Machine:
    """Where kernels run: what they are compiled for, and how many multiprocessors share the work.

    ``model`` is the name of the device; it is empty where there is none, that is in the emulator.
    """

    arch: str
    multiprocessors: int
    model: str = ""


# --- compiling -----------------------------------------------------------------------------------------------------

_compiling = threading.Lock()


@functools.cache
def _compile(
    arch: str, build: Callable[..., Any], key: tuple[Any, ...], addresses: int, numbers: int, strides: int
) -> Any:
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def compile_it() -> Any:
        arguments = [Int64(0)] * addresses + [Int32(1)] * 4 + [Int64(1)] * strides + [Int32(1)] * numbers
        stream = make_fake_stream(use_tvm_ffi_env_stream=False)
        return cute.compile(build(*key), *arguments, stream, options=options)

    return disk_cache.get_or_compile(build, (key, addresses, numbers, strides, options), compile_it)


def compiled(arch: str, build: Callable[..., Any], *key: Any, addresses: int, numbers: int, strides: int = 0) -> Any:
    """The launcher of the kernel ``build(*key)``, loaded or compiled by whichever thread needs it first.

    It takes ``addresses`` device addresses, the four extents of the padded grid, ``strides`` strides and ``numbers``
    more numbers, then the stream.
    """
    with _compiling:  # the compiler is not re-entrant
        return _compile(arch, build, key, addresses, numbers, strides)


# --- arguments -----------------------------------------------------------------------------------------------------


def row_finish(problem: Problem) -> RowFinish:
    """What an operation does with its rows, read off its operands."""
    present, names = problem.present, {operand.name for operand in problem.operation.operands}
    if "cache_output" in names and "gamma" in names:
        layout = Layout.PADDED
    elif "padded_output" in names:
        layout = Layout.BOTTOM_RIGHT
    else:
        layout = Layout.CONTIGUOUS
    return RowFinish(
        PostOps(
            problem.channels[-1],
            bias=bool({"bias", "input_bias"} & present),
            residual="residual" in present,
            residual_bias="residual_bias" in present,
            norm="gamma" in present,
        ),
        layout,
        saves_value="residual_output" in present,
        history=problem.extents["P"] if layout is Layout.PADDED else 0,
        copies_history="previous" in present and layout is Layout.PADDED,
    )


class Addresses:
    """Picks the operands that a kernel takes, in its order, out of those of an operation."""

    def __init__(self, operation: Operation, names: Sequence[str]) -> None:
        positions = {operand.name: index for index, operand in enumerate(operation.operands)}
        positions["workspace"] = len(operation.operands)
        if "output" not in positions:
            positions["output"] = positions["padded_output"]
        self.positions = tuple(positions.get(name) for name in names)

    def __call__(self, operands: Sequence[torch.Tensor | None]) -> list[int]:
        chosen = [None if position is None else operands[position] for position in self.positions]
        return [0 if tensor is None else tensor.data_ptr() for tensor in chosen]


# --- the backend ---------------------------------------------------------------------------------------------------


_thread = threading.local()


def ensure_context(device: torch.device) -> None:
    """Give this thread a context on ``device``, which is its current one, for launchers to find.

    A thread that has not used CUDA has none, and PyTorch's guard makes none for the device that is current anyway.
    """
    if getattr(_thread, "has_context", False):
        return
    (status,) = runtime.cudaSetDevice(torch.cuda.current_device())
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{device} cannot be made current: {status.name}")
    _thread.has_context = True


class Kernels:
    """A backend that runs its target's kernels.

    ``machine`` stands in for the GPU of a problem's device: kernels are then compiled for it and called on whatever
    tensors come, which is how the emulator runs them.
    """

    target: Target

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine
        self.builders: dict[str, Callable[[Problem], Launch]] = {
            "conv3d_raw": self._conv,
            "conv3d_rmsnorm_silu": self._conv,
            "conv3d_rmsnorm_silu_pad": self._conv,
            "conv3d_bias_residual_pad": self._conv,
            "causal_conv3d_with_cache": self._causal,
            "rmsnorm_silu_pad": self._norm,
        }

    def can_implement(self, problem: Problem) -> str | None:
        """None if there are kernels for the problem, otherwise the reason why not."""
        name, channels = problem.operation.name, problem.channels
        if name not in self.builders:
            return f"there is no {self.target.name} kernel for this operation"
        if channels not in CHANNELS[name]:
            listed = ", ".join(map(arrows, CHANNELS[name]))
            return (
                f"channels {arrows(channels)} are not supported by {self.target.name} kernels; supported are {listed}"
            )
        return too_many_pixels(self.grid(problem))

    def compile(self, problem: Problem) -> KernelProgram:
        """Compile what the problem needs, unless that has been done."""
        return KernelProgram(self.builders[problem.operation.name](problem), self.workspace_bytes(problem))

    @staticmethod
    def grid(problem: Problem) -> PaddedGrid:
        """The padded grid that the pixels of a problem are numbered on."""
        sizes = (problem.extents[symbol] for symbol in "NTHW")
        return PaddedGrid(*sizes) if problem.operation.minimum > 1 else PaddedGrid.around(*sizes)

    @staticmethod
    def workspace_bytes(problem: Problem) -> int:
        """Room for the bare convolution where the norm behind it is a kernel of its own."""
        if "gamma" not in problem.present or problem.channels not in WIDE_PAIRS:
            return 0
        grid = Kernels.grid(problem)
        return grid.n * grid.out_t * grid.out_h * grid.out_w * problem.channels[-1] * ELEMENT_BYTES

    def convolution(self, spec: Conv3dSpec, grid: PaddedGrid, machine: Machine) -> tuple[Any, tuple[int, ...]]:
        """The launcher of a convolution and its arguments behind the addresses."""
        raise NotImplementedError

    def machine_of(self, device: torch.device) -> Machine:
        if self.machine is not None:
            return self.machine
        properties = torch.cuda.get_device_properties(device)
        arch = self.target.arch((properties.major, properties.minor))
        return Machine(arch, properties.multi_processor_count, properties.name)

    def _launch(self, device: torch.device, launcher: Any, arguments: Sequence[int], stream: int) -> None:
        if self.machine is not None:
            launcher(*arguments, driver.CUstream(stream))
            return
        with torch.cuda.device(device):
            ensure_context(device)
            launcher(*arguments, driver.CUstream(stream))

    def _conv(self, problem: Problem) -> Launch:
        extents = problem.extents
        grid = self.grid(problem)
        finish, zeros = row_finish(problem), problem.options.get("leading_zero_frames", 0)
        if not self.workspace_bytes(problem):
            spec = Conv3dSpec(extents["Ci"], finish, leading_zero_frames=zeros)
            return self._convolution(problem, spec, grid, CONV_OPERANDS)
        # No tile is as wide as a row of so many channels: the sums go to the workspace, and the norm reads them there.
        raw = Conv3dSpec(extents["Ci"], RowFinish(PostOps(finish.channels)), leading_zero_frames=zeros)
        into_workspace = ["workspace" if name == "output" else name for name in CONV_OPERANDS]
        from_workspace = [{"input": "workspace", "input_bias": "bias"}.get(name, name) for name in NORM_OPERANDS]
        return _in_turn(
            self._convolution(problem, raw, grid, into_workspace),
            self._normalization(problem, finish, grid, from_workspace),
        )

    def _norm(self, problem: Problem) -> Launch:
        return self._normalization(problem, row_finish(problem), self.grid(problem), NORM_OPERANDS)

    def _causal(self, problem: Problem) -> Launch:
        grid, history = self.grid(problem), problem.extents["P"]
        spec = Conv3dSpec(
            CAUSAL_PIXEL,
            RowFinish(PostOps(problem.channels[-1])),
            leading_zero_frames=HALO - history,
            joins_w_taps=True,
        )
        from_packed = ["padded_input" if name == "input" else name for name in CONV_OPERANDS]
        return _in_turn(self._packing(problem, history, grid), self._convolution(problem, spec, grid, from_packed))

    # One kernel each. `names` are the operands behind the kernel's addresses; a kernel reads only those that its
    # options speak of.

    def _convolution(self, problem: Problem, spec: Conv3dSpec, grid: PaddedGrid, names: Sequence[str]) -> Launch:
        launcher, numbers = self.convolution(spec, grid, self.machine_of(problem.device))
        addresses = Addresses(problem.operation, names)

        def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
            self._launch(problem.device, launcher, (*addresses(operands), *numbers), stream)

        return launch

    def _normalization(self, problem: Problem, finish: RowFinish, grid: PaddedGrid, names: Sequence[str]) -> Launch:
        machine = self.machine_of(problem.device)
        launcher = compiled(machine.arch, NormSiluPad, finish, addresses=len(NORM_OPERANDS), numbers=1)
        numbers = (grid.n, grid.t, grid.h, grid.w, NormSiluPad(finish).blocks(grid))
        addresses = Addresses(problem.operation, names)

        def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
            self._launch(problem.device, launcher, (*addresses(operands), *numbers), stream)

        return launch

    def _packing(self, problem: Problem, history: int, grid: PaddedGrid) -> Launch:
        machine = self.machine_of(problem.device)
        launcher = compiled(machine.arch, PackC12, history, addresses=len(PACK_OPERANDS), numbers=1, strides=5)
        extents = (grid.n, grid.t, grid.h, grid.w)
        addresses = Addresses(problem.operation, PACK_OPERANDS)

        def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
            strides = operands[0].stride()  # type: ignore[union-attr]
            arguments = (*addresses(operands), *extents, *strides, machine.multiprocessors)
            self._launch(problem.device, launcher, arguments, stream)

        return launch


def _in_turn(*launches: Launch) -> Launch:
    def launch(operands: Sequence[torch.Tensor | None], stream: int) -> None:
        for one in launches:
            one(operands, stream)

    return launch
