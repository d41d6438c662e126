"""``python -m cudnn_fused.doctor``: is this machine able to run the kernels, and are their results right?

With a GPU that has kernels, every operation runs on small shapes and is compared with the reference on the CPU bit for
bit. On SM100 and SM103 it runs with every tile and split of the reduction that production may choose, once for each of
the two ways of loading the taps along W. Which way is right is remembered for the model of the GPU
(:mod:`cudnn_fused.hardware_quirks`). Each way is examined in a process of its own, which is ended when it does not
answer: a kernel that hangs or breaks the CUDA context does not take the other way's results with it. Without such a GPU
one kernel is compiled for one.

Progress goes to standard error; the report, one block of text to pass on, to standard output. The exit status is 0 if
nothing was found wrong with what operations will use.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cudnn_fused import hardware_quirks, targets
from cudnn_fused.backends import Backend, allocate_workspace
from cudnn_fused.selfcheck.agreement import against_reference
from cudnn_fused.selfcheck.cases import Case, Operands, Skip, make_inputs, make_outputs, make_problem
from cudnn_fused.targets import SM100, Target

if TYPE_CHECKING:
    from cudnn_fused.kernels.conv.select import Tiling

PACKAGES = ("torch", targets.DSL_PACKAGE, "apache-tvm-ffi", "cuda-python")
ISSUES = "the project's issue tracker"
BEGIN, END = "----- cudnn_fused doctor -----", "----- end of report -----"

# Tiles with a tail; two blocks of output channels; several tiles of output channels; every kind of epilogue. On one
# cluster each is several tiles in turn, so that stages and accumulators are used again.
CASES = (
    Case("conv3d_raw", 1, 3, 2, 129, (160, 160), leading_zero_frames=1),
    Case("conv3d_raw", 3, 1, 3, 5, (320, 320)),
    Case("conv3d_raw", 1, 2, 3, 5, (640, 640)),
    Case("conv3d_rmsnorm_silu", 1, 3, 3, 5, (160, 160)),
    Case("conv3d_rmsnorm_silu_pad", 1, 2, 13, 29, (160, 320), skip=Skip.BIASED, history=1),
    Case("conv3d_bias_residual_pad", 1, 2, 3, 5, (320, 640), skip=Skip.PLAIN),
    Case("causal_conv3d_with_cache", 1, 3, 3, 5, (12, 160), history=2),
    Case("rmsnorm_silu_pad", 1, 2, 3, 5, (640,), skip=Skip.BIASED, history=2, input_bias=True),
)
ALIGNED, SHARED, ONLY = "aligned taps", "shared taps", "kernels"
AS_CHOSEN = "as chosen"
PATIENCE = 180.0  # seconds without news of a process: a line takes a few, one that compiles up to 30
LAST_WORDS = 3  # lines of other output that are reported of a process that died

Running = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]
"""A context in which kernels are compiled for tensors and launched on them."""
Configurations = Sequence[tuple[str, Backend]]
"""Backends by what they choose."""


@dataclass(frozen=True)
class Line:
    """The result of one examination, or why there is none."""

    way: str
    what: str
    faults: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.way:12}  {self.what:68} {self.seconds:6.1f} s  {'; '.join(self.faults) or 'agrees'}"


# --- the examination, in a process of its own ----------------------------------------------------------------------


def described(case: Case, configuration: str) -> str:
    channels, shape = "->".join(map(str, case.channels)), "x".join(map(str, case.result_extents))
    return f"{case.variant:26} {channels:9} {shape:11} {configuration}"


def examine(
    case: Case, way: str, configuration: str, kernels: Backend, device: torch.device, running: Running
) -> Line | None:
    """Run a case on integers and compare the results with the reference.

    None if what the configuration prescribes cannot serve the operation.
    """
    began = time.perf_counter()
    inputs, outputs = make_inputs(case, "cpu", integers=True), make_outputs(case, "cpu")
    operands: Operands = {name: tensor.to(device, copy=True) for name, tensor in {**inputs, **outputs}.items()}
    try:
        reason = _launch(case, kernels, operands, running)
        if reason and configuration != AS_CHOSEN:
            return None
        results = {name: operands[name].cpu() for name in outputs}
        faults = [reason] if reason else against_reference(case, {**inputs, **results}, outputs)
    except Exception as error:  # whatever it is, the other lines are wanted as well
        faults = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return Line(way, described(case, configuration), tuple(faults), time.perf_counter() - began)


def _launch(case: Case, kernels: Backend, operands: Operands, running: Running) -> str | None:
    """Why the kernels cannot serve the case, or None if they can; then it has run."""
    tensors = [operands.get(operand.name) for operand in case.operation.operands]
    problem = make_problem(case, operands)
    reason = kernels.can_implement(problem)
    if reason:
        return reason
    stream = 0
    if problem.device.type == "cuda":
        stream = torch.cuda.current_stream(problem.device).cuda_stream
    with running([tensor for tensor in tensors if tensor is not None]):
        program = kernels.compile(problem)
        program(tensors, allocate_workspace(program, problem.device), stream)
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return None


def still_usable(device: torch.device) -> bool:
    """Whether the context has survived. After some errors of a kernel every later call fails, too."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def examine_all(
    way: str, configurations: Configurations, device: torch.device, running: Running, cases: Iterable[Case] = CASES
) -> Iterator[dict[str, Any]]:
    """Every case in every configuration that can serve it: records of what begins, of lines, and of the end."""
    for case in cases:
        for configuration, kernels in configurations:
            if configuration != AS_CHOSEN and not case.flops:
                continue  # there is no convolution to configure
            yield {"begins": described(case, configuration)}
            line = examine(case, way, configuration, kernels, device, running)
            if line is not None:
                yield {"line": dataclasses.asdict(line)}
            if line is not None and line.faults and not still_usable(device):
                yield {"begins": "everything that would have followed: the CUDA context is lost"}
                return
    yield {"ends": True}


def configurations_of(way: str, target: Target) -> Configurations:
    """What is examined in one way. Raises NotImplementedError without a DSL."""
    targets.check_dsl()
    if target is SM100:
        from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling
        from cudnn_fused.kernels.sm100 import sm100

        return _each_tile(sm100, Sm100Tiling.loading(shared_taps=way == SHARED))
    from cudnn_fused.kernels.sm90 import TILING, sm90

    return _each_tile(sm90, TILING)


def _each_tile(backend: Callable[..., Backend], tiling: Tiling[Any]) -> Configurations:
    fixed = ((name, backend(tiling=one)) for name, one in tiling.configurations())
    return [(AS_CHOSEN, backend(tiling=tiling)), *fixed]


def send(records: Iterable[dict[str, Any]]) -> None:
    """Tell the process that has started this one, a record a line."""
    for record in records:
        print(json.dumps(record), flush=True)


# --- the process that examines -------------------------------------------------------------------------------------


def command(way: str, device: torch.device) -> list[str]:
    """The command of the process that examines one way."""
    return [sys.executable, "-m", "cudnn_fused.doctor", "--examine", way, "--device", str(device)]


def examine_apart(way: str, arguments: Sequence[str], patience: float) -> list[Line]:
    """Run the process of one way, and end it when there is no news of it for ``patience`` seconds.

    Lines are shown as they come. What was not finished is a line with a fault.
    """
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    said: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, said), daemon=True).start()
    lines: list[Line] = []
    other_output: list[str] = []
    under_way, began = "its process", time.perf_counter()
    while True:
        try:
            text = said.get(timeout=max(0.0, began + patience - time.perf_counter()))
        except queue.Empty:
            process.kill()
            lines.append(_show(Line(way, under_way, (f"no answer, given up after {patience:.0f} s",), patience)))
            break
        if text is None:
            status = process.wait()
            reason = "; ".join([f"the process ended with status {status}", *other_output[-LAST_WORDS:]])
            lines.append(_show(Line(way, under_way, (reason,), time.perf_counter() - began)))
            break
        record = _record(text)
        if record is None:
            other_output.append(text.strip())
            continue
        if "ends" in record:
            break
        began = time.perf_counter()
        under_way = record.get("begins", under_way)
        if "line" in record:
            found = record["line"]
            lines.append(_show(Line(found["way"], found["what"], tuple(found["faults"]), found["seconds"])))
    with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep a process that hangs
        process.wait(timeout=patience)
    return lines


def _read(process: subprocess.Popen[str], said: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        said.put(text)
    said.put(None)


def _record(text: str) -> dict[str, Any] | None:
    """What a line of output says, unless it is something else than a record."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _show(line: Line) -> Line:
    print(line, file=sys.stderr, flush=True)
    return line


# --- the report ----------------------------------------------------------------------------------------------------


def versions() -> list[str]:
    """What is installed, a line each."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in ("cudnn_fused", *PACKAGES):
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


def right_way(lines: Sequence[Line]) -> str | None:
    """The way of loading taps to use: the first of these whose results are all right."""
    for way in (SHARED, ALIGNED):
        of_way = [line for line in lines if line.way == way]
        if of_way and not any(line.faults for line in of_way):
            return way
    return None


def conclude(target: Target, model: str, lines: Sequence[Line]) -> tuple[int, list[str]]:
    """Remember what follows from the lines. Returns the exit status and what there is to say."""
    wrong = [line for line in lines if line.faults]
    status, said = int(bool(wrong)), []
    if target is SM100:
        way = right_way(lines)
        said.append(f"Verdict for {model}: {way or 'no way of loading taps is right throughout; they stay aligned'}.")
        error = hardware_quirks.remember(model, shared_taps=way == SHARED)
        said.append(f"It could not be kept: {error}" if error else f"Kept in {hardware_quirks.path()}.")
        status = int(way is None)
    if wrong:
        said.append(f"{len(wrong)} of {len(lines)} lines disagree. Please report this whole block to {ISSUES}.")
    else:
        said.append(f"All {len(lines)} results are right.")
    return status, said


def examine_gpu(device: torch.device, patience: float = PATIENCE) -> tuple[int, list[str]]:
    """Examine a GPU. Returns the exit status and the report on it."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    target = targets.target_of(capability)
    report = [f"{device}: {name}, compute capability {capability[0]}.{capability[1]}"]
    if target is None:
        status, said = cross_compile()
        return status, [*report, "There are no kernels for it; the arch-neutral names run the reference on it.", *said]
    try:
        targets.check_dsl()
    except NotImplementedError as error:
        return 1, [*report, str(error)]
    lines: list[Line] = []
    for way in (ALIGNED, SHARED) if target is SM100 else (ONLY,):
        lines += examine_apart(way, command(way, device), patience)
    status, said = conclude(target, name, lines)
    return status, [*report, *map(str, lines), *said]


def cross_compile(arch: str = "sm_100a") -> tuple[int, list[str]]:
    """Compile one kernel without a GPU for it. Returns the exit status and what there is to say."""
    try:
        targets.check_dsl()
        from cudnn_fused.kernels.cross_compile import targeting

        began = time.perf_counter()
        with targeting(arch):
            _compile_one(arch)
    except Exception as error:  # a broken installation fails in many ways
        return 1, [f"Compiling a kernel for {arch} failed: {type(error).__name__}: {error}"]
    return 0, [f"A kernel was compiled for {arch} in {time.perf_counter() - began:.1f} s."]


def _compile_one(arch: str) -> None:
    from cudnn_fused.kernels.compiling import DeviceSpec
    from cudnn_fused.kernels.conv.tile_sm100 import PAIR
    from cudnn_fused.kernels.sm100 import sm100

    case = CASES[0]
    operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
    sm100(DeviceSpec(arch, PAIR)).compile(make_problem(case, operands))


def diagnose() -> tuple[int, list[str]]:
    """Examine every GPU, or what can be without one. Returns the exit status and the report."""
    if not torch.cuda.is_available():
        status, said = cross_compile()
        return status, ["PyTorch finds no CUDA device; CPU tensors run the reference.", *said]
    results = [examine_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return max(status for status, _ in results), [text for _, report in results for text in report]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m cudnn_fused.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--examine", choices=(ALIGNED, SHARED, ONLY), help=argparse.SUPPRESS)  # what `command` runs
    parser.add_argument("--device", type=torch.device, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with torch.no_grad():
        if options.examine:
            target = targets.target_of(torch.cuda.get_device_capability(options.device))
            assert target is not None, "the device has no kernels"
            configurations = configurations_of(options.examine, target)
            send(examine_all(options.examine, configurations, options.device, lambda tensors: contextlib.nullcontext()))
            return 0
        status, report = diagnose()
    print("\n".join([BEGIN, *versions(), *report, END]))
    return status


if __name__ == "__main__":
    sys.exit(main())
