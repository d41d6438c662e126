"""The arithmetic of the steps behind a convolution in kernels, in small pieces that keep every rounding point.

A *fragment* is one lane's share of the channels of one pixel: a list of 32-bit registers with two BF16 channels each,
the lower channel in the lower half. ``B(x)`` is the conversion of FP32 to BF16. Rounding a sum or a product of two
BF16 numbers to FP32 and then to BF16 gives what one rounding to BF16 gives (24 >= 2*8 + 2 bits), so ``B(float(a) +
float(b))`` is ``add.bf16x2`` and ``B(float(a) * float(b))`` is ``mul.bf16x2``. Everything is spelled out as single
PTX instructions with a rounding mode, which no compiler pass fuses or reorders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

LOG2_E = math.log2(math.e)
SILU_SCALE = 16.0

Fragment = list[Int32]


# --- two BF16 at a time --------------------------------------------------------------------------------------------


def _packed(instruction: str, *operands: Int32) -> Int32:
    names = ", ".join(f"{{$r{index}}}" for index in range(len(operands)))
    return prims.inline_ptx(f"{instruction} {{$w0}}, {names};", write_only_types=[Int32], read_only_args=list(operands))


def _scalar(instruction: str, *operands: Float32) -> Float32:
    names = ", ".join(f"{{$r{index}}}" for index in range(len(operands)))
    return prims.inline_ptx(
        f"{instruction} {{$w0}}, {names};", write_only_types=[Float32], read_only_args=list(operands)
    )


def pack(low: Float32, high: Float32) -> Int32:
    """``B`` of two FP32 values."""
    return prims.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[high, low]
    )


def unpack(pair: Int32) -> tuple[Float32, Float32]:
    """Two BF16 as FP32, which is exact: their bits are the upper half of the FP32's."""
    return (pair << 16).bitcast(Float32), (pair & Int32(-0x10000)).bitcast(Float32)


def add(left: Sequence[Int32], right: Sequence[Int32]) -> Fragment:
    """``B(float(left) + float(right))``."""
    return [_packed("add.rn.bf16x2", a, b) for a, b in zip(left, right, strict=True)]


def multiply(left: Sequence[Int32], right: Sequence[Int32]) -> Fragment:
    """``B(float(left) * float(right))``."""
    return [_packed("mul.rn.bf16x2", a, b) for a, b in zip(left, right, strict=True)]


def map_wide(function: Callable[[Float32], Float32], fragment: Sequence[Int32]) -> Fragment:
    """``B(function(float(x)))`` of every channel."""
    return [pack(*map(function, unpack(pair))) for pair in fragment]


# --- normalization and activation ----------------------------------------------------------------------------------


def sum_of_squares(fragment: Sequence[Int32]) -> Float32:
    """FP32, with one running sum for the even and one for the odd channels."""
    sums = [Float32(0.0), Float32(0.0)]
    for pair in fragment:
        for half, value in enumerate(unpack(pair)):
            sums[half] = _scalar("fma.rn.f32", value, value, sums[half])
    return _scalar("add.rn.f32", *sums)


@dataclass(frozen=True)
class Reciprocal:
    """Division of BF16 numbers by one FP32 number, rounded to FP32 and then to BF16 as a true division would be.

    The reciprocal is kept as a sum ``high + low`` that is right to 2**-48. For a BF16 numerator ``v`` the product
    ``v*high`` is exact inside the FMA, so ``fma(v, high, v*low)`` is the quotient to 2**-47 before its one rounding.
    It could round differently from ``v/d`` only where a boundary that decides the BF16 result lies between the two;
    such a boundary ``M`` has 25 bits, and ``|v*2**e - M*d|`` would have to be at most 2. No ``v``, ``M``, ``d`` come
    that close: see ``tests/kernels/test_postops_arithmetic.py``.
    """

    high: Float32
    low: Float32

    @classmethod
    def of(cls, divisor: Float32) -> Reciprocal:
        high = _scalar("rcp.rn.f32", divisor)
        error = _scalar("fma.rn.f32", _scalar("neg.f32", divisor), high, Float32(1.0))
        low = _scalar("mul.rn.f32", error, high)
        # An infinite divisor has no error term (the formula gives NaN): v/inf is 0, and NaN for an infinite v.
        return cls(high, _finite_or_zero(low, divisor))

    @classmethod
    def of_norm(cls, squares: Float32, least: float) -> Reciprocal:
        """The division by the root of a sum of squares, or by ``least`` if that is more."""
        return cls.of(_scalar("max.NaN.f32", _scalar("sqrt.rn.f32", squares), Float32(least)))

    def times(self, value: Float32) -> Float32:
        return _scalar("fma.rn.f32", value, self.high, _scalar("mul.rn.f32", value, self.low))


def _finite_or_zero(value: Float32, guard: Float32) -> Float32:
    return prims.inline_ptx(
        "{ .reg .pred finite; testp.finite.f32 finite, {$r1}; selp.f32 {$w0}, {$r0}, 0f00000000, finite; }",
        write_only_types=[Float32],
        read_only_args=[value, guard],
    )


def scale(fragment: Sequence[Int32], factor: float) -> Fragment:
    """``B(float(x) * factor)`` of every channel, for a factor that is an FP32 number."""
    wide = Float32(factor)
    return map_wide(lambda x: _scalar("mul.rn.f32", x, wide), fragment)


def silu(x: Float32) -> Float32:
    """``x / (1 + exp(-x))`` in FP32, for ``x`` that is a BF16 number.

    ``ex2.approx`` and ``rcp.approx`` are good to an ulp or two of FP32, as are the other steps; after rounding to BF16
    each of the 65,536 possible inputs gives what ``exp`` and a division in FP32 give. The reciprocal is that of
    ``(1 + exp(-x)) / 16``, which keeps it a normal number up to the largest exponential: the ``ftz`` form, one
    instruction, would flush it otherwise. Scaling by a power of two rounds nothing.
    """
    scaled = _scalar("mul.rn.f32", x, Float32(1 / SILU_SCALE))
    power = _scalar("ex2.approx.ftz.f32", _scalar("mul.rn.f32", scaled, Float32(-SILU_SCALE * LOG2_E)))
    sixteenth = Float32(1 / SILU_SCALE)
    divisor = _scalar("fma.rn.f32", power, sixteenth, sixteenth)
    return _scalar("mul.rn.f32", scaled, _scalar("rcp.approx.ftz.f32", divisor))
