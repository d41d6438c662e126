"""Widening and rounding between floating-point formats, exactly once.

Operands of 32 bits and fewer widen exactly to float64, where a product of two is exact and the error of a sum is
found by TwoSum. The float64 result is then *rounded to odd*: if inexact, its last bit is set. Any later rounding to a
format with at least two bits less, in any mode, gives what rounding the exact value would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from ptxemu.errors import UnsupportedInstruction

Array = np.ndarray[Any, np.dtype[Any]]

ROUNDING_MODES = ("rn", "rz", "rm", "rp")
PACKED_ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}

F32_CANONICAL_NAN = np.uint32(0x7FFFFFFF)
HALF_CANONICAL_NAN = np.uint16(0x7FFF)
F32_MIN_NORMAL = np.float32(2.0**-126)

_F32_NAN = F32_CANONICAL_NAN.view(np.float32)
_ELEMENT_STORAGE = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32}
_PACKED_STORAGE = {"f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64}
_HALF_ONE = {"f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}
_HALF_INFINITY = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}
_HALF_MIN_NORMAL = {"f16": np.uint16(0x0400), "bf16": np.uint16(0x0080)}
_HALF_SIGN = np.uint16(0x8000)
_ONE32, _SIXTEEN = np.uint32(1), np.uint32(16)
_BF16_HALF_ULP = np.uint32(0x7FFF)  # one less than half the weight of bf16's last bit in an f32 pattern
_LOW_HALF, _HIGH_HALF = np.uint32(0xFFFF), np.uint32(0xFFFF0000)

_silenced = False


@contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Overflow and invalid operations are results, not warnings, inside this context.

    Every function here silences NumPy for itself. Whoever calls many of them enters this context once and saves each
    call a microsecond or two.
    """
    global _silenced
    before, _silenced = _silenced, True
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        _silenced = before


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function in `ieee_arithmetic`, unless it is active already."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _silenced
        if _silenced:
            return function(*args, **kwargs)
        _silenced = True
        try:
            with np.errstate(all="ignore"):
                return function(*args, **kwargs)
        finally:
            _silenced = False

    return call


def check_rounding(rnd: str) -> None:
    """Raise unless `rnd` is rn, rz, rm or rp."""
    if rnd not in ROUNDING_MODES:
        raise UnsupportedInstruction(f"rounding mode {rnd!r} is none of {', '.join(ROUNDING_MODES)}")


def has_nan(x: Array) -> bool:
    """Whether a floating-point array holds a NaN: its sum of squares is NaN only then, and one BLAS call finds it."""
    square = np.vdot(x, x)
    return bool(square != square)


# --- Widening, packing -----------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Array) -> Array:
    """Exact: a bf16 is the upper half of the f32 of the same value (NaN payloads are kept)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << _SIXTEEN).view(np.float32)


def f16_to_f32(bits: Array) -> Array:
    """Exact."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)


def widen(a: Array, dtype: str) -> Array:
    """The exact float32 (for `f64`: float64) value of an unpacked floating-point register."""
    if dtype == "f32":
        return np.asarray(a, np.float32)
    if dtype == "bf16":
        return bf16_to_f32(a)
    if dtype == "f16":
        return f16_to_f32(a)
    if dtype == "f64":
        return np.asarray(a, np.float64)
    raise UnsupportedInstruction(f"no floating-point type {dtype!r}")


def unpack(a: Array, dtype: str) -> Array:
    """The elements of a packed register array along a new last axis, element 0 (the low half) first."""
    a = np.ascontiguousarray(a, _PACKED_STORAGE[dtype])
    return a[..., None].view(_ELEMENT_STORAGE[PACKED_ELEMENT[dtype]])


def pack(elements: Array, dtype: str) -> Array:
    """The inverse of `unpack`."""
    storage = _ELEMENT_STORAGE[PACKED_ELEMENT[dtype]]
    return np.ascontiguousarray(elements, storage).view(_PACKED_STORAGE[dtype])[..., 0]


# --- Rounding to odd -------------------------------------------------------------------------------------------------


def _set_odd(nearest: Array, error: Array) -> Array:
    """Turn round-to-nearest results into round-to-odd ones, given what the rounding lost.

    `nearest` is inexact where `error` is not 0. If its last bit is clear, the exact value lies between it and the
    neighbour on the side of `error`, which is odd. Overflow (nearest infinite, error of the other sign) lands on the
    largest finite number, whose last bit is set; an infinite operand (error NaN) is left alone.
    """
    if not np.count_nonzero(error):
        return nearest
    bits = np.uint32 if nearest.dtype == np.float32 else np.uint64
    raw = nearest.view(bits)
    move = (error != 0) & (error == error) & ((raw & bits(1)) == 0)
    away = (error > 0) != np.signbit(nearest)  # underflow leaves a zero of the exact value's sign
    return np.where(move, np.where(away, raw + bits(1), raw - bits(1)), raw).view(nearest.dtype)


def sum_to_odd(a: Array, b: Array) -> Array:
    """`a + b` in the operands' own type, rounded to odd (Knuth's TwoSum gives the error exactly)."""
    total = a + b
    b_part = total - a
    return _set_odd(total, (a - (total - b_part)) + (b - b_part))


def f64_to_f32_odd(x: Array) -> Array:
    """Round float64 (exact, or rounded to odd) to float32 by rounding to odd."""
    nearest = x.astype(np.float32)
    return _set_odd(nearest, x - nearest)


# --- Rounding to f32 -------------------------------------------------------------------------------------------------


def direct(nearest: Array, exact: Array, rnd: str) -> Array:
    """Correct a round-to-nearest result to a directed mode; `exact` is wider and compares like the exact value."""
    if rnd == "rn":
        return nearest
    if rnd == "rz":
        wrong, target = np.abs(nearest) > np.abs(exact), nearest.dtype.type(0)
    elif rnd == "rm":
        wrong, target = nearest > exact, nearest.dtype.type(-np.inf)
    else:
        wrong, target = nearest < exact, nearest.dtype.type(np.inf)
    return np.where(wrong, np.nextafter(nearest, target), nearest)


def flush_f32(x: Array) -> Array:
    """Subnormals to zero of the same sign."""
    x = np.asarray(x, np.float32)
    small = np.abs(x) < F32_MIN_NORMAL
    return np.where(small, np.copysign(np.float32(0), x), x) if np.count_nonzero(small) else x


def canonical_f32(x: Array) -> Array:
    """Every NaN becomes 0x7fffffff."""
    return np.where(np.isnan(x), _F32_NAN, x) if has_nan(x) else x


def finish_f32(x: Array, ftz: bool, sat: bool) -> Array:
    """The modifiers of f32 results: `sat` clamps to [+0, 1] and turns NaN into +0."""
    if ftz:
        x = flush_f32(x)
    if sat:
        return np.fmin(np.fmax(x, np.float32(0)), np.float32(1)) + np.float32(0)  # whichever zero fmax gave, +0 now
    return canonical_f32(x)


@quiet
def round_to_f32(x: Array, rnd: str = "rn", *, ftz: bool = False, sat: bool = False) -> Array:
    """Round float64 values (exact, or rounded to odd) to float32."""
    check_rounding(rnd)
    x = np.asarray(x, np.float64)
    return finish_f32(direct(x.astype(np.float32), x, rnd), ftz, sat)


# --- Rounding to f16 and bf16 ----------------------------------------------------------------------------------------


def _f32_to_bf16_high(x: Array, rnd: str) -> Array:
    """float32 (exact, or rounded to odd) as a uint32 pattern whose upper half is the bf16; the lower half is rubbish.

    The upper half of an f32 is the bf16 towards zero; a carry into it, by mode, rounds the other ways.
    """
    raw = x.view(np.uint32)
    if rnd == "rn":
        rounded = raw + (_BF16_HALF_ULP + ((raw >> _SIXTEEN) & _ONE32))
    elif rnd == "rz":
        rounded = raw
    else:
        towards = (raw >> np.uint32(31)) == np.uint32(rnd == "rm")
        rounded = raw + np.where(towards, _LOW_HALF, np.uint32(0))
    return np.where(np.isnan(x), F32_CANONICAL_NAN, rounded) if has_nan(x) else rounded


def _f32_to_f16_bits(x: Array, rnd: str) -> Array:
    rounded = direct(x.astype(np.float16), x, rnd)
    bits = np.ascontiguousarray(rounded).view(np.uint16)
    return np.where(np.isnan(x), HALF_CANONICAL_NAN, bits) if has_nan(x) else bits


def finish_half(
    bits: Array, dtype: str, *, ftz: bool = False, sat: bool = False, relu: bool = False, satfinite: bool = False
) -> Array:
    """The modifiers of f16 and bf16 results, on bit patterns whose NaNs are canonical; see `round_to_half`."""
    magnitude = bits & ~_HALF_SIGN
    negative = bits != magnitude
    nan = magnitude > _HALF_INFINITY[dtype]
    if ftz:
        bits = np.where(magnitude < _HALF_MIN_NORMAL[dtype], bits & _HALF_SIGN, bits)
    if satfinite:
        largest = _HALF_INFINITY[dtype] - np.uint16(1)
        bits = np.where((magnitude > largest) & ~nan, largest | (bits & _HALF_SIGN), bits)
    if relu:
        bits = np.where(negative, np.uint16(0), bits)  # a canonical NaN is positive
    if sat:
        bits = np.where(negative | nan, np.uint16(0), np.minimum(bits, _HALF_ONE[dtype]))
    return bits


@quiet
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
    """Round float64 or float32 values (exact, or rounded to odd) to `f16` or `bf16` bit patterns (uint16).

    `relu` turns negative results (and -0) into +0 and keeps NaN; `sat` clamps to [+0, 1] and turns NaN into +0;
    `satfinite` replaces infinity by the largest finite number of that sign.
    """
    check_rounding(rnd)
    x = np.asarray(x)
    single = f64_to_f32_odd(x) if x.dtype == np.float64 else x
    if dtype == "bf16":
        bits = (_f32_to_bf16_high(single, rnd) >> _SIXTEEN).astype(np.uint16)
    elif dtype == "f16":
        bits = _f32_to_f16_bits(single, rnd)
    else:
        raise UnsupportedInstruction(f"{dtype!r} is not a 16-bit floating-point type")
    if ftz or sat or relu or satfinite:
        return finish_half(bits, dtype, ftz=ftz, sat=sat, relu=relu, satfinite=satfinite)
    return bits


def pack_bf16(high: Array, low: Array, rnd: str) -> Array:
    """Two float32 arrays (exact, or rounded to odd) as one array of bf16x2."""
    return (_f32_to_bf16_high(high, rnd) & _HIGH_HALF) | (_f32_to_bf16_high(low, rnd) >> _SIXTEEN)
