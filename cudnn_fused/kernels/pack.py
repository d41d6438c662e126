"""Packing of a raw chunk for the causal convolution: strided NCTHW with 12 channels to padded NTHWC with 16.

One thread per pixel of the padded tensor, neighbours in W side by side. The frames in front are earlier ones or zeros;
the last two frames of all go into the cache, unpadded, for the next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.arguments import KernelArgument, Signature
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.device import (
    CHUNK_REGISTERS,
    ELEMENT_BYTES,
    GLOBAL,
    chunk_address,
    divide,
    follow_previous_kernel,
    store_chunk,
)
from cudnn_fused.kernels.epilogue.stores import CACHED_FRAMES

THREADS = 256
CHANNELS = 12
PIXEL = 16  # channels of a packed pixel
PAIRS = CHANNELS // 2  # registers of a pixel's real channels
HISTORY_REGISTERS = 2  # history is 8-byte aligned


@dataclass(frozen=True)
class Video(KernelArgument):
    """The address of a raw chunk, and its strides in elements."""

    address: Int64
    stride_n: Int64
    stride_c: Int64
    stride_t: Int64
    stride_h: Int64
    stride_w: Int64

    def offset(self, n: Int32, t: Int32, h: Int32, w: Int32) -> Int64:
        """Of the first channel of a pixel, in elements."""
        return Int64(n) * self.stride_n + Int64(t) * self.stride_t + Int64(h) * self.stride_h + Int64(w) * self.stride_w

    def element(self, offset: Int64) -> Int32:
        """The bits of one BF16."""
        value = prims.load_ext(cutlass.inttoptr(self.address + offset * ELEMENT_BYTES, GLOBAL, Uint16))
        return value.to(Int32)


class PackC12:
    """The kernel for one count of earlier frames; extents and strides are run-time values."""

    BLOCKS_PER_SM = 8

    def __init__(self, history: int, input: str, previous: str, padded: str, cache: str) -> None:
        self.history = history
        self.names = (input, previous, padded, cache)
        extents = dict.fromkeys(("n", "t", "h", "w"), Int32)
        strides = dict.fromkeys(("stride_n", "stride_c", "stride_t", "stride_h", "stride_w"), Int64)
        self.signature = Signature(self.names, {**extents, **strides, "multiprocessors": Int32})

    @cute.jit
    def __call__(self, stream: Any, *values: Any):
        """Launch with the values of ``signature``.

        ``n, t, h, w`` are the extents of the padded tensor, the strides those of the input in elements.
        """
        tensors, numbers = self.signature.bind(values)
        input, previous, padded, cache_output = (tensors[name] for name in self.names)
        strides = {name: value for name, value in numbers.items() if name.startswith("stride_")}
        grid = PaddedGrid(numbers["n"], numbers["t"], numbers["h"], numbers["w"])
        self.kernel(Video(input, **strides), previous, padded, cache_output, grid).launch(
            grid=(numbers["multiprocessors"] * self.BLOCKS_PER_SM, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, video: Video, previous: Int64, padded: Int64, cache_output: Int64, grid: PaddedGrid):
        """One pixel of the padded tensor to a thread at a time."""
        follow_previous_kernel()
        pixel = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        step = cute.arch.grid_dim()[0] * THREADS
        # Compared before it is added to, the pixel number cannot pass 2**31.
        remaining = grid.pixels - pixel
        while remaining > 0:
            frame, inside = divide(pixel, grid.frame_pixels)
            sample, time = divide(frame, grid.t)
            hp, wp = divide(inside, grid.w)
            ho, wo = hp - 1, wp - 1
            real = (ho >= 0) & (ho < grid.out_h) & (wo >= 0) & (wo < grid.out_w)
            current = time - CACHED_FRAMES  # frame of the chunk; earlier ones are negative
            registers = cutlass.Array(Int32, PAIRS, space=cutlass.AddressSpace.rmem)
            for index in cutlass.range_constexpr(PAIRS):
                registers[index] = Int32(0)
            if real & (current >= 0):
                source = video.offset(sample, current, ho, wo)
                for index in cutlass.range_constexpr(PAIRS):
                    low = video.element(source + (2 * index) * video.stride_c)
                    high = video.element(source + (2 * index + 1) * video.stride_c)
                    registers[index] = low | (high << 16)
            if cutlass.const_expr(self.history > 0):
                held = current + self.history
                if real & (current < 0) & (held >= 0):
                    earlier = ((sample * self.history + held) * grid.out_h + ho) * grid.out_w + wo
                    for first in cutlass.range_constexpr(0, PAIRS, HISTORY_REGISTERS):
                        address = chunk_address(previous, earlier, CHANNELS, 2 * first)
                        pair = prims.load_ext(cutlass.inttoptr(address, GLOBAL, Int32), count=HISTORY_REGISTERS)
                        for index in cutlass.range_constexpr(HISTORY_REGISTERS):
                            registers[first + index] = pair[index]
            values = [registers[index] for index in range(PAIRS)] + [Int32(0)] * (PIXEL // 2 - PAIRS)
            for first in cutlass.range_constexpr(0, PIXEL // 2, CHUNK_REGISTERS):
                store_chunk(chunk_address(padded, pixel, PIXEL, 2 * first), values[first : first + CHUNK_REGISTERS])
            cached = cutlass.min(grid.out_t + self.history, CACHED_FRAMES)
            slot = current - grid.out_t + cached
            if real & (slot >= 0):
                kept = ((sample * cached + slot) * grid.out_h + ho) * grid.out_w + wo
                for first in cutlass.range_constexpr(0, PAIRS, HISTORY_REGISTERS):
                    address = chunk_address(cache_output, kept, CHANNELS, 2 * first)
                    pair = tuple(values[first : first + HISTORY_REGISTERS])
                    prims.store_ext(
                        cutlass.Vector.from_elements(pair, dtype=Int32), cutlass.inttoptr(address, GLOBAL, Int32)
                    )
            pixel += step
            remaining -= step
