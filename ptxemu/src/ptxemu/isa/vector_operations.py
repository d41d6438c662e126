"""Register operations that can be applied to many registers at once, and the reordering of a block that lets them.

One NumPy call costs far more than the 32 lanes it works on. Epilogues are long runs of the same operations on
independent registers, so a block's instructions are reordered (dependences kept; what touches memory or barriers
keeps its order) until equal operations stand together, and each such group becomes one call on a stack of registers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from ptxemu.isa.dataflow import read_write_sets
from ptxemu.isa.parser import Instruction
from ptxemu.isa.values import LANES, UNSIGNED, Value

Raw = np.ndarray


@dataclass(frozen=True, eq=False)
class VectorOperation:
    """An operation on registers that treats all lanes alike.

    Attributes:
        apply: from one raw unsigned array per operand to a tuple of one per result, elementwise on any shape.
        widths: bits of each operand's register.
    """

    apply: Callable[..., tuple[Raw, ...]]
    widths: tuple[int, ...]

    def __call__(self, *operands: Value) -> Value | tuple[Value, ...]:
        """One instruction; uniform operands give a uniform result."""
        arrays = [
            value if isinstance(value, np.ndarray) else np.array([value], UNSIGNED[bits])
            for value, bits in zip(operands, self.widths, strict=True)
        ]
        results = self.apply(*arrays)
        if results[0].shape[0] != LANES:
            results = tuple(int(result[0]) for result in results)
        return results[0] if len(results) == 1 else results

    def batch(self, *columns: tuple[Value, ...] | int) -> list[Value]:
        """Many instructions. A column holds one operand of each of them, or an int that they share.

        Returns the first results of all instructions, then the second ones.
        """
        rows = max(len(column) for column in columns if isinstance(column, tuple))
        arrays = []
        for column, bits in zip(columns, self.widths, strict=True):
            if not isinstance(column, tuple):
                arrays.append(np.full((1, 1), column, UNSIGNED[bits]))
                continue
            stacked = np.empty((rows, LANES), UNSIGNED[bits])
            for row, value in zip(stacked, column, strict=True):
                row[:] = value
            arrays.append(stacked)
        return [row for result in self.apply(*arrays) for row in result]


@dataclass(frozen=True)
class Step:
    """An instruction of a block. `group`: what it may be batched with. `ordered`: it keeps its place among those."""

    instruction: Instruction
    group: Hashable | None
    ordered: bool


def arrange(steps: list[Step]) -> list[list[int]]:
    """An order of execution that keeps dependences: lists of positions in `steps`, of which those longer than one are
    batches of a group."""
    followers, missing = _dependences(steps)
    ready = [position for position, count in enumerate(missing) if count == 0 and steps[position].group is None]
    heapify(ready)
    batches: dict[Hashable, list[int]] = {}
    for position, count in enumerate(missing):
        if count == 0 and steps[position].group is not None:
            batches.setdefault(steps[position].group, []).append(position)
    result: list[list[int]] = []
    while ready or batches:
        if ready:
            chosen = [heappop(ready)]
        else:
            group = max(batches, key=lambda name: (len(batches[name]), -batches[name][0]))
            chosen = batches.pop(group)
        result.append(chosen)
        for position in chosen:
            for follower in followers[position]:
                missing[follower] -= 1
                if missing[follower]:
                    continue
                if steps[follower].group is None:
                    heappush(ready, follower)
                else:
                    batches.setdefault(steps[follower].group, []).append(follower)
    return result


def _dependences(steps: list[Step]) -> tuple[list[set[int]], list[int]]:
    """For each step the later ones that must wait for it, and for each how many it waits for."""
    followers: list[set[int]] = [set() for _ in steps]
    last_write: dict[int, int] = {}
    reads_since: dict[int, list[int]] = {}
    last_ordered: int | None = None
    for position, step in enumerate(steps):
        reads, writes = read_write_sets(step.instruction)
        if step.instruction.predicate is not None:
            reads |= writes
        earlier = set()
        for register in _members(reads):
            if register in last_write:
                earlier.add(last_write[register])
            reads_since.setdefault(register, []).append(position)
        for register in _members(writes):
            if register in last_write:
                earlier.add(last_write[register])
            earlier.update(reads_since.pop(register, ()))
            last_write[register] = position
        if step.ordered:
            if last_ordered is not None:
                earlier.add(last_ordered)
            last_ordered = position
        earlier.discard(position)
        for other in earlier:
            followers[other].add(position)
    missing = [0] * len(steps)
    for later in followers:
        for position in later:
            missing[position] += 1
    return followers, missing


def _members(bits: int) -> list[int]:
    members = []
    while bits:
        low = bits & -bits
        members.append(low.bit_length() - 1)
        bits ^= low
    return members
