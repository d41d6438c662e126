"""Tensor memory of one CTA: 128 lanes by 512 columns of 32 bits, its allocator, and who sees which cell.

An address is `lane << 16 | column`. A *region* is any NumPy index of a `[128, 512]` array: the same region serves
the cells, the bitmap of what was written, and whatever else a caller keeps per cell.

Layouts follow the PTX ISA (tcgen05: data movement shapes, data path layouts). 32x32b, 16x256b, 16x128b, 16x64b and the
accumulators of M = 64, 128 and 256 (two CTAs) were also found right by running kernels that are known to be right on
hardware; packing to 16 bits, 16x32bx2, and M = 128 over two CTAs stand on the ISA's wording alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ptxemu.errors import OutOfBounds, TensorMemoryMisuse, UninitializedRead, UnsupportedInstruction

Array = np.ndarray[Any, np.dtype[Any]]
Region = tuple[Any, Any]

LANES = 128
COLUMNS = 512
WARP = 32
MIN_COLUMNS = 32
LANE_SHIFT = 16
FIELD_MASK = 0xFFFF
_HALF_BITS = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of a tensor-memory address."""
    return address >> LANE_SHIFT & FIELD_MASK, address & FIELD_MASK


# --- tcgen05.ld and tcgen05.st ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """Lanes, registers per unit of `.num`, and the largest `.num`."""

    lanes: int
    registers: int
    max_num: int


_SHAPES = {
    "32x32b": _Shape(32, 1, 128),
    "16x64b": _Shape(16, 1, 128),
    "16x128b": _Shape(16, 2, 64),
    "16x256b": _Shape(16, 4, 32),
    "16x32bx2": _Shape(16, 1, 128),
}


@dataclass(frozen=True)
class Access:
    """The cells that a warp's `tcgen05.ld` or `.st` moves; build it with `access`.

    Attributes:
        lane_span: lanes from the address on.
        lanes, columns: cell of register i of thread t, `[registers, 32]`, relative to the address. With `packed`
            that is the cell of the register's low half; its high half is in the next column. Read-only.
        packed: whether two cells of 16 bits share a register (`.pack::16b`, `.unpack::16b`).
        rectangle: lanes are threads and columns registers, so that a region of slices will do.
    """

    lane_span: int
    lanes: Array
    columns: Array
    packed: bool
    rectangle: bool

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.lanes.shape[0]

    @property
    def column_span(self) -> int:
        """Columns from the address on."""
        return int(self.columns.max()) + 1 + int(self.packed)

    def region(self, address: int, warp: int, *, relative: bool = False) -> Region:
        """The cells of an access by warp `warp` (its number in the CTA).

        By the ISA a warp that names a lane of another quarter is undefined, and reported. `relative` takes the lane
        modulo 32 within the warp's own quarter instead: cuDNN's forward convolution over pairs of 64 rows relies on it.

        Raises:
            TensorMemoryMisuse: lanes that this warp cannot reach, or that are not aligned to the shape.
            OutOfBounds: columns past the last.
        """
        lane, column = split_address(address)
        quarter = warp % (LANES // WARP) * WARP
        if relative:
            lane = quarter + lane % WARP
        if not quarter <= lane <= quarter + WARP - self.lane_span or lane % self.lane_span:
            raise TensorMemoryMisuse(
                f"warp {warp} reaches lanes {quarter} to {quarter + WARP - 1}, not {self.lane_span} from {lane} on"
            )
        if column + self.column_span > COLUMNS:
            raise OutOfBounds(f"columns {column} to {column + self.column_span - 1} pass the last of {COLUMNS}")
        if self.rectangle:
            return slice(lane, lane + WARP), slice(column, column + self.registers)
        if self.packed:
            return lane + self.lanes, column + np.stack((self.columns, self.columns + 1))
        return lane + self.lanes, column + self.columns

    def to_registers(self, cells: Array) -> Array:
        """What a load returns: `[registers, 32]` of uint32, from the cells of a region."""
        if self.rectangle:
            return np.ascontiguousarray(cells.T)
        return (cells[0] & _LOW_HALF) | cells[1] << _HALF_BITS if self.packed else cells

    def to_cells(self, registers: Array) -> Array:
        """What a store writes to the cells of a region; unpacking leaves the upper half of each cell zero."""
        registers = np.asarray(registers, np.uint32)
        if self.rectangle:
            return registers.T
        return np.stack((registers & _LOW_HALF, registers >> _HALF_BITS)) if self.packed else registers


def register_count(shape: str, num: int) -> int:
    """Registers per thread of `.shape.xnum`; packing does not change it."""
    if shape not in _SHAPES:
        raise UnsupportedInstruction(f"tcgen05.ld and .st have no shape .{shape}")
    if num & (num - 1) or not 1 <= num <= _SHAPES[shape].max_num:
        raise UnsupportedInstruction(f".{shape} has no count .x{num}")
    return _SHAPES[shape].registers * num


@lru_cache(maxsize=1024)
def access(shape: str, num: int, *, packed: bool = False, half_split: int = 0) -> Access:
    """The cells of `.shape.xnum`; `half_split` is the column offset of the upper sixteen threads of `.16x32bx2`.

    Thread t, register i:

    ==========  ====================  ===============================
    shape       lane                  column
    ==========  ====================  ===============================
    32x32b      t                     i
    16x64b      t / 4 + 8 * (t % 2)   2 * i + t / 2 % 2
    16x128b     t / 4 + 8 * (i % 2)   4 * (i / 2) + t % 4
    16x256b     t / 4 + 8 * (i/2 % 2) 8 * (i / 4) + 2 * (t % 4) + i % 2
    16x32bx2    t % 16                i, + half_split for t >= 16
    ==========  ====================  ===============================

    With `packed` a column c of this table stands for columns 2c and 2c + 1, each with 16 bits in its lower half.
    """
    i, t = np.mgrid[: register_count(shape, num), :WARP]
    if half_split and shape != "16x32bx2":
        raise UnsupportedInstruction(f".{shape} has no half-split offset")
    split = 0
    if shape == "32x32b":
        lanes, columns = t, i
    elif shape == "16x64b":
        lanes, columns = t // 4 + 8 * (t % 2), 2 * i + t // 2 % 2
    elif shape == "16x128b":
        lanes, columns = t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    elif shape == "16x256b":
        lanes, columns = t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    else:
        lanes, columns, split = t % 16, i, half_split * (t // 16)
    columns = columns * (2 if packed else 1) + split
    lanes.flags.writeable = columns.flags.writeable = False
    return Access(_SHAPES[shape].lanes, lanes, columns, packed, shape == "32x32b" and not packed)


# --- tcgen05.mma -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A rectangle of a matrix and the lane and column, relative to the operand's address, of its first cell."""

    rows: slice
    columns: slice
    lane: int
    column: int


@dataclass(frozen=True)
class Placement:
    """Where the `rows x columns` matrix of one CTA lies in its tensor memory, as rectangles."""

    rows: int
    columns: int
    blocks: tuple[Block, ...]

    @property
    def column_span(self) -> int:
        """Columns from the address on."""
        return max(block.column + block.columns.stop - block.columns.start for block in self.blocks)

    def regions(self, address: int) -> Iterator[tuple[Region, Region]]:
        """For each rectangle its region of tensor memory and its index in the matrix.

        Raises:
            OutOfBounds: lanes or columns past the last.
        """
        lane, column = split_address(address)
        for block in self.blocks:
            low, left = lane + block.lane, column + block.column
            high, right = low + block.rows.stop - block.rows.start, left + block.columns.stop - block.columns.start
            if high > LANES or right > COLUMNS:
                raise OutOfBounds(
                    f"a matrix at lane {lane}, column {column} reaches lane {high - 1}, column {right - 1}"
                )
            yield (slice(low, high), slice(left, right)), (block.rows, block.columns)

    def read(self, data: Array, address: int) -> Array:
        """The matrix of 32-bit cells (uint32)."""
        matrix = np.empty((self.rows, self.columns), data.dtype)
        for region, part in self.regions(address):
            matrix[part] = data[region]
        return matrix

    def write(self, data: Array, address: int, matrix: Array) -> None:
        """Store a matrix of 32-bit elements (any 4-byte type)."""
        cells = np.ascontiguousarray(matrix).view(data.dtype)
        for region, part in self.regions(address):
            data[region] = cells[part]


@lru_cache(maxsize=256)
def accumulator_placement(m: int, n: int, cta_group: int) -> Placement:
    """D of `tcgen05.mma` without .ws: `m` and `n` of the whole operation, rows those of one CTA (m / cta_group).

    * M = 128 with one CTA, M = 256 with two: 128 rows, lane = row.
    * M = 64 with one CTA: 64 rows, sixteen in the quarter of each warp: lane = row / 16 * 32 + row % 16.
    * M = 128 with two CTAs: 64 rows, the right half of the columns 64 lanes up: lane = row + 64 * (column >= N / 2).
    """
    rows, every, half = m // cta_group, slice(0, n), n // 2
    if (m, cta_group) in ((128, 1), (256, 2)):
        blocks = [Block(slice(0, rows), every, 0, 0)]
    elif (m, cta_group) == (64, 1):
        blocks = [Block(slice(16 * warp, 16 * warp + 16), every, 32 * warp, 0) for warp in range(4)]
    elif (m, cta_group) == (128, 2):
        blocks = [Block(slice(0, rows), slice(side * half, side * half + half), side * 64, 0) for side in range(2)]
    else:
        raise UnsupportedInstruction(f"no accumulator of M={m} with cta_group::{cta_group}")
    return Placement(rows, n, tuple(blocks))


@lru_cache(maxsize=16)
def a_placement(m: int, cta_group: int, k: int = 16) -> Placement:
    """A in tensor memory, 16-bit elements in pairs: lane = row. Modelled where a CTA has 128 rows."""
    if m // cta_group != LANES:
        raise UnsupportedInstruction(f"A in tensor memory with M={m}, cta_group::{cta_group} is not modelled")
    return Placement(LANES, k // 2, (Block(slice(0, LANES), slice(0, k // 2), 0, 0),))


# --- The memory ------------------------------------------------------------------------------------------------------


class TensorMemory:
    """The cells of one CTA, which of them were written, and which columns are allocated.

    `data` and `written` are `[128, 512]` arrays, uint32 and bool. `allocations` maps first columns to numbers
    of columns: what is left in it when the kernel ends is a leak. Columns are handed out from the lowest free place;
    the hardware's choice is not documented, and code may rely only on the address it is given.
    """

    def __init__(self) -> None:
        self.data = np.zeros((LANES, COLUMNS), np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.allocations: dict[int, int] = {}
        self.permit = True
        self._last_size = COLUMNS

    def allocate(self, columns: int) -> int | None:
        """`tcgen05.alloc`: the first column of a free range, or None if the request has to wait for a `dealloc`.

        Raises:
            TensorMemoryMisuse: no power of two from 32 to 512, more columns than the allocation before, or no permit.
        """
        self._check_size(columns)
        if not self.permit:
            raise TensorMemoryMisuse("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self._last_size:
            raise TensorMemoryMisuse(f"{columns} columns asked for after {self._last_size}: requests may not grow")
        for first in range(0, COLUMNS - columns + 1, MIN_COLUMNS):
            if all(first + columns <= start or start + size <= first for start, size in self.allocations.items()):
                self._last_size = columns
                self.allocations[first] = columns
                self.written[:, first : first + columns] = False
                return first
        return None

    def free(self, address: int, columns: int) -> None:
        """`tcgen05.dealloc`: address and size must be those of one allocation."""
        self._check_size(columns)
        if self.allocations.get(address) != columns:
            raise TensorMemoryMisuse(f"{columns} columns freed at {address:#x}; {self._held()}")
        del self.allocations[address]

    def relinquish_permit(self) -> None:
        """`tcgen05.relinquish_alloc_permit`."""
        self.permit = False

    def require_allocated(self, column: int, count: int, what: str) -> None:
        """Raise unless columns `column .. column + count - 1` lie within one allocation."""
        if not any(first <= column and column + count <= first + size for first, size in self.allocations.items()):
            raise OutOfBounds(f"{what} of tensor memory columns {column} to {column + count - 1}; {self._held()}")

    def require_written(self, region: Region, what: str) -> None:
        """Raise unless something wrote every cell of `region`."""
        written = self.written[region]
        if not written.all():
            lane, column = (int(axis[~written][0]) for axis in _cell_numbers(region, written.shape))
            count = int(written.size - np.count_nonzero(written))
            raise UninitializedRead(
                f"{what} of {count} cells of tensor memory that nothing wrote, first lane {lane}, column {column}"
            )

    def _held(self) -> str:
        held = ", ".join(f"{size} at {first}" for first, size in self.allocations.items())
        return f"allocated: {held or 'none'}"

    @staticmethod
    def _check_size(columns: int) -> None:
        if columns & (columns - 1) or not MIN_COLUMNS <= columns <= COLUMNS:
            raise TensorMemoryMisuse(f"{columns} columns are no power of two from {MIN_COLUMNS} to {COLUMNS}")


def _cell_numbers(region: Region, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Lane and column of every cell of a region."""
    lanes, columns = np.mgrid[:LANES, :COLUMNS]
    return np.broadcast_to(lanes[region], shape), np.broadcast_to(columns[region], shape)
