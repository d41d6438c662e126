"""mbarriers with transaction counts, named barriers of a CTA, the barrier of a cluster. Each carries a vector clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptxemu.errors import BarrierMisuse

MAX_ARRIVALS = (1 << 20) - 1
MAX_TRANSACTIONS = (1 << 20) - 1
NAMED_BARRIERS = 16


def join(target: np.ndarray | None, clock: np.ndarray | None) -> np.ndarray | None:
    """The union of what two clocks know; the target may be changed in place."""
    if clock is None:
        return target
    return clock.copy() if target is None else np.maximum(target, clock, out=target)


class MBarrier:
    """An mbarrier. A phase ends when no arrival is pending and the transaction count is zero."""

    def __init__(self, cta: int, offset: int, count: int, agent: int):
        if not 1 <= count <= MAX_ARRIVALS:
            raise BarrierMisuse(f"mbarrier.init with a count of {count}")
        self.cta, self.offset, self.count, self.agent = cta, offset, count, agent
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.clock: np.ndarray | None = None  # of the arrivals of the phase in progress
        self.known: np.ndarray | None = None  # of all completed phases

    def __str__(self) -> str:
        return (
            f"mbarrier at offset {self.offset} of the cluster's CTA {self.cta} (phase {self.phase}, {self.pending} of "
            f"{self.count} arrivals pending, {self.transactions} bytes outstanding)"
        )

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity has completed: a fresh barrier passes parity 1."""
        return (self.phase & 1) != parity

    def expect(self, size: int) -> None:
        self.transactions += size
        self._check_transactions()

    def complete(self, size: int) -> None:
        self.transactions -= size
        self._check_transactions()
        self._advance()

    def arrive(self, count: int, clock: np.ndarray | None) -> None:
        if count > self.pending:
            raise BarrierMisuse(
                f"{count} arrivals are more than the {self} waits for: a wait is missing or a count wrong"
            )
        self.pending -= count
        self.clock = join(self.clock, clock)
        self._advance()

    def _check_transactions(self) -> None:
        if abs(self.transactions) > MAX_TRANSACTIONS:
            raise BarrierMisuse(f"the transaction count of the {self} leaves its range")

    def _advance(self) -> None:
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.count
        self.known = join(self.known, self.clock)
        if self.known is not None:
            self.known[:, self.agent] = self.phase
        self.clock = None


@dataclass
class NamedBarrier:
    """Barrier `number` of a CTA: `bar.sync` and its kin."""

    number: int
    expected: int = 0
    arrived: int = 0
    generation: int = 0
    clock: np.ndarray | None = None
    known: np.ndarray | None = None

    def arrive(self, lanes: int, expected: int, clock: np.ndarray | None) -> int:
        """Counts `lanes` threads; the generation they belong to."""
        if self.arrived and expected != self.expected:
            raise BarrierMisuse(f"barrier {self.number} used with {expected} and with {self.expected} threads at once")
        if expected % 32:
            raise BarrierMisuse(
                f"barrier {self.number} with {expected} threads, which is not a multiple of the warp size"
            )
        self.expected = expected
        self.arrived += lanes
        if self.arrived > expected:
            raise BarrierMisuse(f"{self.arrived} threads at barrier {self.number}, which waits for {expected}")
        self.clock = join(self.clock, clock)
        generation = self.generation
        if self.arrived == expected:
            self.generation += 1
            self.arrived = 0
            self.known, self.clock = join(self.known, self.clock), None
        return generation


class ClusterBarrier:
    """`barrier.cluster`: all live threads of the cluster arrive, then may pass."""

    def __init__(self) -> None:
        self.generation = 0
        self.arrived: dict[tuple[int, int], int] = {}
        self.clock: np.ndarray | None = None
        self.known: np.ndarray | None = None

    def arrive(self, warp: tuple[int, int], lanes: int, clock: np.ndarray | None) -> None:
        before = self.arrived.get(warp, 0)
        if before & lanes:
            raise BarrierMisuse("barrier.cluster.arrive twice without a barrier.cluster.wait in between")
        self.arrived[warp] = before | lanes
        self.clock = join(self.clock, clock)

    def advance(self, live: dict[tuple[int, int], int]) -> None:
        """Ends the phase once every live thread has arrived."""
        if any(lanes & ~self.arrived.get(warp, 0) for warp, lanes in live.items()) or not self.arrived:
            return
        self.generation += 1
        self.arrived = {}
        self.known, self.clock = join(self.known, self.clock), None
