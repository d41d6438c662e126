"""Register values, and the integer operations on them.

A register holds either a Python int (bool for a predicate), which stands for the same value in every lane, or an
array of 32 lanes of the unsigned type of its width. Uniform values stay Python ints as long as they can: that is most
of what a producer or an MMA warp computes, and several times cheaper than an array. Ints are kept in [0, 2**bits).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Value = Any  # int | bool | np.ndarray
LANES = 32
FULL_MASK = 0xFFFFFFFF
UNSIGNED = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
SIGNED = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}
# What a register holds before anything is written to it: a NaN in every float format, and no plausible address.
POISON = {1: False, 16: 0x7FFF, 32: 0x7FFFDEAD, 64: 0x7FFFDEAD7FFFDEAD, 128: 0x7FFFDEAD7FFFDEAD7FFFDEAD7FFFDEAD}
PENDING_BITS = 0x7FFFDEAD  # a destination register while the operation that will fill it is under way: a NaN
LANE_IDS = np.arange(LANES, dtype=np.uint32)


@cache
def lane_flags(mask: int) -> np.ndarray:
    """The mask as 32 booleans."""
    flags = (mask >> LANE_IDS) & 1 == 1
    flags.setflags(write=False)
    return flags


@cache
def lane_indices(mask: int) -> np.ndarray:
    """The active lanes of the mask, ascending."""
    indices = np.flatnonzero(lane_flags(mask))
    indices.setflags(write=False)
    return indices


@cache
def lowest_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def lane_mask(predicate: Value) -> int:
    """The lanes where a predicate holds, as 32 bits."""
    if predicate is True:
        return FULL_MASK
    if predicate is False:
        return 0
    return int.from_bytes(np.packbits(predicate, bitorder="little").tobytes(), "little")


def as_lanes(value: Value, bits: int) -> np.ndarray:
    """A value as an array of 32 lanes."""
    if isinstance(value, np.ndarray):
        return value
    return np.full(LANES, value, bool if bits == 1 else UNSIGNED[bits])


def lane_value(value: Value, lane: int) -> int:
    return int(value[lane]) if isinstance(value, np.ndarray) else int(value)


def uniform(value: Value, mask: int) -> int | None:
    """The value that all lanes of `mask` share, or None if they differ."""
    if not isinstance(value, np.ndarray):
        return value
    active = value if mask == FULL_MASK else value[lane_indices(mask)]
    first = active[0]
    return int(first) if (active == first).all() else None


def merge(predicate: Value, new: Value, old: Value, bits: int) -> Value:
    """`new` in the lanes where `predicate` holds, `old` elsewhere."""
    if predicate is True or new is old:
        return new
    if predicate is False:
        return old
    return np.where(predicate, as_lanes(new, bits), as_lanes(old, bits))


def signed(value: Value, bits: int) -> Value:
    """The same bits read as two's complement: a Python int or an array of the signed type."""
    if isinstance(value, np.ndarray):
        return value.view(SIGNED[bits])
    return value - ((value >> (bits - 1)) << bits)


def _wrap(value: Value, bits: int) -> Value:
    """Back to the unsigned representation."""
    if isinstance(value, np.ndarray):
        return value.view(UNSIGNED[bits]) if value.dtype.itemsize * 8 == bits else value.astype(UNSIGNED[bits])
    return value & ((1 << bits) - 1)


def resize(value: Value, source_bits: int, target_bits: int, register_bits: int, is_signed: bool) -> Value:
    """Truncates to `source_bits`, converts to `target_bits` and extends to the register, as cvt does with integers."""
    narrow = min(source_bits, target_bits)
    if not isinstance(value, np.ndarray):
        value &= (1 << narrow) - 1
        if is_signed and source_bits <= target_bits:
            value = signed(value, narrow)
        value &= (1 << target_bits) - 1
        if is_signed and target_bits < register_bits:
            value = signed(value, target_bits)
        return value & ((1 << register_bits) - 1)
    kinds = SIGNED if is_signed else UNSIGNED
    return value.astype(UNSIGNED[narrow]).view(kinds[narrow]).astype(kinds[target_bits]).astype(UNSIGNED[register_bits])


# Each maker below returns the function for one type; the translator binds it once per instruction.


@cache
def adder(bits: int) -> Callable[[Value, Value], Value]:
    mask = (1 << bits) - 1

    def add(a: Value, b: Value) -> Value:
        result = a + b
        return result & mask if type(result) is int else result

    return add


@cache
def subtractor(bits: int) -> Callable[[Value, Value], Value]:
    mask = (1 << bits) - 1

    def sub(a: Value, b: Value) -> Value:
        result = a - b
        return result & mask if type(result) is int else result

    return sub


@cache
def multiplier(bits: int) -> Callable[[Value, Value], Value]:
    mask = (1 << bits) - 1

    def mul(a: Value, b: Value) -> Value:
        result = a * b
        return result & mask if type(result) is int else result

    return mul


@cache
def multiply_adder(bits: int) -> Callable[[Value, Value, Value], Value]:
    mask = (1 << bits) - 1

    def mad(a: Value, b: Value, c: Value) -> Value:
        product = a * b
        result = (product & mask if type(product) is int else product) + c
        return result & mask if type(result) is int else result

    return mad


@cache
def wide_multiplier(bits: int, is_signed: bool) -> Callable[[Value, Value], Value]:
    """The full product in twice the width."""
    kinds = SIGNED if is_signed else UNSIGNED

    def widen(value: Value) -> Value:
        if isinstance(value, np.ndarray):
            return value.view(kinds[bits]).astype(kinds[2 * bits])
        return signed(value, bits) if is_signed else value

    return lambda a, b: _wrap(widen(a) * widen(b), 2 * bits)


@cache
def high_multiplier(bits: int, is_signed: bool) -> Callable[[Value, Value], Value]:
    """The upper half of the product."""
    if bits < 64:
        wide = wide_multiplier(bits, is_signed)
        return lambda a, b: _wrap(wide(a, b) >> bits, bits)

    def high(a: Value, b: Value) -> Value:
        if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
            product = signed(a, bits) * signed(b, bits) if is_signed else a * b
            return _wrap(product >> bits, bits)
        return np.array(
            [high(x, y) for x, y in zip(as_lanes(a, bits).tolist(), as_lanes(b, bits).tolist(), strict=True)],
            UNSIGNED[bits],
        )

    return high


@cache
def divider(bits: int, is_signed: bool, remainder: bool) -> Callable[[Value, Value], Value]:
    """Division that truncates towards zero. By zero: all ones, and the dividend as remainder, as GPUs do."""
    mask = (1 << bits) - 1

    def scalar(a: int, b: int) -> int:
        if b == 0:
            return a if remainder else mask
        if is_signed:
            a, b = signed(a, bits), signed(b, bits)
        quotient = abs(a) // abs(b)
        if (a < 0) != (b < 0):
            quotient = -quotient
        return (a - quotient * b if remainder else quotient) & mask

    def divide(a: Value, b: Value) -> Value:
        if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
            return scalar(a, b)
        pairs = zip(as_lanes(a, bits).tolist(), as_lanes(b, bits).tolist(), strict=True)
        return np.array([scalar(x, y) for x, y in pairs], UNSIGNED[bits])

    return divide


@cache
def left_shifter(bits: int) -> Callable[[Value, Value], Value]:
    mask, kind = (1 << bits) - 1, UNSIGNED[bits]

    def shl(a: Value, b: Value) -> Value:
        if not isinstance(b, np.ndarray):
            if b >= bits:
                return 0
            return a << b if isinstance(a, np.ndarray) else (a << b) & mask
        shifted = as_lanes(a, bits) << np.minimum(b, bits - 1).astype(kind)
        return np.where(b < bits, shifted, kind.type(0))

    return shl


@cache
def right_shifter(bits: int, is_signed: bool) -> Callable[[Value, Value], Value]:
    kind = (SIGNED if is_signed else UNSIGNED)[bits]

    def shr(a: Value, b: Value) -> Value:
        if not isinstance(b, np.ndarray):
            if b >= bits:
                if not is_signed:
                    return 0
                b = bits - 1
            if not is_signed:
                return a >> b
            return (
                (a.view(kind) >> b).view(UNSIGNED[bits])
                if isinstance(a, np.ndarray)
                else _wrap(signed(a, bits) >> b, bits)
            )
        shifted = as_lanes(a, bits).view(kind) >> np.minimum(b, bits - 1).astype(kind)
        if not is_signed:
            shifted = np.where(b < bits, shifted, kind.type(0))
        return shifted.view(UNSIGNED[bits])

    return shr


@cache
def selector(bits: int) -> Callable[[Value, Value, Value], Value]:
    """selp: `a` where the predicate holds, else `b`."""
    kind = UNSIGNED[bits].type

    def select(a: Value, b: Value, predicate: Value) -> Value:
        if predicate is True:
            return a
        if predicate is False:
            return b
        return np.where(
            predicate, a if isinstance(a, np.ndarray) else kind(a), b if isinstance(b, np.ndarray) else kind(b)
        )

    return select


@cache
def extreme(bits: int, is_signed: bool, largest: bool) -> Callable[[Value, Value], Value]:
    scalar = max if largest else min
    array = np.maximum if largest else np.minimum

    def pick(a: Value, b: Value) -> Value:
        if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
            return _wrap(scalar(signed(a, bits), signed(b, bits)), bits) if is_signed else scalar(a, b)
        kind = (SIGNED if is_signed else UNSIGNED)[bits]
        return array(as_lanes(a, bits).view(kind), as_lanes(b, bits).view(kind)).view(UNSIGNED[bits])

    return pick


def lanewise(function: Callable[..., int], bits: int) -> Callable[..., Value]:
    """Lifts a function on ints to values; for the rare operations where speed does not matter."""

    def call(*operands: Value) -> Value:
        if not any(isinstance(operand, np.ndarray) for operand in operands):
            return function(*operands)
        columns = [o.tolist() if isinstance(o, np.ndarray) else [o] * LANES for o in operands]
        return np.array([function(*row) for row in zip(*columns, strict=True)], bool if bits == 1 else UNSIGNED[bits])

    return call


def pack(parts: tuple[Value, ...], bits: int) -> Value:
    """Concatenates registers of `bits` each, the first in the low bits."""
    if not any(isinstance(part, np.ndarray) for part in parts):
        result = 0
        for index, part in enumerate(parts):
            result |= part << (index * bits)
        return result
    columns = np.empty((LANES, len(parts)), UNSIGNED[bits])
    for index, part in enumerate(parts):
        columns[:, index] = part
    return columns.view(UNSIGNED[bits * len(parts)])[:, 0]


def unpack(value: Value, bits: int, count: int) -> tuple[Value, ...]:
    """Splits a register into `count` registers of `bits` each, the low bits first."""
    if not isinstance(value, np.ndarray):
        mask = (1 << bits) - 1
        return tuple((value >> (index * bits)) & mask for index in range(count))
    columns = np.ascontiguousarray(value).view(UNSIGNED[bits]).reshape(LANES, count)
    return tuple(np.ascontiguousarray(columns[:, index]) for index in range(count))


def permute_bytes(a: int, b: int, selector_bits: int) -> int:
    """prmt in its default mode: each selector nibble picks a byte of {b, a}, or its sign if bit 3 is set."""
    source = (b << 32) | a
    result = 0
    for index in range(4):
        nibble = (selector_bits >> (4 * index)) & 0xF
        byte = (source >> (8 * (nibble & 7))) & 0xFF
        if nibble & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * index)
    return result


def lookup3(a: int, b: int, c: int, table: int, bits: int = 32) -> int:
    """lop3: bit i of the result is `table[a_i << 2 | b_i << 1 | c_i]`."""
    full = (1 << bits) - 1
    result = 0
    for entry in range(8):
        if (table >> entry) & 1:
            result |= (a if entry & 4 else a ^ full) & (b if entry & 2 else b ^ full) & (c if entry & 1 else c ^ full)
    return result
