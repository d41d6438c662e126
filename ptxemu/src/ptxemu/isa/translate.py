"""Kernels to Python: every basic block becomes one generated function, every opcode a small emitter in a table.

A block function takes a strand (the lanes of a warp that run together), its registers and its warp, and returns the
index of the block that comes next. Emitters live in `alu`, `warp_ops`, `control_ops`, `memory_ops`, `async_ops`,
`barrier_ops`, `wgmma_ops` and `tcgen05_ops`; each one reads all the modifiers of its instruction and returns how to
execute it:

- `Pure(targets, expression)`: registers from registers;
- `Effect(targets, call)`: anything that touches memory or barriers; `{mask}` in the call stands for the active lanes;
- `Blocking(targets, call)`: as an effect, but the call may return `PENDING`; the block is then run again later;
- `Control(statement)`: the end of a block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxemu.errors import Location, UnsupportedInstruction
from ptxemu.isa import counts, values
from ptxemu.isa.dataflow import Block, solve_liveness
from ptxemu.isa.hazards import unfenced_wgmma
from ptxemu.isa.parser import (
    SINK,
    TYPE_BYTES,
    Address,
    FloatBits,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Negated,
    Pair,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ptxemu.isa.vector_operations import Step, VectorOperation, arrange

LOCAL_BASE = 1 << 50  # addresses of local memory, generic and local alike; every lane has its own
PARAMETER_BASE = 1 << 49  # generic addresses of kernel parameters; host addresses end at 1 << 47
SHARED_BASE = 1 << 48  # generic addresses of shared memory
RESERVED_SHARED = 1024  # the system's part at the start of the shared window
CTA_SHIFT = 24  # a shared::cluster address carries the CTA's rank in the cluster above this bit

BLOCKED, EXITED = -1, -2


class _Pending:
    """What a blocking handler returns while it cannot go on."""


PENDING = _Pending()


@dataclass(frozen=True)
class Pure:
    """`operation` and the expressions of its operands are given where many such instructions can become one call."""

    targets: tuple
    expression: str
    operation: VectorOperation | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effect:
    targets: tuple
    call: str


@dataclass(frozen=True)
class Blocking:
    targets: tuple
    call: str


@dataclass(frozen=True)
class Control:
    statement: str


Emitter = Callable[["Translator", Instruction, "Modifiers"], "Pure | Effect | Blocking | Control"]
EMITTERS: dict[str, Emitter] = {}
BLOCKING_OPCODES: set[str] = set()


def emits(*names: str, blocking: bool = False) -> Callable[[Emitter], Emitter]:
    """Registers the emitter of the opcodes whose dotted name begins with one of `names` (the longest match counts)."""

    def register(function: Emitter) -> Emitter:
        for name in names:
            EMITTERS[name] = function
            if blocking:
                BLOCKING_OPCODES.add(name)
        return function

    return register


def find_opcode(instruction: Instruction) -> str | None:
    """The longest registered name that the instruction's opcode begins with."""
    parts = instruction.parts
    for length in range(min(len(parts), 5), 0, -1):
        name = ".".join(parts[:length])
        if name in EMITTERS:
            return name
    return None


class Modifiers:
    """The modifiers of one instruction. Each must be taken: one that is left over is not modelled, an error."""

    def __init__(self, instruction: Instruction, opcode: str):
        self.rest = list(instruction.parts[len(opcode.split(".")) :])

    def take(self, *names: str) -> str | None:
        """Removes and returns the first of `names` that is present."""
        for name in self.rest:
            if name in names:
                self.rest.remove(name)
                return name
        return None

    def flag(self, name: str) -> bool:
        return self.take(name) is not None

    def need(self, *names: str) -> str:
        taken = self.take(*names)
        if taken is None:
            raise UnsupportedInstruction(f"expected one of .{', .'.join(names)}")
        return taken

    def type(self) -> str:
        """Removes and returns the last modifier, which must be a type."""
        if not self.rest or self.rest[-1] not in TYPE_BYTES:
            raise UnsupportedInstruction("the instruction has no type")
        return self.rest.pop()

    def done(self) -> None:
        if self.rest:
            raise UnsupportedInstruction(f"modifier .{'.'.join(self.rest)} is not modelled here")


@dataclass
class Program:
    """A translated kernel: one Python function per block."""

    kernel: Kernel
    module: Module
    blocks: list[Block]
    functions: list[Callable[..., int]]
    source: str
    unsupported: list[tuple[Instruction, str]]
    shared_offsets: dict[str, int]
    static_shared: int
    local_size: int

    def location(self, at: int | None, cta: int | None = None, warp: int | None = None) -> Location:
        if at is None:
            return Location(self.kernel.name, cta, warp)
        instruction = self.kernel.instructions[at]
        return Location(self.kernel.name, cta, warp, instruction.line, instruction.text, instruction.source)


def translate(module: Module, kernel: Kernel) -> Program:
    """Translates one kernel. What is not modelled raises when it is reached, and is listed in `unsupported`."""
    return Translator(module, kernel).program()


class Translator:
    def __init__(self, module: Module, kernel: Kernel):
        self.module = module
        self.kernel = kernel
        self.instructions = _guard_blocking(kernel.instructions)
        self.namespace: dict[str, Any] = {
            "PENDING": PENDING,
            "merge": values.merge,
            "lane_mask": values.lane_mask,
            "lane_flags": values.lane_flags,
            "diverge": _diverge,
        }
        self.bound: dict[int, str] = {}
        self.unsupported: list[tuple[Instruction, str]] = []
        self.parameters = {parameter.name: parameter for parameter in kernel.parameters}
        self.shared_offsets, self.static_shared = _lay_out_shared(module, kernel)
        self.local_offsets, self.local_size = _lay_out([v for v in kernel.variables.values() if v.space == "local"], 0)
        self.at = 0
        self.next_block = 0
        self.block_of: dict[int, int] = {}
        self.unfenced_wgmma: set[int] = set()

    def program(self) -> Program:
        blocks = self._find_blocks()
        kernel = Kernel(**{**vars(self.kernel), "instructions": self.instructions})
        solve_liveness(blocks, self.instructions)
        self.unfenced_wgmma = unfenced_wgmma(blocks, self.instructions)
        lines: list[str] = []
        for block in blocks:
            lines += self._block(block)
        source = "\n".join(lines)
        exec(compile(source, f"<{self.kernel.name[:60]}>", "exec"), self.namespace)
        functions = [self.namespace[f"block_{block.index}"] for block in blocks]
        return Program(
            kernel,
            self.module,
            blocks,
            functions,
            source,
            self.unsupported,
            self.shared_offsets,
            self.static_shared,
            self.local_size,
        )

    # What emitters use.

    def bind(self, value: Any, hint: str = "f") -> str:
        """A name for `value` in the generated code."""
        if id(value) not in self.bound:
            name = f"{hint}_{len(self.bound)}"
            self.bound[id(value)] = name
            self.namespace[name] = value
        return self.bound[id(value)]

    def source(self, operand: object, type_name: str) -> str:
        """A Python expression for the value of a source operand, in the width of `type_name`."""
        if isinstance(operand, Register):
            return f"r[{operand.index}]"
        if isinstance(operand, Negated):
            return f"(r[{operand.register.index}] ^ True)"
        if isinstance(operand, Immediate):
            return self._immediate(operand.value, type_name)
        if isinstance(operand, Special):
            if operand.name.startswith(("%clock", "%globaltimer")):
                return "w.clock_register()"
            return f"w.special[{operand.name!r}]"
        if isinstance(operand, Symbol):
            return self.symbol(operand)
        if isinstance(operand, Vector):
            return "(" + "".join(self.source(item, type_name) + ", " for item in operand.items) + ")"
        raise UnsupportedInstruction(f"operand {operand} is not modelled here")

    def _immediate(self, value: int | float, type_name: str) -> str:
        if type_name == "pred":
            return str(bool(value))
        bits = 8 * TYPE_BYTES[type_name]
        if isinstance(value, FloatBits):
            return str(value.as_width(bits))
        if isinstance(value, float):
            value = FloatBits(_double_bits(value), 64).as_width(bits)
        return str(value & ((1 << bits) - 1))

    def symbol(self, operand: Symbol) -> str:
        """The address of a variable or parameter."""
        if operand.name in self.parameters:
            return str(PARAMETER_BASE + self.parameters[operand.name].offset)
        if operand.name in self.local_offsets:
            return str(LOCAL_BASE + self.local_offsets[operand.name])
        if operand.name in self.shared_offsets:
            return f"(w.shared_base + {self.shared_offsets[operand.name]})"
        if operand.name in self.module.variables or operand.name in self.kernel.variables:
            return f"w.symbols[{operand.name!r}]"
        raise UnsupportedInstruction(f"unknown name {operand.name}")

    def address(self, operand: object, bits: int = 64) -> str:
        """The address that `[base + offset]` names."""
        if not isinstance(operand, Address):
            raise UnsupportedInstruction(f"operand {operand} is not an address")
        base = operand.base
        if isinstance(base, Register) and base.bits < bits:
            bits = base.bits
        text = self.source(base, f"u{bits}")
        if not operand.offset:
            return text
        return f"{self.bind(values.adder(bits), 'add')}({text}, {operand.offset & ((1 << bits) - 1)})"

    def register_bits(self, operand: object) -> int:
        return operand.bits if isinstance(operand, Register) else 0

    # Blocks.

    def _find_blocks(self) -> list[Block]:
        instructions = self.instructions
        leaders = {0}
        for index, instruction in enumerate(instructions):
            if instruction.target is not None:
                leaders.add(instruction.target)
            opcode = find_opcode(instruction)
            if instruction.parts[0] in ("bra", "ret", "exit", "trap"):
                leaders.add(index + 1)
            elif opcode in BLOCKING_OPCODES:
                leaders.add(index)
        starts = sorted(leader for leader in leaders if leader < len(instructions))
        blocks = [
            Block(number, first, last)
            for number, (first, last) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True))
        ]
        self.block_of = {block.first: block.index for block in blocks}
        for block in blocks:
            final = instructions[block.last - 1]
            name = final.parts[0]
            if name == "bra":
                if final.target not in self.block_of:
                    raise UnsupportedInstruction("branch past the end of the kernel", self._location(block.last - 1))
                block.successors.append(self.block_of[final.target])
            if name not in ("bra", "ret", "exit", "trap") or final.predicate is not None:
                block.successors.append(block.index + 1)
            for instruction in instructions[block.first : block.last]:
                block.classes[counts.classify(instruction)] += 1
                block.opcodes[instruction.opcode] += 1
        return blocks

    def _location(self, at: int) -> Location:
        instruction = self.instructions[at]
        return Location(self.kernel.name, None, None, instruction.line, instruction.text, instruction.source)

    def _block(self, block: Block) -> list[str]:
        lines = [f"def block_{block.index}(s, r, w):", f"    w.block_counts[{block.index}] += 1"]
        lines.append(f"    if s.mask != {values.FULL_MASK}: w.partial_counts[{block.index}, s.mask] += 1")
        self.next_block = block.index + 1
        emitted: list[Pure | Effect | Blocking | Control | UnsupportedInstruction] = []
        for self.at in range(block.first, block.last):
            try:
                emitted.append(self._emit(self.instructions[self.at]))
            except UnsupportedInstruction as error:
                self.unsupported.append((self.instructions[self.at], error.reason))
                emitted.append(error)
        for positions in self._order(block, emitted):
            if len(positions) > 1:
                statements = self._batch([emitted[position] for position in positions])
            else:
                self.at = block.first + positions[0]
                statements = self._statements(self.instructions[self.at], emitted[positions[0]])
            lines += [f"    {statement}" for statement in statements]
        if not isinstance(emitted[-1], Control):
            lines.append(f"    return {block.index + 1}")
        return lines

    def _order(self, block: Block, emitted: list) -> list[list[int]]:
        """Positions in the block in the order of execution, those of one batch together.

        What may wait stays first, since the block is then run again from its start; the branch at the end stays last.
        """
        first = int(isinstance(emitted[0], Blocking))
        last = len(emitted) - int(isinstance(emitted[-1], Control))
        steps = [self._step(block.first + n, emitted[n]) for n in range(first, last)]
        middle = [[first + position for position in positions] for positions in arrange(steps)]
        return [*([n] for n in range(first)), *middle, *([n] for n in range(last, len(emitted)))]

    def _step(self, at: int, form: Pure | Effect | Blocking | Control | UnsupportedInstruction) -> Step:
        instruction = self.instructions[at]
        batchable = isinstance(form, Pure) and form.operation is not None and instruction.predicate is None
        return Step(instruction, form.operation if batchable else None, not isinstance(form, Pure))

    def _batch(self, forms: list[Pure]) -> list[str]:
        """Equal operations on different registers as one call."""
        operation = forms[0].operation
        targets = [_flatten(form.targets) for form in forms]
        names = [_target_name(row[position]) for position in range(len(targets[0])) for row in targets]
        columns = []
        for column in zip(*(form.sources for form in forms), strict=True):
            shared = column[0].isdigit() and len(set(column)) == 1
            columns.append(column[0] if shared else f"({', '.join(column)},)")
        if all(column.isdigit() for column in columns):
            columns[0] = f"({', '.join(form.sources[0] for form in forms)},)"
        return [f"{', '.join(names)}, = {self.bind(operation, 'batch')}.batch({', '.join(columns)})"]

    def _emit(self, instruction: Instruction) -> Pure | Effect | Blocking | Control:
        opcode = find_opcode(instruction)
        if opcode is None:
            raise UnsupportedInstruction(f"opcode {instruction.opcode} is not modelled")
        modifiers = Modifiers(instruction, opcode)
        emitted = EMITTERS[opcode](self, instruction, modifiers)
        modifiers.done()
        return emitted

    def _statements(
        self, instruction: Instruction, emitted: Pure | Effect | Blocking | Control | UnsupportedInstruction
    ) -> list[str]:
        if isinstance(emitted, UnsupportedInstruction):
            return [f"s.fail_unsupported({self.at}, {emitted.reason!r})"]
        if isinstance(emitted, Control):
            return [*emitted.statement.splitlines()]
        targets = _flatten(emitted.targets)
        guard = self.source(instruction.predicate, "pred") if instruction.predicate is not None else None
        if isinstance(emitted, Pure):
            return self._assign(targets, emitted.expression, guard)
        statements = [f"s.at = {self.at}"]
        if guard is None:
            call = emitted.call.replace("{mask}", "s.mask")
            if isinstance(emitted, Blocking):
                statements += [f"t = {call}", f"if t is PENDING: return {BLOCKED}", *self._assign(targets, "t", None)]
            else:
                statements += self._assign(targets, call, None)
            return statements
        call = emitted.call.replace("{mask}", "m")
        statements.append(f"m = s.mask & lane_mask({guard})")
        body = self._assign(targets, call, "lane_flags(m)")
        return [*statements, "if m:", *(f"    {line}" for line in body)]

    def _assign(self, targets: list, expression: str, guard: str | None) -> list[str]:
        """Stores the value (or tuple of values) of `expression`; under a guard only in the lanes where it holds."""
        if not targets:
            return [expression] if guard is None or "(" in expression else []
        names = [_target_name(target) for target in targets]
        if guard is None:
            return [f"{', '.join(names)} = {expression}"]
        lines = [f"g = {guard}"]
        if len(targets) == 1:
            if names[0] != "_":
                lines.append(f"{names[0]} = merge(g, {expression}, {names[0]}, {targets[0].bits})")
            return lines
        lines.append(f"t = {expression}")
        for index, (target, name) in enumerate(zip(targets, names, strict=True)):
            if name != "_":
                lines.append(f"{name} = merge(g, t[{index}], {name}, {target.bits})")
        return lines


def _target_name(target: object) -> str:
    return f"r[{target.index}]" if isinstance(target, Register) else "_"


def tuple_source(t: Translator, operand: object, kind: str = "b32") -> str:
    """A Python tuple of the values of `{a, b, ...}` (or of a single operand)."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    return "(" + "".join(t.source(item, kind) + ", " for item in items) + ")"


def aligned(m: Modifiers) -> None:
    """Consumes `.sync.aligned`."""
    m.need("sync")
    m.need("aligned")


def _flatten(targets: tuple) -> list:
    flat: list = []
    for target in targets:
        if isinstance(target, Vector):
            flat += _flatten(target.items)
        elif isinstance(target, Pair):
            flat += [target.first, target.second]
        elif isinstance(target, Register) or target == SINK:
            flat.append(target)
        else:
            raise UnsupportedInstruction(f"{target} cannot be written")
    return flat


def _double_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _guard_blocking(instructions: list[Instruction]) -> list[Instruction]:
    """Turns `@p X` for blocking or ending X into a branch around X, so that lanes part before they wait or leave."""
    result: list[Instruction] = []
    moved: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        moved[index] = len(result)
        predicate = instruction.predicate
        ends = instruction.parts[0] in ("ret", "exit", "trap")
        if predicate is not None and (ends or find_opcode(instruction) in BLOCKING_OPCODES):
            negated = predicate.register if isinstance(predicate, Negated) else Negated(predicate)
            around = Instruction(
                ("bra",), (), negated, instruction.line, instruction.text, instruction.source, index + 1
            )
            result.append(around)
            instruction = Instruction(**{**_fields(instruction), "predicate": None})
        result.append(instruction)
    moved[len(instructions)] = len(result)
    return [Instruction(**{**_fields(i), "target": moved[i.target]}) if i.target is not None else i for i in result]


def _fields(instruction: Instruction) -> dict[str, Any]:
    return {name: getattr(instruction, name) for name in Instruction.__dataclass_fields__}


def _lay_out_shared(module: Module, kernel: Kernel) -> tuple[dict[str, int], int]:
    """Offsets of shared variables in the window of a CTA: static ones, then `.extern` arrays (which overlap)."""
    shared = [v for v in (*module.variables.values(), *kernel.variables.values()) if v.space == "shared"]
    offsets, end = _lay_out([v for v in shared if not v.extern], RESERVED_SHARED)
    dynamic = [v for v in shared if v.extern]
    align = max((v.align for v in dynamic), default=1)
    end = -(-end // align) * align
    offsets.update({variable.name: end for variable in dynamic})
    return offsets, end


def _lay_out(variables: list[Variable], end: int) -> tuple[dict[str, int], int]:
    """Offsets of variables that follow each other from `end` on, and where they end."""
    offsets = {}
    for variable in variables:
        end = -(-end // variable.align) * variable.align
        offsets[variable.name] = end
        end += variable.size
    return offsets, end


def _diverge(strand: Any, predicate: Any, taken: int, following: int) -> int:
    """Where a branch goes whose predicate differs between lanes (of which the inactive ones do not count)."""
    mask = values.lane_mask(predicate) & strand.mask
    if mask == strand.mask:
        return taken
    if not mask:
        return following
    strand.split(strand.mask & ~mask, following)
    return taken
