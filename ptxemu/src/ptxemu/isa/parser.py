"""PTX text to kernels, instructions and operands. Registers and labels inside `{ }` are local to their block."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxemu.errors import Location, PtxSyntaxError

TYPE_BYTES = {
    "pred": 0,
    **{f"{prefix}8": 1 for prefix in "bus"},
    **{f"{prefix}16": 2 for prefix in "busf"},
    **{f"{prefix}32": 4 for prefix in "busf"},
    **{f"{prefix}64": 8 for prefix in "busf"},
    "b128": 16,
    "f16x2": 4,
    "bf16": 2,
    "bf16x2": 4,
}


@dataclass(frozen=True)
class Register:
    """A register; `index` numbers the registers of its kernel, `bits` is 1 for a predicate."""

    name: str
    index: int
    bits: int


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal: an int, or a float that becomes bits once its type is known."""

    value: int | float


@dataclass(frozen=True)
class Symbol:
    """The name of a variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`"""

    items: tuple


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, with the coordinates of `[map, {x, y}]` if there are any."""

    base: object
    offset: int = 0
    coordinates: tuple = ()


@dataclass(frozen=True)
class Pair:
    """`a|b`: two destinations."""

    first: object
    second: object


@dataclass(frozen=True)
class Negated:
    """`!p`"""

    register: Register


SINK = Symbol("_")


@dataclass
class Instruction:
    """One instruction. `parts` is the opcode split at its dots, `target` the index of what a branch goes to."""

    parts: tuple[str, ...]
    operands: tuple
    predicate: Register | Negated | None
    line: int
    text: str
    source: str = ""
    target: int | None = None
    register_sets: tuple[int, int] | None = None  # see `dataflow.read_write_sets`

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its size in bytes and its offset in the parameter buffer."""

    name: str
    size: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A `.shared`, `.global`, `.const` or `.local` variable; `size` is 0 for `.extern .shared` arrays."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""
    extern: bool = False


@dataclass
class Kernel:
    """One `.entry` with everything in it."""

    name: str
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]]
    instructions: list[Instruction] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)


@dataclass
class Module:
    """A parsed PTX text."""

    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]


class _Scope:
    """Registers and labels of one `{ }` block."""

    def __init__(self, parent: _Scope | None):
        self.parent = parent
        self.ranges: list[tuple[str, int, int]] = []  # (prefix, count, bits) of `.reg .b32 %r<N>`
        self.registers: dict[str, Register] = {}
        self.vectors: dict[str, Vector] = {}  # `.reg .v4 .b32 abcd`, whose components are registers `abcd.x` ...
        self.labels: dict[str, int] = {}

    def label(self, name: str) -> int | None:
        if name in self.labels:
            return self.labels[name]
        return self.parent.label(name) if self.parent else None


_STATEMENT = re.compile(
    r"""\s*(?:
      (?P<loc>\.loc\b[^\n]*)
    | (?P<line_directive>\.(?:file|version|target|address_size|minnctapersm|maxntid|reqntid)\b[^\n;{]*)
    | (?P<section>\.section\b[^{]*\{[^}]*\})
    | (?P<entry>(?:\.visible\s+|\.weak\s+)*\.(?:entry|func)\b[^{;]*[{;])
    | (?P<declared>\.extern\s+\.func\b[^;]*;)
    | (?P<open>\{)
    | (?P<close>\})
    | (?P<label>[$%A-Za-z_][\w$]*)\s*:(?!:)
    | (?P<statement>[^;]+);
    )""",
    re.VERBOSE,
)
_OPERAND = re.compile(r"-?0[fF][0-9a-fA-F]{8}$|-?0[dD][0-9a-fA-F]{16}$")
_INTEGER = re.compile(r"[-+~]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?$")
_NAME = re.compile(r"[$%A-Za-z_][\w$]*(?:\.[xyzw])?$")
_COMPONENT = re.compile(r"[$%A-Za-z_][\w$]*\.[xyzw]$")
_RANGE = re.compile(r"([$%A-Za-z_][\w$]*)<(\d+)>$")
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|cluster_n?ctaid)\.[xyz]$|%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock64|clock_hi|"
    r"globaltimer|globaltimer_lo|globaltimer_hi|cluster_ctarank|cluster_nctarank|n?clusterid\.[xyz]|is_explicit_cluster|"
    r"lanemask_(?:eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size)$"
)


def parse(text: str) -> Module:
    """Parses PTX text. Raises `PtxSyntaxError` with the line of what it does not understand."""
    return _Parser(text).module()


def split_top_level(text: str, separator: str = ",") -> list[str]:
    """Splits at separators that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return parts if parts != [""] else []


class _Parser:
    def __init__(self, text: str):
        blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)
        self.files: dict[int, str] = {}
        self.target = ""
        self.kernels: dict[str, Kernel] = {}
        self.variables: dict[str, Variable] = {}
        self.kernel: Kernel | None = None
        self.scope: _Scope | None = None
        self.branches: list[tuple[Instruction, str, _Scope]] = []
        self.source = ""
        self.line = 0

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(message, Location(kernel=self.kernel.name if self.kernel else "", ptx_line=self.line))

    def module(self) -> Module:
        for kind, text, line in self._statements():
            self.line = line
            getattr(self, f"_{kind}")(text)
        if self.kernel:
            raise self.error("the text ends inside a kernel")
        return Module(self.target, self.kernels, self.variables)

    def _statements(self) -> Iterator[tuple[str, str, int]]:
        position, line = 0, 1
        end = len(self.text.rstrip())
        while position < end:
            match = _STATEMENT.match(self.text, position)
            if not match:
                self.line = line
                raise self.error(f"cannot parse {self.text[position : position + 60].strip()!r}")
            kind = match.lastgroup
            start = match.start(kind)
            line += self.text.count("\n", position, start)
            yield kind, match.group(kind).strip(), line
            line += self.text.count("\n", start, match.end())
            position = match.end()

    def _loc(self, text: str) -> None:
        fields = text.split(",")[0].split()
        self.source = f"{self.files.get(int(fields[1]), fields[1])}:{fields[2]}"

    def _line_directive(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == ".file":
            number, _, path = rest.strip().partition(" ")
            self.files[int(number)] = path.split('"')[1] if '"' in path else path
        elif name == ".target":
            self.target = rest.split(",")[0].strip()

    def _section(self, text: str) -> None:
        """Debug sections carry nothing that executes."""

    def _declared(self, text: str) -> None:
        """Declarations of external functions; a call of one is reported where it stands."""

    def _entry(self, text: str) -> None:
        if text.endswith(";"):
            return
        header = re.match(
            r"(?:\.\w+\s+)*\.(entry|func)\s*(?:\([^)]*\)\s*)?([\w$]+)\s*(?:\((.*?)\))?(.*)\{$", text, re.DOTALL
        )
        if not header:
            raise self.error(f"cannot parse the header {text[:80]!r}")
        if header.group(1) == "func":
            raise self.error(f"device function {header.group(2)}: only kernels without calls are supported")
        parameters, offset = [], 0
        for declaration in split_top_level(header.group(3) or ""):
            variable = self._variable(declaration, "param")
            offset = -(-offset // variable.align) * variable.align
            parameters.append(Parameter(variable.name, variable.size, offset))
            offset += variable.size
        directives = {
            match.group(1): tuple(int(value) for value in match.group(2).replace(",", " ").split())
            for match in re.finditer(r"\.(\w+)((?:\s+\d+\s*,?)*(?:\d+)?)", header.group(4))
        }
        self.kernel = Kernel(header.group(2), parameters, directives)
        self.scope = _Scope(None)
        self.source = ""
        self.branches = []

    def _open(self, text: str) -> None:
        if not self.kernel:
            raise self.error("a block outside a kernel")
        self.scope = _Scope(self.scope)

    def _close(self, text: str) -> None:
        if not self.kernel:
            raise self.error("unbalanced }")
        if self.scope.parent:
            self.scope = self.scope.parent
            return
        for instruction, name, scope in self.branches:
            instruction.target = scope.label(name)
            if instruction.target is None:
                self.line = instruction.line
                raise self.error(f"branch to the unknown label {name}")
        self.kernels[self.kernel.name] = self.kernel
        self.kernel = self.scope = None

    def _label(self, text: str) -> None:
        if text in self.scope.labels:
            raise self.error(f"label {text} defined twice in one block")
        self.scope.labels[text] = len(self.kernel.instructions)

    def _statement(self, text: str) -> None:
        if text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self._declare_registers(text)
        elif text.startswith("."):
            variable = self._variable(text, None)
            (self.kernel.variables if self.kernel else self.variables)[variable.name] = variable
        elif self.kernel:
            self._instruction(text)
        else:
            raise self.error(f"an instruction outside a kernel: {text[:60]!r}")

    def _declare_registers(self, text: str) -> None:
        match = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", text, re.DOTALL)
        if not match or match.group(2) not in TYPE_BYTES:
            raise self.error(f"cannot parse the declaration {text[:80]!r}")
        bits = 8 * TYPE_BYTES[match.group(2)] or 1
        for name in split_top_level(match.group(3)):
            spread = _RANGE.match(name)
            if match.group(1) and _NAME.match(name):
                components = (f"{name}.{component}" for component in "xyzw"[: int(match.group(1))])
                self.scope.vectors[name] = Vector(tuple(self._new_register(self.scope, c, bits) for c in components))
            elif spread:
                self.scope.ranges.append((spread.group(1), int(spread.group(2)), bits))
            elif _NAME.match(name):
                self._new_register(self.scope, name, bits)
            else:
                raise self.error(f"cannot parse the register name {name!r}")

    def _new_register(self, scope: _Scope, name: str, bits: int) -> Register:
        register = Register(name, len(self.kernel.registers), bits)
        self.kernel.registers.append(register)
        scope.registers[name] = register
        return register

    def _variable(self, text: str, space: str | None) -> Variable:
        declaration, _, initial = text.partition("=")
        words = re.findall(r"\.\w+(?:::\w+)?|[$%\w]+|\[[^\]]*\]", declaration)
        align, kind, size, name, extern, index = 0, None, 1, "", False, 0
        while index < len(words):
            word = words[index]
            if word == ".align":
                align = int(words[index + 1])
                index += 1
            elif word in (".shared", ".global", ".const", ".local", ".param"):
                space = word[1:]
            elif word == ".extern":
                extern = True
            elif word[1:] in TYPE_BYTES and word[0] == ".":
                kind = word[1:]
            elif word[0] == "[":
                size *= int(word[1:-1] or 0)
            elif word[0] != ".":
                name = word
            index += 1
        if kind is None or not name or space is None:
            raise self.error(f"cannot parse the declaration {text[:80]!r}")
        width = TYPE_BYTES[kind]
        return Variable(name, space, align or width, size * width, self._initial_data(initial, width), extern)

    def _initial_data(self, text: str, width: int) -> bytes:
        if not text.strip():
            return b""
        data = bytearray()
        for item in split_top_level(text.strip().strip("{}")):
            operand = self._operand(item, None)
            if not isinstance(operand, Immediate) or isinstance(operand.value, float):
                raise self.error(f"cannot parse the initial value {item!r}")
            data += (operand.value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        return bytes(data)

    def _instruction(self, text: str) -> None:
        predicate = None
        body = text
        if text.startswith("@"):
            guard, body = re.match(r"@(!?\s*[$%\w]+)\s+(.*)$", text, re.DOTALL).groups()
            predicate = self._operand(guard, self.scope)
        match = re.match(r"([\w.:]+)\s*(.*)$", body, re.DOTALL)
        if not match:
            raise self.error(f"cannot parse the instruction {text[:80]!r}")
        parts = tuple(match.group(1).split("."))
        texts = split_top_level(match.group(2))
        instruction = Instruction(parts, (), predicate, self.line, " ".join(text.split()), self.source)
        if parts[0] == "bra":
            self.branches.append((instruction, texts[0], self.scope))
        else:
            instruction.operands = tuple(self._operand(operand, self.scope) for operand in texts)
        self.kernel.instructions.append(instruction)

    def _operand(self, text: str, scope: _Scope | None) -> object:
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._operand(item, scope) for item in split_top_level(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            return self._address(text[1:-1].strip(), scope)
        if text.startswith("!"):
            return Negated(self._operand(text[1:].strip(), scope))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), scope), self._operand(second.strip(), scope))
        if _OPERAND.match(text):
            return Immediate(_hexadecimal_float(text))
        if _INTEGER.match(text):
            digits = text.rstrip("U")
            return Immediate(~int(digits[1:], 0) if digits[0] == "~" else _integer(digits))
        if _FLOAT.match(text):
            return Immediate(float(text))
        if _SPECIAL.match(text):
            return Special(text)
        if _NAME.match(text):
            return self._vector(text, scope) or self._register(text, scope) or Symbol(text)
        if _COMPONENT.match(text):
            register = self._register(text, scope)
            if register is None:
                raise self.error(f"register {text} is not declared")
            return register
        raise self.error(f"cannot parse the operand {text!r}")

    @staticmethod
    def _vector(name: str, scope: _Scope | None) -> Vector | None:
        while scope and name not in scope.vectors:
            scope = scope.parent
        return scope.vectors[name] if scope else None

    def _register(self, name: str, scope: _Scope | None) -> Register | Vector | None:
        while scope:
            if name in scope.vectors:
                return scope.vectors[name]
            if name in scope.registers:
                return scope.registers[name]
            for prefix, count, bits in scope.ranges:
                suffix = name[len(prefix) :]
                if name.startswith(prefix) and suffix.isdigit() and int(suffix) < count:
                    return self._new_register(scope, name, bits)
            scope = scope.parent
        if name.startswith("%"):
            raise self.error(f"register {name} is not declared")
        return None

    def _address(self, text: str, scope: _Scope | None) -> Address:
        base, *coordinates = split_top_level(text)
        vector = self._operand(coordinates[0], scope).items if coordinates else ()
        match = re.match(r"([$%A-Za-z_][\w$]*)\s*(?:\+\s*(-?\w+))?$", base)
        if match:
            return Address(self._operand(match.group(1), scope), _integer(match.group(2) or "0"), vector)
        operand = self._operand(base, scope)
        if not isinstance(operand, Immediate):
            raise self.error(f"cannot parse the address [{text}]")
        return Address(operand, 0, vector)


def _integer(text: str) -> int:
    """PTX reads a leading 0 as octal; compilers write no such number except 0 itself."""
    return int(text, 0) if not re.match(r"[-+]?0\d+$", text) else int(text, 8)


def _hexadecimal_float(text: str) -> int | float:
    """`0fXXXXXXXX` is a float by its bits, `0d...` a double; `-` in front flips the sign bit."""
    negative = text[0] == "-"
    digits = text[2 + negative :]
    bits = int(digits, 16) ^ ((1 << (4 * len(digits) - 1)) if negative else 0)
    return FloatBits(bits, len(digits) * 4)


class FloatBits(int):
    """The bits of a float literal, with the width they were written in."""

    width: int

    def __new__(cls, bits: int, width: int) -> FloatBits:
        value = super().__new__(cls, bits)
        value.width = width
        return value

    def as_width(self, width: int) -> int:
        """The bits in another width: `0d` literals stand for f32 operands too."""
        if width == self.width:
            return int(self)
        value = struct.unpack("<f" if self.width == 32 else "<d", int(self).to_bytes(self.width // 8, "little"))[0]
        return int.from_bytes(struct.pack("<f" if width == 32 else "<d", value), "little")
