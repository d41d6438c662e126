# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of one CTA: 128 lanes by 512 columns of 32 bits, its allocator, and who sees which cell.

An address is ``lane << 16 | column``. A warp reaches lanes ``32 * (warp % 4)`` to ``+ 31`` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 128
COLUMNS = 512
WARP = 32
MIN_COLUMNS = 32
LANE_SHIFT = 16
COLUMN_MASK = 0xFFFF


class TensorMemoryError(ValueError):
    """A misuse of tensor memory, or a form that is not modelled."""


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of a tensor-memory address."""
    return int(address) >> LANE_SHIFT & COLUMN_MASK, int(address) & COLUMN_MASK


def join_address(lane: int, column: int) -> int:
    """The address of a lane and column."""
    return lane << LANE_SHIFT | column


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of tcgen05.ld and tcgen05.st
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """Registers and 32-bit columns per unit of ``.num``, and the largest ``.num``."""

    registers: int
    columns: int
    max_num: int


_SHAPES = {
    "32x32b": _Shape(1, 1, 128),
    "16x64b": _Shape(1, 2, 128),
    "16x128b": _Shape(2, 4, 64),
    "16x256b": _Shape(4, 8, 32),
    "16x32bx2": _Shape(1, 1, 128),
}


@dataclass(frozen=True)
class Access:
    """Cells that a warp's ``tcgen05.ld`` or ``.st`` touches, relative to its address.

    Attributes:
        lanes: ``[32, registers]``, read-only.
        columns: ``[32, registers]``; with 16-bit packing the register's low half, its high half being the next column.
        packed: whether two cells share a register (``.pack::16b``, ``.unpack::16b``).
    """

    lanes: Array
    columns: Array
    packed: bool

    @property
    def registers(self) -> int:
        return self.lanes.shape[1]

    @property
    def lane_span(self) -> int:
        return int(self.lanes.max()) + 1

    @property
    def column_span(self) -> int:
        return int(self.columns.max()) + 1 + int(self.packed)


def register_count(shape: str, num: int) -> int:
    """Registers per thread of ``.shape.xnum``; packing does not change it."""
    if shape not in _SHAPES:
        raise TensorMemoryError(f"no shape .{shape} in tcgen05.ld and .st")
    if num not in (1, 2, 4, 8, 16, 32, 64, 128) or num > _SHAPES[shape].max_num:
        raise TensorMemoryError(f".x{num} is no count of .{shape}")
    return _SHAPES[shape].registers * num


@lru_cache(maxsize=1024)
def access(shape: str, num: int, *, packed: bool = False, half_split: int = 0) -> Access:
    """The cells of ``.shape.xnum``; ``half_split`` is the column offset of ``.16x32bx2``'s upper sixteen threads.

    Thread t, register i:

    ==========  =================================  ==========================
    shape       lane                               column
    ==========  =================================  ==========================
    32x32b      t                                  i
    16x64b      t / 4 + 8 * (t % 2)                2 * i + t / 2 % 2
    16x128b     t / 4 + 8 * (i % 2)                4 * (i / 2) + t % 4
    16x256b     t / 4 + 8 * (i / 2 % 2)            8 * (i / 4) + 2 * (t % 4) + i % 2
    16x32bx2    t % 16                             i + half_split * (t / 16)
    ==========  =================================  ==========================

    With ``packed`` column c of this table stands for the 16-bit elements 2c and 2c + 1, each in a cell of its own.
    """
    registers = register_count(shape, num)
    if half_split and shape != "16x32bx2":
        raise TensorMemoryError(f".{shape} has no half-split offset")
    t, i = np.arange(WARP)[:, None], np.arange(registers)[None, :]
    split = 0 * t
    if shape == "32x32b":
        lanes, columns = t + 0 * i, i + 0 * t
    elif shape == "16x64b":
        lanes, columns = t // 4 + 8 * (t % 2) + 0 * i, 2 * i + t // 2 % 2
    elif shape == "16x128b":
        lanes, columns = t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    elif shape == "16x256b":
        lanes, columns = t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    else:
        lanes, columns, split = t % 16 + 0 * i, i + 0 * t, half_split * (t // 16)
    columns = columns * (2 if packed else 1) + split
    for array in (lanes, columns):
        array.flags.writeable = False
    return Access(lanes, columns, packed)


# ---------------------------------------------------------------------------------------------------------------------
# Where tcgen05.mma keeps its operands
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Lanes and columns of a matrix in one CTA, relative to the operand's address: cell ``[r, c]`` of the matrix.

    ``lanes`` is ``[rows, 1]`` or ``[rows, columns]``, ``columns`` likewise: they broadcast to the matrix.
    """

    lanes: Array
    columns: Array


@lru_cache(maxsize=256)
def accumulator_placement(m: int, n: int, cta_group: int) -> Placement:
    """D of ``tcgen05.mma`` without .ws: ``m`` and ``n`` of the whole operation, rows those of one CTA (``m / cta_group``).

    * M = 128 with one CTA, M = 256 with two: 128 rows, lane = row.
    * M = 64 with one CTA: 64 rows, sixteen in each warp's quarter: lane = row / 16 * 32 + row % 16.
    * M = 128 with two CTAs: 64 rows; the right half of the columns lies 64 lanes up: lane = row + 64 * (column >= N / 2).
    """
    rows, columns = np.arange(m // cta_group)[:, None], np.arange(n)[None, :]
    if (m, cta_group) in ((128, 1), (256, 2)):
        return Placement(rows, columns)
    if (m, cta_group) == (64, 1):
        return Placement(rows // 16 * 32 + rows % 16, columns)
    if (m, cta_group) == (128, 2):
        half = n // 2
        return Placement(rows + 64 * (columns >= half), columns % half + 0 * rows)
    raise TensorMemoryError(f"no accumulator of M={m} with cta_group::{cta_group}")


# ---------------------------------------------------------------------------------------------------------------------
# The memory
# ---------------------------------------------------------------------------------------------------------------------


class TensorMemory:
    """The cells of one CTA, which of them were written, and the allocator.

    ``cells`` and ``written`` are ``[128, 512]`` arrays (uint32, bool). Reads of a cell nothing wrote raise unless told
    otherwise, as does every access outside the memory, outside an allocation, or outside a warp's own lanes.
    """

    def __init__(self) -> None:
        self.cells = np.zeros((LANES, COLUMNS), np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.allocator = Allocator(self.written)

    # -- tcgen05.ld and .st -----------------------------------------------------------------------------------------------

    def locate(self, address: int, cells: Access, warp: int) -> tuple[Array, Array]:
        """Absolute lanes and columns of a warp's access, checked.

        Raises:
            TensorMemoryError: a lane that warp ``warp`` (its number in the CTA) cannot reach, or an unallocated column.
        """
        lane, column = split_address(address)
        quarter = warp % 4 * WARP
        span = cells.lane_span
        if lane < quarter or lane + span > quarter + WARP or lane % span:
            raise TensorMemoryError(
                f"warp {warp} reaches lanes {quarter}..{quarter + WARP - 1}; its access starts at lane {lane} and spans {span}"
            )
        self.allocator.check(column, cells.column_span)
        return lane + cells.lanes, column + cells.columns

    def load(self, address: int, cells: Access, warp: int) -> Array:
        """``tcgen05.ld``: registers ``[32, n]`` (uint32); raises on cells that nothing wrote."""
        lanes, columns = self.locate(address, cells, warp)
        self._require_written(lanes, columns)
        low = self.cells[lanes, columns]
        if not cells.packed:
            return low
        self._require_written(lanes, columns + 1)
        return (low & np.uint32(0xFFFF)) | self.cells[lanes, columns + 1] << np.uint32(16)

    def store(self, address: int, cells: Access, warp: int, registers: Array) -> None:
        """``tcgen05.st`` of registers ``[32, n]``; unpacking leaves the upper half of each cell zero."""
        lanes, columns = self.locate(address, cells, warp)
        registers = np.asarray(registers, np.uint32)
        if cells.packed:
            self._put(lanes, columns + 1, registers >> np.uint32(16))
            registers = registers & np.uint32(0xFFFF)
        self._put(lanes, columns, registers)

    # -- tcgen05.mma --------------------------------------------------------------------------------------------------------

    def read_accumulator(self, address: int, placement: Placement) -> Array:
        """The float32 matrix at ``address``; raises on cells that nothing wrote."""
        lanes, columns = self._place(address, placement)
        self._require_written(lanes, columns)
        return self.cells[lanes, columns].view(np.float32)

    def write_accumulator(self, address: int, placement: Placement, matrix: Array) -> None:
        """Store a float32 matrix."""
        lanes, columns = self._place(address, placement)
        self._put(lanes, columns, np.ascontiguousarray(matrix, np.float32).view(np.uint32))

    def read_a(self, address: int, placement: Placement, k: int = 16) -> Array:
        """A in tensor memory: 16-bit patterns ``[rows, k]``, two to a cell; ``placement`` has ``k / 2`` columns."""
        lanes, columns = self._place(address, placement)
        self._require_written(lanes, columns)
        return np.ascontiguousarray(self.cells[lanes, columns]).view(np.uint16)[:, :k]

    def _place(self, address: int, placement: Placement) -> tuple[Any, Any]:
        """Index of a placed matrix: slices where it is a plain rectangle, since slices are several times faster."""
        lane, column = split_address(address)
        lanes, columns = placement.lanes, placement.columns
        if lane + int(lanes[-1].max()) >= LANES:
            raise TensorMemoryError(f"a matrix at lane {lane} with {len(lanes)} rows passes lane {LANES - 1}")
        self.allocator.check(column, int(columns.max()) + 1)
        return lane + lanes, column + columns

    # -- cells ----------------------------------------------------------------------------------------------------------------

    def _put(self, lanes: Array, columns: Array, values: Array) -> None:
        self.cells[lanes, columns] = values
        self.written[lanes, columns] = True

    def _require_written(self, lanes: Array, columns: Array) -> None:
        known = self.written[lanes, columns]
        if not known.all():
            first = tuple(np.argwhere(~known)[0])
            lane, column = (int(np.broadcast_to(v, known.shape)[first]) for v in (lanes, columns))
            raise TensorMemoryError(
                f"{int((~known).sum())} of {known.size} cells were never written, the first at lane {lane}, column {column}"
            )


class Allocator:
    """Columns handed out by ``tcgen05.alloc``, always at the lowest free place aligned to the request's size.

    The hardware's own choice of columns is not documented; code may only use the address it is given.
    """

    def __init__(self, written: Array | None = None) -> None:
        self._owned: dict[int, int] = {}
        self._written = written
        self._permit = True
        self._smallest = COLUMNS

    @property
    def allocations(self) -> dict[int, int]:
        """First column to number of columns, of all that is not freed: what is left at exit is a leak."""
        return dict(self._owned)

    def allocate(self, columns: int) -> int | None:
        """First column of a new allocation, or None if the request has to wait for a ``dealloc``.

        Raises:
            TensorMemoryError: not a power of two in 32..512, an allocation larger than an earlier one, or the permit is gone.
        """
        self._check_size(columns)
        if not self._permit:
            raise TensorMemoryError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        if columns > self._smallest:
            raise TensorMemoryError(
                f"an allocation of {columns} columns after one of {self._smallest}: sizes may not grow"
            )
        first = next(self._free_places(columns), None)
        if first is None:
            return None
        self._smallest = columns
        self._owned[first] = columns
        if self._written is not None:
            self._written[:, first : first + columns] = False
        return first

    def deallocate(self, address: int, columns: int) -> None:
        """``tcgen05.dealloc``: address and size must be those of one allocation."""
        self._check_size(columns)
        lane, first = split_address(address)
        if lane or self._owned.get(first) != columns:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {address:#x}, but allocated are {self._owned}"
            )
        del self._owned[first]

    def relinquish_permit(self) -> None:
        """``tcgen05.relinquish_alloc_permit``."""
        self._permit = False

    def check(self, first: int, columns: int) -> None:
        """Raise unless columns ``first .. first + columns - 1`` exist and lie within one allocation."""
        if first + columns > COLUMNS:
            raise TensorMemoryError(f"columns {first}..{first + columns - 1} pass column {COLUMNS - 1}")
        for start, size in self._owned.items():
            if start <= first and first + columns <= start + size:
                return
        raise TensorMemoryError(
            f"columns {first}..{first + columns - 1} lie in no allocation; allocated are {self._owned}"
        )

    @staticmethod
    def _check_size(columns: int) -> None:
        if columns & (columns - 1) or not MIN_COLUMNS <= columns <= COLUMNS:
            raise TensorMemoryError(
                f"{columns} columns: the number must be a power of two from {MIN_COLUMNS} to {COLUMNS}"
            )

    def _free_places(self, columns: int) -> Iterator[int]:
        for first in range(0, COLUMNS, columns):
            if all(first + columns <= start or start + size <= first for start, size in self._owned.items()):
                yield first
