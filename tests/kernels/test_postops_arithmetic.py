"""The number theory behind the post-operations: why their short cuts round as the long way does."""

from __future__ import annotations

import numpy as np
import pytest

BF16_BITS, FP32_BITS = 8, 24  # of a significand
TOLERATED = 2  # units by which a quotient computed with the two-part reciprocal may miss the true one


def boundaries() -> np.ndarray:
    """25-bit numbers next to the middle of two BF16 numbers.

    A quotient is rounded to FP32 and then to BF16. Which BF16 number comes out changes only where the FP32 rounding
    moves on to or off such a middle, that is half an FP32 unit to either side of it.
    """
    middles = np.arange(2**BF16_BITS + 1, 2 ** (BF16_BITS + 1), 2, dtype=np.int64)  # nine bits, the last one set
    shift = FP32_BITS + 1 - (BF16_BITS + 1)
    return np.concatenate([(middles << shift) - 1, (middles << shift) + 1])


def test_no_quotient_lies_close_to_a_boundary() -> None:
    """For a BF16 ``v`` and an FP32 ``d``, ``|v * 2**e - M * d|`` is over two for every boundary ``M``.

    The computed quotient is within 2**-47 of the true one, and ``M * d`` below 2**49: it rounds to the same side.
    """
    close = 0
    for exponent in range(FP32_BITS + 1 - BF16_BITS + FP32_BITS - 2, FP32_BITS + 1 - BF16_BITS + FP32_BITS + 2):
        for value in range(2 ** (BF16_BITS - 1), 2**BF16_BITS):
            numerator = value << exponent
            for boundary in boundaries().tolist():
                for divisor in (numerator // boundary, numerator // boundary + 1):
                    if 2 ** (FP32_BITS - 1) <= divisor < 2**FP32_BITS:
                        close += abs(numerator - boundary * divisor) <= TOLERATED
    assert close == 0


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 to BF16 and back, to nearest even; no NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("operation", [np.add, np.multiply])
def test_rounding_twice_is_rounding_once(operation: np.ufunc) -> None:
    """Sums and products of BF16 numbers may be rounded to BF16 at once: FP32 in between changes nothing."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0x3000, 0x5000, (2, 1_000_000), dtype=np.uint32)
    signs = generator.integers(0, 2, (2, 1_000_000), dtype=np.uint32) << 31
    left, right = ((bits << 16) | signs).view(np.float32)
    exact = operation(left.astype(np.float64), right.astype(np.float64))  # 53 bits hold either
    low, high = np.nextafter(exact, -np.inf), np.nextafter(exact, np.inf)
    once = to_bf16_from_double(exact)
    assert np.array_equal(once, to_bf16(operation(left, right)))
    assert not np.array_equal(low, high)


def to_bf16_from_double(values: np.ndarray) -> np.ndarray:
    """FP64 to BF16 in one rounding to nearest even, for values in the normal range."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, BF16_BITS)), exponent - BF16_BITS).astype(np.float32)
