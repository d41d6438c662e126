"""Tensor-core operands: descriptors, canonical shared-memory layouts, register fragments, and the product itself.

A *chunk* is 16 bytes, the unit of every swizzle here. An operand is a matrix of `rows` (M of A, N of B) by K; it is
*K-major* when neighbours along K are contiguous in shared memory, *MN-major* when neighbours along M or N are.

What is measured and what is not: start addresses that begin any number of 128-byte rows into a swizzled K-major tile,
with base offset 0 and stride offsets of 1024, 1152, 1280 and 2304 bytes, were found exact on an H200 (wgmma), and all
base offsets at start rows 0 to 3 read there what the model says (benchmark/emulator_vs_gpu.py). A pattern that really
starts off its boundary follows the ISA's wording and is unmeasured, as are MN-major layouts with a leading offset that
is not the atom's size. tcgen05 is modelled alike because the ISA words it alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.errors import DescriptorError, OutOfBounds, UnsupportedInstruction
from ptxemu.models import numerics
from ptxemu.models.tensor_map import CHUNK_BYTES, SWIZZLE_LINE_BYTES, SWIZZLE_PERIOD_BYTES, Swizzle

Array = np.ndarray[Any, np.dtype[Any]]

CORE_ROWS = 8
"""Rows of a core matrix; its rows are one chunk wide."""
K_STEP = 16  # elements of 2 bytes that one instruction consumes along K
WARP = 32


class Major(IntEnum):
    """Value of the transpose bits of wgmma and of tcgen05's instruction descriptor."""

    K = 0
    MN = 1


# --- Shared-memory descriptors ---------------------------------------------------------------------------------------

_WGMMA_SWIZZLE = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_TCGEN05_SWIZZLE = {0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}
_TCGEN05_FIXED = 0b001


def _field(value: int, low: int, bits: int) -> int:
    return value >> low & ((1 << bits) - 1)


@dataclass(frozen=True)
class SharedDescriptor:
    """A decoded matrix descriptor; offsets and the start in bytes.

    Attributes:
        start: offset in the CTA's shared window (18 bits, no CTA rank).
        leading: leading-dimension byte offset (LBO).
        stride: stride-dimension byte offset (SBO).
        base_offset: 128-byte rows by which the swizzle pattern's start misses its boundary, modulo 8.
        swizzle: the swizzling mode.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: Swizzle

    @classmethod
    def from_wgmma(cls, value: int) -> SharedDescriptor:
        """Decode the 64-bit descriptor of `wgmma` (sm_90a)."""
        _check_reserved(value, ((14, 2), (30, 2), (46, 3), (52, 10)))
        return cls._decode(value, _WGMMA_SWIZZLE[_field(value, 62, 2)])

    @classmethod
    def from_tcgen05(cls, value: int) -> SharedDescriptor:
        """Decode the 64-bit descriptor of `tcgen05` (sm_100a)."""
        _check_reserved(value, ((14, 2), (30, 2), (53, 8)))
        if _field(value, 46, 3) != _TCGEN05_FIXED:
            raise DescriptorError(f"bits 46-48 of descriptor {value:#018x} are not 0b001")
        if _field(value, 52, 1):
            raise UnsupportedInstruction(
                f"descriptor {value:#018x} has an absolute leading address, which is not modelled"
            )
        code = _field(value, 61, 3)
        if code not in _TCGEN05_SWIZZLE:
            raise DescriptorError(f"swizzle code {code} of descriptor {value:#018x} is invalid")
        return cls._decode(value, _TCGEN05_SWIZZLE[code])

    @classmethod
    def _decode(cls, value: int, swizzle: Swizzle) -> SharedDescriptor:
        offsets = (_field(value, low, 14) * CHUNK_BYTES for low in (0, 16, 32))
        return cls(*offsets, _field(value, 49, 3), swizzle)


def _check_reserved(value: int, fields: tuple[tuple[int, int], ...]) -> None:
    for low, bits in fields:
        if _field(value, low, bits):
            raise DescriptorError(f"bits {low}-{low + bits - 1} of descriptor {value:#018x} must be zero")


# --- Canonical layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperandLayout:
    """Where an operand's chunks lie, in chunks relative to the descriptor's start.

    Attributes:
        chunks: K-major: `[rows, K bytes / 16]`; MN-major: `[K, rows * element bytes / 16]`. Read-only.
        lowest, highest: the extreme entries.
    """

    chunks: Array
    lowest: int
    highest: int


def _linear_k_major(descriptor: SharedDescriptor, rows: int, k_bytes: int) -> Array:
    """Byte offsets before swizzling: rows in groups of eight, `stride` apart; a row of a swizzled tile is a span."""
    row, chunk = np.arange(rows)[:, None], np.arange(k_bytes // CHUNK_BYTES)[None, :]
    if descriptor.swizzle == Swizzle.NONE:
        pitch, across = CHUNK_BYTES, descriptor.leading
    else:
        pitch, across = descriptor.swizzle.span, CHUNK_BYTES
    return row // CORE_ROWS * descriptor.stride + row % CORE_ROWS * pitch + chunk * across


def _linear_mn_major(descriptor: SharedDescriptor, chunks: int, k: int) -> Array:
    """Byte offsets before swizzling, `[k, chunk along M or N]`.

    Unswizzled: core matrices of 8 k by one chunk; `stride` steps along M or N, `leading` to the next 8 k.
    Swizzled: atoms of 8 k by one span; `leading` steps to the next span along M or N, `stride` to the next 8 k.
    """
    row, chunk = np.arange(k)[:, None], np.arange(chunks)[None, :]
    if descriptor.swizzle == Swizzle.NONE:
        return chunk * descriptor.stride + row // CORE_ROWS * descriptor.leading + row % CORE_ROWS * CHUNK_BYTES
    span = descriptor.swizzle.span
    per_atom = span // CHUNK_BYTES
    along = chunk // per_atom * descriptor.leading + chunk % per_atom * CHUNK_BYTES
    return along + row // CORE_ROWS * descriptor.stride + row % CORE_ROWS * span


def _swizzle_from(address: Array, swizzle: Swizzle, base_offset: int) -> Array:
    """Bits 4 and up of `address` ^= the 128-byte row number, counted from the pattern's start."""
    if swizzle == Swizzle.NONE:
        return address
    phases = swizzle.span // CHUNK_BYTES  # 8, 4 or 2
    return address ^ (((address // SWIZZLE_LINE_BYTES) - base_offset) % phases * CHUNK_BYTES)


@lru_cache(maxsize=4096)
def _layout(descriptor: SharedDescriptor, major: Major, rows: int, k: int, element_bytes: int) -> OperandLayout:
    """Layout for a descriptor whose start is reduced modulo the swizzle period."""
    if descriptor.swizzle == Swizzle.B128_ATOM_32B:
        raise UnsupportedInstruction("128-byte swizzling with 32-byte atoms is not modelled for operands")
    if descriptor.swizzle == Swizzle.NONE and descriptor.base_offset:
        raise DescriptorError("a base offset means nothing without swizzling")
    if major == Major.K:
        span = descriptor.swizzle.span
        if span and descriptor.start % span + k * element_bytes > span:
            raise DescriptorError(f"{k} columns from byte {descriptor.start % span} on leave their row of {span} bytes")
        linear = _linear_k_major(descriptor, rows, k * element_bytes)
    else:
        if rows * element_bytes % CHUNK_BYTES:
            raise DescriptorError(f"{rows} elements of {element_bytes} bytes fill no whole chunks")
        linear = _linear_mn_major(descriptor, rows * element_bytes // CHUNK_BYTES, k)
    address = _swizzle_from(descriptor.start + linear, descriptor.swizzle, descriptor.base_offset)
    chunks = (address - descriptor.start) // CHUNK_BYTES
    if np.unique(chunks).size != chunks.size:
        raise DescriptorError(
            f"leading offset {descriptor.leading} and stride offset {descriptor.stride} lay parts of a {rows} x {k} "
            f"{major.name}-major operand ({descriptor.swizzle.name}) over each other"
        )
    chunks.flags.writeable = False
    return OperandLayout(chunks, int(chunks.min()), int(chunks.max()))


def operand_layout(
    descriptor: SharedDescriptor, major: Major, rows: int, k: int = K_STEP, element_bytes: int = 2
) -> OperandLayout:
    """The cached chunk positions of a `rows x k` operand.

    Raises:
        DescriptorError: the mode is not modelled, or the offsets lay two parts of the operand over each other.
    """
    reduced = SharedDescriptor(
        descriptor.start % SWIZZLE_PERIOD_BYTES,
        descriptor.leading,
        descriptor.stride,
        descriptor.base_offset,
        descriptor.swizzle,
    )
    return _layout(reduced, Major(major), rows, k, element_bytes)


def operand_chunks(
    descriptor: SharedDescriptor, major: Major, rows: int, k: int = K_STEP, element_bytes: int = 2, *, shared_bytes: int
) -> Array:
    """Chunk numbers of the operand within shared memory (byte address / 16), for read checks; see
    `OperandLayout`.

    Raises:
        OutOfBounds: part of the operand lies outside the `shared_bytes` of the CTA.
    """
    layout = operand_layout(descriptor, major, rows, k, element_bytes)
    first = descriptor.start // CHUNK_BYTES
    if first + layout.lowest < 0 or (first + layout.highest + 1) * CHUNK_BYTES > shared_bytes:
        raise OutOfBounds(
            f"a {rows} x {k} {Major(major).name}-major operand at {descriptor.start:#x} (LBO {descriptor.leading}, SBO "
            f"{descriptor.stride}, {descriptor.swizzle.name}) spans {(first + layout.lowest) * CHUNK_BYTES:#x} to "
            f"{(first + layout.highest + 1) * CHUNK_BYTES:#x}, outside the {shared_bytes:#x} bytes of shared memory"
        )
    return first + layout.chunks


# --- tcgen05 instruction descriptor ----------------------------------------------------------------------------------

_D_TYPES = {0: "f16", 1: "f32"}
_AB_TYPES = {0: "f16", 1: "bf16"}
_SPARSE_BIT, _SATURATE_BIT, _TRANSPOSE_A_BIT, _TRANSPOSE_B_BIT = 2, 3, 15, 16


@dataclass(frozen=True)
class InstructionDescriptor:
    """The decoded 32-bit instruction descriptor of `tcgen05.mma.kind::f16`.

    `m` and `n` are those of the whole operation: with two CTAs each holds half of A's rows and half of B's.
    """

    d_type: str
    a_type: str
    b_type: str
    negate_a: bool
    negate_b: bool
    a_major: Major
    b_major: Major
    m: int
    n: int

    @classmethod
    def from_bits(cls, value: int) -> InstructionDescriptor:
        """Decode and check the fields that do not depend on the CTA group.

        Raises:
            DescriptorError: reserved bits, an unknown type, or sparsity and saturation, which are not modelled.
        """
        for low, bits in ((0, 2), (6, 1), (23, 1), (29, 3)):
            if _field(value, low, bits):
                raise DescriptorError(
                    f"bits {low}-{low + bits - 1} of instruction descriptor {value:#010x} must be zero"
                )
        if _field(value, _SPARSE_BIT, 1) or _field(value, _SATURATE_BIT, 1):
            raise UnsupportedInstruction(
                f"instruction descriptor {value:#010x}: sparsity and saturation are not modelled"
            )
        types = (
            _D_TYPES.get(_field(value, 4, 2)),
            _AB_TYPES.get(_field(value, 7, 3)),
            _AB_TYPES.get(_field(value, 10, 3)),
        )
        if None in types:
            raise DescriptorError(f"instruction descriptor {value:#010x} has a type that kind::f16 lacks")
        return cls(
            *types,
            bool(_field(value, 13, 1)),
            bool(_field(value, 14, 1)),
            Major(_field(value, _TRANSPOSE_A_BIT, 1)),
            Major(_field(value, _TRANSPOSE_B_BIT, 1)),
            _field(value, 24, 5) << 4,
            _field(value, 17, 6) << 3,
        )

    def check(self, cta_group: int) -> None:
        """Raise `DescriptorError` unless `m` and `n` are legal for `kind::f16` and this CTA group."""
        check_mma_shape(self.m, self.n, cta_group)
        if self.d_type == "f16" and (self.a_type, self.b_type) != ("f16", "f16"):
            raise DescriptorError("kind::f16 with D of f16 takes A and B of f16")


def check_mma_shape(m: int, n: int, cta_group: int) -> None:
    """`tcgen05.mma.kind::f16`, dense, no .ws: M is 64 or 128, N a multiple of 8; for two CTAs 128 or 256, and 16."""
    rows, step = {1: ((64, 128), 8), 2: ((128, 256), 16)}[cta_group]
    if m not in rows or n % step or not step <= n <= 256:
        raise DescriptorError(f"M={m}, N={n} is no shape of kind::f16 with cta_group::{cta_group}")


def check_wgmma_shape(n: int) -> None:
    """`wgmma.m64nNk16`: N in steps of 8 up to 256."""
    if n % 8 or not 8 <= n <= 256:
        raise DescriptorError(f"N={n} is no shape of wgmma.m64nNk16")


# --- The product -----------------------------------------------------------------------------------------------------


def operand_values(bits: Array, dtype: str, negate: bool = False) -> Array:
    """float64 values of f16 or bf16 bit patterns, exact."""
    values = numerics.widen(bits, dtype).astype(np.float64)
    return -values if negate else values


def multiply_accumulate(accumulator: Array | None, a: Array, b: Array) -> Array:
    """`accumulator + a @ b.T` as float32, rounded after every K = 16 step.

    The products of a step and the accumulator are summed in float64 (exact unless their exponents span more than 53
    bits) and rounded once. The order and width of the additions inside a tensor core are not specified; this does not
    claim to be them. Wherever every partial sum is exact in FP32, e.g. on small integers, no order makes a difference.

    Args:
        accumulator: `[M, N]` float32, or None to start from zero (scale-d off, enable-input-d off).
        a: `[M, K]` float64 values from `operand_values`.
        b: `[N, K]` float64 values.
    """
    with np.errstate(all="ignore"):
        result = accumulator
        for first in range(0, a.shape[1], K_STEP):
            step = slice(first, first + K_STEP)
            total = a[:, step] @ b[:, step].T
            result = (total if result is None else np.add(total, result, out=total)).astype(np.float32)
        assert result is not None
        return result


# --- Register fragments ----------------------------------------------------------------------------------------------
# A fragment is `[registers, threads]`. Thread t = 32 * warp + 4 * g + q (g = 0..7, q = 0..3) holds elements in pairs
# e = 0, 1: rows 16 * warp + 8 * h + g, columns 8 * block + 2 * q + e. Registers are ordered by block, then h, then e;
# the two 16-bit elements of a pair share one.


def accumulator_from_fragment(fragment: Array) -> Array:
    """D of `wgmma.m64nNk16`, `[N / 2, 128]` to `[64, N]`; of `mma.m16n8k16`, `[4, 32]` to `[16, 8]`."""
    blocks, warps = fragment.shape[0] // 4, fragment.shape[1] // WARP
    parts = fragment.reshape(blocks, 2, 2, warps, 8, 4)
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(warps * 16, blocks * 8)


def accumulator_to_fragment(matrix: Array) -> Array:
    """The inverse of `accumulator_from_fragment`."""
    warps, blocks = matrix.shape[0] // 16, matrix.shape[1] // 8
    parts = matrix.reshape(warps, 2, 8, blocks, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(blocks * 4, warps * WARP)


def _split_pairs(fragment: Array) -> Array:
    """Registers of two 16-bit elements as two rows each."""
    fragment = np.asarray(fragment, np.uint32)
    halves = np.stack((fragment & np.uint32(0xFFFF), fragment >> np.uint32(16)), axis=1)
    return halves.reshape(-1, fragment.shape[1]).astype(np.uint16)


def a_from_fragment(fragment: Array) -> Array:
    """Register A of K = 16: `[4, threads]` uint32 to `[threads / 2, 16]` 16-bit patterns.

    128 threads for wgmma (64 rows), 32 for `mma.m16n8k16` (16 rows).
    """
    return accumulator_from_fragment(_split_pairs(fragment))


def matrices_to_fragment(matrices: Array, transpose: bool = False) -> Array:
    """`ldmatrix.m8n8{.trans}.b16`: `[count, 8, 8]` 16-bit elements to `[count, 32]` uint32.

    Row r of matrix j is the 16 bytes at the address of thread 8 * j + r. Thread 4 * g + q gets elements 2q and 2q + 1
    of row g, with `transpose` of column g.
    """
    matrices = np.asarray(matrices, np.uint16)
    if transpose:
        matrices = matrices.swapaxes(1, 2)
    return np.ascontiguousarray(matrices).reshape(-1, 2 * WARP).view(np.uint32)


def fragment_to_matrices(fragment: Array, transpose: bool = False) -> Array:
    """`stmatrix.m8n8{.trans}.b16`: the inverse of `matrices_to_fragment`."""
    matrices = np.ascontiguousarray(fragment, np.uint32).view(np.uint16).reshape(-1, 8, 8)
    return matrices.swapaxes(1, 2) if transpose else matrices
