"""Tensor maps in the form in which the hardware reads them.

CuTe's TMA atoms (`cute.nvgpu.cpasync.make_tiled_tma_atom`) do not call the driver: the host code that CuTe DSL compiles
packs the 128 bytes itself. The format is not documented. What follows was found by compiling atoms with known
parameters and reading the bytes; whatever bit those atoms leave constant must have that value here, so that a map which
uses more of the format is refused and not misread.

| 32-bit word | content |
|---|---|
| 0-1 | base address |
| 2 | bits 4-6 rank - 1, 7-10 element type, 13-14 swizzle; the others as in `_CONSTANT_FLAGS` |
| 3-6 | strides of dimensions 1 to 4 in units of 16 bytes, low 32 bits |
| 7 | their upper bits, 4 for each |
| 8-12 | extents - 1 |
| 13 | bits 24-31 box size - 1 of dimension 0; below that the element strides - 1 |
| 14 | box sizes - 1 of dimensions 1 to 4, 8 bits each |
"""

from __future__ import annotations

import struct

from ptxemu.errors import DescriptorError
from ptxemu.models.tensor_map import DataType, TensorMap

_WORDS = struct.Struct("<15I")
_FIELDS = (0x7 << 4) | (0xF << 7) | (0x3 << 13)
_L2_PROMOTION = 0x3 << 21  # no effect on data
_CONSTANT_FLAGS = 0x40002
_DATA_TYPES = {
    0: DataType.UINT8,
    1: DataType.UINT16,
    2: DataType.UINT32,
    3: DataType.INT32,
    4: DataType.UINT64,
    5: DataType.INT64,
    6: DataType.FLOAT16,
    7: DataType.FLOAT32,
    10: DataType.BFLOAT16,
}
_STRIDE_UNIT = 16


def decode_tensor_map(raw: bytes) -> TensorMap:
    """The tiled map that 128 bytes of host code stand for. Raises `DescriptorError` for anything not understood."""
    words = _WORDS.unpack_from(raw)
    flags, strides, extents, boxes = words[2], words[3:7], words[8:13], (words[13] >> 24, words[14])
    data_type = _DATA_TYPES.get(flags >> 7 & 0xF)
    if flags & ~(_FIELDS | _L2_PROMOTION) != _CONSTANT_FLAGS or data_type is None or words[13] & 0xFFFFFF:
        raise DescriptorError(f"a 128-byte parameter is no tensor map in a known form (flags {flags:#x})")
    rank = (flags >> 4 & 0x7) + 1
    outer_boxes = (boxes[1] >> 8 * dimension & 0xFF for dimension in range(rank - 1))
    return TensorMap.from_tiled(
        data_type,
        rank,
        words[0] | words[1] << 32,
        [extent + 1 for extent in extents[:rank]],
        [_STRIDE_UNIT * (strides[d] | (words[7] >> 4 * d & 0xF) << 32) for d in range(rank - 1)],
        [boxes[0] + 1, *(size + 1 for size in outer_boxes)],
        [1] * rank,
        swizzle=flags >> 13 & 0x3,
    )
