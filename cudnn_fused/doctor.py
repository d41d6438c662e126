"""``python -m cudnn_fused.doctor``: is this machine able to run the kernels, and are their results right?

With a GPU that has kernels, every operation runs on small shapes and is compared with the reference on the CPU bit for
bit. On SM100 and SM103 that is done for both ways of loading the taps along W, and which of them is right is remembered
for the model of the GPU (:mod:`cudnn_fused.verdicts`). Without such a GPU one kernel is compiled for one.

The exit status is 0 if nothing was found wrong.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_fused import targets, verdicts
from cudnn_fused.backends import Backend, allocate_workspace, kernels_for
from cudnn_fused.targets import SM100, Target
from cudnn_fused.testing.agreement import against_reference
from cudnn_fused.testing.cases import Case, Operands, Skip, make_inputs, make_outputs, make_problem

PACKAGES = ("torch", targets.DSL_PACKAGE, "apache-tvm-ffi", "cuda-python")
ISSUES = "the project's issue tracker"

# Two tiles with a tail; two blocks of output channels; several tiles of output channels; every kind of epilogue.
CASES = (
    Case("conv3d_raw", 1, 2, 2, 129, (160, 160), leading_zero_frames=1),
    Case("conv3d_raw", 2, 1, 3, 5, (320, 320)),
    Case("conv3d_raw", 1, 1, 3, 5, (640, 640)),
    Case("conv3d_rmsnorm_silu", 1, 1, 3, 5, (160, 160)),
    Case("conv3d_rmsnorm_silu_pad", 1, 2, 13, 29, (160, 320), skip=Skip.BIASED, history=1),
    Case("conv3d_bias_residual_pad", 1, 2, 3, 5, (320, 640), skip=Skip.PLAIN),
    Case("causal_conv3d_with_cache", 1, 2, 3, 5, (12, 160), history=2),
    Case("rmsnorm_silu_pad", 1, 2, 3, 5, (640,), skip=Skip.BIASED, history=2, input_bias=True),
)
SHARED, ALIGNED, ONLY = "shared taps", "aligned taps", ""

Running = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""A context in which kernels are compiled for tensors and launched on them."""


@dataclass(frozen=True)
class Line:
    """What became of one case with one backend."""

    case: Case
    way: str
    faults: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        channels = "->".join(map(str, self.case.channels))
        shape = "x".join(map(str, self.case.result_extents))
        return (
            f"{self.case.variant:26} {channels:9} {shape:11} {self.way:13} {self.seconds:6.1f} s  "
            f"{'; '.join(self.faults) or 'agrees'}"
        )


# --- the examination -----------------------------------------------------------------------------------------------


def examine(case: Case, way: str, kernels: Backend, device: torch.device, running: Running) -> Line:
    """Run a case on integers and compare the results with the reference."""
    began = time.perf_counter()
    inputs, outputs = make_inputs(case, "cpu", integers=True), make_outputs(case, "cpu")
    operands: Operands = {name: tensor.to(device, copy=True) for name, tensor in {**inputs, **outputs}.items()}
    try:
        _launch(case, kernels, operands, running)
        results = {name: operands[name].cpu() for name in outputs}
        faults = against_reference(case, {**inputs, **results}, outputs)
    except Exception as error:  # whatever it is, the other lines are wanted as well
        faults = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return Line(case, way, tuple(faults), time.perf_counter() - began)


def _launch(case: Case, kernels: Backend, operands: Operands, running: Running) -> None:
    tensors = [operands.get(operand.name) for operand in case.operation.operands]
    problem = make_problem(case, operands)
    stream = 0
    if problem.device.type == "cuda":
        stream = torch.cuda.current_stream(problem.device).cuda_stream
    with running([tensor for tensor in tensors if tensor is not None]):
        program = kernels.compile(problem)
        program(tensors, allocate_workspace(program, problem.device), stream)
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)


def examine_all(
    ways: dict[str, Backend], device: torch.device, running: Running, cases: Iterable[Case] = CASES
) -> list[Line]:
    """Every case with every backend; lines are printed as they come."""
    lines = []
    for case in cases:
        for way, kernels in ways.items():
            lines.append(examine(case, way, kernels, device, running))
            print(lines[-1], flush=True)
    return lines


def right_way(lines: Sequence[Line]) -> bool | None:
    """Whether taps may share their pixels; None if no way gave right results throughout."""
    for way in (SHARED, ALIGNED):
        of_way = [line for line in lines if line.way == way]
        if of_way and not any(line.faults for line in of_way):
            return way == SHARED
    return None


# --- the report ----------------------------------------------------------------------------------------------------


def versions() -> list[str]:
    """What is installed, a line each."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return [*lines, f"NVIDIA driver: {driver_version()}"]


def driver_version() -> str:
    """The CUDA version that the installed driver supports."""
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
    except Exception as error:  # there may be no bindings, and with no driver they raise one of several errors
        return f"none ({type(error).__name__})"
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if status == 0 and version else "none"


def conclude(target: Target, model: str, lines: Sequence[Line]) -> int:
    """Print what follows from the lines, remember it, and return the exit status."""
    wrong = [line for line in lines if line.faults]
    status = int(bool(wrong))
    if target is SM100:
        shared = right_way(lines)
        if shared is None:
            print(f"Neither way of loading taps is right throughout on {model}; nothing is remembered.")
        else:
            print(f"Verdict for {model}: {SHARED if shared else ALIGNED}.")
            problem = verdicts.remember(model, shared_taps=shared)
            print(f"It could not be kept: {problem}" if problem else f"Kept in {verdicts.path()}.")
            status = int(any(line.faults for line in wrong if line.way == (SHARED if shared else ALIGNED)))
    if wrong:
        print(f"{len(wrong)} of {len(lines)} lines disagree. Please report this whole output to {ISSUES}.")
    else:
        print("All results are right.")
    return status


def examine_gpu(device: torch.device) -> int:
    """Examine a GPU. Returns the exit status."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    target = targets.target_of(capability)
    print(f"{device}: {name}, compute capability {capability[0]}.{capability[1]}")
    if target is None:
        print("There are no kernels for it; the arch-neutral names run the reference on it.")
        return cross_compile()
    try:
        kernels = kernels_for(target)
    except NotImplementedError as error:
        print(f"{error}")
        return 1
    ways: dict[str, Backend] = {ONLY: kernels} if kernels else {}
    if target is SM100:
        from cudnn_fused.kernels.sm100 import Sm100Kernels

        ways = {SHARED: Sm100Kernels(shared_taps=True), ALIGNED: Sm100Kernels(shared_taps=False)}
    return conclude(target, name, examine_all(ways, device, lambda tensors: contextlib.nullcontext()))


def cross_compile(arch: str = "sm_100a") -> int:
    """Compile one kernel without a GPU for it. Returns the exit status."""
    try:
        targets.check_dsl()
        from cudnn_fused.testing.ptx import targeting

        began = time.perf_counter()
        with targeting(arch):
            _compile_one(arch)
    except Exception as error:  # a broken installation fails in many ways
        print(f"Compiling a kernel for {arch} failed: {type(error).__name__}: {error}")
        return 1
    print(f"A kernel was compiled for {arch} in {time.perf_counter() - began:.1f} s.")
    return 0


def _compile_one(arch: str) -> None:
    from cudnn_fused.kernels.launching import Machine
    from cudnn_fused.kernels.sm100 import Sm100Kernels

    case = CASES[0]
    operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
    Sm100Kernels(Machine(arch, 1)).compile(make_problem(case, operands))


def main() -> int:
    for line in versions():
        print(line)
    with torch.no_grad():
        if not torch.cuda.is_available():
            print("PyTorch finds no CUDA device; CPU tensors run the reference.")
            return cross_compile()
        return max(examine_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


if __name__ == "__main__":
    sys.exit(main())
