"""Basic blocks, and which registers are live where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ptxemu.isa.parser import Address, Instruction, Negated, Pair, Register, Vector


@dataclass
class Block:
    """A basic block: instructions [first, last) of the kernel."""

    index: int
    first: int
    last: int
    successors: list[int] = field(default_factory=list)
    live_in: tuple[int, ...] = ()
    classes: Counter = field(default_factory=Counter)
    opcodes: Counter = field(default_factory=Counter)


def _registers_of(operand: object) -> list[int]:
    if isinstance(operand, Register):
        return [operand.index]
    if isinstance(operand, Negated):
        return [operand.register.index]
    if isinstance(operand, Vector):
        return [index for item in operand.items for index in _registers_of(item)]
    if isinstance(operand, Pair):
        return [*_registers_of(operand.first), *_registers_of(operand.second)]
    if isinstance(operand, Address):
        return [*_registers_of(operand.base), *(i for item in operand.coordinates for i in _registers_of(item))]
    return []


def solve_liveness(blocks: list[Block], instructions: list[Instruction]) -> None:
    """Sets `live_in`: what a block, or one after it, may read before writing it. Strands that meet merge only that."""
    uses, kills = [], []
    for block in blocks:
        used, killed = 0, 0
        for instruction in instructions[block.first : block.last]:
            reads, writes = read_write_sets(instruction)
            used |= reads & ~killed
            if instruction.predicate is None:
                killed |= writes
            else:
                used |= writes & ~killed
        uses.append(used)
        kills.append(killed)
    live = list(uses)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = 0
            for successor in block.successors:
                if successor < len(blocks):
                    out |= live[successor]
            new = uses[block.index] | (out & ~kills[block.index])
            if new != live[block.index]:
                live[block.index] = new
                changed = True
    for block in blocks:
        bits = live[block.index]
        block.live_in = tuple(i for i in range(bits.bit_length()) if (bits >> i) & 1)


# Opcodes whose first operand is a source although it is a register, and those that read their destinations too.
_NO_TARGET = {
    "st",
    "bra",
    "ret",
    "exit",
    "trap",
    "bar",
    "barrier",
    "red",
    "setmaxnreg",
    "prefetch",
    "fence",
    "membar",
    "nanosleep",
}
_READS_TARGETS = {"wgmma"}


def read_write_sets(instruction: Instruction) -> tuple[int, int]:
    """Bit sets of the registers that an instruction reads and writes; found once per instruction."""
    if instruction.register_sets is None:
        instruction.register_sets = _find_register_sets(instruction)
    return instruction.register_sets


def _find_register_sets(instruction: Instruction) -> tuple[int, int]:
    operands = instruction.operands
    reads = writes = 0
    has_target = bool(operands) and instruction.parts[0] not in _NO_TARGET and not isinstance(operands[0], Address)
    if has_target and instruction.parts[:2] in (("tcgen05", "dealloc"), ("tcgen05", "st")):
        has_target = False
    for position, operand in enumerate(operands):
        for index in _registers_of(operand):
            if position == 0 and has_target:
                writes |= 1 << index
                if instruction.parts[0] in _READS_TARGETS:
                    reads |= 1 << index
            else:
                reads |= 1 << index
    if instruction.predicate is not None:
        for index in _registers_of(instruction.predicate):
            reads |= 1 << index
    return reads, writes
