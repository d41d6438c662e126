"""The state of a launch: strands, warps, CTAs, clusters. `scheduler` decides who runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu import errors
from ptxemu.errors import (
    Deadlock,
    EmulatorError,
    KernelTrap,
    Location,
    OutOfBounds,
    RaceError,
    UninitializedRead,
    UnsupportedInstruction,
)
from ptxemu.isa.counts import Counts
from ptxemu.isa.dataflow import Block
from ptxemu.isa.translate import CTA_SHIFT, Program
from ptxemu.isa.values import FULL_MASK, LANE_IDS, LANES, POISON, Value, lane_flags, merge
from ptxemu.machine.async_queue import AsyncQueue, Schedule
from ptxemu.machine.memory import GlobalMemory, LocalMemory, Parameters, SharedMemory
from ptxemu.machine.races import CLUSTER, ORDERED, PUBLISHED, Access, Agents, Conflict, Pipe, SharedShadow, TensorShadow
from ptxemu.models.barriers import NAMED_BARRIERS, ClusterBarrier, MBarrier, NamedBarrier
from ptxemu.models.tensor_memory import TensorMemory

Dim3 = tuple[int, int, int]


class Wait:
    """Why a strand stands still. `ready` says whether it may try again, `describe` what it waits for.

    `mergeable`: nothing has been signalled yet, so lanes that reach the same place may still join.
    `can_time_out`: the instruction may also return without success.
    """

    mergeable = True
    can_time_out = False

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class Reconvergence(Wait):
    """Lanes of a warp-wide instruction that have not come yet."""

    def __init__(self, strand: Strand, mask: int):
        self.strand, self.mask = strand, mask

    def ready(self) -> bool:
        return not (self.mask & self.strand.warp.live & ~self.strand.mask)

    def describe(self) -> str:
        missing = self.mask & self.strand.warp.live & ~self.strand.mask
        return f"the lanes {missing:#010x} of its warp, which have not reached this instruction"


class Strand:
    """Lanes of one warp that execute together, with registers of their own while the warp is divergent."""

    __slots__ = ("at", "deferred", "mask", "pc", "registers", "wait", "warp")

    def __init__(self, warp: Warp, mask: int, pc: int, registers: list[Any]):
        self.warp, self.mask, self.pc, self.registers = warp, mask, pc, registers
        self.wait: Wait | None = None
        self.at: int | None = None
        self.deferred = False  # it polls: other strands of the warp go first

    # What generated code and handlers call.

    def split(self, mask: int, pc: int) -> None:
        """Sends the lanes of `mask` elsewhere as a strand of their own."""
        self.mask &= ~mask
        self.warp.strands.append(Strand(self.warp, mask, pc, self.registers.copy()))

    def converged(self, mask: int) -> bool:
        """Whether all live lanes of `mask` are in this strand; if not, it waits for them."""
        if not (mask & self.warp.live & ~self.mask):
            self.wait = None
            return True
        self.wait = Reconvergence(self, mask)
        return False

    def spin(self) -> None:
        """Gives other strands and warps a turn: this one polls something."""
        self.deferred = self.warp.yielding = True

    def error(self, kind: type[EmulatorError], reason: str) -> EmulatorError:
        return kind(reason, self.location())

    def trap(self) -> None:
        raise self.error(KernelTrap, "the kernel executed trap")

    def fail_unsupported(self, at: int, reason: str) -> None:
        self.at = at
        raise self.error(UnsupportedInstruction, reason)

    def location(self) -> Location:
        return self.warp.location(self.at)

    # Race checks.

    def access(self, asynchronous: bool = False) -> Access:
        """An access of this warp itself, now."""
        warp = self.warp
        return Access(warp.agent, int(warp.clock[ORDERED][warp.agent]) + 1, warp.clock, self.at, asynchronous)

    def pipe_access(self, pipe: Pipe, clock: int, asynchronous: bool) -> Access:
        """An access of an asynchronous pipe that this warp feeds."""
        return Access(self.warp.pipes[pipe], clock, self.warp.clock, self.at, asynchronous)

    def tensor_access(self, pipe: Pipe, clock: int) -> Access:
        """An access to tensor memory. If fences are asked for, what other threads did is ordered by them alone."""
        access = self.pipe_access(pipe, clock, asynchronous=False)
        if self.warp.launch.tensor_fences:
            access.knows = self.warp.fenced_for_tensor_memory()
        return access

    def race(self, conflict: Conflict | None, what: str, missing: str = "fence.proxy.async") -> None:
        """Reports a conflict of the access `what`; `missing` is the fence without which ordered accesses still race."""
        if conflict is None:
            return
        cluster = self.warp.cta.cluster
        earlier = f"{'a write' if conflict.wrote else 'a read'} by {cluster.agents.describe(conflict.agent)}"
        place = cluster.launch.program.location(conflict.at)
        ordered = conflict.clock <= self.warp.clock[ORDERED][conflict.agent]
        why = f"without a {missing} in between" if ordered else "and nothing orders the two"
        raise RaceError(
            f"{what} follows {earlier} (PTX line {place.ptx_line}: {errors.shorten(place.ptx_text)}), {why}",
            self.location(),
        )


class Warp:
    """32 threads of a CTA."""

    def __init__(self, cta: Cta, index: int, live: int, tid: tuple[np.ndarray, ...]):
        launch = cta.cluster.launch
        self.cta, self.index, self.live = cta, index, live
        self.launch = launch
        self.strands = [Strand(self, live, 0, launch.unwritten_registers.copy())]
        self.block_counts = launch.block_counts_of(index)
        self.partial_counts: Counter[tuple[int, int]] = Counter()  # blocks that not all lanes executed, and the lanes
        launch.partial_counts.setdefault(index, []).append(self.partial_counts)
        self.special = {**cta.special, **_lane_special(tid), "%warpid": index}
        self.shared_base = cta.rank << CTA_SHIFT
        self.parameters = launch.parameters
        self.symbols = launch.symbols
        self.local = LocalMemory(launch.program.local_size)
        self.yielding = False
        agents = cta.cluster.agents
        self.pipes = [agents.pipe(cta.rank, index, pipe) for pipe in Pipe]
        self.agent = self.pipes[Pipe.WARP]
        self.clock = agents.clock()
        self.tensor_pipes = [self.pipes[Pipe.TENSOR_LOAD], self.pipes[Pipe.TENSOR_STORE]]
        self.after_fence = self.clock[ORDERED].copy()
        self.before_fence = self.clock[ORDERED][self.tensor_pipes]
        self.fenced: np.ndarray | None = None  # what a release fence has made available to relaxed arrivals
        self.issued = [0] * len(Pipe)  # operations (or groups of them) handed to each pipe
        self.wgmma_open: list[Any] = []
        self.wgmma_groups: deque[tuple[int, list[Any]]] = deque()
        self.copy_groups: deque[list[Any]] = deque()
        self.copy_open: list[Any] = []
        self.bulk_open: dict[int, list[Any]] = {}  # by lane: bulk groups belong to threads
        self.bulk_groups: list[Any] = []
        self.tensor_stores: list[Any] = []
        self.cluster_token: int | None = None

    def uncount(self, block: int, mask: int) -> None:
        """Take back that a block was executed by the lanes of the mask."""
        self.block_counts[block] -= 1
        if mask != FULL_MASK:
            self.partial_counts[block, mask] -= 1

    @property
    def key(self) -> tuple[int, int]:
        return self.cta.rank, self.index

    def location(self, at: int | None) -> Location:
        return self.launch.program.location(at, self.cta.linear, self.index)

    def clock_register(self) -> int:
        """%clock and its kin: a counter that only grows."""
        self.launch.ticks += 1
        return self.launch.ticks

    def release(self) -> np.ndarray | None:
        """The clock that a releasing operation carries. What the warp does afterwards is not part of it."""
        if not self.launch.races:
            return None
        self.clock[ORDERED][self.agent] += 1
        if not self.launch.tensor_fences:
            return self.clock
        clock = self.clock.copy()
        clock[ORDERED][self.tensor_pipes] = self.before_fence
        return clock

    def fence_tensor_memory(self, after: bool) -> None:
        """tcgen05.fence: what was waited for orders later tcgen05 operations (after_thread_sync); finished loads and
        stores of tensor memory are part of later releases (before_thread_sync)."""
        if after:
            self.after_fence = self.clock[ORDERED].copy()
        else:
            self.before_fence = self.clock[ORDERED][self.tensor_pipes]

    def fenced_for_tensor_memory(self) -> np.ndarray:
        """The clock that tcgen05 operations may rely on: their own warp's pipes, and others as of the last fence."""
        clock = self.clock.copy()
        clock[ORDERED] = self.after_fence
        clock[ORDERED][self.pipes] = self.clock[ORDERED][self.pipes]
        return clock

    def relaxed(self) -> np.ndarray | None:
        """The clock that a relaxed operation carries: what a release fence has made available, and the finished loads
        and stores of tensor memory, which go with any signal (tcgen05.fence::before_thread_sync)."""
        if not self.launch.races:
            return None
        clock = np.zeros_like(self.clock) if self.fenced is None else self.fenced.copy()
        ordered = self.before_fence if self.launch.tensor_fences else self.clock[ORDERED][self.tensor_pipes]
        clock[ORDERED][self.tensor_pipes] = ordered
        return clock

    def meet_cluster(self) -> None:
        """A barrier of the cluster is behind the warp: every CTA has started."""
        self.clock[ORDERED][CLUSTER] = 1

    def knows_started(self, cta: Cta) -> bool:
        """Whether a CTA has started is known from a barrier of the cluster, or from anything that came from it."""
        known = self.clock[ORDERED]
        return bool(known[CLUSTER]) or any(known[warp.agent] for warp in cta.warps)

    def acquire(self, clock: np.ndarray | None) -> None:
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)

    def publish(self) -> None:
        """fence.proxy.async: what happened before is visible to the async proxy from now on."""
        if self.launch.races:
            self.clock[ORDERED][self.agent] += 1
            np.maximum(self.clock[PUBLISHED], self.clock[ORDERED], out=self.clock[PUBLISHED])

    def finished(self, pipe: Pipe, number: int) -> None:
        """The warp has waited until its pipe completed everything up to `number`."""
        row = self.clock[ORDERED]
        row[self.pipes[pipe]] = max(int(row[self.pipes[pipe]]), number)

    def merge_strands(self) -> None:
        """Joins strands that stand at the same place. Only registers that are still needed are merged."""
        by_pc: dict[int, Strand] = {}
        kept = []
        for strand in self.strands:
            other = by_pc.get(strand.pc)
            if other is None or not (_can_merge(strand) and _can_merge(other)):
                by_pc.setdefault(strand.pc, strand)
                kept.append(strand)
                continue
            self._merge_into(other, strand)
        self.strands = kept

    def _merge_into(self, target: Strand, source: Strand) -> None:
        flags = lane_flags(source.mask)
        mine, theirs = target.registers, source.registers
        program = self.launch.program
        for index in program.blocks[target.pc].live_in:
            old, new = mine[index], theirs[index]
            if old is not new and not (type(old) is type(new) is int and old == new):
                mine[index] = merge(flags, new, old, program.kernel.registers[index].bits)
        target.mask |= source.mask
        target.wait = None

    def exit_lanes(self, strand: Strand) -> None:
        self.live &= ~strand.mask
        self.strands.remove(strand)
        if not self.cta.live_threads:
            self.cta.check_exit(strand)
        self.cta.cluster.after_exit(self)


def _can_merge(strand: Strand) -> bool:
    return strand.wait is None or strand.wait.mergeable


class Cta:
    """A CTA: its shared and tensor memory, its barriers, its warps."""

    def __init__(self, cluster: Cluster, rank: int, index: Dim3):
        launch = cluster.launch
        self.cluster, self.rank, self.index = cluster, rank, index
        grid, block = launch.grid, launch.block
        self.linear = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.shared = SharedMemory(launch.program.static_shared + launch.shared_bytes)
        self.tensor = TensorMemory()
        self.tensor.data.fill(POISON[32])
        self.shared_shadow = SharedShadow(cluster.agents, self.shared.size) if launch.races else None
        self.tensor_shadow = TensorShadow(cluster.agents) if launch.races else None
        self.remote_uses: dict[int, tuple[int, int]] = {}  # by agent: its clock and the instruction
        self.warpgroups: dict[int, Any] = {}
        self.operand_cache: dict[Any, Any] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.first_barrier, self.last_barrier = 1 << 32, 0  # the range of offsets that holds mbarriers
        self.named = [NamedBarrier(number) for number in range(NAMED_BARRIERS)]
        self.special = _cta_special(self, launch, cluster)
        threads = block[0] * block[1] * block[2]
        self.warps = []
        for first in range(0, threads, LANES):
            ids = np.arange(first, first + LANES, dtype=np.uint32)
            tid = (ids % block[0], ids // block[0] % block[1], ids // (block[0] * block[1]))
            live = FULL_MASK if first + LANES <= threads else (1 << (threads - first)) - 1
            self.warps.append(Warp(self, first // LANES, live, tid))

    @property
    def live_threads(self) -> int:
        return sum(bin(warp.live).count("1") for warp in self.warps)

    def used_by(self, strand: Strand, agent: int, clock: int) -> None:
        """Another CTA of the cluster uses this one's shared memory, which must be ordered before this one's exit."""
        if self.shared_shadow is None or strand.warp.cta is self:
            return
        if not self.live_threads:
            raise strand.error(RaceError, f"a use of shared memory of the cluster's CTA {self.rank}, which has exited")
        self.remote_uses[agent] = (clock, strand.at)

    def check_exit(self, strand: Strand) -> None:
        """The last threads leave. Nothing may use this CTA's shared memory any more."""
        self._check_bulk_stores(strand)
        if not self.remote_uses:
            return
        known = np.maximum.reduce([warp.clock[ORDERED] for warp in self.warps])
        for agent, (clock, at) in self.remote_uses.items():
            if known[agent] < clock:
                place = self.cluster.launch.program.location(at)
                raise errors.RaceError(
                    f"CTA {self.rank} of the cluster exits while {self.cluster.agents.describe(agent)} may still use "
                    f"its shared memory (PTX line {place.ptx_line}: {errors.shorten(place.ptx_text)})",
                    strand.location(),
                )

    def _check_bulk_stores(self, strand: Strand) -> None:
        """Every bulk store must have been waited for, at least until it has read its source."""
        for warp in self.warps:
            waited_for = [operation for group in warp.bulk_groups for operation in group.reads]
            waited_for += [reading for pairs in warp.bulk_open.values() for reading, _ in pairs]
            if waited_for and self.cluster.launch.races:
                place = waited_for[0].location
                raise RaceError(
                    f"the CTA exits while a bulk store of warp {warp.index} may still read its shared memory "
                    f"(PTX line {place.ptx_line}: {errors.shorten(place.ptx_text)})",
                    strand.location(),
                )


def _lane_special(tid: tuple[np.ndarray, ...]) -> dict[str, Value]:
    """The special registers that depend on the lane alone, and the thread index of each lane."""
    one = np.uint32(1)
    below = (one << LANE_IDS) - one
    return {
        "%laneid": LANE_IDS,
        "%lanemask_eq": one << LANE_IDS,
        "%lanemask_lt": below,
        "%lanemask_le": below | (one << LANE_IDS),
        "%lanemask_gt": ~(below | (one << LANE_IDS)),
        "%lanemask_ge": ~below,
        **{f"%tid.{axis}": _uniform_or_lanes(ids) for axis, ids in zip("xyz", tid, strict=True)},
    }


def _uniform_or_lanes(ids: np.ndarray) -> Value:
    return int(ids[0]) if ids.shape == (LANES,) and (ids == ids[0]).all() else ids


def _cta_special(cta: Cta, launch: Launch, cluster: Cluster) -> dict[str, Any]:
    ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
    size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    special: dict[str, Any] = {
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": size,
        "%is_explicit_cluster": size > 1,
        "%smid": cta.linear,
        "%nsmid": ctas,
        "%gridid": 1,
        "%nwarpid": -(-launch.block[0] * launch.block[1] * launch.block[2] // LANES),
        "%dynamic_smem_size": launch.shared_bytes,
        "%total_smem_size": launch.program.static_shared + launch.shared_bytes,
    }
    for position, axis in enumerate("xyz"):
        special[f"%ntid.{axis}"] = launch.block[position]
        special[f"%ctaid.{axis}"] = cta.index[position]
        special[f"%nctaid.{axis}"] = launch.grid[position]
        special[f"%cluster_ctaid.{axis}"] = cta.index[position] % launch.cluster[position]
        special[f"%cluster_nctaid.{axis}"] = launch.cluster[position]
        special[f"%clusterid.{axis}"] = cluster.index[position]
        special[f"%nclusterid.{axis}"] = launch.grid[position] // launch.cluster[position]
    return special


class Cluster:
    """The CTAs of one cluster, which run together."""

    def __init__(self, launch: Launch, index: Dim3):
        self.launch, self.index = launch, index
        nx, ny, nz = launch.cluster
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.agents = Agents(nx * ny * nz, -(-threads // LANES))
        self.barrier = ClusterBarrier()
        self.ctas = []
        for rank in range(nx * ny * nz):
            inner = (rank % nx, rank // nx % ny, rank // (nx * ny))
            position = tuple(i * n + j for i, n, j in zip(index, launch.cluster, inner, strict=True))
            self.ctas.append(Cta(self, rank, position))
        self.warps = [warp for cta in self.ctas for warp in cta.warps]

    def cta(self, rank: int, strand: Strand) -> Cta:
        """A CTA whose memory a strand is about to touch."""
        if rank >= len(self.ctas):
            raise strand.error(OutOfBounds, f"a shared address of CTA {rank} of a cluster of {len(self.ctas)}")
        cta = self.ctas[rank]
        if self.launch.races and strand.warp.cta is not cta and not strand.warp.knows_started(cta):
            raise strand.error(
                RaceError, f"the cluster's CTA {rank} is touched with no barrier.cluster in between: has it started?"
            )
        return cta

    @property
    def done(self) -> bool:
        return not any(warp.live for warp in self.warps)

    def live_lanes(self) -> dict[tuple[int, int], int]:
        return {warp.key: warp.live for warp in self.warps if warp.live}

    def after_exit(self, warp: Warp) -> None:
        self.launch.event()
        self.barrier.advance(self.live_lanes())

    def check_end(self) -> None:
        """What must hold when all threads have left."""
        for cta in self.ctas:
            if cta.tensor.allocations:
                left = cta.tensor.allocations
                columns = ", ".join(f"{count} columns at {first}" for first, count in left.items())
                location = self.launch.program.location(None, cta.linear)
                raise errors.TensorMemoryMisuse(f"tensor memory not freed at the end: {columns}", location)
            for barrier in cta.mbarriers.values():
                if barrier.transactions:
                    location = self.launch.program.location(None, cta.linear)
                    raise errors.BarrierMisuse(f"bulk copies outstanding at the end: {barrier}", location)


@dataclass
class Launch:
    """Everything that the CTAs of a launch share."""

    program: Program
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    parameters: Parameters
    tensor_maps: dict[int, Any]
    memory: GlobalMemory
    schedule: Schedule
    races: bool
    strict: bool = True  # a read of memory that nothing wrote is an error, not a warning
    tensor_fences: bool = False  # order in tensor memory needs the tcgen05.fence that the ISA asks for
    relative_lanes: bool = False  # tcgen05.ld and .st take the lane modulo 32 within the warp's own quarter
    symbols: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    warnings: dict[str, None] = field(default_factory=dict)  # in order, each once
    events: int = 0
    ticks: int = 0

    def __post_init__(self) -> None:
        # By the index of a warp in its CTA: for all such warps together, and for each of them.
        self.block_counts: dict[int, list[int]] = {}
        self.partial_counts: dict[int, list[Counter[tuple[int, int]]]] = {}
        self.unwritten_registers = [POISON[register.bits] for register in self.program.kernel.registers]
        self.queue = AsyncQueue(self.schedule, self.event)

    def event(self) -> None:
        """Something happened that may let a waiting warp go on."""
        self.events += 1

    def guard(self, check: Callable[..., None], *arguments: Any) -> None:
        """Runs a check for memory that nothing wrote. If that is allowed, what it finds becomes a warning."""
        try:
            check(*arguments)
        except UninitializedRead as error:
            if self.strict:
                raise
            self.warnings[error.reason] = None

    def block_counts_of(self, warp: int) -> list[int]:
        """How often each block was executed by the warps with an index, of all CTAs."""
        return self.block_counts.setdefault(warp, [0] * len(self.program.blocks))

    def count_instructions(self) -> None:
        for warp, block_counts in self.block_counts.items():
            lines = self.counts.lines[warp] = Counter()
            surplus = self._surplus(self.partial_counts[warp])
            for block, executed in zip(self.program.blocks, block_counts, strict=True):
                if executed:
                    self.counts.add(block, executed)
                    self._count_lines(block, executed - surplus[block.index], lines)

    @staticmethod
    def _surplus(warps: list[Counter[tuple[int, int]]]) -> Counter[int]:
        """How many executions of each block lanes would have shared, had they met again as soon as they could."""
        surplus: Counter[int] = Counter()
        for partial_counts in warps:
            by_lane: dict[int, np.ndarray] = {}
            for (block, mask), executed in partial_counts.items():
                by_lane[block] = by_lane.get(block, 0) + executed * lane_flags(mask)
                surplus[block] += executed
            surplus.subtract({block: int(executed.max()) for block, executed in by_lane.items()})
        return surplus

    def _count_lines(self, block: Block, executed: int, lines: Counter[int]) -> None:
        instructions = self.program.kernel.instructions
        for at in range(block.first, block.last):
            # A branch around an instruction that blocks was put in front of it, and has its line.
            if not at or instructions[at].line != instructions[at - 1].line:
                lines[instructions[at].line] += executed


def describe_deadlock(clusters: list[Cluster], queue_length: int) -> Deadlock:
    lines = ["no warp can go on:"]
    for cluster in clusters:
        for warp in cluster.warps:
            for strand in warp.strands:
                program = cluster.launch.program
                at = strand.at if strand.wait is None else program.blocks[strand.pc].first
                place = program.location(at, warp.cta.linear, warp.index)
                what = strand.wait.describe() if strand.wait else "nothing (it polls)"
                lanes = "" if strand.mask == warp.live else f" lanes {strand.mask:#010x}"
                source = f" ({place.source})" if place.source else ""
                lines.append(
                    f"  CTA {warp.cta.linear} warp {warp.index}{lanes}: line {place.ptx_line}{source} waits for {what}"
                )
    if queue_length:
        lines.append(f"  {queue_length} asynchronous operations have not run")
    return Deadlock("\n".join(lines), clusters[0].launch.program.location(None))
