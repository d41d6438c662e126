"""The inverses of what the emulator decodes, which tests encode with: descriptors, addresses, fragments, boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.models.matrix import (
    K_STEP,
    InstructionDescriptor,
    Major,
    SharedDescriptor,
    accumulator_to_fragment,
    operand_chunks,
)
from ptxemu.models.tensor_map import CHUNK_BYTES, Swizzle, swizzled_chunks

Array = np.ndarray[Any, Any]

WGMMA_SWIZZLE = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}
TCGEN05_SWIZZLE = {Swizzle.NONE: 0, Swizzle.B128_ATOM_32B: 1, Swizzle.B128: 2, Swizzle.B64: 4, Swizzle.B32: 6}
D_TYPES = {"f16": 0, "f32": 1}
AB_TYPES = {"f16": 0, "bf16": 1}


def _common(descriptor: SharedDescriptor) -> int:
    sizes = ((descriptor.start, 0), (descriptor.leading, 16), (descriptor.stride, 32))
    return sum((size // CHUNK_BYTES & 0x3FFF) << low for size, low in sizes) | descriptor.base_offset << 49


def encode_tcgen05(descriptor: SharedDescriptor) -> int:
    """The 64-bit value for tcgen05."""
    return _common(descriptor) | 1 << 46 | TCGEN05_SWIZZLE[descriptor.swizzle] << 61


def encode_wgmma(descriptor: SharedDescriptor) -> int:
    """The 64-bit value for wgmma."""
    return _common(descriptor) | WGMMA_SWIZZLE[descriptor.swizzle] << 62


def to_bits(descriptor: InstructionDescriptor) -> int:
    """The 32-bit value of an instruction descriptor."""
    return (
        D_TYPES[descriptor.d_type] << 4
        | AB_TYPES[descriptor.a_type] << 7
        | AB_TYPES[descriptor.b_type] << 10
        | descriptor.negate_a << 13
        | descriptor.negate_b << 14
        | descriptor.a_major << 15
        | descriptor.b_major << 16
        | (descriptor.n >> 3) << 17
        | (descriptor.m >> 4) << 24
    )


def gather_operand(
    shared: Array, descriptor: SharedDescriptor, major: Major, rows: int, k: int = K_STEP, element_bytes: int = 2
) -> Array:
    """Reads an operand from shared memory (uint8): unsigned elements `[rows, k]`."""
    chunks = operand_chunks(descriptor, major, rows, k, element_bytes, shared_bytes=shared.size)
    elements = shared.view(np.complex128).take(chunks).view(np.dtype(f"u{element_bytes}"))
    return elements if major == Major.K else elements.T


def read_box(shared: Array, address: int, nbytes: int, swizzle: Swizzle) -> Array:
    """The dense box of `nbytes` at shared offset `address`, swizzle undone."""
    lines = shared[address:].view(np.complex128)
    return lines[swizzled_chunks(address, nbytes, swizzle)].view(np.uint8)


def join_address(lane: int, column: int) -> int:
    """The tensor-memory address of a lane and column."""
    return lane << 16 | column


def _join_pairs(elements: Array) -> Array:
    """Two rows of 16-bit elements as one row of registers."""
    return elements[1::2].astype(np.uint32) << np.uint32(16) | elements[::2]


def a_to_fragment(operand: Array) -> Array:
    """The inverse of `matrix.a_from_fragment`."""
    return _join_pairs(accumulator_to_fragment(np.asarray(operand, np.uint16)))
