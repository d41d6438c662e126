"""Finishing rows in a kernel: the steps of an epilogue on fragments, and the stores of what comes out.

A *row* is one place of the padded linear grid (:mod:`..conv.padded_grid`), halo rows included. ``lanes`` neighbouring
lanes share a row, and a lane holds the chunks of eight channels ``lane, lane + lanes, ...`` of it. The same code stands
behind the convolutions, which take rows from their accumulators, and the standalone normalization, which reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cudnn_fused.kernels.arguments import Addresses
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.device import (
    CHUNK_BYTES,
    CHUNK_REGISTERS,
    chunk_address,
    chunks,
    load_chunk,
    prefetch,
    store_chunk,
    sum_over_lanes,
)
from cudnn_fused.kernels.epilogue import arithmetic
from cudnn_fused.kernels.epilogue.arithmetic import Fragment
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.types import ELEMENT_BYTES

if TYPE_CHECKING:
    from cudnn_fused.kernels.epilogue.device_stores import DeviceStore


@dataclass(frozen=True)
class Row:
    """Where a row lies. Values of a running kernel."""

    grid: PaddedGrid
    n: Int32
    t: Int32
    frame: Int32  # of all output frames
    ho: Int32
    wo: Int32
    in_frame: Boolean
    real: Boolean
    pixel: Int32  # in a contiguous output; of rows without one the first, so that loads from there are harmless

    @classmethod
    def at(cls, grid: PaddedGrid, n: Int32, t: Int32, ho: Int32, wo: Int32) -> Row:
        frame = n * grid.out_t + t
        in_frame = ho < grid.out_h
        real = in_frame & (wo < grid.out_w)
        # Rows without an output take part in the arithmetic, whose shuffles need every lane, with the first pixel's
        # residual; nothing of them is stored but zeros.
        pixel = Int32(cutlass.select_(real, grid.contiguous_pixel(frame, ho, wo), Int32(0)))
        return cls(grid, n, t, frame, ho, wo, in_frame, real, pixel)


@dataclass(frozen=True)
class Destination:
    """A pixel of an output where a row goes, if it does. Values of a running kernel."""

    tensor: Int64
    pixel: Int32
    present: Boolean


@dataclass(frozen=True)
class Span:
    """The channels of a row that a fragment holds: ``size`` chunks, ``lanes`` chunks apart, the first at ``channel``.

    What the steps of an epilogue see of a kernel.
    """

    tensors: Addresses
    row: Row
    channels: int  # of the whole row
    channel: Int32
    lanes: int
    size: int

    math: ClassVar[ModuleType] = arithmetic

    def vector(self, operand: str) -> Fragment:
        """The values for these channels of an operand that is alike for all pixels."""
        return self.load(operand, Int32(0))

    def row_of(self, operand: str) -> Fragment:
        """The values for these channels and this row of an operand with a value for every output."""
        return self.load(operand, self.row.pixel)

    def load(self, operand: str, pixel: Int32) -> Fragment:
        return load_pixel(self.tensors[operand], pixel, self.channels, self.channel, self.lanes, self.size)


class Sums:
    """The sums over a row of an epilogue's statistic, which loops of a kernel carry along."""

    def __init__(self, values: list[Float32]) -> None:
        self.values = values

    def add(self, parts: list[Float32]) -> None:
        self.values = [total + part for total, part in zip(self.values, parts, strict=True)]

    def __extract_mlir_values__(self) -> list[Any]:
        return [value.ir_value() for value in self.values]

    def __new_from_mlir_values__(self, values: list[Any]) -> Sums:
        return Sums([Float32(value) for value in values])


def load_pixel(tensor: Int64, pixel: Int32, channels: int, channel: Int32, lanes: int, size: int) -> Fragment:
    """``size`` chunks of a pixel of a tensor with ``channels``, ``lanes`` chunks apart."""
    first = chunk_address(tensor, pixel, channels, channel)
    fragment = []
    for index in range(size):
        fragment += load_chunk(first + index * lanes * CHUNK_BYTES)
    return fragment


def store_pixel(tensor: Int64, pixel: Int32, channels: int, channel: Int32, lanes: int, fragment: Fragment) -> None:
    """The same the other way round."""
    first = chunk_address(tensor, pixel, channels, channel)
    for index, chunk in enumerate(chunks(fragment)):
        store_chunk(first + index * lanes * CHUNK_BYTES, chunk)


@dataclass(frozen=True)
class RowFinisher:
    """The epilogue of a kernel."""

    epilogue: Epilogue

    @property
    def store(self) -> DeviceStore:
        return self.epilogue.store.on_device()

    @cute.jit
    def finish(
        self,
        main: list,
        grid: PaddedGrid,
        n: Int32,
        t: Int32,
        ho: Int32,
        wo: Int32,
        channel: Int32,
        lanes: cutlass.Constexpr[int],
        tensors: Addresses,
    ):
        """Finish row ``(ho, wo)`` of output frame ``t`` of sample ``n``; ``channel`` is the first of the lane's.

        A row below the frame (``ho >= Ho``) may be passed; nothing is stored for it.
        """
        row = Row.at(grid, n, t, ho, wo)
        span = self.span(row, channel, lanes, main, tensors)
        value = self.value(main, span)
        for destination in self.saved_destinations(row, tensors):
            self.put_if_present(destination, channel, lanes, value)
        reduce = sum_over_lanes(lanes)
        prepared = self.prepared([reduce(part) for part in self.statistic(value)])
        result = self.result(value, prepared, span)
        for destination in self.destinations(row, tensors):
            self.put_if_present(destination, channel, lanes, result)

    # The parts of `finish`. Steps take any part of a lane's channels; only the statistic needs them all.

    def span(self, row: Row, channel: Int32, lanes: int, fragment: Fragment, tensors: Addresses) -> Span:
        size = len(fragment) // CHUNK_REGISTERS
        return Span(tensors, row, self.epilogue.channels, channel, lanes, size)

    def value(self, main: Fragment, span: Span) -> Fragment:
        """The steps before the statistic; all of them where there is none."""
        for step in self.epilogue.before:
            main = step.apply(main, span, None)
        return main

    def statistic(self, value: Fragment) -> list[Float32]:
        """What some channels contribute to the sums over the row; none where no step has a statistic."""
        step = self.epilogue.statistic
        return step.statistic(value, arithmetic) if step else []

    def no_sums(self) -> Sums:
        """The sums before anything is added to them."""
        step = self.epilogue.statistic
        return Sums([Float32(0.0) for _ in range(step.sums if step else 0)])

    def prepared(self, sums: list[Float32]) -> Any:
        """What the statistic's step knows of the row."""
        step = self.epilogue.statistic
        return step.prepared(sums, self.epilogue.channels, arithmetic) if step else None

    def result(self, value: Fragment, prepared: Any, span: Span) -> Fragment:
        """The statistic's step and those behind it. Halo rows that are stored become zeros."""
        for index, step in enumerate(self.epilogue.after):
            value = step.apply(value, span, prepared if index == 0 else None)
        return self.store.masked(span.row, value)

    def saved_destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        """Where the value before the statistic goes."""
        saved = self.epilogue.saved
        return [Destination(tensors[saved], row.pixel, row.real)] if saved else []

    def destinations(self, row: Row, tensors: Addresses) -> list[Destination]:
        """Where the result goes."""
        return self.store.destinations(row, tensors)

    @cute.jit
    def prefetch_row(self, row: Row, channel: Int32, count: cutlass.Constexpr[int], tensors: Addresses):
        """Ask for ``count`` channels of what is read row by row, so that a later load finds them in the L2 cache."""
        if row.real:
            for operand in self.epilogue.row_operands:
                address = chunk_address(tensors[operand], row.pixel, self.epilogue.channels, channel)
                prefetch(address, count * ELEMENT_BYTES)

    @cute.jit
    def put_if_present(self, destination: Destination, channel: Int32, lanes: cutlass.Constexpr[int], fragment: list):
        """Store chunks of a row at one of its destinations, ``lanes`` chunks apart."""
        if destination.present:
            channels = self.epilogue.channels
            store_pixel(destination.tensor, destination.pixel, channels, channel, lanes, fragment)

    def padding_pixels(self, grid: PaddedGrid) -> Int32:
        """How many padding pixels the output has: those that no row is stored to."""
        return self.store.padding_pixels(grid)

    def pad(self, grid: PaddedGrid, index: Int32, lane: Int32, lanes: int, tensors: Addresses) -> None:
        """Zeros or history for the ``index``-th of them, the lanes together."""
        self.store.pad(grid, index, lane, self.epilogue.channels, lanes, tensors)
