"""Which instructions of the machine code a launch executes, and on which pipes.

The emulator runs PTX and counts how often each of its lines is executed. A cubin that was compiled with line
information (which does not change the code) says from which line an instruction comes, and `nvdisasm` prints it. From
both follows how often every basic block of the machine code is executed, and so each of its instructions.
"""

from __future__ import annotations

import enum
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DISASSEMBLER = "nvdisasm"
DISASSEMBLER_PACKAGE = "nvidia-cuda-nvdisasm"

_LINE = re.compile(r'\s*//## File "\.nv_debug_ptx_txt", line (\d+)')
_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_SECTION = re.compile(r"\s*\.section\s+\.text\.")
_BRANCHES, _ENDS, _CALLS = {"BRA", "JMP"}, {"EXIT", "RET", "BRX", "JMX"}, {"CALL"}


class Pipe(enum.Enum):
    """Where an instruction goes from the scheduler, in the terms of Nsight Compute."""

    FMA = "FMA"
    ALU = "ALU"
    XU = "XU"
    LSU = "LSU"
    TENSOR_MEMORY = "tensor memory"
    UNIFORM = "uniform"
    ASYNC = "async"  # copies and products that a thread only starts
    CONTROL = "control"


_MNEMONICS = {
    Pipe.FMA: "FADD FADD2 FMUL FMUL2 FFMA FFMA2 HADD2 HMUL2 HFMA2 FHADD FHFMA IMAD",
    Pipe.ALU: "IADD3 VIADD VIADDMNMX LOP3 PLOP3 SHF LEA ISETP FSETP SEL FSEL PRMT MOV IABS FMNMX FMNMX3 IMNMX VIMNMX"
    " VIMNMX3 F2FP I2FP CS2R P2R R2P SGXT BMSK HSETP2 HMNMX2 FCHK VOTE REDUX",
    Pipe.XU: "MUFU F2I I2F F2F FRND POPC FLO BREV",
    Pipe.LSU: "LD LDG LDS LDL LDSM ST STG STS STL STSM STAS ATOM ATOMS ATOMG RED SHFL LDC SYNCS MEMBAR FENCE CCTL S2R",
    Pipe.TENSOR_MEMORY: "LDTM STTM",
    Pipe.ASYNC: "UBLKCP UBLKPF UBLKRED UTMALDG UTMASTG UTMAPF UTMACCTL UTMACMDFLUSH UTCHMMA UTCBAR UTCATOMSWS",
    Pipe.CONTROL: "BRA BRX JMP CALL RET EXIT BSSY BSYNC BREAK BMOV BAR WARPSYNC NANOSLEEP NOP DEPBAR LDGDEPBAR YIELD"
    " ERRBAR CGAERRBAR UCGABAR_ARV UCGABAR_WAIT ACQBULK PREEXIT ENDCOLLECTIVE WARPGROUP USETMAXREG UVIRTCOUNT"
    " ACQSHMINIT PMTRIG BPT",
    Pipe.UNIFORM: "R2UR S2UR ELECT VOTEU LDCU",
}
_PIPES = {mnemonic: pipe for pipe, mnemonics in _MNEMONICS.items() for mnemonic in mnemonics.split()}


def pipe_of(opcode: str) -> Pipe:
    """The pipe of an opcode such as `MUFU.EX2`. Raises ValueError for one that no table here has."""
    mnemonic = opcode.partition(".")[0]
    if mnemonic in _PIPES:
        return _PIPES[mnemonic]
    if mnemonic.startswith("U"):  # the uniform datapath's own: UMOV, UIADD3, USEL...
        return Pipe.UNIFORM
    raise ValueError(f"the pipe of {opcode} is not known")


@dataclass(frozen=True)
class Instruction:
    """An instruction, and the PTX line that it was made from."""

    opcode: str
    operands: str
    line: int
    predicated: bool

    @property
    def mnemonic(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        """The label that it may jump to."""
        found = _TARGET.search(self.operands) if self.mnemonic in _BRANCHES else None
        return found[1] if found else None

    @property
    def splits(self) -> bool:
        """Whether a basic block ends behind it."""
        return self.mnemonic in _BRANCHES | _ENDS | _CALLS

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction can follow it."""
        if self.predicated or self.mnemonic in _CALLS or not self.splits:
            return True
        # `BRA.U UP0, target` is conditional, too: its condition is an operand.
        return self.mnemonic in _BRANCHES and not self.operands.startswith("`")


@dataclass
class Block:
    """A basic block; `before` are the numbers of those that may precede it."""

    instructions: list[Instruction]
    before: set[int] = field(default_factory=set)

    @property
    def calls(self) -> bool:
        return self.instructions[-1].mnemonic in _CALLS


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin with the PTX lines it comes from.

    Raises:
        FileNotFoundError: `nvdisasm` is neither on the PATH nor installed with its package.
        ValueError: the cubin cannot be read.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "--print-code", "--print-line-info-ptx", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{DISASSEMBLER}: {done.stderr.strip()}")
    return done.stdout


def disassembler() -> str:
    """Where `nvdisasm` is. Raises FileNotFoundError if it is not installed."""
    try:
        files = importlib.metadata.files(DISASSEMBLER_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [str(file.locate()) for file in files if Path(file).stem == DISASSEMBLER]
    found = next(iter(packaged), None) or shutil.which(DISASSEMBLER)
    if found is None:
        raise FileNotFoundError(f"{DISASSEMBLER} is needed: pip install {DISASSEMBLER_PACKAGE}")
    return found


def blocks(listing: str) -> list[Block]:
    """The basic blocks of the only kernel in a listing. Raises ValueError if there is none, or another one."""
    code, labels = _parse(listing)
    if not code:
        raise ValueError("no instruction in the listing")
    starts = {0, *labels.values(), *(at + 1 for at, instruction in enumerate(code) if instruction.splits)}
    bounds = sorted(start for start in starts if start < len(code))
    number = {start: index for index, start in enumerate(bounds)}
    found = [Block(code[start:end]) for start, end in zip(bounds, [*bounds[1:], len(code)], strict=True)]
    for index, block in enumerate(found):
        last = block.instructions[-1]
        if last.target is not None:
            found[number[labels[last.target]]].before.add(index)
        if last.goes_on and index + 1 < len(found):
            found[index + 1].before.add(index)
    return found


def _parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    line = sections = 0
    for text in listing.splitlines():
        if match := _LINE.match(text):
            line = int(match[1])
        elif match := _LABEL.match(text):
            labels[match[1]] = len(code)
        elif match := _INSTRUCTION.match(text):
            code.append(Instruction(match[2], match[3], line, match[1] is not None))
        elif _SECTION.match(text):
            sections += 1
    if sections > 1:
        raise ValueError(f"{sections} kernels in the listing; line numbers would be ambiguous")
    return code, labels


def executions(code: Sequence[Block], lines: Mapping[int, int]) -> list[int]:
    """How often each block is executed, given how often each PTX line was.

    Blocks of which either is executed whenever the other is form a region. Nearly all instructions of a region come
    from lines that were executed equally often. The others were moved there: out of a loop into what precedes it, or
    out of a branch whose instructions became conditional. So a block counts as often as most unconditional
    instructions of its region say, but not more often than the blocks before it together. What ptxas calls are slow
    paths, of divisions by extreme numbers and of warps that have parted, which count as never taken.
    """
    reached = _reachable(code)
    counts = [0] * len(code)
    for region in _regions(code, reached):
        votes: Counter[int] = Counter()
        for at in region:
            votes.update(_votes(code[at], lines))
        for at in region:
            if votes and not code[at].calls:
                counts[at] = votes.most_common(1)[0][0]
    while True:
        capped = [
            min(count, sum(counts[at] for at in block.before)) if block.before else count
            for count, block in zip(counts, code, strict=True)
        ]
        if capped == counts:
            return counts
        counts = capped


def _votes(block: Block, lines: Mapping[int, int]) -> Counter[int]:
    if block.calls:
        return Counter()
    unconditional = [instruction for instruction in block.instructions if not instruction.predicated]
    return Counter(lines.get(instruction.line, 0) for instruction in unconditional or block.instructions)


# --- control flow: sets of blocks are the bits of a number -----------------------------------------------------------


def _members(blocks: int) -> Iterator[int]:
    while blocks:
        lowest = blocks & -blocks
        yield lowest.bit_length() - 1
        blocks ^= lowest


def _reachable(code: Sequence[Block]) -> int:
    """The blocks that the first one leads to, other than by a call."""
    reached, found = 0, 1
    while found & ~reached:
        reached |= found
        for at, block in enumerate(code):
            if any(reached >> before & 1 for before in block.before):
                found |= 1 << at
    return reached


def _dominators(before: Sequence[Iterable[int]], root: int) -> list[int]:
    """For each block, those that are on every way from the root to it."""
    everything = (1 << len(before)) - 1
    found = [everything] * len(before)
    found[root] = 1 << root
    changed = True
    while changed:
        changed = False
        for at, blocks_before in enumerate(before):
            if at == root:
                continue
            common = everything
            for one in blocks_before:
                common &= found[one]
            if common | 1 << at != found[at]:
                found[at] = common | 1 << at
                changed = True
    return found


def _regions(code: Sequence[Block], reached: int) -> list[list[int]]:
    """The blocks that are reached, those together that are on the same ways and in the same loops."""
    end = len(code)
    before = [[one for one in block.before if reached >> one & 1] for block in code]
    after: list[list[int]] = [[] for _ in range(end + 1)]
    for at in _members(reached):
        for one in before[at]:
            after[one].append(at)
    for at in _members(reached):
        if not after[at] or code[at].instructions[-1].mnemonic in _ENDS:
            after[at].append(end)
    dominators, followers = _dominators(before, 0), _dominators(after, end)
    loops = _loops(before, dominators, reached)
    regions: list[list[int]] = []
    for at in _members(reached):
        for region in regions:
            first = region[0]
            if loops[first] == loops[at] and dominators[at] >> first & 1 and followers[first] >> at & 1:
                region.append(at)
                break
        else:
            regions.append([at])
    return regions


def _loops(before: Sequence[Sequence[int]], dominators: Sequence[int], reached: int) -> list[int]:
    """For each block, the first blocks of the loops that it is in."""
    loops = [0] * len(before)
    for head in _members(reached):
        for last in before[head]:
            if not dominators[last] >> head & 1:
                continue
            body, rest = 1 << head, [last]
            while rest:
                at = rest.pop()
                if not body >> at & 1:
                    body |= 1 << at
                    rest += before[at]
            for at in _members(body):
                loops[at] |= 1 << head
    return loops


def executed_opcodes(cubin: bytes, lines: Mapping[int, int]) -> Counter[str]:
    """How often each opcode is issued to a warp, whether or not a condition disables it.

    Args:
        cubin: one kernel, compiled with line information.
        lines: how often the warps in question executed each line of its PTX.
    """
    code = blocks(disassemble(cubin))
    issued: Counter[str] = Counter()
    for block, count in zip(code, executions(code, lines), strict=True):
        if count:
            for instruction in block.instructions:
                issued[instruction.opcode] += count
    return issued
