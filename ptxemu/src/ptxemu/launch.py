"""`launch`: run a kernel of a PTX text on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.errors import LaunchError

# These register their emitters.
from ptxemu.instructions import (  # noqa: F401
    alu,
    async_ops,
    barrier_ops,
    control_ops,
    memory_ops,
    tcgen05_ops,
    wgmma_ops,
)
from ptxemu.isa.counts import Counts
from ptxemu.isa.parser import Module, Parameter, parse
from ptxemu.isa.translate import PARAMETER_BASE, Program, translate
from ptxemu.machine.async_queue import Order, Schedule
from ptxemu.machine.memory import GlobalMemory, Parameters, Region, region_of
from ptxemu.machine.scheduler import Scheduler
from ptxemu.machine.state import Dim3, Launch
from ptxemu.models.rounding import ieee_arithmetic
from ptxemu.models.tensor_map import TensorMap

MAX_THREADS = 1024
MAX_CLUSTER = 16
MAX_SHARED_BYTES = 232448  # 227 KiB, the most a CTA of SM90 and SM100 may have
TENSOR_MAP_BYTES = 128
POINTER_BYTES = 8


@dataclass(frozen=True)
class Report:
    """What `launch` returns.

    Attributes:
        entry: name of the kernel.
        counts: executed instructions by class and opcode, tensor-core work, bytes by path.
        unsupported: opcodes and modifiers in the kernel that are not modelled; none of them was reached.
        warnings: reads of memory that nothing wrote, if those are allowed.
    """

    entry: str
    counts: Counts
    unsupported: tuple[str, ...]
    warnings: tuple[str, ...]


def launch(
    ptx: str,
    entry: str | None,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int] = (1, 1, 1),
    shared_bytes: int = 0,
    args: Sequence[Any] = (),
    *,
    memory: Sequence[Any] = (),
    schedule: str | Order | Schedule = Order.EARLY,
    seed: int = 0,
    races: bool = True,
    uninitialized: str = "error",
    tensor_fences: bool = False,
    relative_lanes: bool = False,
) -> Report:
    """Runs a kernel on the CPU; the tensors among its arguments are changed in place.

    Args:
        ptx: PTX text for sm_90a or sm_100a.
        entry: name of the kernel; None if the text has one kernel.
        grid, block, cluster: up to three dimensions, x first; the grid counts CTAs and is a multiple of the cluster.
        shared_bytes: dynamic shared memory per CTA.
        args: one per kernel parameter: a NumPy array or CPU torch tensor (its address is passed), a `TensorMap`, an
            int, a float (for 4 bytes an f32, for 8 an f64), a bool, a NumPy scalar, or the parameter's raw bytes.
        memory: further tensors that the kernel may access, whose addresses stand in raw bytes or in tensor maps.
        schedule: "early", "late", "newest" or "random" (see `Order`), or a `Schedule`.
        seed: of the random schedule.
        races: check that conflicting accesses to shared and tensor memory are ordered.
        uninitialized: what a read of shared or tensor memory does that nothing wrote: "error", or "poison" for a NaN
            and a warning in the report (some kernels read what they then do not use).
        tensor_fences: the race check asks for tcgen05.fence::before_thread_sync and ::after_thread_sync around
            barriers that order tensor memory. The ISA wants them; most kernels in the field have none.
        relative_lanes: tcgen05.ld and .st take the lane of their address modulo 32, within the quarter of their warp.
            By the ISA lanes of other quarters are undefined, which is an error otherwise; a kernel by NVIDIA uses them.

    Raises:
        LaunchError: the arguments do not fit the kernel.
        PtxSyntaxError: the text cannot be parsed.
        EmulatorError: any fault of the kernel; see `ptxemu.errors`.
    """
    module = _parse(ptx)
    name = _entry_name(module, entry)
    program = _program(ptx, name)
    dimensions = [_dim3(value, what) for value, what in ((grid, "grid"), (block, "block"), (cluster, "cluster"))]
    _check_dimensions(program, *dimensions, shared_bytes)
    if uninitialized not in ("error", "poison"):
        raise LaunchError(f"uninitialized is 'error' or 'poison', not {uninitialized!r}")
    global_memory = GlobalMemory()
    for tensor in memory:
        global_memory.add(region_of(tensor))
    data, maps = _pack(program.kernel.parameters, args, global_memory)
    if not isinstance(schedule, Schedule):
        schedule = Schedule(Order(schedule), seed)
    state = Launch(
        program,
        *dimensions,
        shared_bytes,
        Parameters(data),
        {PARAMETER_BASE + offset: _with_source(found, global_memory) for offset, found in maps.items()},
        global_memory,
        schedule,
        races,
        uninitialized == "error",
        tensor_fences,
        relative_lanes,
        _place_variables(program, global_memory),
    )
    with ieee_arithmetic():
        Scheduler(state).run()
    state.count_instructions()
    missing = tuple(sorted({f"{instruction.opcode}: {reason}" for instruction, reason in program.unsupported}))
    return Report(name, state.counts, missing, tuple(state.warnings))


def unsupported_instructions(ptx: str, entry: str | None = None) -> list[str]:
    """What of a kernel the emulator does not model, each with its PTX line; empty if it models everything."""
    program = _program(ptx, _entry_name(_parse(ptx), entry))
    return [f"line {instruction.line}: {instruction.opcode}: {reason}" for instruction, reason in program.unsupported]


@lru_cache(maxsize=16)
def _parse(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=32)
def _program(ptx: str, entry: str) -> Program:
    module = _parse(ptx)
    return translate(module, module.kernels[entry])


def _entry_name(module: Module, entry: str | None) -> str:
    if entry is None and len(module.kernels) == 1:
        return next(iter(module.kernels))
    if entry not in module.kernels:
        raise LaunchError(f"no kernel {entry!r}; the text has {', '.join(module.kernels) or 'none'}")
    return entry


def _dim3(value: Sequence[int] | int, what: str) -> Dim3:
    sizes = (value,) if isinstance(value, int) else tuple(int(size) for size in value)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise LaunchError(f"{what} {sizes} must have one to three positive sizes")
    return (*sizes, 1, 1)[:3]


def _check_dimensions(program: Program, grid: Dim3, block: Dim3, cluster: Dim3, shared_bytes: int) -> None:
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"grid {grid} is no multiple of cluster {cluster}")
    if np.prod(cluster) > MAX_CLUSTER:
        raise LaunchError(f"a cluster has at most {MAX_CLUSTER} CTAs, not {np.prod(cluster)}")
    if np.prod(block) > MAX_THREADS:
        raise LaunchError(f"a CTA has at most {MAX_THREADS} threads, not {np.prod(block)}")
    required = program.kernel.directives.get("reqntid")
    if required and (*required, 1, 1)[:3] != block:
        raise LaunchError(f"the kernel requires blocks of {required}, not {block}")
    required = program.kernel.directives.get("reqnctapercluster")
    if required and (*required, 1, 1)[:3] != cluster:
        raise LaunchError(f"the kernel requires clusters of {required}, not {cluster}")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise LaunchError(f"{shared_bytes} bytes of dynamic shared memory; the limit is {MAX_SHARED_BYTES}")


def _pack(parameters: list[Parameter], args: Sequence[Any], memory: GlobalMemory) -> tuple[bytes, dict[int, TensorMap]]:
    """The parameter buffer, and the tensor maps in it by offset."""
    if len(args) != len(parameters):
        raise LaunchError(f"the kernel has {len(parameters)} parameters, {len(args)} arguments were passed")
    data = bytearray(max((p.offset + p.size for p in parameters), default=0))
    maps = {}
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        if isinstance(value, TensorMap):
            if parameter.size != TENSOR_MAP_BYTES:
                raise LaunchError(f"argument {number} is a tensor map, its parameter has {parameter.size} bytes")
            maps[parameter.offset] = value
            continue
        raw = _raw_bytes(value, parameter.size, number, memory)
        data[parameter.offset : parameter.offset + parameter.size] = raw
    return bytes(data), maps


def _raw_bytes(value: Any, size: int, number: int, memory: GlobalMemory) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, (bool, int)):
        raw = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif isinstance(value, float):
        kind = {4: np.float32, 8: np.float64}.get(size)
        if kind is None:
            raise LaunchError(f"argument {number} is a float, its parameter has {size} bytes")
        raw = kind(value).tobytes()
    else:
        region = region_of(value)
        memory.add(region)
        raw = region.base.to_bytes(POINTER_BYTES, "little")
    if len(raw) != size:
        raise LaunchError(f"argument {number} has {len(raw)} bytes, its parameter {size}")
    return raw


def _with_source(tensor_map: TensorMap, memory: GlobalMemory) -> TensorMap:
    """The map reading and writing the launch's memory. A map that brings a source of its own keeps it."""
    return tensor_map if tensor_map.source else dataclasses.replace(tensor_map, source=memory.bytes)


def _place_variables(program: Program, memory: GlobalMemory) -> dict[str, int]:
    """Gives `.global` and `.const` variables of the module an address."""
    addresses = {}
    for variable in (*program.module.variables.values(), *program.kernel.variables.values()):
        if variable.space not in ("global", "const"):
            continue
        block = np.zeros(variable.size + variable.align, np.uint8)
        start = -block.ctypes.data % variable.align
        block[start : start + len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        inner = block[start : start + variable.size]
        memory.add(Region(inner.ctypes.data, inner, block))
        addresses[variable.name] = inner.ctypes.data
    return addresses
