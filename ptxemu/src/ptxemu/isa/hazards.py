"""wgmma without its fence, found in a kernel's text.

`wgmma.mma_async` needs a `wgmma.fence` before the first one of a kernel, and between an ordinary computation of its
accumulators and itself. Moves into accumulators are let through, since compilers sink them below the fence.

The search runs over all paths of the control flow, possible or not; what it finds is reported when it is executed.
(`tcgen05.wait::ld` is not searched for: the hardware interlocks the registers of a load, and kernels rely on it. A wait
that is missing before tensor memory is overwritten shows in the race check.)
"""

from __future__ import annotations

from collections.abc import Sequence

from ptxemu.isa.dataflow import Block, read_write_sets
from ptxemu.isa.parser import Instruction

Registers = int  # a set, one bit each


def unfenced_wgmma(blocks: Sequence[Block], instructions: Sequence[Instruction]) -> set[int]:
    """Indices of the `wgmma.mma_async` that some path reaches without the fence that its accumulators need."""
    written = [read_write_sets(instruction)[1] for instruction in instructions]
    accumulators = 0
    for instruction, registers in zip(instructions, written, strict=True):
        if _is_wgmma(instruction):
            accumulators |= registers
    if not accumulators:
        return set()

    def after(unfenced: Registers, at: int) -> Registers:
        instruction = instructions[at]
        if instruction.parts[:2] == ("wgmma", "fence"):
            return 0
        if _is_wgmma(instruction) or instruction.parts[0] == "mov":
            return unfenced
        return unfenced | (written[at] & accumulators)

    entry: list[Registers] = [0] * len(blocks)
    entry[0] = accumulators
    waiting = list(range(len(blocks)))
    while waiting:
        block = blocks[waiting.pop()]
        unfenced = entry[block.index]
        for at in range(block.first, block.last):
            unfenced = after(unfenced, at)
        for successor in block.successors:
            if successor < len(blocks) and unfenced & ~entry[successor]:
                entry[successor] |= unfenced
                waiting.append(successor)

    found = set()
    for block in blocks:
        unfenced = entry[block.index]
        for at in range(block.first, block.last):
            if _is_wgmma(instructions[at]) and written[at] & unfenced:
                found.add(at)
            unfenced = after(unfenced, at)
    return found


def _is_wgmma(instruction: Instruction) -> bool:
    return instruction.parts[:2] == ("wgmma", "mma_async")
