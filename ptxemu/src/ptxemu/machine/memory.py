"""Global memory (tensors at their real host addresses), the parameter buffer, and shared memory of a CTA."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxemu.errors import LaunchError, Misaligned, OutOfBounds, UninitializedRead
from ptxemu.isa.translate import RESERVED_SHARED
from ptxemu.isa.values import LANES, POISON, UNSIGNED

ITEM_TYPES = {
    **{width: UNSIGNED[8 * width] for width in (1, 2, 4, 8)},
    16: np.dtype(np.complex128),  # only ever moved
    32: np.dtype("V32"),
}
WORD = 4  # bytes, the granule of race checks
UNKNOWN_SWIZZLE = 255
CHUNK = 16  # bytes, the granule of bulk copies and matrix operands


@dataclass
class Region:
    """A registered range of global memory. `owner` keeps the tensor alive."""

    base: int
    data: np.ndarray
    owner: Any = None
    views: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.base + self.data.size

    def view(self, width: int) -> np.ndarray:
        """The region as items of `width` bytes, as far as whole items fit."""
        if width not in self.views:
            count = self.data.size // width
            self.views[width] = np.ndarray((count,), ITEM_TYPES[width], self.data)
        return self.views[width]


def region_of(tensor: Any) -> Region:
    """The bytes that a NumPy array or a CPU torch tensor spans, at its address."""
    if isinstance(tensor, np.ndarray):
        address, itemsize, shape, strides = tensor.ctypes.data, tensor.itemsize, tensor.shape, tensor.strides
    elif hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise LaunchError(f"a tensor on {tensor.device} was passed; the emulator takes CPU tensors")
        itemsize = tensor.element_size()
        address, shape = tensor.data_ptr(), tuple(tensor.shape)
        strides = tuple(stride * itemsize for stride in tensor.stride())
    else:
        raise LaunchError(f"{type(tensor).__name__} is neither a NumPy array nor a torch tensor")
    if not all(shape):
        return Region(address, np.zeros(0, np.uint8), tensor)
    if any(stride < 0 for stride in strides):
        raise LaunchError("tensors with negative strides are not supported")
    span = itemsize + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_uint8 * span).from_address(address)
    return Region(address, np.frombuffer(raw, np.uint8), tensor)


class GlobalMemory:
    """All registered regions. An address that none of them holds is out of bounds."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.bases: list[int] = []
        self.last: Region | None = None

    def add(self, region: Region) -> Region:
        """Registers a region; regions that overlap or touch an equal tensor are joined into one."""
        if not region.data.size:
            return region
        overlapping = [r for r in self.regions if r.base < region.end and region.base < r.end]
        for other in overlapping:
            if other.base <= region.base and region.end <= other.end:
                return other
        if overlapping:
            low = min(region.base, *(r.base for r in overlapping))
            high = max(region.end, *(r.end for r in overlapping))
            owners = (region.owner, *(r.owner for r in overlapping))
            self.regions = [r for r in self.regions if r not in overlapping]
            raw = (ctypes.c_uint8 * (high - low)).from_address(low)
            region = Region(low, np.frombuffer(raw, np.uint8), owners)
        position = bisect.bisect([r.base for r in self.regions], region.base)
        self.regions.insert(position, region)
        self.bases = [r.base for r in self.regions]
        self.last = region
        return region

    def find(self, low: int, high: int, what: str) -> Region:
        """The region that holds [low, high)."""
        region = self._holding(low)
        if region is not None and high <= region.end:
            self.last = region
            return region
        raise OutOfBounds(f"{what} of global bytes {low:#x}..{high:#x} {self._nearest(low)}")

    def _nearest(self, address: int) -> str:
        position = bisect.bisect(self.bases, address) - 1
        if position < 0:
            return "lies below every tensor"
        region = self.regions[position]
        return f"lies {address - region.base} bytes into a tensor of {region.data.size} bytes"

    def bytes(self, address: int, size: int) -> np.ndarray:
        """A writable view of global bytes, for bulk copies."""
        region = self.find(address, address + size, "bulk access")
        return region.data[address - region.base : address - region.base + size]

    def items(self, addresses: np.ndarray | int, size: int, what: str) -> list[tuple[np.ndarray, Any, Any]]:
        """(region as items of `size` bytes, index of each access, which accesses) for every region they lie in."""
        if not isinstance(addresses, np.ndarray):
            return [(*self._region_items(addresses, addresses, addresses, size, what), slice(None))]
        low, high = int(addresses.min()), int(addresses.max())
        region = self._holding(low)
        if region is None or high + size <= region.end:
            return [(*self._region_items(low, high, addresses, size, what), slice(None))]
        parts = []
        left = np.arange(addresses.size)
        while left.size:
            first = int(addresses[left].min())
            region = self.find(first, first + size, what)
            here = addresses[left] < region.end
            chosen, left = left[here], left[~here]
            inside = addresses[chosen]
            parts.append((*self._region_items(first, int(inside.max()), inside, size, what), chosen))
        return parts

    def _holding(self, address: int) -> Region | None:
        """The region that an address lies in."""
        if self.last is not None and self.last.base <= address < self.last.end:
            return self.last
        position = bisect.bisect(self.bases, address) - 1
        return self.regions[position] if position >= 0 and address < self.regions[position].end else None

    def _region_items(
        self, low: int, high: int, addresses: np.ndarray | int, size: int, what: str
    ) -> tuple[np.ndarray, Any]:
        misaligned = addresses & (size - 1)
        region = self.find(low, high + size, what)
        if misaligned.any() if isinstance(addresses, np.ndarray) else misaligned:
            raise Misaligned(f"{what} of {size} bytes at global address {low:#x}, which is not a multiple of {size}")
        if region.base % size:
            # The region begins between two items: go through its bytes.
            start = -region.base % size
            view = np.ndarray(((region.data.size - start) // size,), ITEM_TYPES[size], region.data, start)
            return view, (addresses - (region.base + start)) // size
        return region.view(size), (addresses - region.base) // size


class Parameters:
    """The parameter buffer of a launch."""

    def __init__(self, data: bytes):
        self.data = data

    def load(self, offset: int, size: int) -> int:
        return int.from_bytes(self.data[offset : offset + size], "little")


class LocalMemory:
    """Local memory of one warp: bytes of each lane, and which of them have been written."""

    def __init__(self, size: int):
        self.data = np.full((LANES, size // 2 + 1), POISON[16], np.uint16).view(np.uint8)
        self.written = np.zeros(self.data.shape, bool)
        self.size = size

    def index(self, lanes: np.ndarray, offsets: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Index of the bytes of one access per lane."""
        low, high = int(offsets.min()), int(offsets.max()) + size
        if low < 0 or high > self.size:
            raise OutOfBounds(f"{what} of local bytes {low}..{high} of {self.size}")
        if (offsets & (size - 1)).any():
            raise Misaligned(f"{what} of {size} bytes at local offset {low}, which is not a multiple of {size}")
        return lanes[:, None], offsets[:, None] + np.arange(size)

    def require_written(self, index: tuple[np.ndarray, np.ndarray]) -> None:
        """Raises if a byte was never written."""
        if not self.written[index].all():
            raise UninitializedRead(f"load of local memory that nothing wrote, at offset {int(index[1].min())}")


class SharedMemory:
    """Shared memory of one CTA: the bytes, and which of them have been written."""

    def __init__(self, size: int):
        self.size = -(-size // 128) * 128
        self.limit = size
        self.data = np.full(self.size // 2, POISON[16], np.uint16).view(np.uint8)
        self.written = np.zeros(self.size, bool)
        self.items = {width: self.data.view(kind) for width, kind in ITEM_TYPES.items()}
        self.written_rows = {width: self.written.reshape(-1, width) for width in ITEM_TYPES}
        self.chunks = self.items[CHUNK]
        self.written_chunks = self.written_rows[CHUNK]
        self.useful_chunks = np.zeros(
            self.size // CHUNK, bool
        )  # written by something else than the fill of a bulk copy
        self.swizzles = np.full(self.size // CHUNK, UNKNOWN_SWIZZLE, np.uint8)  # of the copy that wrote each chunk
        self.version = 0  # grows with every write

    def check(self, low: int, high: int, what: str) -> None:
        if low < RESERVED_SHARED or high > self.limit:
            where = "in the part that the system reserves" if low < RESERVED_SHARED else f"of {self.limit}"
            raise OutOfBounds(f"{what} of shared bytes {low}..{high} {where}")

    def index(self, offsets: np.ndarray | int, size: int, what: str) -> Any:
        """Index of each access in the items of `size` bytes."""
        if isinstance(offsets, np.ndarray):
            self.check(int(offsets.min()), int(offsets.max()) + size, what)
            misaligned = bool((offsets & (size - 1)).any())
        else:
            self.check(offsets, offsets + size, what)
            misaligned = bool(offsets & (size - 1))
        if misaligned:
            first = int(np.atleast_1d(offsets)[np.flatnonzero(np.atleast_1d(offsets) & (size - 1))[0]])
            raise Misaligned(f"{what} of {size} bytes at shared offset {first}, which is not a multiple of {size}")
        return offsets // size

    def require_written(self, index: Any, size: int, what: str) -> None:
        """Raises if a byte of the items of `size` bytes was never written."""
        flags = self.written_rows[size][index]
        if not flags.all():
            bad = np.atleast_1d(index).reshape(-1)[np.flatnonzero(~flags.reshape(-1, size).all(axis=1))[0]]
            raise UninitializedRead(f"{what} of shared memory that nothing wrote, at offset {int(bad) * size}")

    def put(self, index: Any, size: int, values: Any) -> None:
        self.items[size][index] = values
        self.written_rows[size][index] = True
        for first in range(0, size, CHUNK):
            chunk = (index * size + first) // CHUNK
            self.useful_chunks[chunk] = True
            self.swizzles[chunk] = UNKNOWN_SWIZZLE
        self.version += 1
