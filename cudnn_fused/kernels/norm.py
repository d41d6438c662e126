"""The steps of an epilogue alone: an existing tensor is normalized, activated and stored with padding and history.

Rows are those of a convolution's output on the padded linear grid, so finishing them is :mod:`.epilogue.rows`; this
kernel only reads them from memory. It is bound by memory bandwidth: every thread has five 16-byte loads per operand in
flight.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_fused.kernels.arguments import Addresses, Signature
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.device import CHUNK_CHANNELS, divide, follow_previous_kernel
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.rows import RowFinisher, load_pixel
from cudnn_fused.window import DENSE_3X3X3, Window

THREADS = 128
LANE_CHUNKS = 5  # chunks of eight channels that a lane holds of a row: C = 40 * lanes


class RowsKernel:
    """The kernel for one epilogue over the tensor ``input``; N, T, H and W are run-time values.

    ``window`` and ``absent_frames`` are those of the grid that numbers the rows.
    """

    # 8, 4, 2, 1 rows gave 0.90, 0.91, 0.93, 0.945 of the bandwidth of an elementwise kernel at 1,4,240,416,160 with a
    # residual, and 0.872, 0.881, 0.889, 0.874 without.
    ROWS_PER_THREAD = 2

    def __init__(self, epilogue: Epilogue, input: str, window: Window = DENSE_3X3X3, absent_frames: int = 0) -> None:
        reason = self.can_implement(epilogue)
        if reason:
            raise ValueError(reason)
        self.epilogue, self.input, self.window, self.absent_frames = epilogue, input, window, absent_frames
        self.lanes = epilogue.channels // (LANE_CHUNKS * CHUNK_CHANNELS)
        numbers = dict.fromkeys(("n", "t", "h", "w", "blocks"), Int32)
        self.signature = Signature((input, *epilogue.operands), numbers)

    @staticmethod
    def can_implement(epilogue: Epilogue) -> str | None:
        """Why the kernel cannot serve an epilogue, or None if it can."""
        lanes, rest = divmod(epilogue.channels, LANE_CHUNKS * CHUNK_CHANNELS)
        if rest or lanes not in (1, 2, 4, 8, 16, 32):
            return f"a row of {epilogue.channels} channels cannot be shared out to lanes of 40"
        return None

    def blocks(self, grid: PaddedGrid) -> int:
        """How many blocks to launch for a grid of these extents."""
        block_rows = THREADS // self.lanes * self.ROWS_PER_THREAD
        return -(-grid.n * grid.out_t * grid.frame_rows // block_rows)

    @cute.jit
    def __call__(self, stream: Any, *values: Any):
        """Launch with the values of ``signature``. ``n, t, h, w`` are the extents of the padded grid."""
        tensors, numbers = self.signature.bind(values)
        grid = PaddedGrid(numbers["n"], numbers["t"], numbers["h"], numbers["w"], self.window, self.absent_frames)
        self.kernel(tensors[self.input], tensors, grid).launch(
            grid=(numbers["blocks"], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, input: Int64, tensors: Addresses, grid: PaddedGrid):
        finisher = RowFinisher(self.epilogue)
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
            main = load_pixel(input, pixel, self.epilogue.channels, channel, self.lanes, LANE_CHUNKS)
            finisher.finish(main, grid, sample, time, ho, wo, channel, self.lanes, tensors)
            index += step
        index, padding = thread // self.lanes, finisher.padding_pixels(grid)
        while index < padding:
            finisher.pad(grid, index, lane, self.lanes, tensors)
            index += step
