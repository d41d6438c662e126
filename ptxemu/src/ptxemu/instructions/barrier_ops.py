"""Emitters and handlers of mbarriers, named and cluster barriers, fences and what else only synchronises."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.errors import BarrierMisuse, OutOfBounds, UnsupportedInstruction
from ptxemu.isa import values
from ptxemu.isa.parser import Instruction
from ptxemu.isa.translate import CTA_SHIFT, PENDING, SHARED_BASE, Blocking, Effect, Modifiers, Translator, emits
from ptxemu.isa.values import LANES, Value, lane_indices
from ptxemu.machine.state import Cta, Strand, Wait
from ptxemu.models.barriers import MBarrier, NamedBarrier

_OFFSET_MASK = (1 << CTA_SHIFT) - 1
_SPACES = ("shared", "shared::cta", "shared::cluster")
MBARRIER_BYTES = 8


def shared_target(strand: Strand, address: int, remote: bool) -> tuple[Cta, int]:
    """The CTA and the offset that a shared address names; a shared::cta address must be the CTA's own."""
    if address >= SHARED_BASE:
        address -= SHARED_BASE
    rank, offset = address >> CTA_SHIFT, address & _OFFSET_MASK
    cta = strand.warp.cta
    if rank == cta.rank:
        return cta, offset
    if not remote:
        raise strand.error(
            OutOfBounds, f"shared address {address:#x} belongs to CTA {rank} of the cluster, not to this one"
        )
    return cta.cluster.cta(rank, strand), offset


def find_mbarrier(strand: Strand, address: int, remote: bool = True) -> MBarrier:
    cta, offset = shared_target(strand, address, remote)
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise strand.error(
            BarrierMisuse, f"no mbarrier was initialised at offset {offset} of the cluster's CTA {cta.rank}"
        )
    return barrier


def _by_address(strand: Strand, mask: int, address: Value) -> list[tuple[int, int]]:
    """(address, number of lanes) of the active lanes."""
    if not isinstance(address, np.ndarray):
        return [(address, bin(mask).count("1"))]
    found, counts = np.unique(address[lane_indices(mask)], return_counts=True)
    return [(int(a), int(n)) for a, n in zip(found, counts, strict=True)]


def _one(strand: Strand, mask: int, value: Value, what: str) -> int:
    shared = values.uniform(value, mask)
    if shared is None:
        raise strand.error(UnsupportedInstruction, f"{what} differs between lanes")
    return shared


class MBarrierWait(Wait):
    can_time_out = True

    def __init__(self, barrier: MBarrier, parity: int):
        self.barrier, self.parity, self.timed_out = barrier, parity, False

    def ready(self) -> bool:
        return self.timed_out or self.barrier.passed(self.parity)

    def describe(self) -> str:
        return f"parity {self.parity} of the {self.barrier}"


class NamedWait(Wait):
    mergeable = False

    def __init__(self, barrier: NamedBarrier, generation: int):
        self.barrier, self.generation = barrier, generation

    def ready(self) -> bool:
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        return f"barrier {self.barrier.number} ({self.barrier.arrived} of {self.barrier.expected} threads are there)"


class ClusterWait(Wait):
    def __init__(self, strand: Strand, generation: int):
        self.barrier, self.generation = strand.warp.cta.cluster.barrier, generation

    def ready(self) -> bool:
        return self.barrier.generation > self.generation

    def describe(self) -> str:
        return "the cluster barrier"


# Handlers.


def mbarrier_init(strand: Strand, mask: int, address: Value, count: Value) -> None:
    for target, _ in _by_address(strand, mask, address):
        cta, offset = shared_target(strand, target, remote=False)
        cta.shared.index(offset, MBARRIER_BYTES, "mbarrier.init")
        if offset in cta.mbarriers:
            raise strand.error(BarrierMisuse, f"mbarrier.init of the live {cta.mbarriers[offset]}")
        cta.first_barrier = min(cta.first_barrier, offset)
        cta.last_barrier = max(cta.last_barrier, offset + MBARRIER_BYTES)
        agent = cta.cluster.agents.barrier(cta.rank, offset) if strand.warp.launch.races else 0
        cta.mbarriers[offset] = MBarrier(cta.rank, offset, _one(strand, mask, count, "the count"), agent)
    strand.warp.launch.event()


def mbarrier_inval(strand: Strand, mask: int, address: Value) -> None:
    for target, _ in _by_address(strand, mask, address):
        cta, offset = shared_target(strand, target, remote=False)
        find_mbarrier(strand, target, remote=False)
        del cta.mbarriers[offset]


def mbarrier_arrive(
    strand: Strand, mask: int, address: Value, count: Value, expect: Value, remote: bool, relaxed: bool
) -> Value:
    """Arrives `count` times per active lane, after raising the transaction count by `expect`. Returns the phase."""
    warp = strand.warp
    clock = warp.relaxed() if relaxed else warp.release()
    phase = 0
    for target, lanes in _by_address(strand, mask, address):
        barrier = find_mbarrier(strand, target, remote)
        phase = barrier.phase
        if expect is not None:
            barrier.expect(lanes * _one(strand, mask, expect, "the transaction count"))
        barrier.arrive(lanes * _one(strand, mask, count, "the count"), clock)
        if barrier.cta != warp.cta.rank:
            # A relaxed arrival is ordered by the warp's next release.
            access = strand.access()
            warp.cta.cluster.ctas[barrier.cta].used_by(strand, access.agent, access.clock - (not relaxed))
    warp.launch.event()
    return phase


def mbarrier_transactions(strand: Strand, mask: int, address: Value, size: Value, complete: bool) -> None:
    for target, lanes in _by_address(strand, mask, address):
        barrier = find_mbarrier(strand, target)
        amount = lanes * _one(strand, mask, size, "the transaction count")
        barrier.complete(amount) if complete else barrier.expect(amount)
    strand.warp.launch.event()


def mbarrier_wait(strand: Strand, address: Value, phase: Value, by_parity: bool, suspends: bool) -> Any:
    """try_wait and test_wait. A state, as opposed to a parity, is the phase number that `mbarrier_arrive` returned."""
    barrier = find_mbarrier(strand, _one(strand, strand.mask, address, "the address"), remote=False)
    parity = _one(strand, strand.mask, phase, "the phase")
    if not by_parity:
        parity &= 1
    elif parity > 1:
        raise strand.error(BarrierMisuse, f"{parity} is no phase parity")
    wait, strand.wait = strand.wait, None
    if barrier.passed(parity):
        strand.warp.acquire(barrier.known)
        return True
    launch = strand.warp.launch
    if isinstance(wait, MBarrierWait) and wait.timed_out:
        launch.counts.barrier_timeouts += 1
        return False
    if not suspends or launch.schedule.spuriously_fails():
        strand.spin()
        return False
    strand.wait = MBarrierWait(barrier, parity)
    return PENDING


def _named(strand: Strand, number: Value) -> NamedBarrier:
    index = _one(strand, strand.mask, number, "the barrier's number")
    named = strand.warp.cta.named
    if index >= len(named):
        raise strand.error(BarrierMisuse, f"there is no barrier {index}")
    return named[index]


def _arrive_named(strand: Strand, number: Value, threads: Value | None) -> tuple[NamedBarrier, int]:
    warp = strand.warp
    lanes = LANES if strand.mask == warp.live else bin(strand.mask).count("1")
    if threads is None:
        expected = LANES * sum(1 for other in warp.cta.warps if other.live)
    else:
        expected = _one(strand, strand.mask, threads, "the thread count")
    barrier = _named(strand, number)
    generation = barrier.arrive(lanes, expected, warp.release())
    warp.launch.event()
    return barrier, generation


def barrier_sync(strand: Strand, number: Value, threads: Value | None, aligned: bool) -> Any:
    wait = strand.wait
    if isinstance(wait, NamedWait):
        strand.wait = None
        strand.warp.acquire(wait.barrier.known)
        return None
    if aligned and not strand.converged(strand.warp.live):
        return PENDING
    strand.wait = None
    barrier, generation = _arrive_named(strand, number, threads)
    if barrier.generation > generation:
        strand.warp.acquire(barrier.known)
        return None
    strand.wait = NamedWait(barrier, generation)
    return PENDING


def barrier_arrive(strand: Strand, number: Value, threads: Value, aligned: bool) -> Any:
    if aligned and not strand.converged(strand.warp.live):
        return PENDING
    strand.wait = None
    _arrive_named(strand, number, threads)
    return None


def cluster_arrive(strand: Strand, relaxed: bool, aligned: bool) -> Any:
    if aligned and not strand.converged(strand.warp.live):
        return PENDING
    strand.wait = None
    warp = strand.warp
    cluster = warp.cta.cluster
    if warp.cluster_token not in (None, cluster.barrier.generation):
        raise strand.error(BarrierMisuse, "barrier.cluster.arrive twice without a barrier.cluster.wait in between")
    warp.cluster_token = cluster.barrier.generation
    cluster.barrier.arrive(warp.key, strand.mask, warp.relaxed() if relaxed else warp.release())
    cluster.barrier.advance(cluster.live_lanes())
    warp.launch.event()
    return None


def cluster_wait(strand: Strand, aligned: bool) -> Any:
    if aligned and not strand.converged(strand.warp.live):
        return PENDING
    warp = strand.warp
    barrier = warp.cta.cluster.barrier
    if warp.cluster_token is None:
        raise strand.error(BarrierMisuse, "barrier.cluster.wait without a barrier.cluster.arrive before it")
    if barrier.generation == warp.cluster_token:
        strand.wait = ClusterWait(strand, warp.cluster_token)
        return PENDING
    strand.wait = None
    if strand.mask == warp.live:
        warp.cluster_token = None
    warp.acquire(barrier.known)
    warp.meet_cluster()
    return None


def fence(strand: Strand, proxy: bool) -> None:
    """A release or proxy fence: later relaxed arrivals, or asynchronous accesses, may rely on what came before."""
    warp = strand.warp
    if proxy:
        warp.publish()
    elif warp.launch.races:
        clock = warp.release()
        warp.fenced = clock.copy()


def nothing() -> None:
    """An instruction without effect on results."""


# Emitters.


def _space(m: Modifiers) -> bool:
    """Consumes the state space of an mbarrier; whether it may lie in another CTA (generic addresses may)."""
    return m.take(*_SPACES) not in ("shared", "shared::cta")


def _order(m: Modifiers) -> bool:
    """Consumes ordering and scope; whether the operation is relaxed."""
    relaxed = m.take("release", "acquire", "relaxed") == "relaxed"
    m.take("cta", "cluster", "gpu", "sys")
    return relaxed


@emits("mbarrier.init")
def _emit_init(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _space(m)
    m.need("b64")
    function = t.bind(mbarrier_init, "mbarrier_init")
    return Effect((), f"{function}(s, {{mask}}, {t.address(i.operands[0])}, {t.source(i.operands[1], 'u32')})")


@emits("mbarrier.inval")
def _emit_inval(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _space(m)
    m.need("b64")
    return Effect((), f"{t.bind(mbarrier_inval, 'mbarrier_inval')}(s, {{mask}}, {t.address(i.operands[0])})")


@emits("mbarrier.arrive")
def _emit_arrive(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    expects = m.flag("expect_tx")
    relaxed = _order(m)
    remote = _space(m)
    m.need("b64")
    has_state = not hasattr(i.operands[0], "offset")
    address, *rest = i.operands[1 if has_state else 0 :]
    amount = t.source(rest[0], "u32") if rest else "1"
    count, expect = ("1", amount) if expects else (amount, "None")
    call = (
        f"{t.bind(mbarrier_arrive, 'mbarrier_arrive')}(s, {{mask}}, {t.address(address)}, "
        f"{count}, {expect}, {remote}, {relaxed})"
    )
    return Effect(i.operands[:1] if has_state else (), call)


@emits("mbarrier.expect_tx", "mbarrier.complete_tx")
def _emit_transactions(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    _order(m)
    _space(m)
    m.need("b64")
    address, size = t.address(i.operands[0]), t.source(i.operands[1], "u32")
    complete = i.parts[1] == "complete_tx"
    return Effect((), f"{t.bind(mbarrier_transactions, 'transactions')}(s, {{mask}}, {address}, {size}, {complete})")


@emits("mbarrier.try_wait", "mbarrier.test_wait", blocking=True)
def _emit_wait(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    by_parity = m.flag("parity")
    _order(m)
    _space(m)
    m.need("b64")
    address, phase = t.address(i.operands[1]), t.source(i.operands[2], "u32" if by_parity else "u64")
    call = f"{t.bind(mbarrier_wait, 'mbarrier_wait')}(s, {address}, {phase}, {by_parity}, {i.parts[1] == 'try_wait'})"
    return Blocking(i.operands[:1], call)


@emits("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", blocking=True)
def _emit_sync(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    aligned = m.flag("aligned") or i.parts[0] == "bar"
    threads = t.source(i.operands[1], "u32") if len(i.operands) > 1 else "None"
    call = f"{t.bind(barrier_sync, 'barrier_sync')}(s, {t.source(i.operands[0], 'u32')}, {threads}, {aligned})"
    return Blocking((), call)


@emits("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive", blocking=True)
def _emit_named_arrive(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    aligned = m.flag("aligned") or i.parts[0] == "bar"
    number, threads = (t.source(operand, "u32") for operand in i.operands)
    return Blocking((), f"{t.bind(barrier_arrive, 'barrier_arrive')}(s, {number}, {threads}, {aligned})")


@emits("barrier.cluster.arrive", blocking=True)
def _emit_cluster_arrive(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    relaxed = _order(m)
    return Blocking((), f"{t.bind(cluster_arrive, 'cluster_arrive')}(s, {relaxed}, {m.flag('aligned')})")


@emits("barrier.cluster.wait", blocking=True)
def _emit_cluster_wait(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    _order(m)
    return Blocking((), f"{t.bind(cluster_wait, 'cluster_wait')}(s, {m.flag('aligned')})")


_FENCES = {
    ("proxy", "async"),
    ("proxy", "async", "shared::cta"),
    ("proxy", "async", "shared::cluster"),
    ("proxy", "async", "global"),
    ("proxy", "alias"),
    ("mbarrier_init", "release", "cluster"),
    *(
        (order, scope)
        for order in ("acq_rel", "sc", "acquire", "release")
        for scope in ("cta", "cluster", "gpu", "sys")
    ),
}


@emits("fence", "membar")
def _emit_fence(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    kind = tuple(m.rest)
    if i.parts[0] == "fence" and kind not in _FENCES:
        raise UnsupportedInstruction(f"fence.{'.'.join(kind)} is not modelled")
    m.rest.clear()
    return Effect((), f"{t.bind(fence, 'fence')}(s, {kind[:2] == ('proxy', 'async')})")


@emits("griddepcontrol")
def _emit_grid(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.need("wait", "launch_dependents")
    return Effect((), f"{t.bind(nothing, 'nothing')}()")


@emits("setmaxnreg")
def _emit_registers(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.need("inc", "dec")
    m.need("sync")
    m.need("aligned")
    m.need("u32")
    count = i.operands[0].value
    if not 24 <= count <= 256 or count % 8:
        raise UnsupportedInstruction(f"setmaxnreg takes multiples of 8 from 24 to 256, not {count}")
    return Effect((), f"{t.bind(nothing, 'nothing')}()")
