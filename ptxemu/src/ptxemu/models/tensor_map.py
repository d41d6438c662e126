"""Tensor maps: what a bulk tensor copy moves, where it lands, and which maps the driver would refuse.

Dimension order is the driver's and PTX's everywhere: dimension 0 is the innermost one. A *dense box* is the box as
one run of bytes, dimension 0 fastest, before swizzling; `write_box` applies the swizzle,
which depends on absolute shared-memory addresses.

Not modelled, and refused: interleaved layouts, packed 4- and 6-bit types, types that convert on the way (TF32, flushed
FP32), the `im2col::w` modes, the 8-byte flip.
Unmeasured: the NaN bit pattern of `oobFill`, and boxes whose rows are shorter than the swizzle span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ptxemu.errors import DescriptorError, Misaligned, OutOfBounds, UnsupportedInstruction
from ptxemu.models import numerics

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ByteSource = Callable[[int, int], Bytes]
"""`source(address, nbytes)` returns a writable uint8 view of that range of global memory."""

CHUNK_BYTES = 16
MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_EXTENT = 2**32
MAX_STRIDE = 2**40
MAX_CHANNELS_PER_PIXEL = 256
MAX_PIXELS_PER_COLUMN = 1024
SWIZZLE_PERIOD_BYTES = 1024
SWIZZLE_LINE_BYTES = 128
REMEMBERED_COLUMNS = 256
# Bits of a corner, signed, and of an instruction's offset, unsigned, by the rank of the map.
IM2COL_CORNER_BITS = {3: 16, 4: 8, 5: 5}


class DataType(IntEnum):
    """`CUtensorMapDataType`."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    PACKED_16U4_ALIGN8B = 13
    PACKED_16U4_ALIGN16B = 14
    PACKED_16U6_ALIGN16B = 15

    @property
    def nbytes(self) -> int:
        return _ELEMENT_TYPES[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in _NAN_PATTERNS


_ELEMENT_TYPES = {
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.INT32: np.dtype(np.int32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT64: np.dtype(np.int64),
    DataType.FLOAT16: np.dtype(np.uint16),
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.BFLOAT16: np.dtype(np.uint16),
}
_NAN_PATTERNS = {
    DataType.FLOAT16: b"\xff\x7f",
    DataType.BFLOAT16: b"\xff\x7f",
    DataType.FLOAT32: b"\xff\xff\xff\x7f",
    DataType.FLOAT64: b"\xff\xff\xff\xff\xff\xff\xff\x7f",
}
_HALF_NAMES = {DataType.FLOAT16: "f16", DataType.BFLOAT16: "bf16"}


class Swizzle(IntEnum):
    """`CUtensorMapSwizzle`."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span(self) -> int:
        """Bytes within which chunks are permuted; the inner box dimension may not exceed it."""
        return {Swizzle.NONE: 0, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, SWIZZLE_LINE_BYTES)


class Fill(IntEnum):
    """`CUtensorMapFloatOOBfill`."""

    ZERO = 0
    NAN = 1


# Which address bits are XORed: (shift, mask) of `address ^ (address >> shift & mask)`.
_SWIZZLE_XOR = {
    Swizzle.NONE: (0, 0x00),
    Swizzle.B32: (3, 0x10),
    Swizzle.B64: (3, 0x30),
    Swizzle.B128: (3, 0x70),
    Swizzle.B128_ATOM_32B: (2, 0x60),
    Swizzle.B128_ATOM_64B: (1, 0x40),
}


def swizzle_address(address: Any, swizzle: Swizzle) -> Any:
    """Where the byte of linear (unswizzled) absolute shared address `address` is stored. It is its own inverse.

    128-byte swizzle: bits 4-6 ^= bits 7-9; 64-byte: bits 4-5 ^= bits 7-8; 32-byte: bit 4 ^= bit 7; the forms with 32-
    and 64-byte atoms: bits 5-6 ^= bits 7-8, bit 6 ^= bit 7. Works on integers and integer arrays.
    """
    if swizzle not in _SWIZZLE_XOR:
        raise UnsupportedInstruction(f"swizzle {Swizzle(swizzle).name} is not modelled")
    shift, mask = _SWIZZLE_XOR[Swizzle(swizzle)]
    return address ^ ((address >> shift) & mask)


@lru_cache(maxsize=4096)
def _swizzled_chunks(phase: int, chunks: int, swizzle: Swizzle) -> np.ndarray[Any, np.dtype[np.intp]]:
    linear = phase + CHUNK_BYTES * np.arange(chunks)
    index = (swizzle_address(linear, swizzle) - phase) // CHUNK_BYTES
    index.flags.writeable = False
    return index


def swizzled_chunks(address: int, nbytes: int, swizzle: Swizzle) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Positions of the 16-byte chunks of a dense box that starts at absolute shared address `address`.

    Entry i is the position of dense chunk i in chunks from `address` on: the XOR stays within a 128-byte line. Cached
    and read-only.
    """
    if address % SWIZZLE_LINE_BYTES or nbytes % CHUNK_BYTES:
        raise Misaligned(f"a box of {nbytes} bytes at shared address {address:#x}, which must be a multiple of 128")
    return _swizzled_chunks(address % SWIZZLE_PERIOD_BYTES, nbytes // CHUNK_BYTES, Swizzle(swizzle))


def _lines(shared: Bytes, address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The 128-byte lines that the range touches, as 16-byte items."""
    if not 0 <= address <= shared.size - nbytes:
        raise OutOfBounds(f"shared bytes {address:#x} to {address + nbytes - 1:#x} of {shared.size:#x}")
    end = -(-(address + nbytes) // SWIZZLE_LINE_BYTES) * SWIZZLE_LINE_BYTES
    return shared[address:end].view(np.complex128)


def write_box(shared: Bytes, address: int, dense: Bytes, swizzle: Swizzle) -> None:
    """Store a dense box at shared offset `address`; `shared[0]` is offset 0 of the window."""
    lines = _lines(shared, address, dense.size)
    lines[swizzled_chunks(address, dense.size, swizzle)] = np.ascontiguousarray(dense).view(np.complex128)


@dataclass(frozen=True)
class Im2colWindow:
    """The im2col part of a map; corners and offsets are in W, H, D order.

    Base pixels run over `lower .. extent - 1 + upper` inclusive in every spatial dimension.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels_per_pixel: int
    pixels_per_column: int


_Walk = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]
_Column = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """Keep what neighbouring copies ask for again: other channels and other taps of the same pixels."""
    if len(cache) >= REMEMBERED_COLUMNS:
        cache.clear()
    for array in value:
        array.flags.writeable = False
    cache[key] = value
    return value


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    Attributes:
        base: global address of element (0, ..., 0).
        data_type: type of an element.
        extents: elements in each dimension.
        strides: bytes between neighbours of dimensions 1 and up (one fewer than `extents`); rows may overlap.
        box: elements that a tiled copy traverses in each dimension; empty for im2col maps.
        element_strides: step of the traversal in each dimension; dimension 0 always steps by 1.
        swizzle, fill: as given to the driver.
        window: the im2col parameters, or None for a tiled map.
        source: access to global memory; needed by loads and stores only.

    Raises:
        DescriptorError: the driver would return CUDA_ERROR_INVALID_VALUE, or the map is not modelled.
    """

    base: int
    data_type: DataType
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = ()
    swizzle: Swizzle = Swizzle.NONE
    fill: Fill = Fill.ZERO
    window: Im2colWindow | None = None
    source: ByteSource | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.extents))
        _validate(self)

    # Constructors.

    @classmethod
    def from_tiled(
        cls,
        data_type: int,
        rank: int,
        address: int,
        extents: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int],
        interleave: int = 0,
        swizzle: int = 0,
        l2_promotion: int = 0,
        oob_fill: int = 0,
        *,
        source: ByteSource | None = None,
    ) -> TensorMap:
        """From the parameters of `cuTensorMapEncodeTiled`, in their order (L2 promotion does not affect data)."""
        _refuse_interleave(interleave)
        _check_lengths(rank, extents=extents, box=box, element_strides=element_strides)
        return cls(
            address,
            _enum(DataType, data_type),
            tuple(map(int, extents)),
            tuple(map(int, strides))[: rank - 1],
            tuple(map(int, box)),
            (1, *map(int, element_strides[1:])),
            _enum(Swizzle, swizzle),
            _enum(Fill, oob_fill),
            source=source,
        )

    @classmethod
    def from_im2col(
        cls,
        data_type: int,
        rank: int,
        address: int,
        extents: Sequence[int],
        strides: Sequence[int],
        lower: Sequence[int],
        upper: Sequence[int],
        channels_per_pixel: int,
        pixels_per_column: int,
        element_strides: Sequence[int],
        interleave: int = 0,
        swizzle: int = 0,
        l2_promotion: int = 0,
        oob_fill: int = 0,
        *,
        source: ByteSource | None = None,
    ) -> TensorMap:
        """From the parameters of `cuTensorMapEncodeIm2col`, in their order."""
        _refuse_interleave(interleave)
        _check_lengths(rank, extents=extents, element_strides=element_strides)
        window = Im2colWindow(
            tuple(map(int, lower))[: rank - 2],
            tuple(map(int, upper))[: rank - 2],
            int(channels_per_pixel),
            int(pixels_per_column),
        )
        return cls(
            address,
            _enum(DataType, data_type),
            tuple(map(int, extents)),
            tuple(map(int, strides))[: rank - 1],
            element_strides=(1, *map(int, element_strides[1:])),
            swizzle=_enum(Swizzle, swizzle),
            fill=_enum(Fill, oob_fill),
            window=window,
            source=source,
        )

    @classmethod
    def over(cls, array: np.ndarray[Any, Any], data_type: DataType, box: Sequence[int], **options: Any) -> TensorMap:
        """A tiled map of a NumPy array whose last axis is contiguous; `box` is innermost first, like the map."""
        if array.strides[-1] != array.itemsize or array.itemsize != data_type.nbytes:
            raise DescriptorError("the last axis must be contiguous, and its elements of the map's size")
        return cls(
            array.ctypes.data,
            data_type,
            array.shape[::-1],
            array.strides[-2::-1] if array.ndim > 1 else (),
            tuple(box),
            source=array_source(array),
            **options,
        )

    # Sizes.

    @property
    def rank(self) -> int:
        return len(self.extents)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        """Elements that are moved in each dimension (im2col: channels, pixels)."""
        if self.window is not None:
            return self.window.channels_per_pixel, self.window.pixels_per_column
        return tuple(-(-n // step) for n, step in zip(self.box, self.element_strides, strict=True))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one dense row (dimension 0)."""
        return self._shape[0] * self.data_type.nbytes

    @cached_property
    def box_bytes(self) -> int:
        """Bytes of the full box. Elements that are filled count: this is what a load adds to `complete_tx`."""
        return int(np.prod(self._shape, dtype=np.int64)) * self.data_type.nbytes

    def bytes_in_bounds(self, coords: Sequence[int], offsets: Sequence[int] = ()) -> int:
        """Bytes that a copy at `coords` really reads or writes in global memory."""
        if self.window is None:
            return self.data_type.nbytes * int(np.prod([stop - start for start, stop in self._bounds(coords)]))
        _, valid = self._pixels(coords, offsets)
        start, stop = self._channel_bounds(coords[0])
        return int(valid.sum()) * (stop - start) * self.data_type.nbytes

    def rows_in_bounds(self, coords: Sequence[int], offsets: Sequence[int] = ()) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For every dense row (dimension 0, or an im2col pixel) whether its outer coordinates lie in the tensor."""
        if self.window is not None:
            return self._pixels(coords, offsets)[1]
        inside = np.zeros(self._shape[:0:-1], bool)
        inside[tuple(slice(*bound) for bound in self._bounds(coords)[:0:-1])] = True
        return inside.reshape(-1)

    # Copies.

    def load(self, coords: Sequence[int], offsets: Sequence[int] = ()) -> Bytes:
        """The dense box at `coords` (dimension 0 first), elements outside the tensor filled.

        `offsets` are the im2col offsets of the instruction (W, H, D); tiled maps take none.
        """
        dense = self._filled()
        rows = dense.reshape(*self._shape[:0:-1], self.row_bytes)
        if self.window is not None:
            self._im2col_rows(rows, coords, offsets, load=True)
            return dense
        self._check_coords(coords, offsets)
        bounds = self._bounds(coords)
        if all(start < stop for start, stop in bounds):
            rows[self._inside(bounds)] = self._view(coords, bounds)
        return dense

    def store(self, coords: Sequence[int], dense: Bytes) -> None:
        """Write a dense box; elements outside the tensor are dropped. im2col maps store without offsets."""
        self._write(coords, dense, lambda old, new: new)

    def reduce(self, coords: Sequence[int], dense: Bytes, op: str) -> None:
        """`cp.reduce.async.bulk.tensor`: combine a dense box with global memory by add, min, max, and, or, xor."""
        if self.window is not None:
            raise UnsupportedInstruction("reductions through im2col maps are not modelled")
        self._write(coords, dense, lambda old, new: _combine(old, new, self.data_type, op))

    def _write(self, coords: Sequence[int], dense: Bytes, combine: Callable[[Bytes, Bytes], Bytes]) -> None:
        if dense.size != self.box_bytes:
            raise DescriptorError(f"a box of this map has {self.box_bytes} bytes, not {dense.size}")
        rows = dense.reshape(*self._shape[:0:-1], self.row_bytes)
        if self.window is not None:
            if any(self.window.lower) or any(self.window.upper):
                raise UnsupportedInstruction("an im2col store through a map with corners is not modelled")
            self._im2col_rows(rows, coords, (0,) * (self.rank - 2), load=False)
            return
        self._check_coords(coords, ())
        bounds = self._bounds(coords)
        if all(start < stop for start, stop in bounds):
            target = self._view(coords, bounds)
            target[...] = combine(target, rows[self._inside(bounds)])

    # Tiled.

    def _check_coords(self, coords: Sequence[int], offsets: Sequence[int]) -> None:
        if len(coords) != self.rank:
            raise DescriptorError(f"{len(coords)} coordinates for a map of rank {self.rank}")
        if len(offsets):
            raise DescriptorError("a tiled map takes no im2col offsets")

    def _bounds(self, coords: Sequence[int]) -> list[tuple[int, int]]:
        """For each dimension the range of box positions whose element lies inside the tensor."""
        bounds = []
        for c, step, count, extent in zip(coords, self.element_strides, self._shape, self.extents, strict=True):
            start = min(max(0, -(c // step)), count)
            stop = min(max(start, -((c - extent) // step)), count)
            bounds.append((start, stop))
        return bounds

    def _inside(self, bounds: list[tuple[int, int]]) -> tuple[slice, ...]:
        """Index of the in-bounds part of the dense rows, outermost dimension first."""
        size = self.data_type.nbytes
        rows = tuple(slice(start, stop) for start, stop in bounds[:0:-1])
        return (*rows, slice(bounds[0][0] * size, bounds[0][1] * size))

    def _view(self, coords: Sequence[int], bounds: list[tuple[int, int]]) -> Bytes:
        """Global memory of the in-bounds part as a strided byte array, outermost dimension first."""
        size = self.data_type.nbytes
        lengths = [stop - start for start, stop in bounds]
        steps = [step * stride for step, stride in zip(self.element_strides[1:], self.strides, strict=True)]
        offset = (coords[0] + bounds[0][0]) * size
        span = lengths[0] * size
        for c, (start, _), length, es, stride, step in zip(
            coords[1:], bounds[1:], lengths[1:], self.element_strides[1:], self.strides, steps, strict=True
        ):
            offset += (c + start * es) * stride
            span += (length - 1) * step
        memory = self._memory(self.base + offset, span)
        return np.ndarray((*lengths[:0:-1], lengths[0] * size), np.uint8, memory, strides=(*steps[::-1], 1))

    def _memory(self, address: int, nbytes: int) -> Bytes:
        if self.source is None:
            raise DescriptorError("this map has no source of global memory")
        return self.source(address, nbytes)

    def _filled(self) -> Bytes:
        if self.fill == Fill.ZERO:
            return np.zeros(self.box_bytes, np.uint8)
        return np.frombuffer(_NAN_PATTERNS[self.data_type] * (self.box_bytes // self.data_type.nbytes), np.uint8).copy()

    # im2col.

    def _channel_bounds(self, channel: int) -> tuple[int, int]:
        start = min(max(0, -channel), self._shape[0])
        return start, min(max(start, self.extents[0] - channel), self._shape[0])

    @cached_property
    def _walks(self) -> dict[tuple[int, ...], _Walk]:
        return {}

    @cached_property
    def _columns(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], _Column]:
        return {}

    def _pixels(self, coords: Sequence[int], offsets: Sequence[int]) -> _Column:
        """Byte offset of every pixel of the column (channel 0), and which pixels lie inside the tensor."""
        key = tuple(coords[1:]), tuple(offsets)
        if len(coords) == self.rank and key in self._columns:
            return self._columns[key]
        self._check_im2col(coords, offsets)
        base, address, valid = self._walk(key[0])
        for pixel, offset, extent in zip(base, offsets, self.extents[1:], strict=False):
            valid = valid & ((pixel + offset).view(np.uint64) < extent)  # a negative pixel is a huge one
        shift = sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=False))
        return _remember(self._columns, key, (address + shift, valid))

    def _walk(self, start: tuple[int, ...]) -> _Walk:
        """Base pixels from `start` on (`[spatial, pixels]`), their byte offsets, and whether their image exists."""
        window = self.window
        assert window is not None
        if start in self._walks:
            return self._walks[start]
        position = np.arange(window.pixels_per_column)
        base = np.empty((self.rank - 2, window.pixels_per_column), np.int64)
        for i in range(self.rank - 2):
            step = self.element_strides[i + 1]
            position = position + (start[i] - window.lower[i]) // step
            position, within = np.divmod(position, self._base_positions(i))
            base[i] = window.lower[i] + within * step
        image = start[-1] + position
        address = np.array(self.strides[:-1]) @ base + image * self.strides[-1]
        return _remember(self._walks, start, (base, address, (image >= 0) & (image < self.extents[-1])))

    def _base_positions(self, i: int) -> int:
        """How many base pixels spatial dimension `i` has."""
        assert self.window is not None
        span = self.extents[i + 1] + self.window.upper[i] - self.window.lower[i]
        return -(-span // self.element_strides[i + 1])

    def _check_im2col(self, coords: Sequence[int], offsets: Sequence[int]) -> None:
        window, spatial = self.window, self.rank - 2
        assert window is not None
        if len(coords) != self.rank or len(offsets) != spatial:
            raise DescriptorError(
                f"an im2col map of rank {self.rank} takes {self.rank} coordinates and {spatial} offsets"
            )
        limit = 1 << IM2COL_CORNER_BITS[self.rank]
        for i in range(spatial):
            if not 0 <= offsets[i] < limit:
                raise DescriptorError(f"im2col offset {offsets[i]} of dimension {i + 1} is outside 0..{limit - 1}")
            start, step = coords[i + 1] - window.lower[i], self.element_strides[i + 1]
            if start % step or not 0 <= start // step < self._base_positions(i):
                raise DescriptorError(
                    f"coordinate {coords[i + 1]} of dimension {i + 1} is no base pixel of the map's window"
                )

    def _im2col_rows(self, rows: Bytes, coords: Sequence[int], offsets: Sequence[int], *, load: bool) -> None:
        """Move the in-bounds pixels between global memory and the dense rows."""
        address, valid = self._pixels(coords, offsets)
        start, stop = self._channel_bounds(coords[0])
        if start == stop or not valid.any():
            return
        size = self.data_type.nbytes
        everything = bool(valid.all())
        address = address if everything else address[valid]
        low, high, row = int(address.min()), int(address.max()), (stop - start) * size
        memory = self._memory(self.base + low + (coords[0] + start) * size, high - low + row)
        # Every pixel starts at a multiple of 16 bytes from the first: overlapping windows, 16 bytes apart, index as
        # rows.
        windows = np.ndarray(((high - low) // CHUNK_BYTES + 1, row), np.uint8, memory, strides=(CHUNK_BYTES, 1))
        index = (address - low) // CHUNK_BYTES
        columns = slice(start * size, stop * size)
        selected = slice(None) if everything else valid
        if load:
            rows[selected, columns] = windows[index]
        else:
            windows[index] = rows[selected, columns]


# --- Sources of global memory ----------------------------------------------------------------------------------------


def array_source(array: np.ndarray[Any, Any]) -> ByteSource:
    """Access to the bytes of one NumPy array by their real addresses; anything outside raises `OutOfBounds`."""
    low = array.ctypes.data
    span = array.itemsize + sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array.view(np.uint8), (span,), (1,))

    def view(address: int, nbytes: int) -> Bytes:
        if address < low or address + nbytes > low + span:
            raise OutOfBounds(f"global bytes {address:#x}..{address + nbytes:#x} lie outside the array at {low:#x}")
        return flat[address - low : address - low + nbytes]

    return view


# --- Reductions ------------------------------------------------------------------------------------------------------

_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _combine(old: Bytes, new: Bytes, data_type: DataType, op: str) -> Bytes:
    element = _ELEMENT_TYPES[data_type]
    a, b = (np.ascontiguousarray(v).view(element) for v in (old, new))
    if op in _BITWISE and not data_type.is_float:
        result = _BITWISE[op](a, b)
    elif op not in ("add", "min", "max"):
        raise UnsupportedInstruction(f"reduction .{op} on {data_type.name} is not modelled")
    elif data_type in _HALF_NAMES:
        name = _HALF_NAMES[data_type]
        result = numerics.add(a, b, name) if op == "add" else _half_extreme(op)(a, b, dtype=name)
    elif op == "add":
        with np.errstate(over="ignore"):
            result = a + b
    else:
        result = (np.minimum if op == "min" else np.maximum)(a, b)
    return result.view(np.uint8)


def _half_extreme(op: str) -> Callable[..., Any]:
    return numerics.minimum if op == "min" else numerics.maximum


# --- Validation, by the driver's rules -------------------------------------------------------------------------------


def _enum(kind: type[IntEnum], value: int) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise DescriptorError(f"{value} is no {kind.__name__}") from None


def _refuse_interleave(interleave: int) -> None:
    if interleave:
        raise UnsupportedInstruction(f"interleave {interleave} is not modelled")


def _check_lengths(rank: int, **arrays: Sequence[int]) -> None:
    for name, values in arrays.items():
        if len(values) != rank:
            raise DescriptorError(f"{name} has {len(values)} entries for rank {rank}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DescriptorError(message)


def _validate(m: TensorMap) -> None:
    if m.data_type not in _ELEMENT_TYPES or m.swizzle not in _SWIZZLE_XOR:
        raise UnsupportedInstruction(
            f"tensor maps of {m.data_type.name} with swizzle {m.swizzle.name} are not modelled"
        )
    low_rank = 1 if m.window is None else 3
    _require(low_rank <= m.rank <= MAX_RANK, f"rank {m.rank} is outside {low_rank}..{MAX_RANK}")
    _require(m.base % CHUNK_BYTES == 0, f"global address {m.base:#x} is not a multiple of 16")
    _require(len(m.strides) == m.rank - 1, f"{len(m.strides)} strides for rank {m.rank}")
    _require(len(m.element_strides) == m.rank, f"{len(m.element_strides)} element strides for rank {m.rank}")
    _require(all(0 < n <= MAX_EXTENT for n in m.extents), f"extents {m.extents} are outside 1..2**32")
    _require(
        all(0 <= s < MAX_STRIDE and s % CHUNK_BYTES == 0 for s in m.strides),
        f"strides {m.strides} must be multiples of 16 bytes below 2**40",
    )
    _require(
        all(1 <= s <= MAX_ELEMENT_STRIDE for s in m.element_strides),
        f"element strides {m.element_strides} are outside 1..{MAX_ELEMENT_STRIDE}",
    )
    _require(m.element_strides[0] == 1, "dimension 0 cannot be traversed in steps")
    _require(m.fill == Fill.ZERO or m.data_type.is_float, "NaN fill needs a floating-point type")
    _validate_box(m) if m.window is None else _validate_window(m, m.window)
    _require(m.row_bytes % CHUNK_BYTES == 0, f"the inner box dimension of {m.row_bytes} bytes is not a multiple of 16")
    _require(
        m.swizzle == Swizzle.NONE or m.row_bytes <= m.swizzle.span,
        f"the inner box dimension of {m.row_bytes} bytes exceeds the swizzle span of {m.swizzle.span}",
    )


def _validate_box(m: TensorMap) -> None:
    _require(len(m.box) == m.rank, f"the box has {len(m.box)} dimensions for rank {m.rank}")
    _require(all(1 <= n <= MAX_BOX for n in m.box), f"box {m.box} is outside 1..{MAX_BOX}")


def _validate_window(m: TensorMap, window: Im2colWindow) -> None:
    spatial = m.rank - 2
    _require(not m.box, "an im2col map has no box")
    if m.element_strides[-1] != 1:
        raise UnsupportedInstruction("an im2col map that steps over images is not modelled")
    _require(
        len(window.lower) == len(window.upper) == spatial,
        f"an im2col map of rank {m.rank} has {spatial} corners a side",
    )
    limit = 1 << (IM2COL_CORNER_BITS[m.rank] - 1)
    corners = (*window.lower, *window.upper)
    _require(all(-limit <= c < limit for c in corners), f"corners {corners} are outside -{limit}..{limit - 1}")
    _require(
        1 <= window.channels_per_pixel <= MAX_CHANNELS_PER_PIXEL,
        f"{window.channels_per_pixel} channels per pixel are outside 1..{MAX_CHANNELS_PER_PIXEL}",
    )
    _require(
        1 <= window.pixels_per_column <= MAX_PIXELS_PER_COLUMN,
        f"{window.pixels_per_column} pixels per column are outside 1..{MAX_PIXELS_PER_COLUMN}",
    )
    for i in range(spatial):
        _require(
            m.extents[i + 1] + window.upper[i] - window.lower[i] > 0,
            f"the window of dimension {i + 1} has no base pixel",
        )
