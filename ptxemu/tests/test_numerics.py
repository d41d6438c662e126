"""Arithmetic of the emulator against rational numbers, PyTorch's conversions, and the ISA's tables of special cases."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from ptxemu.errors import UnsupportedInstruction
from ptxemu.models import approximations, numerics

MODES = ("rn", "rz", "rm", "rp")
# Precision in bits, least and greatest exponent of a normal number.
FORMATS = {"f32": (24, -126, 127), "f64": (53, -1022, 1023), "f16": (11, -14, 15), "bf16": (8, -126, 127)}
ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
RNG = np.random.default_rng(2024)
RNG_START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    RNG.bit_generator.state = RNG_START


# --- The oracle: exact rational results, rounded by integer arithmetic -----------------------------------------------


def round_rational(x: Fraction, fmt: str, rnd: str) -> float:
    """The number of format `fmt` that `x` (not zero) rounds to."""
    precision, low, high = FORMATS[fmt]
    sign, magnitude = (-1.0 if x < 0 else 1.0), abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, low) - precision + 1)
    units, rest = divmod(magnitude, quantum)
    towards_infinity = {"rz": False, "rm": sign < 0, "rp": sign > 0}
    if rnd == "rn":
        up = 2 * rest > quantum or (2 * rest == quantum and units % 2 == 1)
    else:
        up = rest > 0 and towards_infinity[rnd]
    result = (units + up) * quantum
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** high
    if result > largest:
        return sign * (math.inf if rnd == "rn" or towards_infinity[rnd] else float(largest))
    return math.copysign(float(result), sign)


def expected(op: str, values: tuple[float, ...], fmt: str, rnd: str) -> float:
    """What IEEE 754 says of one operation on finite or special numbers."""
    if op == "add":
        a, b, c = values[0], 1.0, values[1]
    elif op == "mul":
        a, b, c = values[0], values[1], math.copysign(0.0, -values[0] * math.copysign(1, values[1]))
    else:
        a, b, c = values
    if not all(map(math.isfinite, values)):
        with np.errstate(all="ignore"):
            product = np.float64(a) * np.float64(b) if op != "add" else np.float64(a)
            return float(product if op == "mul" else product + np.float64(c))
    exact = Fraction(a) * Fraction(b) + (Fraction(c) if op != "mul" else 0)
    if exact:
        return round_rational(exact, fmt, rnd)
    product_sign = math.copysign(1, a) * math.copysign(1, b)
    if op == "mul" or (Fraction(a) * Fraction(b) == 0 and c == 0 and product_sign == math.copysign(1, c)):
        return math.copysign(0.0, product_sign)
    return -0.0 if rnd == "rm" else 0.0


def to_storage(values: np.ndarray, fmt: str) -> np.ndarray:
    """Float64 numbers that the format holds exactly, as the library's array type."""
    if fmt == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if fmt == "f16":
        return values.astype(np.float16).view(np.uint16)
    return values.astype({"f32": np.float32, "f64": np.float64}[fmt])


@np.errstate(all="ignore")
def from_storage(values: np.ndarray, fmt: str) -> np.ndarray:
    if fmt == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if fmt == "f16":
        return values.view(np.float16).astype(np.float64)
    return values.astype(np.float64)


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal, with the sign of zeros, all NaN alike."""
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


@np.errstate(all="ignore")
def assert_same(actual: np.ndarray, wanted: np.ndarray, *operands: np.ndarray) -> None:
    bad = ~same(np.asarray(actual, np.float64), np.asarray(wanted, np.float64))
    if bad.any():
        i = tuple(np.argwhere(bad)[0])
        shown = [o[i] for o in operands]
        raise AssertionError(f"{bad.sum()} of {bad.size} differ, first {shown}: {actual[i]!r}, not {wanted[i]!r}")


def special_numbers(fmt: str) -> list[float]:
    precision, low, high = FORMATS[fmt]
    tiny, ulp = 2.0 ** (low - precision + 1), 2.0 ** (1 - precision)
    largest = (2 - ulp) * 2.0**high
    magnitudes = [
        0.0,
        tiny,
        3 * tiny,
        2.0**low - tiny,
        2.0**low,
        0.5,
        1.0,
        1.0 + ulp,
        2.0 - ulp,
        3.0,
        largest,
        math.inf,
    ]
    return [s * m for m in magnitudes for s in (1.0, -1.0)] + [math.nan]


def random_numbers(fmt: str, count: int) -> np.ndarray:
    """Non-zero numbers: half of any magnitude, half within a few binades of 1, where ties and cancellation live."""
    precision, low, high = FORMATS[fmt]
    exponents = np.concatenate((RNG.integers(low - precision, high + 1, count // 2), RNG.integers(-3, 4, count // 2)))
    significands = 1 + RNG.integers(0, 2 ** (precision - 1), count) * 2.0 ** (1 - precision)
    wanted = np.ldexp(significands, exponents) * RNG.choice((-1.0, 1.0), count)
    rounded = np.array([round_rational(Fraction(v), fmt, "rz") for v in wanted])
    return RNG.permutation(np.where(rounded == 0, 1.0, rounded))


ARITY = {"add": 2, "mul": 2, "fma": 3}
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {"add": numerics.add, "mul": numerics.mul, "fma": numerics.fma}


def check_operation(op: str, operands: list[np.ndarray], fmt: str, rnd: str) -> None:
    stored = [to_storage(v, fmt) for v in operands]
    actual = from_storage(FUNCTIONS[op](*stored, fmt, rnd), fmt)
    wanted = np.array([expected(op, tuple(map(float, values)), fmt, rnd) for values in zip(*operands, strict=True)])
    assert_same(actual, wanted, *operands)


@pytest.mark.parametrize("rnd", MODES)
@pytest.mark.parametrize("op", ARITY)
@pytest.mark.parametrize("fmt", FORMATS)
def test_arithmetic_rounds_the_exact_result_once(fmt: str, op: str, rnd: str) -> None:
    special = special_numbers(fmt)
    tuples = list(itertools.product(special, repeat=ARITY[op]))
    if len(tuples) > 2000:
        tuples = [tuples[i] for i in RNG.choice(len(tuples), 2000, replace=False)]
    check_operation(op, [np.array(column) for column in zip(*tuples, strict=True)], fmt, rnd)
    check_operation(op, [random_numbers(fmt, 1000) for _ in range(ARITY[op])], fmt, rnd)


@pytest.mark.parametrize("rnd", MODES)
def test_fma_of_near_ties(rnd: str) -> None:
    """Products that lie on a tie of float32, moved off it by an addend too small for float64 to see."""
    a = np.float64(1 + 2.0**-23) * RNG.choice((1.0, -1.0), 500)
    b = 1 + 2.0**-23 + RNG.integers(0, 1000, 500) * 2.0**-23
    c = RNG.choice((1.0, -1.0), 500) * np.exp2(RNG.integers(-149, -40, 500).astype(np.float64))
    check_operation("fma", [a, b, c], "f32", rnd)
    tie = (1 + 2.0**-12) * np.ones(500)  # its square is 1 + 2**-11 + 2**-24, a tie
    check_operation("fma", [tie, tie * RNG.choice((1.0, -1.0), 500), c], "f32", rnd)


def test_fma_near_ties_of_subnormal_results() -> None:
    """The product is a hair off half of the least subnormal: float64 cannot tell, and sees a tie."""
    a = np.float64(2.0**-80) * np.array([1 - 2.0**-23, 1 + 2.0**-23, 1.0, 1 + 2.0**-23])
    b = np.float64(2.0**-70) * np.array([1 + 2.0**-23, 1 + 2.0**-23, 1.0, 1 - 2.0**-23])
    for odd in (0, 1):
        for sign in (1.0, -1.0):
            c = sign * np.full(4, 2.0**-127 + odd * 2.0**-149)
            for rnd in MODES:
                check_operation("fma", [a, b, c], "f32", rnd)
                check_operation("fma", [-a, b, c], "f32", rnd)


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_half_fma_near_ties(fmt: str) -> None:
    """bf16 and f16 results must not pass through f32: the tie is broken by what f32 would lose."""
    precision = FORMATS[fmt][0]
    one = np.ones(300)
    ulp = 2.0 ** (1 - precision)
    a, b = one * (1 + ulp), one * (1 + ulp * 2 ** (precision // 2))
    c = RNG.choice((1.0, -1.0), 300) * np.exp2(RNG.integers(FORMATS[fmt][1], -8, 300).astype(np.float64))
    for rnd in MODES:
        check_operation("fma", [a, b, c], fmt, rnd)
        check_operation("fma", [one, one + ulp / 2 * 0, ulp / 2 + 0 * c], fmt, rnd)


def test_double_rounding_through_f32_would_be_caught() -> None:
    """A case where bf16(f32(a * b + c)) is wrong, so that the test above can fail."""
    a = to_storage(np.array([1 + 2.0**-7]), "bf16")
    b = to_storage(np.array([1.0 + 2.0**-1]), "bf16")
    c = to_storage(np.array([-(2.0**-40)]), "bf16")
    exact = Fraction(1 + 2.0**-7) * Fraction(3, 2) - Fraction(2.0**-40)  # just below a tie
    through_f32 = numerics.cvt(np.float32([float(exact)]), "bf16", "f32", "rn")
    assert from_storage(numerics.fma(a, b, c, "bf16"), "bf16") == round_rational(exact, "bf16", "rn")
    assert from_storage(through_f32, "bf16") != round_rational(exact, "bf16", "rn")


@pytest.mark.parametrize("rnd", MODES)
def test_div_rcp_sqrt(rnd: str) -> None:
    a, b = random_numbers("f32", 3000), random_numbers("f32", 3000)
    actual = numerics.div(a.astype(np.float32), b.astype(np.float32), "f32", rnd)
    wanted = np.array([round_rational(Fraction(x) / Fraction(y), "f32", rnd) for x, y in zip(a, b, strict=True)])
    assert_same(actual, wanted, a, b)
    assert_same(
        numerics.rcp(b.astype(np.float32), "f32", rnd),
        np.array([round_rational(1 / Fraction(y), "f32", rnd) for y in b]),
        b,
    )
    roots = numerics.sqrt(np.abs(a).astype(np.float32), "f32", rnd)
    for x, root in zip(np.abs(a), roots, strict=True):
        assert root_is_rounded(Fraction(float(x)), float(root), rnd), (x, root)


def root_is_rounded(x: Fraction, root: float, rnd: str) -> bool:
    """Whether `root` is sqrt(x) rounded to f32, by squaring."""
    down, up = (Fraction(float(np.nextafter(np.float32(root), np.float32(d)))) for d in (0, np.inf))
    r = Fraction(root)
    if rnd == "rn":
        return ((down + r) / 2) ** 2 <= x <= ((r + up) / 2) ** 2
    return r**2 <= x < up**2 if rnd in ("rz", "rm") else down**2 < x <= r**2


def test_f64_division_and_special_quotients() -> None:
    a, b = random_numbers("f64", 400), random_numbers("f64", 400)
    for rnd in MODES:
        wanted = np.array([round_rational(Fraction(x) / Fraction(y), "f64", rnd) for x, y in zip(a, b, strict=True)])
        assert_same(numerics.div(a, b, "f64", rnd), wanted, a, b)
    quotients = numerics.div(np.float32([1, -1, 0, np.inf, 1]), np.float32([0, 0, 0, np.inf, np.inf]))
    assert_same(quotients, np.array([np.inf, -np.inf, np.nan, np.nan, 0]))
    assert_same(numerics.sqrt(np.float32([-0.0, 0.0, -1, np.inf])), np.array([-0.0, 0.0, np.nan, np.inf]))


# --- Modifiers -------------------------------------------------------------------------------------------------------


def test_ftz_flushes_inputs_and_results() -> None:
    subnormal, normal = np.float32(2.0**-130), np.float32(2.0**-126)
    values = np.float32([subnormal, -subnormal, normal])
    assert_same(numerics.add(values, np.float32(0), ftz=True), np.array([0.0, 0.0, normal]))
    assert_same(numerics.mul(values, np.float32(1), ftz=True), np.array([0.0, -0.0, normal]))
    assert_same(numerics.mul(np.float32([normal, -normal]), np.float32(0.5), ftz=True), np.array([0.0, -0.0]))
    assert_same(numerics.mul(np.float32([normal]), np.float32(0.5)), np.array([normal / 2]))
    assert_same(numerics.fma(values, np.float32(2.0**20), np.float32(0), ftz=True), np.array([0.0, 0.0, 2.0**-106]))


def test_sat_and_relu() -> None:
    values = np.float32([-2, -0.0, 0.25, 1, 7, np.inf, -np.inf, np.nan])
    clamped = np.array([0.0, 0.0, 0.25, 1, 1, 1, 0, 0])
    assert_same(numerics.mul(values, np.float32(1), sat=True), clamped)
    assert_same(numerics.cvt(values, "f32", "f32", sat=True), clamped)
    assert_same(from_storage(numerics.cvt(values, "f16", "f32", "rn", sat=True), "f16"), clamped)
    rectified = np.array([0.0, 0.0, 0.25, 1, 7, np.inf, 0, np.nan])
    for fmt in ("f16", "bf16"):
        assert_same(from_storage(numerics.cvt(values, fmt, "f32", "rn", relu=True), fmt), rectified)
        stored, one, zero = (to_storage(v, fmt) for v in (values, np.ones(8), np.zeros(8)))
        assert_same(from_storage(numerics.fma(stored, one, zero, fmt, relu=True), fmt), rectified)


def test_nan_results_are_canonical() -> None:
    payload = np.uint32([0xFFC12345, 0x7F800001]).view(np.float32)
    for result in (
        numerics.add(payload, np.float32(1)),
        numerics.mul(payload, np.float32(1)),
        numerics.fma(payload, np.float32(1), np.float32(1)),
        numerics.maximum(payload, payload),
        numerics.add(np.float32([np.inf, -np.inf]), np.float32([-np.inf, np.inf])),
        numerics.ex2_approx(payload),
        numerics.cvt(payload, "f32", "f32", "rni"),
    ):
        assert (result.view(np.uint32) == 0x7FFFFFFF).all()
    for fmt in ("f16", "bf16"):
        assert (numerics.cvt(payload, fmt, "f32", "rn") == 0x7FFF).all()
        assert (numerics.mul(np.uint16([0xFFF1]), np.uint16([0]), fmt) == 0x7FFF).all()


def test_satfinite() -> None:
    values = np.float32([np.inf, 3.4e38, -np.inf, np.nan, 1])
    bits = numerics.cvt(values, "bf16", "f32", "rn", satfinite=True)
    assert bits.tolist() == [0x7F7F, 0x7F7F, 0xFF7F, 0x7FFF, 0x3F80]
    assert numerics.cvt(values, "f16", "f32", "rn", satfinite=True).tolist() == [0x7BFF, 0x7BFF, 0xFBFF, 0x7FFF, 0x3C00]


def test_overflow_and_invalid_operations_are_no_warnings() -> None:
    large, infinite = np.float32([3e38]), np.float32([np.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numerics.add(large, large) == np.inf
        assert np.isnan(numerics.add(infinite, -infinite))
        assert numerics.cvt(large, "f16", "f32", "rn") == 0x7C00
        with numerics.ieee_arithmetic(), numerics.ieee_arithmetic():
            assert numerics.mul(large, large) == np.inf
        assert numerics.mul(large, large) == np.inf


def test_unknown_forms_are_refused() -> None:
    one = np.ones(2, np.float32)
    for call in (
        lambda: numerics.add(one, one, "f32", "rna"),
        lambda: numerics.add(one, one, "e4m3"),
        lambda: numerics.fma(one, one, one, "f32", relu=True),
        lambda: numerics.add(one, one, "f64", ftz=True),
        lambda: numerics.mul(np.uint16([1]), np.uint16([1]), "bf16", ftz=True),
        lambda: numerics.cvt(one, "bf16", "f32"),
        lambda: numerics.cvt(one, "s32", "f32", "rn"),
        lambda: numerics.cvt(np.int32([1]), "f32", "s32"),
        lambda: numerics.cvt_pack(one, one, "bf16x2", "rm"),
        lambda: numerics.cvt(one, "f32", "f32", "rn", relu=True),
        lambda: numerics.tanh_approx(one, "f64"),
        lambda: numerics.div_full(one, one, "f16"),
        lambda: numerics.rsqrt_approx(one.astype(np.float64), "f64"),
        lambda: numerics.rcp_approx(one.astype(np.float64)),
    ):
        with pytest.raises(UnsupportedInstruction):
            call()


# --- Packed and mixed types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16x2", "f16x2", "f32x2"])
def test_packed_operations_are_two_independent_ones(dtype: str) -> None:
    element = dtype.removesuffix("x2")
    low, high = ([to_storage(random_numbers(element, 64), element) for _ in range(3)] for _ in range(2))
    packed = [numerics.pack(np.stack((x, y), -1), dtype) for x, y in zip(low, high, strict=True)]
    for rnd in MODES:
        result = numerics.unpack(numerics.fma(*packed, dtype, rnd), dtype)
        assert np.array_equal(result[:, 0], numerics.fma(*low, element, rnd))
        assert np.array_equal(result[:, 1], numerics.fma(*high, element, rnd))
    if dtype != "f32x2":
        bits = numerics.maximum(packed[0], packed[1], dtype=dtype)
        assert np.array_equal(bits >> 16, numerics.maximum(high[0], high[1], dtype=element))
        assert np.array_equal(numerics.neg(packed[0], dtype), packed[0] ^ np.uint32(0x80008000))
        assert np.array_equal(numerics.absolute(packed[0], dtype), packed[0] & np.uint32(0x7FFF7FFF))


def test_element_zero_is_the_low_half() -> None:
    assert numerics.unpack(np.uint32([0x3F804000]), "bf16x2").tolist() == [[0x4000, 0x3F80]]
    assert numerics.unpack(np.uint64([0x3F80000040000000]), "f32x2").tolist() == [[2.0, 1.0]]


def test_mixed_precision() -> None:
    a, b = ALL_HALVES[::23], ALL_HALVES[::-23]
    c = random_numbers("f32", a.size + a.size % 2)[: a.size].astype(np.float32)
    for fmt in ("bf16", "f16"):
        x, y = from_storage(a, fmt), from_storage(b, fmt)
        wanted = [expected("fma", (float(p), float(q), float(r)), "f32", "rz") for p, q, r in zip(x, y, c, strict=True)]
        assert_same(numerics.fma_mixed(a, b, c, fmt, "rz"), np.array(wanted), x, y, c)
        sums = [expected("add", (float(p), -float(r)), "f32", "rn") for p, r in zip(x, c, strict=True)]
        assert_same(numerics.sub_mixed(a, c, fmt), np.array(sums), x, c)
        assert_same(numerics.add_mixed(a, -c, fmt), np.array(sums), x, c)


# --- min, max --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_min_max_of_special_numbers(fmt: str) -> None:
    pairs = list(itertools.product(special_numbers(fmt), repeat=2))
    a, b = (np.array(column) for column in zip(*pairs, strict=True))
    x, y = to_storage(a, fmt), to_storage(b, fmt)

    def order(v: float) -> tuple[float, float]:
        return v, math.copysign(1, v)

    def pick(choose: Callable[..., float], nan: bool) -> np.ndarray:
        def one(p: float, q: float) -> float:
            if math.isnan(p) or math.isnan(q):
                return math.nan if nan or (math.isnan(p) and math.isnan(q)) else (q if math.isnan(p) else p)
            return choose(p, q, key=order)

        return np.array([one(p, q) for p, q in pairs])

    for nan in (False, True):
        assert_same(from_storage(numerics.maximum(x, y, dtype=fmt, nan=nan), fmt), pick(max, nan), a, b)
        assert_same(from_storage(numerics.minimum(x, y, dtype=fmt, nan=nan), fmt), pick(min, nan), a, b)


def test_min_max_of_zeros_without_a_nan_nearby() -> None:
    a, b = np.float32([-0.0, 0.0, 1.0]), np.float32([0.0, -0.0, 2.0])
    assert_same(numerics.maximum(a, b), np.array([0.0, 0.0, 2.0]))
    assert_same(numerics.minimum(a, b), np.array([-0.0, -0.0, 1.0]))


def test_min_max_modifiers() -> None:
    a, b = np.float32([3, -3, -5, 2]), np.float32([-2, -4, 5, np.nan])
    assert_same(numerics.maximum(a, b, xorsign_abs=True), np.array([-3.0, 4.0, -5.0, 2.0]))
    assert_same(numerics.minimum(a, b, xorsign_abs=True), np.array([-2.0, 3.0, -5.0, 2.0]))
    assert_same(numerics.maximum(np.float32([1]), np.float32([2]), np.float32([3])), np.array([3.0]))
    subnormal = np.float32([2.0**-140])
    assert_same(numerics.maximum(subnormal, np.float32([0]), ftz=True), np.array([0.0]))
    assert_same(numerics.absolute(np.float32([-0.0, -2])), np.array([0.0, 2.0]))
    assert_same(numerics.neg(np.float32([0.0, -2])), np.array([-0.0, 2.0]))


# --- cvt -------------------------------------------------------------------------------------------------------------


def test_widening_halves_is_exact_for_every_pattern() -> None:
    for fmt, kind in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        theirs = torch.from_numpy(ALL_HALVES.view(np.int16)).view(kind).float().numpy()
        assert_same(numerics.cvt(ALL_HALVES, "f32", fmt), theirs)
        assert_same(numerics.cvt(ALL_HALVES, "f64", fmt), theirs)
        back = numerics.cvt(theirs, fmt, "f32", "rn")
        number = ~np.isnan(theirs)
        assert np.array_equal(back[number], ALL_HALVES[number])


@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_narrowing_around_every_half(fmt: str) -> None:
    """Every upper half of an f32, with lower halves around the ties."""
    low = np.uint32([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = ((ALL_HALVES.astype(np.uint32) << 16)[:, None] | low).reshape(-1).view(np.float32)
    x = x[~np.isnan(x)]
    kind = torch.bfloat16 if fmt == "bf16" else torch.float16
    theirs = torch.from_numpy(x).to(kind).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(numerics.cvt(x, fmt, "f32", "rn"), theirs)
    down, up, to_zero = (from_storage(numerics.cvt(x, fmt, "f32", rnd), fmt) for rnd in ("rm", "rp", "rz"))
    nearest = from_storage(theirs, fmt)
    assert ((down <= x) & (x <= up)).all()
    assert ((nearest == down) | (nearest == up)).all()
    assert_same(to_zero, np.where(np.signbit(x), up, down), x)
    exact = down == up
    assert np.array_equal(exact, x == nearest)


def test_cvt_pack_puts_the_first_operand_high() -> None:
    a, b = np.float32([1.0, np.nan]), np.float32([2.0, -0.0])
    assert numerics.cvt_pack(a, b, "bf16x2").tolist() == [0x3F804000, 0x7FFF8000]
    assert numerics.cvt_pack(a, b, "f16x2", "rz").tolist() == [0x3C004000, 0x7FFF8000]
    assert numerics.cvt_pack(a, -b, "bf16x2", relu=True).tolist() == [0x3F800000, 0x7FFF0000]
    x, y = random_numbers("f32", 1000).astype(np.float32), random_numbers("f32", 1000).astype(np.float32)
    for rnd in ("rn", "rz"):
        packed = numerics.cvt_pack(x, y, "bf16x2", rnd)
        assert np.array_equal(packed >> 16, numerics.cvt(x, "bf16", "f32", rnd))
        assert np.array_equal(packed & 0xFFFF, numerics.cvt(y, "bf16", "f32", rnd))


INTEGERS = {f"{s}{b}": np.dtype(f"{n}{b}") for s, n in (("s", "int"), ("u", "uint")) for b in (8, 16, 32, 64)}


@pytest.mark.parametrize("dst", INTEGERS)
@pytest.mark.parametrize("src", FORMATS)
def test_float_to_integer(src: str, dst: str) -> None:
    limits = np.iinfo(INTEGERS[dst])
    edges = [float(v) + d for v in (limits.min, limits.max, limits.max + 1) for d in (-1, -0.5, 0, 0.5, 1)]
    near = np.concatenate((np.arange(-40, 41) / 4, edges, special_numbers(src)[:-1]))
    x = np.array([v if v == 0 or math.isinf(v) else round_rational(Fraction(v), src, "rz") for v in near])
    functions = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for rnd, function in functions.items():
        wanted = []
        for value in x:
            integral = value if math.isinf(value) else function(Fraction(value))
            wanted.append(int(min(max(integral, limits.min), limits.max)))
        assert numerics.cvt(to_storage(x, src), dst, src, rnd).tolist() == wanted
    nan = int(numerics.cvt(to_storage(np.array([np.nan]), src), dst, src, "rzi")[0])
    top_bit = limits.min if dst[0] == "s" else 1 << (limits.bits - 1)
    assert nan == (top_bit if src == "f64" or limits.bits == 64 else 0)


@pytest.mark.parametrize("rnd", MODES)
@pytest.mark.parametrize("src", INTEGERS)
def test_integer_to_float(src: str, rnd: str) -> None:
    limits = np.iinfo(INTEGERS[src])
    values = RNG.integers(limits.min, limits.max, 300, dtype=INTEGERS[src], endpoint=True)
    edges = np.array([limits.min, limits.max, limits.max - 1], INTEGERS[src])
    values = np.concatenate((values, edges, values[:100] >> (limits.bits // 2)))
    for dst in FORMATS:
        wanted = [round_rational(Fraction(int(v)), dst, rnd) if v else 0.0 for v in values]
        assert_same(from_storage(numerics.cvt(values, dst, src, rnd), dst), np.array(wanted), values)


def test_integer_to_integer() -> None:
    assert numerics.cvt(np.int32([-1, 300, -300]), "u8", "s32").tolist() == [255, 44, 212]
    assert numerics.cvt(np.int32([-1, 300, -300]), "u8", "s32", sat=True).tolist() == [0, 255, 0]
    assert numerics.cvt(np.uint32([0xFFFFFFFF, 5]), "s16", "u32", sat=True).tolist() == [32767, 5]
    assert numerics.cvt(np.uint32([0x1FF]), "s32", "s8").tolist() == [-1]


def test_integral_rounding_keeps_the_type() -> None:
    x = np.float32([2.5, -2.5, 0.5, -0.25, 3.5])
    assert_same(numerics.cvt(x, "f32", "f32", "rni"), np.array([2.0, -2.0, 0.0, -0.0, 4.0]))
    assert_same(numerics.cvt(x, "f32", "f32", "rmi"), np.array([2.0, -3.0, 0.0, -1.0, 3.0]))
    bits = numerics.cvt(to_storage(x, "bf16"), "bf16", "bf16", "rpi")
    assert_same(from_storage(bits, "bf16"), np.array([3.0, -2.0, 1.0, -0.0, 4.0]))


def test_f64_to_narrower_types_rounds_once() -> None:
    x = np.concatenate(
        (
            random_numbers("f64", 2000),
            1 + np.arange(-64, 64) * 2.0**-52 + 2.0**-24,
            1 + 2.0**-8 + 2.0**-52 * np.arange(-3, 4),
        )
    )
    for rnd, fmt in itertools.product(MODES, ("f32", "f16", "bf16")):
        wanted = np.array([round_rational(Fraction(v), fmt, rnd) for v in x])
        assert_same(from_storage(numerics.cvt(x, fmt, "f64", rnd), fmt), wanted, x)


# --- Approximations --------------------------------------------------------------------------------------------------

# Operands and results of the ISA's tables.
SPECIAL_CASES = {
    "ex2": ((-np.inf, 0.0), (-0.0, 1.0), (0.0, 1.0), (np.inf, np.inf)),
    "lg2": ((-np.inf, np.nan), (-1.0, np.nan), (-0.0, -np.inf), (0.0, -np.inf), (np.inf, np.inf)),
    "rcp": ((-np.inf, -0.0), (-0.0, -np.inf), (0.0, np.inf), (np.inf, 0.0)),
    "rsqrt": ((-np.inf, np.nan), (-1.0, np.nan), (-0.0, -np.inf), (0.0, np.inf), (np.inf, 0.0)),
    "sqrt": ((-np.inf, np.nan), (-1.0, np.nan), (-0.0, -0.0), (0.0, 0.0), (np.inf, np.inf)),
    "tanh": ((-np.inf, -1.0), (-0.0, -0.0), (0.0, 0.0), (np.inf, 1.0), (2.0**-140, 2.0**-140)),
    "sin": ((-np.inf, np.nan), (-0.0, -0.0), (0.0, 0.0), (np.inf, np.nan)),
    "cos": ((-np.inf, np.nan), (-0.0, 1.0), (0.0, 1.0), (np.inf, np.nan)),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", SPECIAL_CASES)
def test_approximations_keep_the_documented_special_cases(name: str, seed: int | None) -> None:
    function = getattr(numerics, f"{name}_approx")
    operands, wanted = zip(*SPECIAL_CASES[name], (np.nan, np.nan), strict=True)
    x = np.float32(operands)
    if seed is None:
        result = function(x)
    else:
        with numerics.perturbed_approximations(seed):
            result = function(x)
    assert_same(result, np.array(wanted), x)


def truth(name: str, x: np.ndarray) -> np.ndarray:
    functions = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rcp": np.reciprocal,
        "rsqrt": lambda v: 1 / np.sqrt(v),
        "sqrt": np.sqrt,
    }
    functions |= {"tanh": np.tanh, "sin": np.sin, "cos": np.cos}
    return functions[name](x.astype(np.float64))


def domain(name: str, count: int) -> np.ndarray:
    low, high = {"ex2": (-140, 127), "tanh": (-9, 9), "sin": (-6.28, 6.28), "cos": (-6.28, 6.28)}.get(name, (0, 0))
    if low == high:
        return np.abs(random_numbers("f32", count)).astype(np.float32) + np.float32(2.0**-120)
    return RNG.uniform(low, high, count).astype(np.float32)


RELATIVE_BOUNDS = {"rsqrt": 2.0**-22.9, "sqrt": 2.0**-23, "tanh": 2.0**-11, "rcp": 2.0**-22, "ex2": 2.0**-21.4}
ABSOLUTE_BOUNDS = {"sin": 2.0**-20.5, "cos": 2.0**-20.5}


@pytest.mark.parametrize("name", SPECIAL_CASES)
def test_approximations_are_rounded_by_default_and_stay_within_bounds_when_perturbed(name: str) -> None:
    function = getattr(numerics, f"{name}_approx")
    x = domain(name, 4000)
    exact = truth(name, x)
    default = function(x)
    assert np.array_equal(default, exact.astype(np.float32))
    results = []
    for seed in (1, 2):
        with numerics.perturbed_approximations(seed):
            results.append(function(x))
            assert np.array_equal(results[-1], function(x)), "a perturbation must be repeatable"
    assert (results[0] != results[1]).mean() > 0.1
    assert (results[0] != default).mean() > 0.1
    assert np.array_equal(function(x), default), "the perturbation must end with its context"
    for result in results:
        error = np.abs(result.astype(np.float64) - exact)
        if name == "lg2":
            assert (error <= np.where((x > 0.5) & (x < 2), 2.0**-22, 2.0**-22 * np.abs(exact))).all()
        elif name in ABSOLUTE_BOUNDS:
            assert (error <= ABSOLUTE_BOUNDS[name]).all()
        else:
            large = np.abs(exact) >= 2.0**-126  # below, an ulp is no longer relative
            assert (error <= RELATIVE_BOUNDS[name] * np.abs(exact))[large].all()
        if name in ("ex2", "rcp"):
            ulps = np.abs(result.view(np.int32).astype(np.int64) - default.view(np.int32))
            assert ulps.max() == (2 if name == "ex2" else 1)


def test_ex2_ftz_flushes_its_result() -> None:
    x = np.float32([-126.5, -126, -149, 2.0**-130])
    assert_same(numerics.ex2_approx(x, ftz=True), np.array([0.0, 2.0**-126, 0.0, 1.0]))
    assert numerics.ex2_approx(x)[0] > 0


def test_trigonometric_bound_depends_on_the_range() -> None:
    x = RNG.uniform(7, 314, 4000).astype(np.float32)
    with numerics.perturbed_approximations(3):
        error = np.abs(numerics.sin_approx(x) - np.sin(x.astype(np.float64)))
    assert 2.0**-20.5 < error.max() <= 2.0**-14.7


@np.errstate(all="ignore")
def test_half_approximations() -> None:
    finite = ALL_HALVES[np.isfinite(numerics.widen(ALL_HALVES, "bf16"))]
    for dtype, bound in (("bf16", 2.0**-7), ("f16", 2.0**-9.9)):
        bits = finite if dtype == "bf16" else ALL_HALVES[(ALL_HALVES & 0x7C00) != 0x7C00]
        x = numerics.widen(bits, dtype).astype(np.float64)
        exact = np.exp2(x)
        usable = (exact < 6e4) & (exact > 2.0 ** (FORMATS[dtype][1] + 1))
        for seed in (None, 5):
            with numerics.perturbed_approximations(seed) if seed else np.errstate():
                result = numerics.widen(numerics.ex2_approx(bits, dtype), dtype)
            assert (np.abs(result - exact) <= bound * exact)[usable].all()
    packed = numerics.pack(np.stack((finite, finite[::-1]), -1), "bf16x2")
    both = numerics.unpack(numerics.tanh_approx(packed, "bf16x2"), "bf16x2")
    assert np.array_equal(both[:, 0], numerics.tanh_approx(finite, "bf16"))
    assert np.array_equal(both[::-1, 1], numerics.tanh_approx(finite, "bf16"))


@np.errstate(all="ignore")
def test_approximate_division() -> None:
    a, b = random_numbers("f32", 2000).astype(np.float32), random_numbers("f32", 2000).astype(np.float32)
    exact = a.astype(np.float64) / b.astype(np.float64)
    for function in (numerics.div_full, numerics.div_approx):
        small = np.abs(b) <= np.float32(2.0**126)
        assert_same(function(a, b)[small], exact.astype(np.float32)[small])
        with numerics.perturbed_approximations(7):
            moved = function(a, b)
        ulps = np.abs(moved.view(np.int32).astype(np.int64) - exact.astype(np.float32).view(np.int32))
        usable = small & np.isfinite(moved)
        assert ulps[usable].max() == 2
    huge = np.float32(2.0**127)
    assert_same(
        numerics.div_approx(np.float32([huge, -huge, np.inf]), np.float32([huge] * 3)), np.array([0.0, -0.0, np.nan])
    )
    assert_same(numerics.div_full(np.float32([huge]), np.float32([huge])), np.array([1.0]))


def test_bounds_are_of_one_kind() -> None:
    bounds = [v for v in vars(approximations).values() if isinstance(v, approximations.ErrorBound)]
    assert len(bounds) >= 6
    assert all((b.ulps > 0) + (b.relative > 0) + (b.absolute > 0) == 1 for b in bounds)
