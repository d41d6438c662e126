# SPDX-License-Identifier: Apache-2.0
"""PTX floating-point arithmetic on NumPy arrays, every result rounded once.

Values travel in the natural NumPy type of their register class:

====================  =====================================================
PTX type              array
====================  =====================================================
``f32``               ``float32``
``f64``               ``float64``
``f16``, ``bf16``     ``uint16`` bit patterns
``f16x2``, ``bf16x2`` ``uint32``, element 0 in the low half
``f32x2``             ``uint64``, element 0 in the low half
``s8`` … ``u64``      the NumPy integer type of that name
====================  =====================================================

Shapes are free and broadcast. Rounding modes are PTX's names without the dot: ``rn``, ``rz``, ``rm``, ``rp``.
An unknown type, mode or modifier raises ``ValueError``: nothing is guessed.

How one rounding is achieved: operands of 32 bits and fewer widen exactly to float64, where a product of two is exact and a
sum's error is found by TwoSum. The float64 result is then *rounded to odd*: if inexact, its last bit is set. Any later
rounding to a format with at least two bits less, in any mode, gives what rounding the exact value would have given.

NaN results of f32 are the canonical 0x7fffffff and of f16 and bf16 0x7fff, as the ISA's hardware produces them. Subnormals
are kept unless ``ftz`` is given; ``ftz`` flushes inputs and the rounded result to zero of the same sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import wraps
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ROUNDING_MODES = ("rn", "rz", "rm", "rp")
INTEGER_ROUNDING_MODES = ("rni", "rzi", "rmi", "rpi")

F32_CANONICAL_NAN = np.uint32(0x7FFFFFFF)
HALF_CANONICAL_NAN = np.uint16(0x7FFF)
F32_MIN_NORMAL = np.float32(2.0**-126)
F16_MIN_NORMAL_BITS = 0x0400
BF16_MIN_NORMAL_BITS = 0x0080

_F32_NAN = F32_CANONICAL_NAN.view(np.float32)
_F32_TIE_MASK = np.uint64(0x1FFFFFFF)  # the 29 bits of a float64 significand that a float32 lacks
_F32_TIE = np.uint64(0x10000000)

_PACKED_ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
_ELEMENT_STORAGE = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32}
_PACKED_STORAGE = {"f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64}
_HALF_ONE_BITS = {"f16": 0x3C00, "bf16": 0x3F80}
_HALF_INF_BITS = {"f16": 0x7C00, "bf16": 0x7F80}
_HALF_MIN_NORMAL_BITS = {"f16": F16_MIN_NORMAL_BITS, "bf16": BF16_MIN_NORMAL_BITS}
_INTEGER_TYPES = {
    f"{sign}{bits}": np.dtype(f"{name}{bits}")
    for sign, name in (("s", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Overflow, underflow and invalid operations are results here, not accidents."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


def _check_rounding(rnd: str) -> None:
    if rnd not in ROUNDING_MODES:
        raise ValueError(f"unknown rounding mode {rnd!r}; PTX has {', '.join(ROUNDING_MODES)}")


# ---------------------------------------------------------------------------------------------------------------------
# Widening and rounding
# ---------------------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Array) -> Array:
    """Exact: a bf16 is the upper half of the f32 of the same value (NaN payloads are kept)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_to_f32(bits: Array) -> Array:
    """Exact."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def widen(a: Array, dtype: str) -> Array:
    """The exact float32 (for ``f64``: float64) value of an unpacked floating-point register."""
    if dtype == "bf16":
        return bf16_to_f32(a)
    if dtype == "f16":
        return f16_to_f32(a)
    if dtype == "f32":
        return np.asarray(a, np.float32)
    if dtype == "f64":
        return np.asarray(a, np.float64)
    raise ValueError(f"no floating-point type {dtype!r}")


def _set_odd(nearest: Array, error: Array, bits: type) -> Array:
    """Turn round-to-nearest results into round-to-odd ones, given the sign of what the rounding lost.

    ``nearest`` is inexact where ``error`` is not 0. If its last bit is clear, the exact value lies between it and the
    neighbour on the side of ``error``; that neighbour is odd. Overflow (nearest inf, error of the other sign) lands on the
    largest finite number, whose last bit is set, and an infinite operand (error NaN) is left alone.
    """
    raw = nearest.view(bits)
    move = (error != 0) & ~np.isnan(error) & ((raw & bits(1)) == 0)
    if not move.any():
        return nearest
    away = (error > 0) == (nearest > 0)
    return np.where(move, np.where(away, raw + bits(1), raw - bits(1)), raw).view(nearest.dtype)


def _sum_to_odd(a: Array, b: Array) -> Array:
    """``a + b`` in float64, rounded to odd (Knuth's TwoSum gives the error exactly)."""
    total = a + b
    b_part = total - a
    return _set_odd(total, (a - (total - b_part)) + (b - b_part), np.uint64)


def _f64_to_f32_odd(x: Array) -> Array:
    nearest = x.astype(np.float32)
    return _set_odd(nearest, x - nearest, np.uint32)


def _direct(nearest: Array, exact: Array, rnd: str) -> Array:
    """Correct a round-to-nearest result to a directed mode; ``exact`` is float64 and compares like the exact value."""
    if rnd == "rn":
        return nearest
    value = nearest.astype(np.float64)
    zero, inf = nearest.dtype.type(0), nearest.dtype.type(np.inf)
    if rnd == "rz":
        return np.where(np.abs(value) > np.abs(exact), np.nextafter(nearest, zero), nearest)
    if rnd == "rm":
        return np.where(value > exact, np.nextafter(nearest, -inf), nearest)
    return np.where(value < exact, np.nextafter(nearest, inf), nearest)


def flush_f32(x: Array) -> Array:
    """Subnormals to zero of the same sign."""
    x = np.asarray(x, np.float32)
    small = np.abs(x) < F32_MIN_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def canonical_f32(x: Array) -> Array:
    """Every NaN becomes 0x7fffffff."""
    nan = np.isnan(x)
    return np.where(nan, _F32_NAN, x) if nan.any() else x


def _saturate_f32(x: Array) -> Array:
    """Clamp to [+0, 1], NaN to +0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def _finish_f32(x: Array, ftz: bool, sat: bool) -> Array:
    if ftz:
        x = flush_f32(x)
    return _saturate_f32(x) if sat else canonical_f32(x)


@_quiet
def round_to_f32(x: Array, rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """Round float64 values (exact, or rounded to odd) to float32."""
    _check_rounding(rnd)
    x = np.asarray(x, np.float64)
    return _finish_f32(_direct(x.astype(np.float32), x, rnd), ftz, sat)


def _f32_to_bf16_bits(x: Array, rnd: str) -> Array:
    """Round float32 (exact, or rounded to odd) to bf16 bits: drop 16 bits of the pattern, with a carry by mode."""
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    high = raw >> np.uint32(16)
    if rnd == "rn":
        high = (raw + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    elif rnd != "rz":
        towards = (raw >> np.uint32(31)) == np.uint32(rnd == "rm")
        high = high + (towards & ((raw & np.uint32(0xFFFF)) != 0))
    nan = np.isnan(x)
    return np.where(nan, HALF_CANONICAL_NAN, high.astype(np.uint16)) if nan.any() else high.astype(np.uint16)


def _f32_to_f16_bits(x: Array, rnd: str) -> Array:
    x = np.asarray(x, np.float32)
    rounded = _direct(x.astype(np.float16), x.astype(np.float64), rnd)
    return np.where(np.isnan(x), HALF_CANONICAL_NAN, np.ascontiguousarray(rounded).view(np.uint16))


def _finish_half(bits: Array, dtype: str, *, ftz: bool, sat: bool, relu: bool, satfinite: bool = False) -> Array:
    """The modifiers of f16 and bf16 results, on the bit patterns."""
    magnitude = bits & np.uint16(0x7FFF)
    negative = bits != magnitude
    nan = magnitude > _HALF_INF_BITS[dtype]
    if ftz:
        bits = np.where(magnitude < _HALF_MIN_NORMAL_BITS[dtype], bits & np.uint16(0x8000), bits)
    if satfinite:
        limit = np.uint16(_HALF_INF_BITS[dtype] - 1)
        bits = np.where((magnitude > limit) & ~nan, limit | (bits & np.uint16(0x8000)), bits)
    if relu:
        bits = np.where(negative & ~nan, np.uint16(0), bits)
    if sat:
        one = np.uint16(_HALF_ONE_BITS[dtype])
        bits = np.where(negative | nan, np.uint16(0), np.minimum(bits, one))
    return bits


@_quiet
def round_to_half(
    x: Array,
    dtype: str,
    rnd: str = "rn",
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Array:
    """Round float64 or float32 values (exact, or rounded to odd) to ``f16`` or ``bf16`` bit patterns (uint16).

    ``relu`` turns negative results (and -0) into +0 and keeps NaN; ``sat`` clamps to [+0, 1] and turns NaN into +0;
    ``satfinite`` replaces infinity by the largest finite number of that sign.
    """
    _check_rounding(rnd)
    x = np.asarray(x)
    single = _f64_to_f32_odd(x) if x.dtype == np.float64 else x
    if dtype == "bf16":
        bits = _f32_to_bf16_bits(single, rnd)
    elif dtype == "f16":
        bits = _f32_to_f16_bits(single, rnd)
    else:
        raise ValueError(f"{dtype!r} is not a 16-bit floating-point type")
    if ftz or sat or relu or satfinite:
        bits = _finish_half(bits, dtype, ftz=ftz, sat=sat, relu=relu, satfinite=satfinite)
    return bits


# ---------------------------------------------------------------------------------------------------------------------
# add, sub, mul, fma
# ---------------------------------------------------------------------------------------------------------------------


def pack_halves(high: Array, low: Array) -> Array:
    """Two uint16 arrays as one uint32 array."""
    return (np.asarray(high).astype(np.uint32) << np.uint32(16)) | np.asarray(low).astype(np.uint32)


def unpack(a: Array, dtype: str) -> Array:
    """The elements of a packed register array along a new last axis, element 0 (the low half) first."""
    a = np.asarray(a, _PACKED_STORAGE[dtype])
    return np.ascontiguousarray(a)[..., None].view(_ELEMENT_STORAGE[_PACKED_ELEMENT[dtype]])


def pack(elements: Array, dtype: str) -> Array:
    """The inverse of :func:`unpack`."""
    storage = _ELEMENT_STORAGE[_PACKED_ELEMENT[dtype]]
    return np.ascontiguousarray(elements, storage).view(_PACKED_STORAGE[dtype])[..., 0]


def _exact_zero_sum(total: Array, a: Array, b: Array, rnd: str) -> Array:
    """x + (-x) is +0, but -0 when rounding down; zeros of one sign keep it in every mode."""
    if rnd != "rm":
        return total
    return np.where((total == 0) & ~((a == 0) & (b == 0) & (np.signbit(a) == np.signbit(b))), -0.0, total)


def _add_f32(a: Array, b: Array, rnd: str) -> Array:
    if rnd == "rn":
        return a + b
    a, b = a.astype(np.float64), b.astype(np.float64)
    exact = _exact_zero_sum(_sum_to_odd(a, b), a, b, rnd)
    return _direct(exact.astype(np.float32), exact, rnd)


def _mul_f32(a: Array, b: Array, rnd: str) -> Array:
    if rnd == "rn":
        return a * b
    exact = a.astype(np.float64) * b.astype(np.float64)
    return _direct(exact.astype(np.float32), exact, rnd)


def _fma_to_odd(a: Array, b: Array, c: Array, rnd: str) -> Array:
    """``a * b + c`` of values that were widened from 32 bits or fewer: the product is exact in float64."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    return _exact_zero_sum(_sum_to_odd(product, c), product, c, rnd)


def _fma_f32(a: Array, b: Array, c: Array, rnd: str) -> Array:
    if rnd == "rn":
        # Rounding twice errs only where the float64 sum sits on a tie of float32, or in float32's subnormal range.
        total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        risky = ((total.view(np.uint64) & _F32_TIE_MASK) == _F32_TIE) | (np.abs(total) < F32_MIN_NORMAL)
        if not risky.any():
            return total.astype(np.float32)
    exact = _fma_to_odd(a, b, c, rnd)
    return _direct(exact.astype(np.float32), exact, rnd)


_F32_OPERATIONS: dict[str, Callable[..., Array]] = {"add": _add_f32, "mul": _mul_f32, "fma": _fma_f32}


def _fraction_result(op: str, values: tuple[float, ...]) -> Fraction:
    a, b, *rest = (Fraction(v) for v in values)
    if op == "add":
        return a + b
    if op == "mul":
        return a * b
    return a * b + rest[0] if op == "fma" else a / b


def _fraction_to_f64(exact: Fraction, rnd: str) -> float:
    """Round a non-zero rational to float64."""
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = float("inf") if exact > 0 else float("-inf")
    if not np.isinf(nearest):
        below, above = Fraction(nearest) < exact, Fraction(nearest) > exact
    else:
        below, above = exact > 0 > nearest, nearest > 0
        above, below = nearest > 0, nearest < 0
    if nearest == 0:
        nearest = np.copysign(0.0, 1.0 if exact > 0 else -1.0)
    if (rnd == "rz" and (above if exact > 0 else below)) or (rnd == "rm" and above) or (rnd == "rp" and below):
        target = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[rnd]
        return float(np.nextafter(nearest, target))
    return float(nearest)


def _native_f64(op: str, values: tuple[Array, ...]) -> Array:
    if op == "add":
        return values[0] + values[1]
    if op == "mul":
        return values[0] * values[1]
    return values[0] * values[1] + values[2] if op == "fma" else values[0] / values[1]


def _f64_operation(op: str, values: tuple[Array, ...], rnd: str) -> Array:
    """f64 arithmetic: native where the processor rounds as asked, else one rational number per element (slow, rare)."""
    values = tuple(np.broadcast_arrays(*(np.asarray(v, np.float64) for v in values)))
    result = np.array(_native_f64(op, values), np.float64)
    if rnd == "rn" and op != "fma":
        return result
    finite = np.logical_and.reduce([np.isfinite(v) for v in values])
    if op == "div":
        finite &= values[1] != 0
    for index in zip(*np.nonzero(finite), strict=True):
        operands = tuple(float(v[index]) for v in values)
        exact = _fraction_result(op, operands)
        if exact != 0:
            result[index] = _fraction_to_f64(exact, rnd)
        elif op in ("add", "fma"):
            addends = operands if op == "add" else (float(operands[0] * operands[1]), operands[2])
            keeps_sign = addends[0] == addends[1] == 0 and np.signbit(addends[0]) == np.signbit(addends[1])
            zero = addends[0] if keeps_sign else (-0.0 if rnd == "rm" else 0.0)
            result[index] = zero
    return result


def _half_exact(op: str, values: tuple[Array, ...], rnd: str) -> Array:
    wide = [v.astype(np.float64) for v in values]
    if op == "add":
        return _exact_zero_sum(_sum_to_odd(*wide), *wide, rnd)
    return wide[0] * wide[1] if op == "mul" else _fma_to_odd(*wide, rnd)


def _flush_half(bits: Array, dtype: str) -> Array:
    return _finish_half(np.asarray(bits, np.uint16), dtype, ftz=True, sat=False, relu=False)


@_quiet
def _arithmetic(op: str, operands: tuple[Array, ...], dtype: str, rnd: str, ftz: bool, sat: bool, relu: bool) -> Array:
    _check_rounding(rnd)
    if dtype in _PACKED_ELEMENT:
        elements = tuple(unpack(v, dtype) for v in operands)
        return pack(_arithmetic(op, elements, _PACKED_ELEMENT[dtype], rnd, ftz, sat, relu), dtype)
    if dtype == "f32":
        if relu:
            raise ValueError("f32 arithmetic has no .relu")
        values = tuple(np.asarray(v, np.float32) for v in operands)
        if ftz:
            values = tuple(flush_f32(v) for v in values)
        return _finish_f32(_F32_OPERATIONS[op](*values, rnd), ftz, sat)
    if dtype == "f64":
        if ftz or sat or relu:
            raise ValueError("f64 arithmetic has no .ftz, .sat or .relu")
        return _f64_operation(op, operands, rnd)
    if dtype not in ("f16", "bf16"):
        raise ValueError(f"no floating-point arithmetic on {dtype!r}")
    if dtype == "bf16" and (ftz or sat):
        raise ValueError("bf16 arithmetic has no .ftz or .sat")
    if ftz:
        operands = tuple(_flush_half(v, dtype) for v in operands)
    exact = _half_exact(op, tuple(widen(v, dtype) for v in operands), rnd)
    return round_to_half(exact, dtype, rnd, ftz=ftz, sat=sat, relu=relu)


def add(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """``add.rnd{.ftz}{.sat}.dtype``."""
    return _arithmetic("add", (a, b), dtype, rnd, ftz, sat, False)


def sub(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """``sub.rnd{.ftz}{.sat}.dtype``: ``a + (-b)``."""
    return _arithmetic("add", (a, neg(b, dtype)), dtype, rnd, ftz, sat, False)


def mul(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """``mul.rnd{.ftz}{.sat}.dtype``."""
    return _arithmetic("mul", (a, b), dtype, rnd, ftz, sat, False)


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
    """``fma.rnd{.ftz}{.sat}{.relu}.dtype``: ``a * b + c`` rounded once; ``relu`` for f16 and bf16 only."""
    return _arithmetic("fma", (a, b, c), dtype, rnd, ftz, sat, relu)


def add_mixed(a: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """``add.rnd{.sat}.f32.atype``: ``a`` is f16 or bf16, ``c`` and the result are f32."""
    return add(widen(a, atype), c, "f32", rnd, sat=sat)


def sub_mixed(a: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """``sub.rnd{.sat}.f32.atype``: ``a - c``."""
    return sub(widen(a, atype), c, "f32", rnd, sat=sat)


def fma_mixed(a: Array, b: Array, c: Array, atype: str, rnd: str = "rn", *, sat: bool = False) -> Array:
    """``fma.rnd{.sat}.f32.atype``: ``a`` and ``b`` are f16 or bf16, ``c`` and the result are f32."""
    return fma(widen(a, atype), widen(b, atype), c, "f32", rnd, sat=sat)


# ---------------------------------------------------------------------------------------------------------------------
# abs, neg, min, max
# ---------------------------------------------------------------------------------------------------------------------

_RAW_TYPE = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def _raw(a: Array, dtype: str) -> Array:
    storage = np.uint16 if dtype in ("f16", "bf16") else {"f32": np.float32, "f64": np.float64}[dtype]
    return np.ascontiguousarray(a, storage).view(_RAW_TYPE[dtype]).reshape(np.shape(a))


def _from_raw(raw: Array, dtype: str) -> Array:
    return raw if dtype in ("f16", "bf16") else raw.view({"f32": np.float32, "f64": np.float64}[dtype])


def _flush(a: Array, dtype: str) -> Array:
    if dtype == "f32":
        return flush_f32(a)
    if dtype in ("f16", "bf16"):
        return _flush_half(a, dtype)
    raise ValueError(f"{dtype} has no .ftz")


def _sign_bit(dtype: str) -> Any:
    raw = _RAW_TYPE[dtype]
    return raw(1 << (8 * np.dtype(raw).itemsize - 1))


def _on_elements(function: Callable[..., Array], operands: tuple[Array, ...], dtype: str, **modifiers: Any) -> Array:
    if dtype in _PACKED_ELEMENT:
        return pack(function(*(unpack(v, dtype) for v in operands), _PACKED_ELEMENT[dtype], **modifiers), dtype)
    if dtype not in _RAW_TYPE:
        raise ValueError(f"no floating-point type {dtype!r}")
    return function(*operands, dtype, **modifiers)


def _neg_element(a: Array, dtype: str, ftz: bool) -> Array:
    a = _flush(a, dtype) if ftz else a
    return _from_raw(_raw(a, dtype) ^ _sign_bit(dtype), dtype)


def _abs_element(a: Array, dtype: str, ftz: bool) -> Array:
    a = _flush(a, dtype) if ftz else a
    return _from_raw(_raw(a, dtype) & ~_sign_bit(dtype), dtype)


def neg(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """``neg{.ftz}.dtype``: flips the sign bit, of NaN too."""
    return _on_elements(_neg_element, (a,), dtype, ftz=ftz)


def absolute(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """``abs{.ftz}.dtype``: clears the sign bit, of NaN too."""
    return _on_elements(_abs_element, (a,), dtype, ftz=ftz)


def _order_key(raw: Array, dtype: str) -> Array:
    """Unsigned keys that sort like the numbers, -0 before +0."""
    sign = _sign_bit(dtype)
    return np.where((raw & sign) != 0, ~raw, raw | sign)


def _canonical_nan(dtype: str) -> Any:
    if dtype == "f64":
        return np.uint64(0x7FF8000000000000)
    return F32_CANONICAL_NAN if dtype == "f32" else HALF_CANONICAL_NAN


def _extreme_element(a: Array, b: Array, dtype: str, largest: bool, ftz: bool, nan: bool, xorsign_abs: bool) -> Array:
    if ftz:
        a, b = _flush(a, dtype), _flush(b, dtype)
    raw_a, raw_b = np.broadcast_arrays(_raw(a, dtype), _raw(b, dtype))
    sign = _sign_bit(dtype)
    nan_a, nan_b = np.isnan(widen(a, dtype)), np.isnan(widen(b, dtype))
    result_sign = (raw_a ^ raw_b) & sign
    if xorsign_abs:
        raw_a, raw_b = raw_a & ~sign, raw_b & ~sign
    first = _order_key(raw_a, dtype) >= _order_key(raw_b, dtype)
    result = np.where(first == largest, raw_a, raw_b)
    if xorsign_abs:
        result = result | result_sign
    if (nan_a | nan_b).any():
        canonical = _canonical_nan(dtype)
        if nan:
            result = np.where(nan_a | nan_b, canonical, result)
        else:
            result = np.where(nan_a, np.where(nan_b, canonical, raw_b), np.where(nan_b, raw_a, result))
    return _from_raw(result, dtype)


def _extreme(operands: tuple[Array, ...], dtype: str, largest: bool, ftz: bool, nan: bool, xorsign_abs: bool) -> Array:
    if len(operands) < 2 or (xorsign_abs and len(operands) != 2):
        raise ValueError("min and max take two or three operands, with .xorsign.abs two")
    modifiers = {"largest": largest, "ftz": ftz, "nan": nan, "xorsign_abs": xorsign_abs}
    result = operands[0]
    for operand in operands[1:]:
        result = _on_elements(_extreme_element, (result, operand), dtype, **modifiers)
    return result


@_quiet
def minimum(
    *operands: Array, dtype: str = "f32", ftz: bool = False, nan: bool = False, xorsign_abs: bool = False
) -> Array:
    """``min{.ftz}{.NaN}{.xorsign.abs}.dtype`` of two or three operands.

    -0 is less than +0. One NaN operand loses against a number unless ``nan`` (the ``.NaN`` modifier); NaN results are
    canonical. ``xorsign_abs`` compares magnitudes and gives the result the exclusive or of the signs.
    """
    return _extreme(operands, dtype, False, ftz, nan, xorsign_abs)


@_quiet
def maximum(
    *operands: Array, dtype: str = "f32", ftz: bool = False, nan: bool = False, xorsign_abs: bool = False
) -> Array:
    """``max``; see :func:`minimum`."""
    return _extreme(operands, dtype, True, ftz, nan, xorsign_abs)


# ---------------------------------------------------------------------------------------------------------------------
# rcp, sqrt, div with IEEE rounding
# ---------------------------------------------------------------------------------------------------------------------
# For 24-bit operands a quotient or root is either a float32 (or a tie between two) exactly, or at least 2**-51 of itself away
# from every one of them: x/y = m needs x = m*y, an equation between integers of at most 49 bits, and x = m*m one of 50.
# float64 evaluates both to 2**-53, so its result compares with float32 numbers and ties as the exact value does.


@_quiet
def div(a: Array, b: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """``div.rnd{.ftz}.f32`` and ``div.rnd.f64``, correctly rounded."""
    _check_rounding(rnd)
    if dtype == "f64" and not ftz:
        return _f64_operation("div", (a, b), rnd)
    if dtype != "f32":
        raise ValueError(f"no div on {dtype!r}{' with .ftz' if ftz else ''}")
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if ftz:
        a, b = flush_f32(a), flush_f32(b)
    return round_to_f32(a.astype(np.float64) / b.astype(np.float64), rnd, ftz=ftz)


def rcp(a: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """``rcp.rnd{.ftz}``, correctly rounded."""
    one = np.float64(1) if dtype == "f64" else np.float32(1)
    return div(one, a, dtype, rnd, ftz=ftz)


@_quiet
def sqrt(a: Array, dtype: str = "f32", rnd: str = "rn", *, ftz: bool = False) -> Array:
    """``sqrt.rnd{.ftz}.f32`` in every mode and ``sqrt.rn.f64``, correctly rounded; sqrt(-0) is -0."""
    _check_rounding(rnd)
    if dtype == "f64" and rnd == "rn" and not ftz:
        return np.sqrt(np.asarray(a, np.float64))
    if dtype != "f32":
        raise ValueError(f"no sqrt.{rnd} on {dtype!r}{' with .ftz' if ftz else ''}")
    a = flush_f32(a) if ftz else np.asarray(a, np.float32)
    return round_to_f32(np.sqrt(a.astype(np.float64)), rnd, ftz=ftz)


# ---------------------------------------------------------------------------------------------------------------------
# cvt
# ---------------------------------------------------------------------------------------------------------------------


def _round_to_integral(x: Array, rnd: str) -> Array:
    """Round to an integer in floating point: ``rni`` to nearest even, ``rzi``, ``rmi``, ``rpi``."""
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    if rnd not in functions:
        raise ValueError(f"conversion to an integral value needs one of {', '.join(functions)}, not {rnd!r}")
    return functions[rnd](x)


def _float_to_int(x: Array, src: str, dst: str, rnd: str) -> Array:
    """Out-of-range values clamp. NaN gives 0, except from f64 or to 64 bits, where it gives the top bit alone."""
    target = _INTEGER_TYPES[dst]
    limits = np.iinfo(target)
    integral = _round_to_integral(x.astype(np.float64), rnd)
    # 2**63 and 2**64 are float64 numbers, the 64-bit maxima below them are not: compare with the power of two.
    too_large = integral >= float(limits.max) + (0 if limits.bits == 64 else 1)
    too_small = integral < float(limits.min)
    nan = np.isnan(integral)
    result = np.where(too_large | too_small | nan, 0.0, integral).astype(target)
    wide = src == "f64" or limits.bits == 64
    nan_value = np.array(1 << (limits.bits - 1), np.uint64).astype(target) if wide else target.type(0)
    result = np.where(too_large, target.type(limits.max), np.where(too_small, target.type(limits.min), result))
    return np.where(nan, nan_value, result)


def _int_to_exact(a: Array) -> Array:
    """Integers as float64, exact up to 53 bits and rounded to odd beyond."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
    high = (a >> a.dtype.type(32)).astype(np.float64) * 2.0**32
    return _sum_to_odd(high, low)


def _int_to_f64(a: Array, rnd: str) -> Array:
    if a.dtype.itemsize < 8 or rnd == "rn":
        return a.astype(np.float64)
    exact = [Fraction(int(v)) for v in a.ravel()]
    return np.array([_fraction_to_f64(v, rnd) if v else 0.0 for v in exact]).reshape(a.shape)


def _float_to_float(
    a: Array, src: str, dst: str, rnd: str | None, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Array:
    if ftz and src in ("f32", "f16"):
        a = _flush(a, src)
    x = widen(a, src)
    if rnd in INTEGER_ROUNDING_MODES:
        if src != dst:
            raise ValueError(f"cvt.{rnd} between floating-point types needs equal types, not {dst}.{src}")
        x, rnd = _round_to_integral(x, rnd), "rn"
    widening = {"bf16": 0, "f16": 0, "f32": 1, "f64": 2}
    exact = src == dst or widening[dst] > widening[src]
    if not exact and rnd is None:
        raise ValueError(f"cvt.{dst}.{src} needs a rounding mode")
    rnd = rnd or "rn"
    if dst in ("f16", "bf16"):
        return round_to_half(x, dst, rnd, ftz=ftz and dst == "f16", sat=sat, relu=relu, satfinite=satfinite)
    if dst == "f64":
        return _saturate_f64(x.astype(np.float64)) if sat else x.astype(np.float64)
    if relu or satfinite:
        raise ValueError("cvt to f32 has no .relu or .satfinite")
    return round_to_f32(x, rnd, ftz=ftz, sat=sat)


def _saturate_f64(x: Array) -> Array:
    return np.where(x > 0, np.minimum(x, 1.0), 0.0)


def _int_to_int(a: Array, dst: str, sat: bool) -> Array:
    target = _INTEGER_TYPES[dst]
    if not sat:
        return a.astype(target)
    limits, source = np.iinfo(target), np.iinfo(a.dtype)
    low, high = max(limits.min, source.min), min(limits.max, source.max)
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(target)


@_quiet
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
    """``cvt{.rnd}{.relu}{.satfinite}{.ftz}{.sat}.dst.src``.

    ``dst`` and ``src`` are ``f16``, ``bf16``, ``f32``, ``f64`` or an integer type; see the module for their arrays (an
    integer source is first taken modulo its width). Conversion to an integer needs ``rni``/``rzi``/``rmi``/``rpi`` and
    clamps; narrowing between floating-point types and integer to floating point need ``rn``/``rz``/``rm``/``rp``.
    """
    if src in _INTEGER_TYPES:
        values = np.asarray(a).astype(_INTEGER_TYPES[src])
        if dst in _INTEGER_TYPES:
            return _int_to_int(values, dst, sat)
        if rnd is None:
            raise ValueError(f"cvt.{dst}.{src} needs a rounding mode")
        _check_rounding(rnd)
        if dst == "f64":
            return _int_to_f64(values, rnd)
        exact = _int_to_exact(values)
        return round_to_f32(exact, rnd, sat=sat) if dst == "f32" else round_to_half(exact, dst, rnd, sat=sat)
    if dst in _INTEGER_TYPES:
        if rnd is None:
            raise ValueError(f"cvt.{dst}.{src} needs a rounding mode")
        x = _flush(a, src) if ftz else a
        return _float_to_int(widen(x, src), src, dst, rnd)
    return _float_to_float(a, src, dst, rnd, ftz, sat, relu, satfinite)


def cvt_pack(a: Array, b: Array, dst: str, rnd: str = "rn", *, relu: bool = False, satfinite: bool = False) -> Array:
    """``cvt.rnd{.relu}{.satfinite}.{bf16x2,f16x2}.f32 d, a, b``: ``a`` goes into the high half, ``b`` into the low one."""
    if dst not in ("bf16x2", "f16x2"):
        raise ValueError(f"cannot pack two f32 into {dst!r}")
    if rnd not in ("rn", "rz"):
        raise ValueError(f"cvt.{dst}.f32 has .rn and .rz, not .{rnd}")
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    halves = round_to_half(np.stack((b, a), axis=-1), _PACKED_ELEMENT[dst], rnd, relu=relu, satfinite=satfinite)
    return pack(halves, dst)


# ---------------------------------------------------------------------------------------------------------------------
# Approximate functions: models of the multi-function unit
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorBound:
    """A documented maximum error; the largest of the stated kinds counts."""

    ulps: int = 0  # of the correctly rounded result
    relative: float = 0.0
    absolute: float = 0.0


_TRIGONOMETRIC_BOUNDS = ((2 * np.pi, ErrorBound(absolute=2.0**-20.5)), (100 * np.pi, ErrorBound(absolute=2.0**-14.7)))
_EX2_BOUNDS = {"f32": ErrorBound(ulps=2), "f16": ErrorBound(relative=2.0**-9.9), "bf16": ErrorBound(relative=2.0**-7)}
_TANH_BOUNDS = {
    "f32": ErrorBound(relative=2.0**-11),
    "f16": ErrorBound(absolute=2.0**-10.987),
    "bf16": ErrorBound(relative=2.0**-8),
}


@dataclass(frozen=True)
class ApproximationModel:
    """The ``.approx`` functions, as models: no two chips need agree with them bit for bit.

    With ``seed=None`` every result is the float64 value rounded once, i.e. the correctly rounded one (unless the exact
    value lies within about 2**-52 of itself from a tie). With a seed every result that the ISA does not fix as a special case
    is displaced by an amount that depends on the operand and the seed alone, within the maximum error that the ISA
    documents: code that needs more than is documented gives different answers under different seeds.
    """

    seed: int | None = None

    def _unit(self, raw: Array, salt: int) -> Array:
        """Deterministic numbers in [-1, 1) from bit patterns."""
        mixed = raw.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ np.uint64((self.seed * 0xD1B54A32D192ED03 + salt * 0x8CB92BA72F3D8DD7) % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = mixed ^ (mixed >> np.uint64(27))
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0

    def _perturb(self, exact: Array, rounded: Array, bound: ErrorBound, operand: Array, salt: int) -> Array:
        """A neighbour of ``rounded`` (float32) whose distance from ``exact`` (float64) keeps within ``bound``."""
        unit = self._unit(np.ascontiguousarray(operand).view(np.uint32), salt)
        if bound.ulps:
            steps = np.rint(unit * bound.ulps).astype(np.int64)
            moved = (rounded.view(np.uint32).astype(np.int64) + steps).astype(np.uint32).view(np.float32)
            allowed = np.isfinite(moved) & (np.sign(moved) == np.sign(rounded))
        else:
            limit = np.maximum(np.abs(exact) * bound.relative, bound.absolute)
            moved = (exact + unit * limit).astype(np.float32)
            allowed = np.isfinite(moved) & (np.abs(moved - exact) <= limit)
        return np.where(allowed & np.isfinite(rounded) & (rounded != 0), moved, rounded)

    def _apply(
        self,
        name: str,
        operand: Array,
        exact: Array,
        bound: ErrorBound,
        *,
        ftz: bool = False,
        special: Array | bool = False,
    ) -> Array:
        """Round ``exact`` to float32 and displace it where the result is no special case of the ISA's table."""
        rounded = round_to_f32(exact, ftz=ftz)
        if self.seed is None:
            return rounded
        salt = int.from_bytes(name.encode(), "little") & 0xFFFFFFFF
        moved = self._perturb(exact, rounded, bound, operand, salt)
        moved = flush_f32(moved) if ftz else moved
        return canonical_f32(np.where(special, rounded, moved))

    @staticmethod
    def _operand(x: Array, ftz: bool) -> tuple[Array, Array]:
        x = flush_f32(x) if ftz else np.asarray(x, np.float32)
        return x, x.astype(np.float64)

    @_quiet
    def ex2(self, x: Array, *, ftz: bool = False) -> Array:
        """``ex2.approx{.ftz}.f32``: at most 2 ulp from the correctly rounded result; 2**±0 is 1."""
        x, wide = self._operand(x, ftz)
        return self._apply("ex2", x, np.exp2(wide), _EX2_BOUNDS["f32"], ftz=ftz, special=x == 0)

    @_quiet
    def lg2(self, x: Array, *, ftz: bool = False) -> Array:
        """``lg2.approx{.ftz}.f32``: absolute error 2**-22 in (0.5, 2), relative error 2**-22 outside."""
        x, wide = self._operand(x, ftz)
        exact = np.log2(wide)
        near = self._apply("lg2", x, exact, ErrorBound(absolute=2.0**-22), ftz=ftz)
        far = self._apply("lg2", x, exact, ErrorBound(relative=2.0**-22), ftz=ftz)
        return np.where((x > 0.5) & (x < 2), near, far)

    @_quiet
    def rcp(self, x: Array, *, ftz: bool = False) -> Array:
        """``rcp.approx{.ftz}.f32``: at most 1 ulp."""
        x, wide = self._operand(x, ftz)
        return self._apply("rcp", x, 1.0 / wide, ErrorBound(ulps=1), ftz=ftz)

    @_quiet
    def rsqrt(self, x: Array, *, ftz: bool = False) -> Array:
        """``rsqrt.approx{.ftz}.f32``: relative error 2**-22.9; negative operands give NaN, -0 gives -inf."""
        x, wide = self._operand(x, ftz)
        return self._apply("rsqrt", x, 1.0 / np.sqrt(wide), ErrorBound(relative=2.0**-22.9), ftz=ftz)

    @_quiet
    def sqrt(self, x: Array, *, ftz: bool = False) -> Array:
        """``sqrt.approx{.ftz}.f32``: relative error 2**-23."""
        x, wide = self._operand(x, ftz)
        return self._apply("sqrt", x, np.sqrt(wide), ErrorBound(relative=2.0**-23), ftz=ftz)

    @_quiet
    def tanh(self, x: Array) -> Array:
        """``tanh.approx.f32``: relative error 2**-11; subnormals pass through."""
        x, wide = self._operand(x, False)
        special = np.isinf(x) | (np.abs(x) < F32_MIN_NORMAL)
        exact = np.where(np.abs(x) < F32_MIN_NORMAL, wide, np.tanh(wide))
        return self._apply("tanh", x, exact, _TANH_BOUNDS["f32"], special=special)

    def _trigonometric(self, name: str, x: Array, function: Callable[[Array], Array], ftz: bool) -> Array:
        x, wide = self._operand(x, ftz)
        exact = function(wide)
        result = self._apply(name, x, exact, ErrorBound(absolute=2.0), ftz=ftz)  # beyond 100 pi nothing is promised
        for limit, bound in reversed(_TRIGONOMETRIC_BOUNDS):
            result = np.where(
                np.abs(wide) <= limit, self._apply(name, x, exact, bound, ftz=ftz, special=x == 0), result
            )
        return result

    @_quiet
    def sin(self, x: Array, *, ftz: bool = False) -> Array:
        """``sin.approx{.ftz}.f32``: absolute error 2**-20.5 within 2 pi, 2**-14.7 within 100 pi."""
        return self._trigonometric("sin", x, np.sin, ftz)

    @_quiet
    def cos(self, x: Array, *, ftz: bool = False) -> Array:
        """``cos.approx{.ftz}.f32``: bounds as for :meth:`sin`."""
        return self._trigonometric("cos", x, np.cos, ftz)

    def _divide(self, name: str, a: Array, b: Array, ftz: bool) -> Array:
        exact = a.astype(np.float64) / b.astype(np.float64)
        key = (a.view(np.uint32) ^ (b.view(np.uint32) * np.uint32(0x85EBCA6B))).view(np.float32)
        return self._apply(name, key, exact, ErrorBound(ulps=2), ftz=ftz)

    @_quiet
    def div_full(self, a: Array, b: Array, *, ftz: bool = False) -> Array:
        """``div.full{.ftz}.f32``: at most 2 ulp over the full range."""
        a, b = (
            np.ascontiguousarray(v) for v in np.broadcast_arrays(self._operand(a, ftz)[0], self._operand(b, ftz)[0])
        )
        return self._divide("div.full", a, b, ftz)

    @_quiet
    def div_approx(self, a: Array, b: Array, *, ftz: bool = False) -> Array:
        """``div.approx{.ftz}.f32``: at most 2 ulp for |b| up to 2**126; beyond, a zero (NaN for an infinite ``a``)."""
        a, b = (
            np.ascontiguousarray(v) for v in np.broadcast_arrays(self._operand(a, ftz)[0], self._operand(b, ftz)[0])
        )
        quotient = self._divide("div.approx", a, b, ftz)
        huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
        zero = canonical_f32(a * np.copysign(np.float32(0), b))  # inf * 0 is the NaN that the ISA asks for
        return np.where(huge, zero, quotient)

    def _half_function(
        self, name: str, a: Array, dtype: str, function: Callable[[Array], Array], bound: ErrorBound, ftz: bool
    ) -> Array:
        x = widen(_flush_half(a, dtype) if ftz else a, dtype)
        exact = function(x.astype(np.float64))
        if self.seed is None:
            return round_to_half(exact, dtype, ftz=ftz)
        # Displace by half the bound: rounding to 16 bits uses up to the other half of it.
        halved = ErrorBound(relative=bound.relative / 2, absolute=bound.absolute / 2)
        moved = self._apply(name, x, exact, halved, special=(x == 0) | np.isinf(x))
        return round_to_half(moved, dtype, ftz=ftz)

    @_quiet
    def ex2_half(self, a: Array, dtype: str, *, ftz: bool = False) -> Array:
        """``ex2.approx{.ftz}`` of f16, bf16 and their x2 forms: relative error 2**-9.9 (f16), 2**-7 (bf16)."""
        if dtype in _PACKED_ELEMENT:
            return pack(self.ex2_half(unpack(a, dtype), _PACKED_ELEMENT[dtype], ftz=ftz), dtype)
        return self._half_function("ex2", a, dtype, np.exp2, _EX2_BOUNDS[dtype], ftz)

    @_quiet
    def tanh_half(self, a: Array, dtype: str) -> Array:
        """``tanh.approx`` of f16, bf16 and their x2 forms: absolute error 2**-10.987 (f16), relative 2**-8 (bf16)."""
        if dtype in _PACKED_ELEMENT:
            return pack(self.tanh_half(unpack(a, dtype), _PACKED_ELEMENT[dtype]), dtype)
        return self._half_function("tanh", a, dtype, np.tanh, _TANH_BOUNDS[dtype], False)


CORRECTLY_ROUNDED = ApproximationModel()
"""The default model of the ``.approx`` functions."""
