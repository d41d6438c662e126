"""PTX floating-point arithmetic on NumPy arrays, every result rounded once.

Values travel in the natural NumPy type of their register class:

====================  =====================================================
PTX type              array
====================  =====================================================
`f32`               `float32`
`f64`               `float64`
`f16`, `bf16`     `uint16` bit patterns
`f16x2`, `bf16x2` `uint32`, element 0 in the low half
`f32x2`             `uint64`, element 0 in the low half
`s8` to `u64`     the NumPy integer type of that name
====================  =====================================================

Shapes are free and broadcast. Rounding modes are PTX's names without the dot: `rn`, `rz`, `rm`, `rp`. A type,
mode or modifier that an instruction does not have raises `.errors.UnsupportedInstruction`: nothing is
guessed.

NaN results of f32 are the canonical 0x7fffffff and of f16 and bf16 0x7fff. Subnormals are kept unless `ftz` is
given; `ftz` flushes inputs and the rounded result to zero of the same sign (that a result which rounds up to the
least normal number stays is an assumption). The `.approx` functions (`ex2_approx` and so on) come from
`.approximations`, which says what they model.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ptxemu.errors import UnsupportedInstruction
from ptxemu.models.approximations import (
    cos_approx,
    div_approx,
    div_full,
    ex2_approx,
    lg2_approx,
    perturbed_approximations,
    rcp_approx,
    rsqrt_approx,
    sin_approx,
    sqrt_approx,
    tanh_approx,
)
from ptxemu.models.rounding import (
    F32_CANONICAL_NAN,
    HALF_CANONICAL_NAN,
    PACKED_ELEMENT,
    Array,
    bf16_to_f32,
    check_rounding,
    direct,
    f16_to_f32,
    finish_f32,
    finish_half,
    flush_f32,
    has_nan,
    ieee_arithmetic,
    pack,
    pack_bf16,
    quiet,
    round_to_f32,
    round_to_half,
    sum_to_odd,
    unpack,
    widen,
)

__all__ = [
    "absolute",
    "add",
    "add_mixed",
    "bf16_to_f32",
    "cos_approx",
    "cvt",
    "cvt_pack",
    "div",
    "div_approx",
    "div_full",
    "ex2_approx",
    "f16_to_f32",
    "flush_f32",
    "fma",
    "fma_mixed",
    "ieee_arithmetic",
    "lg2_approx",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "pack",
    "perturbed_approximations",
    "rcp",
    "rcp_approx",
    "round_to_f32",
    "round_to_half",
    "rsqrt_approx",
    "sin_approx",
    "sqrt",
    "sqrt_approx",
    "sub",
    "sub_mixed",
    "tanh_approx",
    "unpack",
    "widen",
]

INTEGER_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_INTEGER_TYPES = {
    f"{sign}{bits}": np.dtype(f"{name}{bits}")
    for sign, name in (("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}
_TIE_MASK = np.uint64(0x1FFFFFFF)  # the 29 bits of a float64 significand that a float32 lacks
_TIE = np.uint64(0x10000000)
_EXPONENT = np.uint32(0x7F800000)  # zero in the pattern of a float32 that is zero or subnormal


# --- add, sub, mul, fma of f32 ---------------------------------------------------------------------------------------


def _exact_zero_sum(total: Array, a: Array, b: Array, rnd: str) -> Array:
    """x + (-x) is +0, but -0 when rounding down; zeros of one sign keep it in every mode."""
    if rnd != "rm" or np.count_nonzero(total) == total.size:
        return total
    keeps_sign = (a == 0) & (b == 0) & (np.signbit(a) == np.signbit(b))
    return np.where((total == 0) & ~keeps_sign, total.dtype.type(-0.0), total)


def _round_sum(a: Array, b: Array, rnd: str) -> Array:
    """`a + b` of float64 values, rounded once to float32.

    The float64 sum is all that is needed unless it misleads: for `rn` on a tie of float32, or where a float32 result
    is subnormal and has its ties elsewhere; for the other modes where it is a float32 itself and hides an error.
    """
    total = a + b
    nearest = total.astype(np.float32)
    if rnd == "rn":
        on_tie = (total.view(np.uint64) & _TIE_MASK) == _TIE
        normal = nearest.view(np.uint32) & _EXPONENT
        misled = np.count_nonzero(on_tie) or np.count_nonzero(normal) != normal.size
    else:
        misled = np.count_nonzero(nearest != total) != nearest.size
    if misled:
        total = _exact_zero_sum(sum_to_odd(a, b), a, b, rnd)
        nearest = total.astype(np.float32)
    return direct(nearest, total, rnd)


def _add_f32(a: Array, b: Array, rnd: str) -> Array:
    return a + b if rnd == "rn" else _round_sum(a.astype(np.float64), b.astype(np.float64), rnd)


def _mul_f32(a: Array, b: Array, rnd: str) -> Array:
    if rnd == "rn":
        return a * b
    exact = a.astype(np.float64) * b.astype(np.float64)
    return direct(exact.astype(np.float32), exact, rnd)


def _fma_f32(a: Array, b: Array, c: Array, rnd: str) -> Array:
    return _round_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64), rnd)


_F32_OPERATIONS: dict[str, Callable[..., Array]] = {"add": _add_f32, "mul": _mul_f32, "fma": _fma_f32}


def _operation_f32(op: str, operands: tuple[Array, ...], rnd: str, ftz: bool, sat: bool) -> Array:
    values = map(flush_f32, operands) if ftz else (np.asarray(v, np.float32) for v in operands)
    return finish_f32(_F32_OPERATIONS[op](*values, rnd), ftz, sat)


# --- f64: native where the processor rounds as asked, else one rational number per element (slow, and rare in kernels)

_NATIVE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
}


def _fraction_to_f64(exact: Fraction, rnd: str) -> float:
    """Round a non-zero rational to float64."""
    sign = 1.0 if exact > 0 else -1.0
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = sign * np.inf
    if np.isinf(nearest):
        above, below = sign > 0, sign < 0
    else:
        above, below = Fraction(nearest) > exact, Fraction(nearest) < exact
    nearest = float(np.copysign(nearest, sign))
    if rnd == "rz" and (above if sign > 0 else below):
        return float(np.nextafter(nearest, 0.0))
    if rnd == "rm" and above:
        return float(np.nextafter(nearest, -np.inf))
    return float(np.nextafter(nearest, np.inf)) if rnd == "rp" and below else nearest


def _zero_sum_f64(a: float, b: float, rnd: str) -> float:
    """The sign of an exact zero; see `_exact_zero_sum`."""
    if a == b == 0 and np.signbit(a) == np.signbit(b):
        return a
    return -0.0 if rnd == "rm" else 0.0


def _operation_f64(op: str, operands: tuple[Array, ...], rnd: str) -> Array:
    values = tuple(np.broadcast_arrays(*(np.asarray(v, np.float64) for v in operands)))
    result = np.array(_NATIVE[op](*values))
    if rnd == "rn" and op != "fma":
        return result
    finite = np.logical_and.reduce([np.isfinite(v) for v in values])
    if op == "div":
        finite &= values[1] != 0
    for index in np.argwhere(finite):
        where = tuple(index)
        numbers = tuple(float(v[where]) for v in values)
        exact = _NATIVE[op](*map(Fraction, numbers))
        if exact:
            result[where] = _fraction_to_f64(exact, rnd)
        elif op in ("add", "fma"):
            first = numbers[0] if op == "add" else numbers[0] * numbers[1]
            result[where] = _zero_sum_f64(first, numbers[-1], rnd)
    return result


# --- f16, bf16, and the dispatch by type -----------------------------------------------------------------------------


def _flush_half(bits: Array, dtype: str) -> Array:
    return finish_half(np.asarray(bits, np.uint16), dtype, ftz=True)


def _half_in(wide: type, op: str, halves: tuple[Array, ...], rnd: str) -> tuple[Array, bool]:
    """An operation on 16-bit formats in a wider type, rounded to odd, and whether the type's range was enough.

    Range is all that float32 may lack: two bf16 or f16 have at most 22 bits of product.
    """
    values = tuple(v.astype(wide, copy=False) for v in halves)
    enough = True
    if op != "add":
        product = values[0] * values[1]
        enough = wide is np.float64 or np.count_nonzero(product.view(np.uint32) & _EXPONENT) == product.size
        values = (product, *values[2:])
    result = values[0] if op == "mul" else _exact_zero_sum(sum_to_odd(*values), *values, rnd)
    return result, enough and bool(np.isfinite(result).all())


def _half_to_odd(op: str, halves: tuple[Array, ...], rnd: str) -> Array:
    """The exact result of an operation on 16-bit formats (as float32), rounded to odd."""
    result, enough = _half_in(np.float32, op, halves, rnd)
    return result if enough else _half_in(np.float64, op, halves, rnd)[0]


def _operation_half(
    op: str, operands: tuple[Array, ...], dtype: str, rnd: str, ftz: bool, sat: bool, relu: bool
) -> Array:
    if dtype == "bf16" and (ftz or sat):
        raise UnsupportedInstruction("bf16 arithmetic has no .ftz or .sat")
    if ftz:
        operands = tuple(_flush_half(v, dtype) for v in operands)
    exact = _half_to_odd(op, tuple(widen(v, dtype) for v in operands), rnd)
    return round_to_half(exact, dtype, rnd, ftz=ftz, sat=sat, relu=relu)


@quiet
def _arithmetic(
    op: str, operands: tuple[Array, ...], dtype: str, rnd: str, ftz: bool, sat: bool, relu: bool = False
) -> Array:
    check_rounding(rnd)
    if dtype == "f32" and not relu:
        return _operation_f32(op, operands, rnd, ftz, sat)
    if dtype in PACKED_ELEMENT:
        elements = tuple(unpack(v, dtype) for v in operands)
        return pack(_arithmetic(op, elements, PACKED_ELEMENT[dtype], rnd, ftz, sat, relu), dtype)
    if dtype in ("f16", "bf16"):
        return _operation_half(op, operands, dtype, rnd, ftz, sat, relu)
    if dtype == "f64" and not (ftz or sat or relu):
        return _operation_f64(op, operands, rnd)
    raise UnsupportedInstruction(f"{op} with these modifiers is not defined on {dtype!r}")


def add(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """`add.rnd{.ftz}{.sat}.dtype`."""
    return _arithmetic("add", (a, b), dtype, rnd, ftz, sat)


def sub(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """`sub.rnd{.ftz}{.sat}.dtype`: `a + (-b)`."""
    return _arithmetic("add", (a, neg(b, dtype)), dtype, rnd, ftz, sat)


def mul(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """`mul.rnd{.ftz}{.sat}.dtype`."""
    return _arithmetic("mul", (a, b), dtype, rnd, ftz, sat)


def fma(
    a: Array,
    b: Array,
    c: Array,
    dtype: str = "f32",
    rnd: str = "rn",
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Array:
    """`fma.rnd{.ftz}{.sat}{.relu}.dtype`: `a * b + c` rounded once; `relu` for f16 and bf16 only."""
    return _arithmetic("fma", (a, b, c), dtype, rnd, ftz, sat, relu)


def add_mixed(a: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """`add.rnd{.sat}.f32.atype`: `a` is f16 or bf16, `c` and the result are f32."""
    return add(widen(a, atype), c, "f32", rnd, sat=sat)


def sub_mixed(a: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """`sub.rnd{.sat}.f32.atype`: `a - c`."""
    return sub(widen(a, atype), c, "f32", rnd, sat=sat)


def fma_mixed(a: Array, b: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """`fma.rnd{.sat}.f32.atype`: `a` and `b` are f16 or bf16, `c` and the result are f32."""
    return fma(widen(a, atype), widen(b, atype), c, "f32", rnd, sat=sat)


# --- abs, neg, min, max ----------------------------------------------------------------------------------------------

_RAW_TYPE = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
_VALUE_TYPE = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
_CANONICAL_NAN = {
    "f16": HALF_CANONICAL_NAN,
    "bf16": HALF_CANONICAL_NAN,
    "f32": F32_CANONICAL_NAN,
    "f64": np.uint64(0x7FF8000000000000),
}
_SIGN = {"f16": np.uint16(1 << 15), "bf16": np.uint16(1 << 15), "f32": np.uint32(1 << 31), "f64": np.uint64(1 << 63)}


def _raw(a: Array, dtype: str) -> Array:
    return np.asarray(a, _VALUE_TYPE[dtype]).view(_RAW_TYPE[dtype])


def _flush(a: Array, dtype: str) -> Array:
    if dtype == "f32":
        return flush_f32(a)
    if dtype == "f16":
        return _flush_half(a, dtype)
    raise UnsupportedInstruction(f"{dtype} has no .ftz")


def _on_elements(function: Callable[..., Array], operands: tuple[Array, ...], dtype: str, *modifiers: bool) -> Array:
    """Apply a function of unpacked operands and their type to any type."""
    if dtype in PACKED_ELEMENT:
        elements = (unpack(v, dtype) for v in operands)
        return pack(function(*elements, PACKED_ELEMENT[dtype], *modifiers), dtype)
    if dtype not in _RAW_TYPE:
        raise UnsupportedInstruction(f"no floating-point type {dtype!r}")
    return function(*operands, dtype, *modifiers)


def _neg_element(a: Array, dtype: str, ftz: bool) -> Array:
    return (_raw(_flush(a, dtype) if ftz else a, dtype) ^ _SIGN[dtype]).view(_VALUE_TYPE[dtype])


def _abs_element(a: Array, dtype: str, ftz: bool) -> Array:
    return (_raw(_flush(a, dtype) if ftz else a, dtype) & ~_SIGN[dtype]).view(_VALUE_TYPE[dtype])


def neg(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`neg{.ftz}.dtype`: flips the sign bit, of NaN too."""
    return _on_elements(_neg_element, (a,), dtype, ftz)


def absolute(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`abs{.ftz}.dtype`: clears the sign bit, of NaN too."""
    return _on_elements(_abs_element, (a,), dtype, ftz)


def _order_key(raw: Array, dtype: str) -> Array:
    """Unsigned keys that sort like the numbers, -0 before +0."""
    sign = _SIGN[dtype]
    return np.where((raw & sign) != 0, ~raw, raw | sign)


def _extreme_f32(a: Array, b: Array, largest: bool) -> Array | None:
    """The common case: no NaN, and no zero whose sign NumPy would not choose as PTX does."""
    result = np.maximum(a, b) if largest else np.minimum(a, b)
    return None if has_nan(result) or np.count_nonzero(result) != result.size else result


def _extreme_element(
    a: Array, b: Array, dtype: str, largest: bool, ftz: bool, propagate_nan: bool, xorsign_abs: bool
) -> Array:
    if ftz:
        a, b = _flush(a, dtype), _flush(b, dtype)
    if dtype == "f32" and not xorsign_abs:
        quick = _extreme_f32(a, b, largest)
        if quick is not None:
            return quick
    raw_a, raw_b = np.broadcast_arrays(_raw(a, dtype), _raw(b, dtype))
    sign = _SIGN[dtype]
    nan_a, nan_b = np.isnan(widen(a, dtype)), np.isnan(widen(b, dtype))
    result_sign = (raw_a ^ raw_b) & sign
    if xorsign_abs:
        raw_a, raw_b = raw_a & ~sign, raw_b & ~sign
    a_is_larger = _order_key(raw_a, dtype) >= _order_key(raw_b, dtype)
    number = np.where(nan_a | (~nan_b & (a_is_larger != largest)), raw_b, raw_a)
    if xorsign_abs:
        number = number | result_sign
    no_number = nan_a | nan_b if propagate_nan else nan_a & nan_b
    return np.where(no_number, _CANONICAL_NAN[dtype], number).view(_VALUE_TYPE[dtype])


def _extreme(operands: tuple[Array, ...], dtype: str, *modifiers: bool) -> Array:
    if len(operands) < 2:
        raise UnsupportedInstruction("min and max take two operands or more")
    result = operands[0]
    for operand in operands[1:]:
        result = _on_elements(_extreme_element, (result, operand), dtype, *modifiers)
    return result


@quiet
def minimum(
    *operands: Array, dtype: str = "f32", ftz: bool = False, nan: bool = False, xorsign_abs: bool = False
) -> Array:
    """`min{.ftz}{.NaN}{.xorsign.abs}.dtype` of two or three operands.

    -0 is less than +0. One NaN operand loses against a number unless `nan` (the `.NaN` modifier); NaN results are
    canonical. `xorsign_abs` compares magnitudes and gives the result the exclusive or of the signs.
    """
    return _extreme(operands, dtype, False, ftz, nan, xorsign_abs)


@quiet
def maximum(
    *operands: Array, dtype: str = "f32", ftz: bool = False, nan: bool = False, xorsign_abs: bool = False
) -> Array:
    """`max`; see `minimum`."""
    return _extreme(operands, dtype, True, ftz, nan, xorsign_abs)


# --- rcp, sqrt, div with IEEE rounding -------------------------------------------------------------------------------
# A quotient or root of 24-bit operands either is a float32, or a tie between two, or is at least 2**-51 of itself
# away from all of those: x/y = m needs x = m*y, an equation between integers of at most 49 bits, and x = m*m one of
# 50. float64 evaluates both to 2**-53, so that its result compares with float32 numbers and ties as the exact value
# does.


@quiet
def div(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """`div.rnd{.ftz}.f32` and `div.rnd.f64`, correctly rounded."""
    check_rounding(rnd)
    if dtype == "f64" and not ftz:
        return _operation_f64("div", (a, b), rnd)
    if dtype != "f32":
        raise UnsupportedInstruction(f"div.{rnd}{'.ftz' if ftz else ''} is not defined on {dtype!r}")
    a, b = (flush_f32(v) if ftz else np.asarray(v, np.float32) for v in (a, b))
    return round_to_f32(a.astype(np.float64) / b.astype(np.float64), rnd, ftz=ftz)


def rcp(a: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """`rcp.rnd{.ftz}`, correctly rounded."""
    one = np.float64(1) if dtype == "f64" else np.float32(1)
    return div(one, a, dtype, rnd, ftz=ftz)


@quiet
def sqrt(a: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """`sqrt.rnd{.ftz}.f32` in every mode and `sqrt.rn.f64`, correctly rounded; sqrt(-0) is -0."""
    check_rounding(rnd)
    if dtype == "f64" and rnd == "rn" and not ftz:
        return np.sqrt(np.asarray(a, np.float64))
    if dtype != "f32":
        raise UnsupportedInstruction(f"sqrt.{rnd}{'.ftz' if ftz else ''} is not modelled on {dtype!r}")
    a = flush_f32(a) if ftz else np.asarray(a, np.float32)
    return round_to_f32(np.sqrt(a.astype(np.float64)), rnd, ftz=ftz)


# --- cvt -------------------------------------------------------------------------------------------------------------

_SIGNIFICAND_BITS = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}


def _float_to_int(x: Array, src: str, dst: str, rnd: str) -> Array:
    """Out-of-range values clamp. NaN gives 0, except from f64 or to 64 bits, where it gives the top bit alone."""
    if rnd not in INTEGER_ROUNDINGS:
        raise UnsupportedInstruction(f"cvt.{dst}.{src} needs one of {', '.join(INTEGER_ROUNDINGS)}, not {rnd!r}")
    target = _INTEGER_TYPES[dst]
    limits = np.iinfo(target)
    integral = INTEGER_ROUNDINGS[rnd](x.astype(np.float64))
    nan = np.isnan(integral)
    too_large = integral >= 2.0 ** (limits.bits - (1 if dst[0] == "s" else 0))  # 2**64 is a float64, 2**64 - 1 is not
    too_small = integral < float(limits.min)
    result = np.where(too_large | too_small | nan, 0.0, integral).astype(target)
    result = np.where(too_large, target.type(limits.max), np.where(too_small, target.type(limits.min), result))
    top_bit = np.array(1 << (limits.bits - 1), np.uint64).astype(target)
    return np.where(nan, top_bit if src == "f64" or limits.bits == 64 else target.type(0), result)


def _int_to_odd(a: Array) -> Array:
    """Integers as float64, exact up to 53 bits and rounded to odd beyond."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
    high = (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32
    return sum_to_odd(high, low)


def _int_to_float(a: Array, dst: str, src: str, rnd: str, sat: bool) -> Array:
    check_rounding(rnd)
    if dst == "f32":
        return round_to_f32(_int_to_odd(a), rnd, sat=sat)
    if dst in ("f16", "bf16"):
        return round_to_half(_int_to_odd(a), dst, rnd, sat=sat)
    if dst == "f64" and not sat and (a.dtype.itemsize < 8 or rnd == "rn"):
        return a.astype(np.float64)
    if dst == "f64" and not sat:
        exact = (Fraction(int(v)) for v in a.ravel())
        return np.array([_fraction_to_f64(v, rnd) if v else 0.0 for v in exact]).reshape(a.shape)
    raise UnsupportedInstruction(f"cvt.{dst}.{src} is not modelled")


def _int_to_int(a: Array, dst: str, sat: bool) -> Array:
    target = _INTEGER_TYPES[dst]
    if not sat:
        return a.astype(target)
    limits, source = np.iinfo(target), np.iinfo(a.dtype)
    low, high = max(limits.min, source.min), min(limits.max, source.max)
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(target)


def _float_to_float(
    a: Array, dst: str, src: str, rnd: str | None, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Array:
    x = widen(_flush(a, src) if ftz and src != "bf16" else a, src)
    if rnd in INTEGER_ROUNDINGS:
        if src != dst:
            raise UnsupportedInstruction(f"cvt.{rnd}.{dst}.{src}: integral rounding needs equal types")
        x, rnd = INTEGER_ROUNDINGS[rnd](x), "rn"
    elif rnd is None:
        if src != dst and _SIGNIFICAND_BITS[dst] <= _SIGNIFICAND_BITS[src]:
            raise UnsupportedInstruction(f"cvt.{dst}.{src} needs a rounding mode")
        rnd = "rn"
    if dst in ("f16", "bf16"):
        return round_to_half(x, dst, rnd, ftz=ftz and dst == "f16", sat=sat, relu=relu, satfinite=satfinite)
    if relu or satfinite:
        raise UnsupportedInstruction(f"cvt to {dst} has no .relu or .satfinite")
    if dst == "f32":
        # Widening to f32 moves bits: it keeps NaN payloads.
        return x if x.dtype == np.float32 and src != dst and not sat else round_to_f32(x, rnd, ftz=ftz, sat=sat)
    wide = x.astype(np.float64)
    return np.fmin(np.fmax(wide, 0.0), 1.0) + 0.0 if sat else wide


@quiet
def cvt(
    a: Array,
    dst: str,
    src: str,
    rnd: str | None = None,
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Array:
    """`cvt{.rnd}{.relu}{.satfinite}{.ftz}{.sat}.dst.src`.

    `dst` and `src` are `f16`, `bf16`, `f32`, `f64` or an integer type; see the module for their arrays
    (an integer source is first taken modulo its width). Conversion to an integer needs `rni`, `rzi`, `rmi` or
    `rpi` and clamps; narrowing between floating-point types and integer to floating point need `rn`, `rz`,
    `rm` or `rp`.
    """
    if src not in _INTEGER_TYPES and dst not in _INTEGER_TYPES:
        return _float_to_float(a, dst, src, rnd, ftz, sat, relu, satfinite)
    if relu or satfinite:
        raise UnsupportedInstruction(f"cvt.{dst}.{src} has no .relu or .satfinite")
    if src not in _INTEGER_TYPES:
        x = widen(_flush(a, src) if ftz else a, src)
        return _float_to_int(x, src, dst, rnd or "")
    values = np.asarray(a).astype(_INTEGER_TYPES[src])
    if dst in _INTEGER_TYPES:
        return _int_to_int(values, dst, sat)
    return _int_to_float(values, dst, src, rnd or "", sat)


@quiet
def cvt_pack(a: Array, b: Array, dst: str, rnd: str = "rn", *, relu: bool = False, satfinite: bool = False) -> Array:
    """`cvt.rnd{.relu}{.satfinite}.{bf16x2,f16x2}.f32 d, a, b`: `a` goes into the high half, `b` into the low."""
    if dst not in ("bf16x2", "f16x2"):
        raise UnsupportedInstruction(f"cannot pack two f32 into {dst!r}")
    if rnd not in ("rn", "rz"):
        raise UnsupportedInstruction(f"cvt.{dst}.f32 has .rn and .rz, not .{rnd}")
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if dst == "bf16x2" and not (relu or satfinite):
        return pack_bf16(a, b, rnd)
    halves = np.stack(np.broadcast_arrays(b, a), axis=-1)
    return pack(round_to_half(halves, PACKED_ELEMENT[dst], rnd, relu=relu, satfinite=satfinite), dst)
