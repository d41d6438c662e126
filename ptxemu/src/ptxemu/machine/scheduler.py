"""Who runs next: warps in turn, each until it waits, and asynchronous work when the schedule says so."""

from __future__ import annotations

from collections.abc import Iterator

from ptxemu.errors import EmulatorError
from ptxemu.isa.translate import BLOCKED, EXITED
from ptxemu.machine.state import Cluster, Launch, Strand, Warp, describe_deadlock

SLICE_BLOCKS = 4000  # blocks that a warp runs before the others get a turn
IDLE_ROUNDS = 64  # rounds in which warps only poll before that counts as a deadlock


class Scheduler:
    """Runs the clusters of a launch one after another; together if one waits for what another does in global memory."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.schedule = launch.schedule
        self.functions = launch.program.functions

    def run(self) -> None:
        pending = self._cluster_indices()
        active: list[Cluster] = []
        idle = 0
        timed_out_at = -1
        while True:
            if not active:
                index = next(pending, None)
                if index is None:
                    return
                active.append(Cluster(self.launch, index))
            before = self.launch.events
            ran = self._round(active)
            active = [cluster for cluster in active if not self._finished(cluster)]
            if self.schedule.flushes():
                self.launch.queue.step()
            if ran and self.launch.events != before:
                idle = 0
                continue
            idle += 1
            if ran and idle < IDLE_ROUNDS and not len(self.launch.queue):
                continue
            if not active or self.launch.queue.step():
                idle = 0
                continue
            if timed_out_at != self.launch.events and self._time_out(active):
                timed_out_at = self.launch.events
                continue
            index = next(pending, None)
            if index is None:
                raise describe_deadlock(active, len(self.launch.queue))
            active.append(Cluster(self.launch, index))
            idle = 0

    def _cluster_indices(self) -> Iterator[tuple[int, int, int]]:
        nx, ny, nz = (g // c for g, c in zip(self.launch.grid, self.launch.cluster, strict=True))
        return ((x, y, z) for z in range(nz) for y in range(ny) for x in range(nx))

    def _finished(self, cluster: Cluster) -> bool:
        if not cluster.done:
            return False
        while self.launch.queue.step():
            pass
        cluster.check_end()
        return True

    def _round(self, active: list[Cluster]) -> bool:
        """Lets every warp that can go on run once; whether there was one."""
        ran = False
        for warp in self.schedule.arrange([warp for cluster in active for warp in cluster.warps if warp.live]):
            if any(strand.wait is None or strand.wait.ready() for strand in warp.strands):
                ran = True
                self._run_warp(warp)
        return ran

    def _time_out(self, active: list[Cluster]) -> bool:
        """Nothing else can happen: waits that may fail return False."""
        found = False
        for cluster in active:
            for warp in cluster.warps:
                for strand in warp.strands:
                    if strand.wait is not None and strand.wait.can_time_out:
                        strand.wait.timed_out = True
                        found = True
        return found

    def _run_warp(self, warp: Warp) -> None:
        budget = SLICE_BLOCKS
        warp.yielding = False
        while budget > 0 and not warp.yielding:
            if len(warp.strands) > 1:
                warp.merge_strands()
            strand = self._pick_strand(warp)
            if strand is None:
                return
            try:
                budget = self._run_strand(warp, strand, budget)
            except EmulatorError as error:
                error.location = error.location or strand.location()
                raise

    @staticmethod
    def _pick_strand(warp: Warp) -> Strand | None:
        """The strand that lags behind most, of those that can go on: so lanes that parted meet again."""
        able = [strand for strand in warp.strands if strand.wait is None or strand.wait.ready()]
        chosen = min((strand for strand in able if not strand.deferred), key=_place, default=None)
        if chosen is None and able:
            for strand in able:
                strand.deferred = False
            chosen = min(able, key=_place)
        return chosen

    def _run_strand(self, warp: Warp, strand: Strand, budget: int) -> int:
        """Runs a strand until it waits, leaves, splits, reaches another strand or has used its budget."""
        functions, registers, pc = self.functions, strand.registers, strand.pc
        strands = warp.strands
        count = len(strands)
        alone = count == 1
        meet = (
            -1 if alone else min((other.pc for other in strands if other is not strand and other.pc > pc), default=-1)
        )
        while budget > 0 and not warp.yielding:
            budget -= 1
            following = functions[pc](strand, registers, warp)
            if following < 0:
                if following == EXITED:
                    warp.exit_lanes(strand)
                else:
                    assert following == BLOCKED
                    strand.pc = pc
                    warp.uncount(pc, strand.mask)  # it begins with what waits, and will be executed again
                return budget
            strand.pc = pc = following
            if alone:
                if len(strands) > 1:
                    return budget
            elif pc >= meet >= 0 or len(strands) != count:
                return budget
        strand.deferred = budget <= 0 or strand.deferred
        return budget


def _place(strand: Strand) -> int:
    return strand.pc
