"""What a launch did: executed instructions by class, tensor-core work, bytes by path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ptxemu.isa.dataflow import Block
from ptxemu.isa.parser import Instruction

_CLASSES = {
    **dict.fromkeys(("bra", "ret", "exit", "trap", "call"), "control"),
    **dict.fromkeys(("ld", "st", "ldmatrix", "stmatrix", "atom", "red", "prefetch"), "memory"),
    **dict.fromkeys(
        ("mbarrier", "bar", "barrier", "fence", "membar", "griddepcontrol", "setmaxnreg", "nanosleep"), "sync"
    ),
    **dict.fromkeys(("shfl", "vote", "match", "redux", "elect", "activemask"), "warp"),
    **dict.fromkeys(("wgmma", "tcgen05", "mma"), "tensor"),
    **dict.fromkeys(("cp", "clusterlaunchcontrol", "prefetchu"), "async copy"),
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"), "special function"),
    **dict.fromkeys(("mov", "selp", "cvta", "mapa", "prmt", "shf"), "move"),
}
_FLOAT_TYPES = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


def classify(instruction: Instruction) -> str:
    """The class an instruction is counted in."""
    name = instruction.parts[0]
    if name in _CLASSES:
        return _CLASSES[name]
    if name == "cvt":
        return "convert"
    return "float" if instruction.parts[-1] in _FLOAT_TYPES else "integer"


@dataclass
class Counts:
    """
    Attributes:
        instructions: executed warp instructions by class.
        opcodes: executed warp instructions by opcode.
        lines: how often a line of the PTX is issued, by the index of the warp in its CTA and the number of the line, if
            lanes that part meet again where they can. The emulator may let them meet later, and executes more then.
        macs_issued: multiply-accumulates of all tensor-core instructions.
        macs_useful: those of them whose operand rows hold at least one element that is not known to be zero fill.
        bytes: by path, such as "global to shared (TMA)".
    """

    instructions: Counter = field(default_factory=Counter)
    opcodes: Counter = field(default_factory=Counter)
    lines: dict[int, Counter[int]] = field(default_factory=dict)
    macs_issued: int = 0
    macs_useful: int = 0
    bytes: Counter = field(default_factory=Counter)
    barrier_timeouts: int = 0

    def add(self, block: Block, executed: int) -> None:
        """Count a block of instructions that was executed so many times."""
        for total, per_block in ((self.instructions, block.classes), (self.opcodes, block.opcodes)):
            for name, number in per_block.items():
                total[name] += number * executed

    def __str__(self) -> str:
        lines = [f"  {name:32} {count:>14,}" for name, count in self.instructions.most_common()]
        lines += [f"  {path:32} {count:>14,} bytes" for path, count in self.bytes.most_common()]
        lines.append(f"  {'multiply-accumulates issued':32} {self.macs_issued:>14,}")
        lines.append(f"  {'multiply-accumulates useful':32} {self.macs_useful:>14,}")
        return "\n".join(lines)
