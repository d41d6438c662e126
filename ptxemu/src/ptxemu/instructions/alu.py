"""Emitters of the register operations: arithmetic, logic, predicates, moves, conversions, exchanges within a warp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from ptxemu.errors import UnsupportedInstruction
from ptxemu.instructions import warp_ops
from ptxemu.isa import values
from ptxemu.isa.parser import TYPE_BYTES, Address, Instruction, Register, Vector
from ptxemu.isa.translate import Modifiers, Pure, Translator, emits
from ptxemu.isa.values import LANES, UNSIGNED, Value
from ptxemu.isa.vector_operations import VectorOperation
from ptxemu.models import numerics

FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")
ROUNDINGS = ("rn", "rz", "rm", "rp")


def _bits(type_name: str) -> int:
    return 8 * TYPE_BYTES[type_name] or 1


def _width(type_name: str) -> int:
    """The register width of a floating-point type: f32x2 lives in 64 bits."""
    return 64 if type_name == "f32x2" else _bits(type_name)


def _call(t: Translator, function: Any, name: str, *sources: str) -> str:
    return f"{t.bind(function, name)}({', '.join(sources)})"


def _sources(t: Translator, instruction: Instruction, type_name: str, first: int = 1) -> list[str]:
    kind = "b64" if type_name == "f32x2" else type_name
    return [t.source(operand, kind) for operand in instruction.operands[first:]]


# Floating point: the registers' bits are viewed as what `numerics` takes, and back.

_NUMPY_OF = {"f32": np.float32, "f64": np.float64}


def float_view(raw: np.ndarray, type_name: str) -> np.ndarray:
    """The bits of registers as the array that `numerics` takes for their type."""
    return raw.view(_NUMPY_OF[type_name]) if type_name in _NUMPY_OF else raw


@cache
def float_operation(name: str, operand_types: tuple[str, ...], result: str, options: tuple) -> VectorOperation:
    """A function of `numerics` as an operation on registers."""
    function = partial(getattr(numerics, name), **dict(options))
    raw = UNSIGNED[_width(result)]

    def apply(*operands: np.ndarray) -> tuple[np.ndarray]:
        views = [float_view(operand, kind) for operand, kind in zip(operands, operand_types, strict=True)]
        return (np.ascontiguousarray(function(*views)).view(raw),)

    return VectorOperation(apply, tuple(_width(kind) for kind in operand_types))


def _vector(t: Translator, i: Instruction, operation: VectorOperation, name: str, sources: list[str]) -> Pure:
    return Pure(i.operands[:1], f"{t.bind(operation, name)}({', '.join(sources)})", operation, tuple(sources))


def _float(t: Translator, i: Instruction, name: str, types: tuple[str, ...], result: str, **options: Any) -> Pure:
    operation = float_operation(name, types, result, tuple(sorted(options.items())))
    kinds = ["b64" if kind == "f32x2" else kind for kind in types]
    sources = [t.source(operand, kind) for operand, kind in zip(i.operands[1:], kinds, strict=True)]
    return _vector(t, i, operation, name, sources)


def _float_type(m: Modifiers) -> str:
    """The type of a floating-point instruction, `f32x2` included."""
    if m.rest and m.rest[-1] in FLOATS:
        return m.rest.pop()
    raise UnsupportedInstruction("the instruction has no floating-point type")


def _options(m: Modifiers, *flags: str) -> dict[str, bool]:
    return {flag: True for flag in flags if m.flag(flag)}


# Arithmetic.


@emits("add", "sub")
def _add(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    name = i.parts[0]
    if m.rest[-1] in FLOATS:
        kind = _float_type(m)
        rounding = m.take(*ROUNDINGS) or "rn"
        if m.rest and m.rest[-1] == "f32" and kind in ("bf16", "f16"):
            m.rest.pop()
            return _float(t, i, f"{name}_mixed", (kind, "f32"), "f32", atype=kind, rnd=rounding, **_options(m, "sat"))
        return _float(t, i, name, (kind, kind), kind, dtype=kind, rnd=rounding, **_options(m, "ftz", "sat"))
    kind = m.type()
    bits = _bits(kind)
    if m.flag("sat"):
        raise UnsupportedInstruction("saturating integer addition is not modelled")
    function = values.adder(bits) if name == "add" else values.subtractor(bits)
    return Pure(i.operands[:1], _call(t, function, name, *_sources(t, i, kind)))


@emits("mul")
def _mul(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    if m.rest[-1] in FLOATS:
        kind = _float_type(m)
        rounding = m.take(*ROUNDINGS) or "rn"
        return _float(t, i, "mul", (kind, kind), kind, dtype=kind, rnd=rounding, **_options(m, "ftz", "sat"))
    kind = m.type()
    part = m.take("lo", "hi", "wide") or "lo"
    bits, is_signed = _bits(kind), kind[0] == "s"
    function = {
        "lo": lambda: values.multiplier(bits),
        "hi": lambda: values.high_multiplier(bits, is_signed),
        "wide": lambda: values.wide_multiplier(bits, is_signed),
    }[part]()
    return Pure(i.operands[:1], _call(t, function, f"mul_{part}", *_sources(t, i, kind)))


@cache
def _mad_function(part: str, bits: int, is_signed: bool) -> Callable[..., Value]:
    if part == "lo":
        return values.multiply_adder(bits)
    width = 2 * bits if part == "wide" else bits
    maker = values.wide_multiplier if part == "wide" else values.high_multiplier
    product, add = maker(bits, is_signed), values.adder(width)
    return lambda a, b, c: add(product(a, b), c)


@emits("mad")
def _mad(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    if m.rest[-1] in FLOATS:
        return _fma(t, i, m)
    kind = m.type()
    part = m.take("lo", "hi", "wide") or "lo"
    function = _mad_function(part, _bits(kind), kind[0] == "s")
    wide = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[kind] if part == "wide" else kind
    a, b = (t.source(operand, kind) for operand in i.operands[1:3])
    return Pure(i.operands[:1], _call(t, function, f"mad_{part}", a, b, t.source(i.operands[3], wide)))


@emits("fma")
def _fma(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = _float_type(m)
    rounding = m.take(*ROUNDINGS) or "rn"
    if m.rest and m.rest[-1] == "f32" and kind in ("bf16", "f16"):
        m.rest.pop()
        return _float(t, i, "fma_mixed", (kind, kind, "f32"), "f32", atype=kind, rnd=rounding, **_options(m, "sat"))
    options = _options(m, "ftz", "sat", "relu")
    return _float(t, i, "fma", (kind,) * 3, kind, dtype=kind, rnd=rounding, **options)


@emits("div")
def _div(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    if m.rest[-1] in FLOATS:
        kind = _float_type(m)
        rounding = m.need(*ROUNDINGS, "approx", "full")
        ftz = _options(m, "ftz")
        if rounding in ROUNDINGS:
            return _float(t, i, "div", (kind, kind), kind, dtype=kind, rnd=rounding, **ftz)
        return _float(t, i, f"div_{rounding}", (kind, kind), kind, **ftz)
    return _divide(t, i, m, False)


@emits("rem")
def _rem(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    return _divide(t, i, m, True)


def _divide(t: Translator, i: Instruction, m: Modifiers, remainder: bool) -> Pure:
    kind = m.type()
    function = values.divider(_bits(kind), kind[0] == "s", remainder)
    return Pure(i.operands[:1], _call(t, function, i.parts[0], *_sources(t, i, kind)))


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def _special_function(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    name = i.parts[0]
    kind = _float_type(m)
    rounding = m.need(*ROUNDINGS, "approx")
    ftz = _options(m, "ftz")
    if rounding in ROUNDINGS:
        return _float(t, i, name, (kind,), kind, dtype=kind, rnd=rounding, **ftz)
    options = {"dtype": kind} if kind != "f32" and name in ("ex2", "tanh", "rsqrt") else {}
    return _float(t, i, f"{name}_approx", (kind,), kind, **options, **ftz)


@emits("min", "max")
def _extreme(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    largest = i.parts[0] == "max"
    if m.rest[-1] in FLOATS:
        kind = _float_type(m)
        options = _options(m, "ftz")
        if m.flag("NaN"):
            options["nan"] = True
        if m.flag("xorsign") and m.flag("abs"):
            options["xorsign_abs"] = True
        types = (kind,) * (len(i.operands) - 1)
        return _float(t, i, "maximum" if largest else "minimum", types, kind, dtype=kind, **options)
    kind = m.type()
    function = values.extreme(_bits(kind), kind[0] == "s", largest)
    return Pure(i.operands[:1], _call(t, function, i.parts[0], *_sources(t, i, kind)))


@emits("abs", "neg")
def _sign(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    name = i.parts[0]
    if m.rest[-1] in FLOATS:
        kind = _float_type(m)
        numeric = "absolute" if name == "abs" else "neg"
        return _float(t, i, numeric, (kind,), kind, dtype=kind, **_options(m, "ftz"))
    kind = m.type()
    return Pure(i.operands[:1], _call(t, _integer_sign(name, _bits(kind)), name, *_sources(t, i, kind)))


@cache
def _integer_sign(name: str, bits: int) -> Callable[[Value], Value]:
    subtract = values.subtractor(bits)
    if name == "neg":
        return lambda a: subtract(0, a) if not isinstance(a, np.ndarray) else -a.view(UNSIGNED[bits])
    return values.lanewise(lambda a: abs(values.signed(a, bits)), bits)


# Logic and shifts.


@emits("and", "or", "xor")
def _logic(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    symbol = {"and": "&", "or": "|", "xor": "^"}[i.parts[0]]
    a, b = _sources(t, i, m.type())
    return Pure(i.operands[:1], f"{a} {symbol} {b}")


@emits("not")
def _not(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    ones = "True" if kind == "pred" else str((1 << _bits(kind)) - 1)
    return Pure(i.operands[:1], f"{_sources(t, i, kind)[0]} ^ {ones}")


@emits("shl", "shr")
def _shift(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    bits = _bits(kind)
    left = i.parts[0] == "shl"
    function = values.left_shifter(bits) if left else values.right_shifter(bits, kind[0] == "s")
    value, amount = t.source(i.operands[1], kind), t.source(i.operands[2], "u32")
    return Pure(i.operands[:1], _call(t, function, i.parts[0], value, amount))


@emits("shf")
def _funnel_shift(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    direction = m.need("l", "r")
    mode = m.need("wrap", "clamp")
    m.need("b32")
    return Pure(i.operands[:1], _call(t, _funnel(direction, mode), "shf", *_sources(t, i, "b32")))


@cache
def _funnel(direction: str, mode: str) -> Callable[..., Value]:
    def shift(low: int, high: int, amount: int) -> int:
        amount = amount & 31 if mode == "wrap" else min(amount, 32)
        joined = (high << 32) | low
        return ((joined << amount) >> 32 if direction == "l" else joined >> amount) & 0xFFFFFFFF

    return values.lanewise(shift, 32)


def _bit_count(a: int, bits: int) -> int:
    return bin(a).count("1")


def _leading_zeros(a: int, bits: int) -> int:
    return bits - a.bit_length()


def _reverse(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def _find_bit(a: int, bits: int) -> int:
    return a.bit_length() - 1 if a else 0xFFFFFFFF


_BIT_FUNCTIONS = {
    "popc": (_bit_count, 32),
    "clz": (_leading_zeros, 32),
    "brev": (_reverse, None),
    "bfind": (_find_bit, 32),
}


@emits("popc", "clz", "brev", "bfind")
def _bit_function(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    if kind[0] == "s":
        raise UnsupportedInstruction("bfind of signed types is not modelled")
    function, result_bits = _BIT_FUNCTIONS[i.parts[0]]
    bits = _bits(kind)
    return Pure(
        i.operands[:1], _call(t, _bit_lifted(function, bits, result_bits or bits), i.parts[0], *_sources(t, i, kind))
    )


@cache
def _bit_lifted(function: Callable[[int, int], int], bits: int, result_bits: int) -> Callable[[Value], Value]:
    return values.lanewise(lambda a: function(a, bits), result_bits)


@emits("prmt")
def _prmt(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    m.need("b32")
    return Pure(i.operands[:1], _call(t, _PERMUTE, "prmt", *_sources(t, i, "b32")))


_PERMUTE = values.lanewise(values.permute_bytes, 32)


@emits("lop3")
def _lop3(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    m.need("b32")
    return Pure(i.operands[:1], _call(t, _LOOKUP, "lop3", *_sources(t, i, "b32")))


_LOOKUP = values.lanewise(values.lookup3, 32)


@emits("bfe")
def _bfe(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    sources = [t.source(i.operands[1], kind), *(t.source(operand, "u32") for operand in i.operands[2:])]
    return Pure(i.operands[:1], _call(t, _field_extractor(_bits(kind), kind[0] == "s"), "bfe", *sources))


@cache
def _field_extractor(bits: int, is_signed: bool) -> Callable[..., Value]:
    def extract(a: int, position: int, length: int) -> int:
        position, length = position & 0xFF, length & 0xFF
        field = (a >> position) & ((1 << length) - 1) if position < bits else 0
        sign_at = min(position + length - 1, bits - 1)
        if is_signed and length and (a >> sign_at) & 1:
            field |= -1 << max(0, min(length, bits - position))
        return field & ((1 << bits) - 1)

    return values.lanewise(extract, bits)


@emits("bfi")
def _bfi(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    sources = [*(t.source(o, kind) for o in i.operands[1:3]), *(t.source(o, "u32") for o in i.operands[3:])]
    return Pure(i.operands[:1], _call(t, _field_inserter(_bits(kind)), "bfi", *sources))


@cache
def _field_inserter(bits: int) -> Callable[..., Value]:
    def insert(a: int, b: int, position: int, length: int) -> int:
        mask = (((1 << (length & 0xFF)) - 1) << (position & 0xFF)) & ((1 << bits) - 1)
        return (b & ~mask) | ((a << (position & 0xFF)) & mask)

    return values.lanewise(insert, bits)


# Predicates.

_COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


@emits("setp")
def _setp(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    combine = m.take("and", "or", "xor")
    comparison = m.need(*_COMPARE, *_UNSIGNED_NAMES, *_UNORDERED, "num", "nan")
    function = _comparison(comparison, kind, m.flag("ftz"))
    a, b = (t.source(operand, kind) for operand in i.operands[1:3])
    result = _call(t, function, "setp", a, b)
    pair = not isinstance(i.operands[0], Register)
    if combine is None and not pair:
        return Pure(i.operands[:1], result)
    other = t.source(i.operands[3], "pred") if combine else "True"
    symbol = {"and": "&", "or": "|", "xor": "^", None: "&"}[combine]
    if not pair:
        return Pure(i.operands[:1], f"{result} {symbol} {other}")
    both = t.bind(_both_ways(combine or "and"), "both")
    return Pure(i.operands[:1], f"{both}({result}, {other})")


@cache
def _both_ways(combine: str) -> Callable[[Value, Value], tuple[Value, Value]]:
    """`setp ... p|q`: p combines the comparison, q its negation."""
    apply = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}[combine]
    return lambda a, b: (apply(a, b), apply(a ^ True, b))


@cache
def _comparison(name: str, kind: str, ftz: bool) -> Callable[[Value, Value], Value]:
    bits = _bits(kind)
    if kind in FLOATS:
        return _float_comparison(name, kind, ftz)
    compare = _COMPARE[_UNSIGNED_NAMES.get(name, name)]
    if kind[0] != "s" or name in ("eq", "ne"):
        return compare
    flip = 1 << (bits - 1)
    return lambda a, b: compare(a ^ flip, b ^ flip)


def _float_comparison(name: str, kind: str, ftz: bool) -> Callable[[Value, Value], Value]:
    bits = _bits(kind)

    def wide(value: Value) -> np.ndarray:
        raw = value if isinstance(value, np.ndarray) else np.array([value], UNSIGNED[bits])
        array = numerics.widen(float_view(raw, kind), kind)
        return numerics.flush_f32(array) if ftz else array

    def compare(a: Value, b: Value) -> Value:
        x, y = wide(a), wide(b)
        unordered = np.isnan(x) | np.isnan(y)
        if name in ("num", "nan"):
            result = ~unordered if name == "num" else unordered
        elif name in _UNORDERED:
            result = _COMPARE[_UNORDERED[name]](x, y) | unordered
        else:
            result = _COMPARE[name](x, y) & ~unordered
        return result if result.shape[0] == LANES else bool(result[0])

    return compare


_PROPERTIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@emits("testp")
def _testp(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    tested = _property(m.need(*_PROPERTIES), kind)
    return Pure(i.operands[:1], _call(t, tested, "testp", t.source(i.operands[1], kind)))


@cache
def _property(name: str, kind: str) -> Callable[[Value], Value]:
    def test(a: Value) -> Value:
        result = _PROPERTIES[name](float_view(a, kind))
        return result if result.shape[0] == LANES else bool(result[0])

    return test


@emits("selp")
def _selp(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    a, b = (t.source(operand, kind) for operand in i.operands[1:3])
    return Pure(i.operands[:1], _call(t, values.selector(_bits(kind)), "selp", a, b, t.source(i.operands[3], "pred")))


# Moves and conversions.


@emits("mov")
def _mov(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    kind = m.type()
    target, source = i.operands
    if isinstance(source, Vector):
        bits = _bits(kind) // len(source.items)
        parts = "".join(t.source(item, f"b{bits}") + ", " for item in source.items)
        sources = tuple(t.source(item, f"b{bits}") for item in source.items)
        return Pure(
            (target,), f"{t.bind(values.pack, 'pack')}(({parts}), {bits})", _packing(bits, len(sources)), sources
        )
    if isinstance(target, Vector):
        count = len(target.items)
        bits = _bits(kind) // count
        text = t.source(source, kind)
        return Pure(
            (target,), f"{t.bind(values.unpack, 'unpack')}({text}, {bits}, {count})", _unpacking(bits, count), (text,)
        )
    if isinstance(source, Address):
        raise UnsupportedInstruction("mov takes no address in brackets")
    return Pure((target,), t.source(source, kind))


@cache
def _packing(bits: int, count: int) -> VectorOperation:
    def apply(*parts: np.ndarray) -> tuple[np.ndarray]:
        joined = np.stack(np.broadcast_arrays(*parts), axis=-1)
        return (joined.view(UNSIGNED[bits * count])[..., 0],)

    return VectorOperation(apply, (bits,) * count)


@cache
def _unpacking(bits: int, count: int) -> VectorOperation:
    def apply(joined: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = np.ascontiguousarray(joined)[..., None].view(UNSIGNED[bits])
        return tuple(np.ascontiguousarray(np.moveaxis(parts, -1, 0)))

    return VectorOperation(apply, (bits * count,))


@emits("cvta")
def _cvta(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    to_space = m.flag("to")
    space = m.need("shared", "shared::cta", "shared::cluster", "global", "param", "const", "local", "param::entry")
    kind = m.type()
    source = t.source(i.operands[1], kind)
    if not space.startswith("shared"):
        return Pure(i.operands[:1], source)
    function = warp_ops.generic_to_shared if to_space else warp_ops.shared_to_generic
    return Pure(i.operands[:1], _call(t, function, "cvta", source))


@emits("cvt")
def _cvt(t: Translator, i: Instruction, m: Modifiers) -> Pure:
    source = _type_or_float(m)
    target = _type_or_float(m)
    rounding = m.take(*ROUNDINGS, "rni", "rzi", "rmi", "rpi", "rna")
    flags = _options(m, "ftz", "sat", "relu", "satfinite")
    if target in ("bf16x2", "f16x2"):
        if source != "f32":
            raise UnsupportedInstruction(f"conversion from {source} to {target} is not modelled")
        return _float(t, i, "cvt_pack", ("f32", "f32"), target, dst=target, rnd=rounding or "rn", **flags)
    register = t.register_bits(i.operands[0])
    if source not in FLOATS and target not in FLOATS and not flags:
        function = _integer_conversion(
            _bits(source), _bits(target), register, source[0] == "s" and target[0] == "s", source[0] == "s"
        )
        return Pure(i.operands[:1], _call(t, function, "cvt", t.source(i.operands[1], source)))
    source_bits = t.register_bits(i.operands[1]) or _bits(source)
    operation = _conversion(source, target, rounding, tuple(flags), source_bits, register)
    return _vector(t, i, operation, "cvt", [t.source(i.operands[1], source)])


def _type_or_float(m: Modifiers) -> str:
    if m.rest and (m.rest[-1] in FLOATS or m.rest[-1] in TYPE_BYTES):
        return m.rest.pop()
    raise UnsupportedInstruction("cvt between types that are not modelled")


@cache
def _integer_conversion(
    source: int, target: int, register: int, both_signed: bool, source_signed: bool
) -> Callable[[Value], Value]:
    def convert(value: Value) -> Value:
        wide = values.resize(value, source, max(source, target), max(source, target), source_signed)
        return values.resize(wide, target, target, register, both_signed)

    if source == target == register and not isinstance(source, str):
        return lambda value: value
    return convert


@cache
def _conversion(
    source: str, target: str, rounding: str | None, flags: tuple[str, ...], source_bits: int, register: int
) -> VectorOperation:
    """A conversion that involves floating point or saturates."""
    options = dict.fromkeys(flags, True)
    bits, out = _bits(source), _bits(target)

    def apply(array: np.ndarray) -> tuple[np.ndarray]:
        if bits != source_bits:
            array = array.astype(UNSIGNED[bits])
        result = np.ascontiguousarray(numerics.cvt(float_view(array, source), target, source, rounding, **options))
        if target not in FLOATS and out != register:
            result = result.astype((values.SIGNED if target[0] == "s" else UNSIGNED)[register])
        return (result.view(UNSIGNED[register]),)

    return VectorOperation(apply, (source_bits,))
