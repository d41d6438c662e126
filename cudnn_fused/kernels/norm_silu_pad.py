"""The post-operations alone: an existing tensor is normalized, activated and stored with padding, history and cache.

Rows are those of a convolution's output on the padded linear grid, so finishing them is :mod:`.rows`; this kernel only
reads them from memory. It is bound by memory bandwidth: every thread has five 16-byte loads per operand in flight.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_fused.kernels.device import CHUNK_CHANNELS, divide, follow_previous_kernel
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.rows import RowFinish, Tensors

THREADS = 128
LANE_CHUNKS = 5  # chunks of eight channels that a lane holds of a row: C = 40 * lanes


class NormSiluPad:
    """The kernel for one channel count and set of options; N, T, H and W are run-time values."""

    # 8, 4, 2, 1 rows gave 0.90, 0.91, 0.93, 0.945 of the bandwidth of an elementwise kernel at 1,4,240,416,160 with a
    # residual, and 0.872, 0.881, 0.889, 0.874 without.
    ROWS_PER_THREAD = 2

    def __init__(self, finish: RowFinish) -> None:
        self.finish = finish
        self.lanes = finish.channels // (LANE_CHUNKS * CHUNK_CHANNELS)
        if finish.channels % (LANE_CHUNKS * CHUNK_CHANNELS) or self.lanes not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"a row of {finish.channels} channels cannot be shared out to lanes of 40")

    def blocks(self, grid: PaddedGrid) -> int:
        """How many blocks to launch for a padded output of these extents."""
        block_rows = THREADS // self.lanes * self.ROWS_PER_THREAD
        return -(-grid.n * grid.out_t * grid.frame_rows // block_rows)

    @cute.jit
    def __call__(
        self,
        input: Int64,
        bias: Int64,
        gamma: Int64,
        residual: Int64,
        residual_bias: Int64,
        previous: Int64,
        output: Int64,
        cache_output: Int64,
        residual_output: Int64,
        n: Int32,
        t: Int32,
        h: Int32,
        w: Int32,
        blocks: Int32,
        stream,
    ):
        """Launch. ``n, t, h, w`` are the extents of the padded output; tensors are device addresses, 0 if unused."""
        tensors = Tensors(bias, gamma, residual, residual_bias, previous, output, cache_output, residual_output)
        self.kernel(input, tensors, PaddedGrid(n, t, h, w)).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, input: Int64, tensors: Tensors, grid: PaddedGrid):
        follow_previous_kernel()
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        threads = cute.arch.grid_dim()[0] * THREADS
        lane = thread % self.lanes
        channel = lane * CHUNK_CHANNELS
        rows = grid.n * grid.out_t * grid.frame_rows
        index, step = thread // self.lanes, threads // self.lanes
        # All threads make the same number of turns: the sums over lanes need whole warps.
        last = (rows + step - 1) // step * step
        while index < last:
            frame, row = divide(cutlass.min(index, rows - 1), grid.frame_rows)
            sample, time = divide(frame, grid.out_t)
            ho, wo = divide(row, grid.w)
            ho = Int32(cutlass.select_(index < rows, ho, grid.out_h))  # past the end counts as below the frame
            real = (wo < grid.out_w) & (index < rows)
            pixel = Int32(cutlass.select_(real, grid.contiguous_pixel(frame, ho, wo), Int32(0)))
            main = self.finish.load(input, pixel, channel, self.lanes, LANE_CHUNKS)
            self.finish.store(main, grid, sample, time, ho, wo, channel, self.lanes, tensors)
            index += step
        index, fillers = thread // self.lanes, self.finish.filler_pixels(grid)
        while index < fillers:
            self.finish.fill(grid, index, lane, self.lanes, tensors)
            index += step
