"""The `.approx` functions of PTX, as models: what a chip's multi-function unit returns is not documented bit by bit.

By default every result is the float64 value rounded once, i.e. the correctly rounded one (unless the exact value lies
within about 2**-52 of itself from a tie). Inside `perturbed_approximations` every result that the ISA does not
list as a special case is displaced by an amount that depends on the operands and the seed alone, within the maximum
error that the ISA documents. Code that needs more accuracy than is documented gives different answers under different
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from ptxemu.errors import UnsupportedInstruction
from ptxemu.models.rounding import (
    F32_MIN_NORMAL,
    PACKED_ELEMENT,
    Array,
    canonical_f32,
    finish_half,
    flush_f32,
    pack,
    quiet,
    round_to_f32,
    round_to_half,
    unpack,
    widen,
)


@dataclass(frozen=True)
class ErrorBound:
    """A documented maximum error, of exactly one kind."""

    ulps: int = 0  # distance from the correctly rounded result
    relative: float = 0.0
    absolute: float = 0.0


# PTX ISA 9.2, sections "Floating Point Instructions" and "Half Precision Floating Point Instructions".
EX2_BOUND = {"f32": ErrorBound(ulps=2), "f16": ErrorBound(relative=2.0**-9.9), "bf16": ErrorBound(relative=2.0**-7)}
TANH_BOUND = {
    "f32": ErrorBound(relative=2.0**-11),
    "f16": ErrorBound(absolute=2.0**-10.987),
    "bf16": ErrorBound(relative=2.0**-8),
}
LG2_NEAR_ONE_BOUND = ErrorBound(absolute=2.0**-22)  # for 0.5 < x < 2
LG2_BOUND = ErrorBound(relative=2.0**-22)
RCP_BOUND = ErrorBound(ulps=1)
RSQRT_BOUND = ErrorBound(relative=2.0**-22.9)
SQRT_BOUND = ErrorBound(relative=2.0**-23)
DIV_BOUND = ErrorBound(ulps=2)
TRIGONOMETRIC_BOUNDS = (
    (2 * np.pi, ErrorBound(absolute=2.0**-20.5)),
    (100 * np.pi, ErrorBound(absolute=2.0**-14.7)),
    (np.inf, ErrorBound(absolute=2.0)),  # beyond 100 pi nothing is promised
)

_seed: ContextVar[int | None] = ContextVar("seed of the perturbed approximations", default=None)


@contextmanager
def perturbed_approximations(seed: int) -> Iterator[None]:
    """Displace the results of the `.approx` functions within their documented errors, by `seed` and operands."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def _unit(raw: Array, name: str, seed: int) -> Array:
    """Deterministic numbers in [-1, 1) from bit patterns: a multiply-and-xorshift hash."""
    key = int.from_bytes(name.encode(), "little") * 0x8CB92BA72F3D8DD7 + seed * 0xD1B54A32D192ED03
    mixed = raw.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = mixed ^ (mixed >> np.uint64(27))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def _displace(exact: Array, rounded: Array, bound: ErrorBound, unit: Array) -> Array:
    """A float32 neighbour of `rounded` that keeps within `bound` of `exact` (float64)."""
    if bound.ulps:
        steps = np.rint(unit * bound.ulps).astype(np.int64)
        moved = (rounded.view(np.uint32).astype(np.int64) + steps).astype(np.uint32).view(np.float32)
        allowed = np.isfinite(moved) & (np.signbit(moved) == np.signbit(rounded))
    else:
        limit = np.abs(exact) * bound.relative + bound.absolute
        moved = (exact + unit * limit).astype(np.float32)
        allowed = np.isfinite(moved) & (np.abs(moved - exact) <= limit)
    return np.where(allowed & np.isfinite(rounded) & (rounded != 0), moved, rounded)


def _approximate(
    name: str, key: Array, exact: Array, bound: ErrorBound, *, ftz: bool = False, special: Array | bool = False
) -> Array:
    """Round `exact` to float32; with a seed, displace it by a function of `key` unless the case is `special`."""
    rounded = round_to_f32(exact, ftz=ftz)
    seed = _seed.get()
    if seed is None:
        return rounded
    moved = _displace(exact, rounded, bound, _unit(key.view(np.uint32), name, seed))
    moved = flush_f32(moved) if ftz else moved
    return canonical_f32(np.where(special, rounded, moved))


def _operand(x: Array, ftz: bool) -> tuple[Array, Array]:
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise UnsupportedInstruction(f"an .approx function of {x.dtype} is not modelled")
    x = flush_f32(x) if ftz else x
    return x, x.astype(np.float64)


def _check_f32(name: str, dtype: str) -> None:
    if dtype != "f32":
        raise UnsupportedInstruction(f"{name} is not modelled on {dtype!r}")


def _half(
    name: str, a: Array, dtype: str, function: Callable[[Array], Array], bounds: dict[str, ErrorBound], ftz: bool
) -> Array:
    """A function of f16, bf16 or two of them."""
    if dtype in PACKED_ELEMENT:
        return pack(_half(name, unpack(a, dtype), PACKED_ELEMENT[dtype], function, bounds, ftz), dtype)
    if dtype not in bounds:
        raise UnsupportedInstruction(f"{name}.approx is not defined on {dtype!r}")
    bits = finish_half(a, dtype, ftz=True) if ftz else a
    x = widen(bits, dtype)
    exact = function(x.astype(np.float64))
    if _seed.get() is None:
        return round_to_half(exact, dtype, ftz=ftz)
    # Displaced by half the bound: rounding to 16 bits uses up to the other half.
    bound = bounds[dtype]
    halved = ErrorBound(relative=bound.relative / 2, absolute=bound.absolute / 2)
    return round_to_half(_approximate(name, x, exact, halved, special=(x == 0) | np.isinf(x)), dtype, ftz=ftz)


@quiet
def ex2_approx(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`ex2.approx{.ftz}`: f32 at most 2 ulp from the correctly rounded result; f16, bf16 and their x2 forms too.

    2**0 is 1; infinities give 0 and infinity.
    """
    if dtype != "f32":
        return _half("ex2", a, dtype, np.exp2, EX2_BOUND, ftz)
    x, wide = _operand(a, ftz)
    return _approximate("ex2", x, np.exp2(wide), EX2_BOUND[dtype], ftz=ftz, special=x == 0)


@quiet
def tanh_approx(a: Array, dtype: str = "f32") -> Array:
    """`tanh.approx`: f32 with relative error 2**-11, subnormals passing through; f16, bf16 and their x2 forms too."""
    if dtype != "f32":
        return _half("tanh", a, dtype, np.tanh, TANH_BOUND, False)
    x, wide = _operand(a, False)
    small = np.abs(x) < F32_MIN_NORMAL
    exact = np.where(small, wide, np.tanh(wide))
    return _approximate("tanh", x, exact, TANH_BOUND[dtype], special=small | np.isinf(x))


@quiet
def lg2_approx(a: Array, *, ftz: bool = False) -> Array:
    """`lg2.approx{.ftz}.f32`: absolute error 2**-22 in (0.5, 2), relative error 2**-22 outside."""
    x, wide = _operand(a, ftz)
    exact = np.log2(wide)
    near = _approximate("lg2", x, exact, LG2_NEAR_ONE_BOUND, ftz=ftz)
    return np.where((x > 0.5) & (x < 2), near, _approximate("lg2", x, exact, LG2_BOUND, ftz=ftz))


@quiet
def rcp_approx(a: Array, *, ftz: bool = False) -> Array:
    """`rcp.approx{.ftz}.f32`: at most 1 ulp."""
    x, wide = _operand(a, ftz)
    return _approximate("rcp", x, 1.0 / wide, RCP_BOUND, ftz=ftz)


@quiet
def rsqrt_approx(a: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`rsqrt.approx{.ftz}.f32`: relative error 2**-22.9; negative operands give NaN, -0 gives -inf."""
    _check_f32("rsqrt.approx", dtype)
    x, wide = _operand(a, ftz)
    return _approximate("rsqrt", x, 1.0 / np.sqrt(wide), RSQRT_BOUND, ftz=ftz)


@quiet
def sqrt_approx(a: Array, *, ftz: bool = False) -> Array:
    """`sqrt.approx{.ftz}.f32`: relative error 2**-23."""
    x, wide = _operand(a, ftz)
    return _approximate("sqrt", x, np.sqrt(wide), SQRT_BOUND, ftz=ftz)


def _trigonometric(name: str, a: Array, function: Callable[[Array], Array], ftz: bool) -> Array:
    x, wide = _operand(a, ftz)
    exact = function(wide)
    results = [_approximate(name, x, exact, bound, ftz=ftz, special=x == 0) for _, bound in TRIGONOMETRIC_BOUNDS]
    ranges = [np.abs(wide) <= limit for limit, _ in TRIGONOMETRIC_BOUNDS]
    return np.select(ranges, results, results[-1])


@quiet
def sin_approx(a: Array, *, ftz: bool = False) -> Array:
    """`sin.approx{.ftz}.f32`: absolute error 2**-20.5 within 2 pi, 2**-14.7 within 100 pi."""
    return _trigonometric("sin", a, np.sin, ftz)


@quiet
def cos_approx(a: Array, *, ftz: bool = False) -> Array:
    """`cos.approx{.ftz}.f32`: absolute error 2**-20.5 within 2 pi, 2**-14.7 within 100 pi."""
    return _trigonometric("cos", a, np.cos, ftz)


def _quotient(name: str, a: Array, b: Array, ftz: bool) -> Array:
    exact = a.astype(np.float64) / b.astype(np.float64)
    key = a.view(np.uint32) ^ (b.view(np.uint32) * np.uint32(0x85EBCA6B))
    return _approximate(name, key, exact, DIV_BOUND, ftz=ftz)


@quiet
def div_full(a: Array, b: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`div.full{.ftz}.f32`: at most 2 ulp over the full range."""
    _check_f32("div.full", dtype)
    return _quotient("div.full", _operand(a, ftz)[0], _operand(b, ftz)[0], ftz)


@quiet
def div_approx(a: Array, b: Array, dtype: str = "f32", *, ftz: bool = False) -> Array:
    """`div.approx{.ftz}.f32`: at most 2 ulp for |b| up to 2**126; beyond, a zero (NaN for an infinite `a`)."""
    _check_f32("div.approx", dtype)
    x, y = _operand(a, ftz)[0], _operand(b, ftz)[0]
    huge = (np.abs(y) > np.float32(2.0**126)) & np.isfinite(y)
    zero = canonical_f32(x * np.copysign(np.float32(0), y))  # infinity times zero is the NaN that the ISA asks for
    return np.where(huge, zero, _quotient("div.approx", x, y, ftz))
