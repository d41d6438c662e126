"""Valid 3x3x3 convolution with fused post-operations for Hopper (SM90).

A CTA is four warpgroups. Two *consumers* multiply: each owns half of the CTA's tile as FP32 accumulators, rounds the
finished sums to BF16 into its half of a *staging* tile in shared memory, and goes on with the next tile. One
*epilogue* warpgroup reads the staged rows, applies the post-operations and stores, while the tensor cores work on the
next tile. In the last warpgroup one warp loads activations and one loads weights, each through a ring of stages.

The rows of a tile are consecutive rows of one output frame on the padded linear grid (:mod:`.padded_grid`): a stage of
activations is ``tile_m + 2`` consecutive pixels, read three times at a distance of one pixel for the taps along W. The
swizzle of a tile is a function of absolute shared-memory addresses, so a descriptor may start at any pixel row.

Layers with few tiles split the reduction over the CTAs of a cluster; see :meth:`Conv3dSm90.exchange_partial_sums`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.arguments import Addresses
from cudnn_fused.kernels.conv.host import Conv3dKernel
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.schedule import TileCoord
from cudnn_fused.kernels.conv.spec import (
    DESCRIPTOR_UNIT,
    ELEMENT_BYTES,
    K_CHUNK,
    K_STEP,
    ROW_BYTES,
    SWIZZLE_ROWS,
    Conv3dSpec,
)
from cudnn_fused.kernels.conv.tile_sm90 import CONSUMERS, HALF_BLOCK_CHUNKS, M_BLOCK, TileConfig
from cudnn_fused.kernels.device import (
    CHUNK_BYTES,
    CHUNK_CHANNELS,
    CHUNK_REGISTERS,
    SHARED,
    WARP,
    WARPGROUP,
    PipelineState,
    divide,
    follow_previous_kernel,
    load_chunk,
    meet,
    shared_address,
    shared_pointer,
    wait,
    wait_cluster,
)
from cudnn_fused.kernels.epilogue import arithmetic
from cudnn_fused.kernels.epilogue.rows import Row

UNIT_CHANNELS = DESCRIPTOR_UNIT // ELEMENT_BYTES
STAGING_BARRIER = 1  # named barriers STAGING_BARRIER + consumer


@dataclass(frozen=True)
class Swizzle:
    """How the 16-byte units of a shared-memory row are permuted: over 128 bytes, or over 64."""

    value: cuda.TensorMapSwizzle
    mode: int  # in bits 62 and 63 of a matrix descriptor
    row_bytes: int

    def descriptor(self, place: Int32) -> Int64:
        """Matrix descriptor of a K-major operand: groups of eight rows one behind the other, no leading offset (1).

        PTX ISA, wgmma, "Matrix Descriptor Format": start address in bits 0-13, leading offset in 16-29, stride offset
        in 32-45, base offset 0 in 49-51, swizzle in 62-63; addresses and offsets in 16-byte units, as ``place`` is.
        The permutation depends on address bits alone, so ``place`` may be any row of a tile.
        """
        group = SWIZZLE_ROWS * self.row_bytes // DESCRIPTOR_UNIT
        constant = (self.mode << 62) | (group << 32) | (1 << 16)
        return Int64(place) + Int64(constant - (constant >> 63 << 64))


SWIZZLES = {
    K_CHUNK: Swizzle(cuda.TensorMapSwizzle.s128b, 1, ROW_BYTES),
    K_CHUNK // 2: Swizzle(cuda.TensorMapSwizzle.s64b, 2, ROW_BYTES // 2),
}
"""By the channels of a row."""


class Role(enum.IntEnum):
    """Warpgroups of a CTA: the consumers come first."""

    EPILOGUE = CONSUMERS
    LOADERS = CONSUMERS + 1


class Loader(enum.IntEnum):
    """Warps of the loaders' warpgroup."""

    ACTIVATIONS = 0
    WEIGHTS = 1


THREADS = (Role.LOADERS + 1) * WARPGROUP
LAST_FINISHERS = (CONSUMERS + 1) * WARPGROUP  # threads that finish a CTA's last tile: the epilogue's and the consumers'


@dataclass(frozen=True)
class Shared:
    """The shared memory of a CTA.

    The barriers are mbarrier objects (PTX ISA, "mbarrier"): a phase ends when all arrivals and, at ``a_full`` and
    ``b_full``, all bytes of ``mbarrier.arrive.expect_tx`` are in. Waits name the parity of a phase
    (``mbarrier.try_wait.parity``).
    """

    a_full: cutlass.Array
    a_empty: cutlass.Array
    b_full: cutlass.Array
    b_empty: cutlass.Array
    staged: cutlass.Array  # per consumer: its half of the staging tile holds results
    drained: cutlass.Array  # per consumer: the epilogue has read them
    partial_empty: cutlass.Array  # per level and consumer: the partner may write its partial sums here
    partial_full: cutlass.Array  # per level and consumer: it has
    a: cutlass.Array
    b: cutlass.Array
    staging: cutlass.Array

    @classmethod
    def allocate(cls, spec: Conv3dSpec, config: TileConfig) -> Shared:
        def barriers(count: int) -> cutlass.Array:
            return cutlass.Array(Int64, count, space=SHARED, alignment=8)

        def tile(size: int) -> cutlass.Array:
            return cutlass.Array(cutlass.Int8, size, space=SHARED, alignment=SWIZZLE_ROWS * ROW_BYTES)

        levels = CONSUMERS * max(config.split_levels, 1)  # an array has an element
        return cls(
            a=tile(config.a_stages * config.a_stage_bytes(spec)),
            b=tile(config.b_stages * config.b_stage_bytes),
            staging=tile(config.staging_bytes),
            a_full=barriers(config.a_stages),
            a_empty=barriers(config.a_stages),
            b_full=barriers(config.b_stages),
            b_empty=barriers(config.b_stages),
            staged=barriers(CONSUMERS),
            drained=barriers(CONSUMERS),
            partial_empty=barriers(levels),
            partial_full=barriers(levels),
        )

    def initialize(self) -> None:
        """Set the arrival counts; one thread."""
        counts = (
            (self.a_full, 1),
            (self.a_empty, CONSUMERS),
            (self.b_full, 1),
            (self.b_empty, CONSUMERS),
            (self.staged, WARPGROUP),
            (self.drained, WARPGROUP),
            (self.partial_empty, WARPGROUP),
            (self.partial_full, WARPGROUP),
        )
        for barriers, count in counts:
            for index in range(barriers.shape[0]):
                prims.mbarrier_init(barriers.subview(index), count)


class Accumulators:
    """The FP32 sums of a consumer thread: ``m_blocks * n_blocks`` blocks of 64 rows by ``n_block`` channels.

    In a block, warp ``w`` and lane ``l`` hold rows ``16*w + l//4 + 8*half`` and channels ``8*j + 2*(l%4) + e`` in
    register ``4*j + 2*half + e``: matrix D of PTX ISA, wgmma, "Register Fragments". A block is one LLVM struct from its
    first wgmma to its last: taken apart in between, it would cost the compiler seconds.
    """

    def __init__(self, config: TileConfig, blocks: list[ir.Value]) -> None:
        self.config, self.blocks = config, blocks

    @classmethod
    def zero(cls, config: TileConfig) -> Accumulators:
        struct = llvm.StructType.get_literal([ir.F32Type.get()] * config.block_registers)
        return cls(config, [llvm.mlir_zero(struct) for _ in range(config.m_blocks * config.n_blocks)])

    def multiply(self, m: int, n: int, descriptor_a: Int64, descriptor_b: Int64) -> None:
        """Issue one wgmma into block ``(m, n)``."""
        index = m * self.config.n_blocks + n
        self.blocks[index] = nvvm.wgmma_mma_async(
            self.blocks[index].type,
            self.blocks[index],
            descriptor_a.ir_value(),
            descriptor_b.ir_value(),
            ir.Attribute.parse(f"#nvvm.shape<m = {M_BLOCK}, n = {self.config.n_block}, k = {K_STEP}>"),
            nvvm.WGMMATypes.bf16,
            nvvm.WGMMATypes.bf16,
            nvvm.WGMMATypes.f32,
            nvvm.WGMMAScaleOut.one,
            nvvm.WGMMAScaleIn.one,
            nvvm.WGMMAScaleIn.one,
            nvvm.MMALayout.row,
            nvvm.MMALayout.col,
        )

    def registers(self) -> list[Float32]:
        """All sums, block by block."""
        scalar = ir.F32Type.get()
        return [
            Float32(llvm.extractvalue(scalar, block, [index]))
            for block in self.blocks
            for index in range(self.config.block_registers)
        ]

    # Loops of a kernel carry the blocks along.

    def __extract_mlir_values__(self):
        return list(self.blocks)

    def __new_from_mlir_values__(self, values):
        return Accumulators(self.config, list(values))


class Conv3dSm90(Conv3dKernel):
    """The kernel of one operation and tile."""

    # Registers per thread after the warpgroups have traded: at most 65536 in all.
    CONSUMER_REGISTERS = 192
    EPILOGUE_REGISTERS = 104
    LOADER_REGISTERS = 24

    def __init__(self, spec: Conv3dSpec, config: TileConfig, input: str, weight: str) -> None:
        super().__init__(spec, config, input, weight)
        self.config = config
        # Channels that a stage holds of each chunk of a unit: half a chunk where that is all there is, because shared
        # memory is the bottleneck and zeros take as long to write as numbers.
        self.widths = tuple(K_CHUNK if steps > K_CHUNK // K_STEP // 2 else K_CHUNK // 2 for steps in spec.unit_steps)

    # --- host ------------------------------------------------------------------------------------------------------

    def launch(
        self,
        input: Int64,
        weight: Int64,
        tensors: Addresses,
        grid: PaddedGrid,
        split: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        a_map, b_map = self.tensor_maps(input, weight, grid, max(self.widths))
        a_narrow_map, b_narrow_map = self.tensor_maps(input, weight, grid, min(self.widths))
        self.kernel(a_map, b_map, a_narrow_map, b_narrow_map, tensors, grid).launch(
            grid=(clusters * split, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(split, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def tensor_maps(
        self, input: Int64, weight: Int64, grid: PaddedGrid, width: int
    ) -> tuple[cuda.TensorMap, cuda.TensorMap]:
        """Tensor maps of activations and weights for stages of ``width`` channels."""
        config, spec, swizzle = self.config, self.spec, SWIZZLES[width].value
        a_map = self.activation_map(input, grid, width, config.a_rows(spec) // config.a_boxes(spec), swizzle)
        return a_map, self.weight_map(weight, width, config.n_block, swizzle)

    # --- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        a_map: cutlass.GridConstant[cuda.TensorMap],
        b_map: cutlass.GridConstant[cuda.TensorMap],
        a_narrow_map: cutlass.GridConstant[cuda.TensorMap],
        b_narrow_map: cutlass.GridConstant[cuda.TensorMap],
        tensors: Addresses,
        grid: PaddedGrid,
    ):
        shared = Shared.allocate(self.spec, self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0 and prims.elect_sync():
            prims.prefetch_tensormap(a_map.get_ptr())
            prims.prefetch_tensormap(b_map.get_ptr())
            shared.initialize()
        prims.fence_mbarrier_init()
        prims.barrier_cluster_arrive_relaxed()
        prims.barrier_cluster_wait()
        follow_previous_kernel()

        warpgroup = warp // (WARPGROUP // WARP)
        if warpgroup == Role.LOADERS:
            prims.setmaxregister(self.LOADER_REGISTERS, prims.SetMaxRegisterAction.DECREASE)
            loader = warp % (WARPGROUP // WARP)
            if loader == Loader.ACTIVATIONS:
                self.load_activations(shared, a_map, a_narrow_map, grid)
            elif loader == Loader.WEIGHTS:
                self.load_weights(shared, b_map, b_narrow_map, grid)
        elif warpgroup == Role.EPILOGUE:
            prims.setmaxregister(self.EPILOGUE_REGISTERS, prims.SetMaxRegisterAction.DECREASE)
            self.finish_rows(shared, grid, tensors)
        else:
            prims.setmaxregister(self.CONSUMER_REGISTERS, prims.SetMaxRegisterAction.INCREASE)
            self.multiply(shared, warpgroup, grid, tensors)
        # A CTA's shared memory must outlive what the others of its cluster still send there.
        prims.barrier_cluster_arrive()
        prims.barrier_cluster_wait()

    def cluster(self) -> tuple[Int32, Int32, Int32, Int32]:
        """This CTA's rank in its cluster, the cluster's size, its first tile and the step to the next.

        The CTAs of a cluster work on one tile, each on its share of the reduction.
        """
        size = cute.arch.make_warp_uniform(cute.arch.block_in_cluster_dim()[0])
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        return rank, size, cute.arch.block_idx()[0] // size, cute.arch.grid_dim()[0] // size

    @cute.jit
    def load_activations(self, shared: Shared, wide_map, narrow_map, grid: PaddedGrid):
        """One warp: for every unit of every tile, the pixels under the tile's rows and its halo."""
        config, spec = self.config, self.spec
        rank, split, tile, step = self.cluster()
        tiles = self.scheduler.count(grid)
        stage = PipelineState.writing(config.a_stages)
        box_rows = config.a_rows(spec) // config.a_boxes(spec)
        while tile < tiles:
            place = self.scheduler.place(tile, grid, rank, split)
            origin = grid.frame(place.n, place.t) + place.row
            unit = place.first_unit
            while unit < place.end_unit:
                pixel = origin + grid.tap_shift(*spec.tap_row(unit))
                first_channel = spec.first_channel(unit)
                for chunk, width in enumerate(self.widths):
                    tensor_map = wide_map if width == max(self.widths) else narrow_map
                    row_bytes = width * ELEMENT_BYTES
                    wait(shared.a_empty.subview(stage.index), stage.phase)
                    if prims.elect_sync():
                        full = shared.a_full.subview(stage.index)
                        prims.mbarrier_arrive_expect_tx(full, config.a_rows(spec) * row_bytes)
                        for box in cutlass.range_constexpr(config.a_boxes(spec)):
                            offset = stage.index * config.a_stage_bytes(spec) + box * box_rows * row_bytes
                            prims.cp_async_bulk_tensor_shared_cluster_global(
                                shared.a.subview(offset),
                                tensor_map.get_ptr(),
                                (first_channel + chunk * K_CHUNK, pixel + box * box_rows),
                                full,
                                [],
                            )
                    stage.advance()
                unit += 1
            tile += step

    @cute.jit
    def load_weights(self, shared: Shared, wide_map, narrow_map, grid: PaddedGrid):
        """One warp: for every chunk of every unit, a stage per tap along W and per block of output channels."""
        config, spec = self.config, self.spec
        rank, split, tile, step = self.cluster()
        tiles = self.scheduler.count(grid)
        stage = PipelineState.writing(config.b_stages)
        while tile < tiles:
            place = self.scheduler.place(tile, grid, rank, split)
            unit = place.first_unit
            while unit < place.end_unit:
                first_tap, first_channel = spec.first_tap(unit), spec.first_channel(unit)
                for chunk, width in enumerate(self.widths):
                    tensor_map = wide_map if width == max(self.widths) else narrow_map
                    for s in cutlass.range_constexpr(spec.w_taps):
                        for n in cutlass.range_constexpr(config.n_blocks):
                            wait(shared.b_empty.subview(stage.index), stage.phase)
                            if prims.elect_sync():
                                full = shared.b_full.subview(stage.index)
                                prims.mbarrier_arrive_expect_tx(full, config.n_block * width * ELEMENT_BYTES)
                                prims.cp_async_bulk_tensor_shared_cluster_global(
                                    shared.b.subview(stage.index * config.b_stage_bytes),
                                    tensor_map.get_ptr(),
                                    (
                                        first_channel + chunk * K_CHUNK,
                                        first_tap + s,
                                        place.channel + n * config.n_block,
                                    ),
                                    full,
                                    [],
                                )
                            stage.advance()
                unit += 1
            tile += step

    @cute.jit
    def multiply(self, shared: Shared, consumer: Int32, grid: PaddedGrid, tensors: Addresses):
        """A consumer: accumulate each tile, then stage it for the epilogue; at last, help to finish the last one."""
        config = self.config
        rank, split, tile, step = self.cluster()
        tiles = self.scheduler.count(grid)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        a, b = PipelineState.reading(config.a_stages), PipelineState.reading(config.b_stages)
        phase = Int32(0)  # of the tile: alternates
        while tile < tiles:
            place = self.scheduler.place(tile, grid, rank, split)
            units = place.end_unit - place.first_unit
            sums, a, b = self.accumulate(shared, a, b, units, consumer, thread)
            wait(shared.drained.subview(consumer), phase ^ 1)
            meet()
            if split > 1:
                self.exchange_partial_sums(shared, sums, consumer, rank, split, thread, phase)
            else:
                self.stage_results(shared, sums, consumer, thread)
            prims.mbarrier_arrive(shared.staged.subview(consumer))
            phase = phase ^ 1
            tile += step
        for each in cutlass.range_constexpr(CONSUMERS):
            wait(shared.staged.subview(each), phase ^ 1)
        place = self.scheduler.place(tile - step, grid, rank, split)  # every CTA has a tile
        rows = CONSUMERS * (config.consumer_rows // split)
        worker = (consumer + 1) * WARPGROUP + thread  # behind those of the epilogue
        self.finish_staged(shared, grid, place, Int32(0), rows, worker, Int32(LAST_FINISHERS), tensors)

    @cute.jit
    def accumulate(
        self, shared: Shared, a: PipelineState, b: PipelineState, units: Int32, consumer: Int32, thread: Int32
    ):
        """Multiply the stages of a tile as they arrive. Returns the sums and where the rings then stand."""
        config, spec = self.config, self.spec
        sums = Accumulators.zero(config)
        a_base, b_base = self.place_of(shared.a), self.place_of(shared.b)
        first_row = consumer * config.consumer_rows
        a_busy, b_busy = Int32(-1), Int32(-1)  # stages that issued, unfinished wgmmas still read
        unit = Int32(0)
        while unit < units:
            for chunk, width in enumerate(self.widths):
                swizzle = SWIZZLES[width]
                wait(shared.a_full.subview(a.index), a.phase)
                row_units, step_units = width // UNIT_CHANNELS, K_STEP // UNIT_CHANNELS
                a_stage = a_base + a.index * (config.a_stage_bytes(spec) // DESCRIPTOR_UNIT) + first_row * row_units
                for s in cutlass.range_constexpr(spec.w_taps):
                    for n in cutlass.range_constexpr(config.n_blocks):
                        wait(shared.b_full.subview(b.index), b.phase)
                        meet()
                        b_stage = b_base + b.index * (config.b_stage_bytes // DESCRIPTOR_UNIT)
                        prims.wgmma_fence_aligned()
                        for k in cutlass.range_constexpr(spec.unit_steps[chunk]):
                            for m in cutlass.range_constexpr(config.m_blocks):
                                a_row = a_stage + (m * M_BLOCK + s) * row_units
                                sums.multiply(
                                    m,
                                    n,
                                    swizzle.descriptor(a_row + k * step_units),
                                    swizzle.descriptor(b_stage + k * step_units),
                                )
                        prims.wgmma_commit_group_sync_aligned()
                        # All groups but the newest are done (PTX ISA, "wgmma.wait_group"), so the stages that the group
                        # before it read are free.
                        prims.wgmma_wait_group_sync_aligned(1)
                        self.release(shared.b_empty, b_busy, thread)
                        b_busy = b.index
                        if cutlass.const_expr(s == 0 and n == 0):
                            self.release(shared.a_empty, a_busy, thread)
                        b.advance()
                a_busy = a.index
                a.advance()
            unit += 1
        prims.wgmma_wait_group_sync_aligned(0)
        self.release(shared.b_empty, b_busy, thread)
        self.release(shared.a_empty, a_busy, thread)
        return sums, a, b

    def place_of(self, tile: cutlass.Array) -> Int32:
        """Where a tile begins, in 16-byte units, as matrix descriptors count."""
        return cute.arch.make_warp_uniform(shared_address(tile) >> 4) & 0x3FFF

    @cute.jit
    def release(self, empty: cutlass.Array, stage: Int32, thread: Int32):
        """One thread of a consumer gives a stage back; -1 is none."""
        if thread == 0 and stage >= 0:
            prims.mbarrier_arrive(empty.subview(stage))

    # --- staging ---------------------------------------------------------------------------------------------------

    def staging_offset(self, row: Int32, chunk: Int32) -> Int32:
        """Byte of a 16-byte chunk of a staged row.

        Rows are dense. Chunks are permuted within groups as wide as the lanes of a row, such that eight rows at one
        chunk (a matrix of ``stmatrix``), and the eight chunks that eight lanes load, fall into different banks:
        ``8 // group`` rows side by side do so by themselves, so the permutation changes after as many.
        """
        group = self.config.lanes
        key = (row // (8 // group)) & (group - 1)
        return (row * self.config.row_chunks + (chunk ^ key)) * (CHUNK_CHANNELS * ELEMENT_BYTES)

    @cute.jit
    def stage_results(self, shared: Shared, sums: Accumulators, consumer: Int32, thread: Int32):
        """Round the sums to BF16 and store them as rows of the consumer's half of the staging tile."""
        config = self.config
        warp, lane = thread // WARP, thread % WARP
        # Lane l addresses a row of matrix l // 8 of four: two chunks side by side, each in two halves of eight rows.
        half, side = (lane // 8) % 2, lane // 16
        registers, block_chunks = sums.registers(), config.n_block // CHUNK_CHANNELS
        for m in cutlass.range_constexpr(config.m_blocks):
            row = consumer * config.consumer_rows + m * M_BLOCK + warp * 16 + half * 8 + lane % 8
            for n in cutlass.range_constexpr(config.n_blocks):
                for j in cutlass.range_constexpr(0, block_chunks, 2):
                    first = (m * config.n_blocks + n) * config.block_registers + 4 * j
                    self.store_matrices(shared, row, n * block_chunks + j + side, registers[first : first + 8])

    def store_matrices(self, shared: Shared, row: Int32, chunk: Int32, values: list[Float32]) -> None:
        """Round eight sums of a thread to BF16 and store them as a row's part of four 8x8 matrices."""
        pairs = [arithmetic.pack(*values[first : first + 2]) for first in range(0, 8, 2)]
        place = shared.staging.subview(self.staging_offset(row, chunk))
        prims.stmatrix(place, pairs, prims.MMALayout.ROW)

    def owned_row(self, index: Int32, rank: Int32, split: Int32) -> Int32:
        """The ``index``-th of a consumer's rows that this CTA finishes; without a split these are all.

        The first halving is by block where there are two. Halving a block leaves every other group of eight rows.
        """
        block, half = (rank % 2, rank // 2) if self.config.m_blocks == 2 else (0, rank)
        groups_apart = 1 + split // (2 * self.config.m_blocks)
        return block * M_BLOCK + ((index // 8) * groups_apart + half) * 8 + index % 8

    @cute.jit
    def exchange_partial_sums(
        self,
        shared: Shared,
        sums: Accumulators,
        consumer: Int32,
        rank: Int32,
        split: Int32,
        thread: Int32,
        phase: Int32,
    ):
        """Add up what the CTAs of the cluster have summed, and stage the rows that this CTA owns."""
        for levels in cutlass.range_constexpr(1, self.config.split_levels + 1):
            if split == 1 << levels:
                self.reduce_scatter(shared, sums, consumer, rank, thread, phase, levels)

    @cute.jit
    def reduce_scatter(
        self,
        shared: Shared,
        sums: Accumulators,
        consumer: Int32,
        rank: Int32,
        thread: Int32,
        phase: Int32,
        levels: cutlass.Constexpr[int],
    ):
        """Recursive halving over a cluster of ``2**levels`` CTAs.

        In each level a CTA keeps one half of its sums, sends the other to the CTA whose rank differs in that bit, and
        adds what it receives: always the same numbers in the same order. Equal threads of two CTAs hold the same
        places of a tile, so a thread sends to its own slots in the partner's staging tile, in register order.
        """
        config = self.config
        first_slot = consumer * (config.staging_bytes // CONSUMERS) + thread * CHUNK_BYTES
        mine = shared_pointer(shared.staging.subview(first_slot), Float32)
        values = sums.registers()
        for level in cutlass.range_constexpr(levels):
            keeps_upper = (rank >> level) % 2 == 1
            partner = rank ^ (1 << level)
            lower, upper = self.halves(values, level)
            empty = shared.partial_empty.subview(level * CONSUMERS + consumer)
            full = shared.partial_full.subview(level * CONSUMERS + consumer)
            prims.mbarrier_arrive(prims.mapa(empty, partner), scope=prims.MemScope.CLUSTER)
            theirs = prims.mapa(mine, partner)
            wait_cluster(empty, phase)
            for first in cutlass.range_constexpr(0, len(lower), CHUNK_REGISTERS):
                leaving = [
                    Float32(cutlass.select_(keeps_upper, lower[first + i], upper[first + i]))
                    for i in range(CHUNK_REGISTERS)
                ]
                # Slots of a thread lie a warpgroup's slots apart.
                vector = cutlass.Vector.from_elements(tuple(leaving), dtype=Float32)
                (theirs + first * WARPGROUP).store(vector, alignment=CHUNK_BYTES)
            prims.mbarrier_arrive(prims.mapa(full, partner), scope=prims.MemScope.CLUSTER)
            wait_cluster(full, phase)
            values = []
            for first in cutlass.range_constexpr(0, len(lower), CHUNK_REGISTERS):
                received = prims.load_ext(mine + first * WARPGROUP, count=CHUNK_REGISTERS)
                for i in cutlass.range_constexpr(CHUNK_REGISTERS):
                    kept = Float32(cutlass.select_(keeps_upper, upper[first + i], lower[first + i]))
                    values.append(kept + received[i])
        prims.barrier_cta_sync(STAGING_BARRIER + consumer, thread_count=WARPGROUP)  # all slots are read
        meet()
        self.stage_owned(shared, values, consumer, rank, thread, levels)

    def halves(self, values: list[Float32], level: int) -> tuple[list[Float32], list[Float32]]:
        """A thread's sums cut in two: by block while there are two along M, else by the half of the block."""
        if self.config.m_blocks == 2 and level == 0:
            middle = len(values) // 2
            return values[:middle], values[middle:]
        return tuple([value for index, value in enumerate(values) if index // 2 % 2 == half] for half in range(2))

    @cute.jit
    def stage_owned(
        self,
        shared: Shared,
        values: list,
        consumer: Int32,
        rank: Int32,
        thread: Int32,
        levels: cutlass.Constexpr[int],
    ):
        """Stage the sums that are left after ``levels`` halvings, at the places of their rows."""
        config = self.config
        warp, lane = thread // WARP, thread % WARP
        whole_block = config.m_blocks == 2 and levels == 1
        # Matrices of one store: two halves by two chunks of a whole block, or four chunks of one half.
        half = (lane // 8) % 2 if cutlass.const_expr(whole_block) else rank >> (levels - 1)
        side = lane // 16 if cutlass.const_expr(whole_block) else lane // 8
        block = rank % 2 if cutlass.const_expr(config.m_blocks == 2) else Int32(0)
        row = consumer * config.consumer_rows + block * M_BLOCK + warp * 16 + half * 8 + lane % 8
        chunks_stored = 2 if whole_block else HALF_BLOCK_CHUNKS
        for index in cutlass.range_constexpr(len(values) // 8):
            chunk = index * chunks_stored + side
            self.store_matrices(shared, row, chunk, values[8 * index : 8 * index + 8])

    # --- epilogue ----------------------------------------------------------------------------------------------------

    @cute.jit
    def finish_rows(self, shared: Shared, grid: PaddedGrid, tensors: Addresses):
        """The epilogue warpgroup: finish staged rows, and fill the padding pixels.

        Each tile gets a share of the padding pixels, which are filled while that tile is computed. The consumers have
        no next tile to compute beside the last tile of a CTA, so their threads finish some of its rows.
        """
        config, finisher = self.config, self.finisher
        rank, split, tile, step = self.cluster()
        tiles = self.scheduler.count(grid)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane, slot = thread % config.lanes, thread // config.lanes
        rows_at_once = WARPGROUP // config.lanes
        owned_rows = config.consumer_rows // split
        padding, padding_pixels = cute.arch.block_idx()[0] * rows_at_once + slot, finisher.padding_pixels(grid)
        padding_step = cute.arch.grid_dim()[0] * rows_at_once
        turns = (tiles - tile + step - 1) // step
        padded_each_turn = ((padding_pixels + padding_step - 1) // padding_step + turns - 1) // turns
        phase = Int32(0)
        while tile < tiles:
            place = self.scheduler.place(tile, grid, rank, split)
            self.prefetch_rows(grid, place, thread, tensors)
            padded = Int32(0)
            while padded < padded_each_turn:
                if padding < padding_pixels:
                    finisher.pad(grid, padding, lane, config.lanes, tensors)
                padding += padding_step
                padded += 1
            last = tile + step >= tiles
            part, parts = Int32(0), Int32(cutlass.select_(last, 1, CONSUMERS))
            workers = Int32(cutlass.select_(last, LAST_FINISHERS, WARPGROUP))
            while part < parts:
                wait(shared.staged.subview(part), phase)
                if last:
                    wait(shared.staged.subview(CONSUMERS - 1), phase)
                first = part * owned_rows
                end = Int32(cutlass.select_(last, CONSUMERS * owned_rows, first + owned_rows))
                self.finish_staged(shared, grid, place, first, end, thread, workers, tensors)
                prims.mbarrier_arrive(shared.drained.subview(part))
                part += 1
            phase = phase ^ 1
            tile += step

    def tile_row(self, index: Int32, rank: Int32, split: Int32) -> Int32:
        """The row in the tile of the ``index``-th of those that this CTA finishes, the first consumer's before."""
        owned_rows = self.config.consumer_rows // split
        consumer = Int32(index >= owned_rows)
        return consumer * self.config.consumer_rows + self.owned_row(index - consumer * owned_rows, rank, split)

    @cute.jit
    def finish_staged(
        self,
        shared: Shared,
        grid: PaddedGrid,
        place: TileCoord,
        first: Int32,
        end: Int32,
        worker: Int32,
        workers: Int32,
        tensors: Addresses,
    ):
        """Finish the rows ``first`` to ``end`` of those that this CTA finishes, shared out over ``workers`` threads.

        ``lanes`` neighbouring threads share a row; lane ``l`` has the chunks ``l, l + lanes, ...`` of it.
        """
        config, finisher = self.config, self.finisher
        rank, split, _, _ = self.cluster()
        lane, slot = worker % config.lanes, worker // config.lanes
        index = first + slot
        while index < end:
            row = self.tile_row(index, rank, split)
            main = self.staged_row(shared, row, lane)
            ho, wo = divide(place.row + row, grid.w)
            channel = place.channel + lane * CHUNK_CHANNELS
            finisher.finish(main, grid, place.n, place.t, ho, wo, channel, config.lanes, tensors)
            index += workers // config.lanes

    @cute.jit
    def prefetch_rows(self, grid: PaddedGrid, place: TileCoord, thread: Int32, tensors: Addresses):
        """Ask for the residual of a tile while the tile is computed, so that its rows come out of the L2 cache."""
        rank, split, _, _ = self.cluster()
        if cutlass.const_expr(self.spec.epilogue.row_operands):
            index = thread
            while index < CONSUMERS * (self.config.consumer_rows // split):
                ho, wo = divide(place.row + self.tile_row(index, rank, split), grid.w)
                row = Row.at(grid, place.n, place.t, ho, wo)
                self.finisher.prefetch_row(row, place.channel, self.config.tile_n, tensors)
                index += WARPGROUP

    def staged_row(self, shared: Shared, row: Int32, lane: Int32) -> arithmetic.Fragment:
        fragment = []
        for chunk in range(0, self.config.row_chunks, self.config.lanes):
            place = shared.staging.subview(self.staging_offset(row, chunk + lane))
            fragment += load_chunk(shared_address(place), SHARED)
        return fragment
