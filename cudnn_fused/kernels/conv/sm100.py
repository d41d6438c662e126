"""Valid 3x3x3 convolution with fused post-operations for Blackwell (SM100, SM103).

Two CTAs on neighbouring multiprocessors form a *pair*, which multiplies as one: a block of a tile has 256 rows, of
which each CTA loads 128, and each CTA loads half of the weights. One thread of the first CTA, the leader, issues all
products of the pair. The sums stand in tensor memory, 128 rows in each CTA, in a ring of *accumulators* of one block
each, which the epilogue drains before it does anything else. A tile is two blocks side by side, computed from one load
of the activations, or two below each other, computed from one load of the weights, or one.

Layers with few tiles split the reduction over the pairs of a cluster; see :meth:`Conv3dSm100.add_shares`.

A CTA is seven warps: four of the epilogue, in which a thread owns a row, so that a norm needs no other thread; one that
multiplies; one that loads activations and one that loads weights, each through a ring of stages.

The rows of a tile are consecutive rows of one output frame on the padded linear grid (:mod:`.padded_grid`). Each tap
along W has a stage of activations of its own, the pixels of a CTA's rows. With ``TileConfig.shared_taps`` a stage has
two pixels more and is read three times at a distance of one: the swizzle of a tile is a function of absolute
shared-memory addresses, so a descriptor may start at any pixel row, if the hardware reads the ISA that way.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.arguments import Addresses
from cudnn_fused.kernels.conv.host import Conv3dKernel
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.spec import (
    DESCRIPTOR_UNIT,
    ELEMENT_BYTES,
    K_CHUNK,
    K_STEP,
    ROW_BYTES,
    SWIZZLE_BYTES,
    Conv3dSpec,
)
from cudnn_fused.kernels.conv.tile_sm100 import (
    BLOCK_M,
    BLOCK_ROWS,
    EPILOGUE_WARPS,
    FP32_BYTES,
    PAIR,
    TMEM_COLUMNS,
    TileConfig,
)
from cudnn_fused.kernels.device import (
    ALL_LANES,
    CHUNK_BYTES,
    CHUNK_CHANNELS,
    CHUNK_REGISTERS,
    SHARED,
    WARP,
    PipelineState,
    divide,
    follow_previous_kernel,
    meet,
    shared_address,
    shared_pointer,
    wait,
    wait_cluster,
)
from cudnn_fused.kernels.epilogue import arithmetic
from cudnn_fused.kernels.epilogue.rows import Row
from cudnn_fused.kernels.epilogue.staging import StagingSlots

BOTH = prims.CTAGroup.CTA_2
TMEM = 6  # the address space of tensor memory, whose addresses are lane << 16 | column
TMEM_LANE = 1 << 16
PART = 32  # channels of one step of the epilogue, at most
UNUSED_OFFSET = 16  # leading offset of a descriptor of swizzled rows


class Role(enum.IntEnum):
    """Warps of a CTA: those of the epilogue come first, since the lanes that a warp can drain go by its number."""

    ALLOCATOR = 0  # of the epilogue
    MULTIPLIER = EPILOGUE_WARPS
    ACTIVATIONS = EPILOGUE_WARPS + 1
    WEIGHTS = EPILOGUE_WARPS + 2


THREADS = (Role.WEIGHTS + 1) * WARP


@dataclass(frozen=True)
class Shared:
    """The shared memory of a CTA. Of the ``full`` barriers and ``acc_empty``, only the leader's are used.

    The barriers are mbarrier objects (PTX ISA, "mbarrier"): a phase ends when all arrivals and, at ``a_full`` and
    ``b_full``, all bytes of ``mbarrier.arrive.expect_tx`` are in. ``tcgen05.commit`` arrives at ``a_empty``,
    ``b_empty`` and ``acc_full`` when the products before it are done.
    """

    a_full: cutlass.Array
    a_empty: cutlass.Array
    b_full: cutlass.Array
    b_empty: cutlass.Array
    acc_full: cutlass.Array
    acc_empty: cutlass.Array
    partial_empty: cutlass.Array  # per warp of the epilogue: its owner has room for what this CTA has summed
    partial_full: cutlass.Array  # per warp of the epilogue: the other shares' sums of its rows are here
    tmem: cutlass.Array  # where tensor memory was allocated
    a: cutlass.Array
    b: cutlass.Array
    exchange: cutlass.Array  # of the warps of the epilogue: slots of rows, and what other shares have summed

    @classmethod
    def allocate(cls, spec: Conv3dSpec, config: TileConfig) -> Shared:
        def barriers(count: int) -> cutlass.Array:
            return cutlass.Array(Int64, count, space=SHARED, alignment=8)

        def tile(size: int) -> cutlass.Array:
            return cutlass.Array(cutlass.Int8, size, space=SHARED, alignment=SWIZZLE_BYTES)

        return cls(
            a=tile(config.a_stages * config.a_stage_bytes(spec)),
            b=tile(config.b_stages * config.b_stage_bytes),
            exchange=cutlass.Array(cutlass.Int8, config.exchange_bytes, space=SHARED, alignment=CHUNK_BYTES),
            a_full=barriers(config.a_stages),
            a_empty=barriers(config.a_stages),
            b_full=barriers(config.b_stages),
            b_empty=barriers(config.b_stages),
            acc_full=barriers(config.accumulators),
            acc_empty=barriers(config.accumulators),
            partial_empty=barriers(EPILOGUE_WARPS),
            partial_full=barriers(EPILOGUE_WARPS),
            tmem=cutlass.Array(Int32, 1, space=SHARED),
        )

    def initialize(self, split: Int32) -> None:
        """Set the arrival counts; one thread."""
        counts = (
            (self.a_full, 1),
            (self.a_empty, 1),
            (self.b_full, 1),
            (self.b_empty, 1),
            (self.acc_full, 1),
            (self.acc_empty, PAIR * EPILOGUE_WARPS),
            (self.partial_empty, 1),
            (self.partial_full, cutlass.max(split - 1, 1)),
        )
        for barriers, count in counts:
            for index in range(barriers.shape[0]):
                prims.mbarrier_init(barriers.subview(index), count)


@dataclass(frozen=True)
class Cluster:
    """Where a CTA is. Values of a running kernel."""

    rank: Int32  # in its pair; 0 is the leader
    share: Int32  # of the reduction: the pair's place in the cluster
    split: Int32  # pairs in the cluster
    number: Int32
    count: Int32  # of all clusters

    @property
    def leader(self) -> Int32:
        """The rank in the cluster of the leader of this pair."""
        return self.share * PAIR


class Conv3dSm100(Conv3dKernel):
    """The kernel of one operation and tile."""

    def __init__(self, spec: Conv3dSpec, config: TileConfig, input: str, weight: str) -> None:
        super().__init__(spec, config, input, weight)
        self.config = config

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
        config, swizzle = self.config, cuda.TensorMapSwizzle.s128b
        a_map = self.activation_map(input, grid, K_CHUNK, config.a_box_rows(self.spec), swizzle)
        b_map = self.weight_map(weight, K_CHUNK, config.b_rows, swizzle)
        self.kernel(a_map, b_map, tensors, grid).launch(
            grid=(PAIR * split * clusters, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(PAIR * split, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    # --- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        a_map: cutlass.GridConstant[cuda.TensorMap],
        b_map: cutlass.GridConstant[cuda.TensorMap],
        tensors: Addresses,
        grid: PaddedGrid,
    ):
        shared = Shared.allocate(self.spec, self.config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        split = self.cluster().split
        if warp == Role.MULTIPLIER and prims.elect_sync():
            shared.initialize(split)
        prims.fence_mbarrier_init()
        prims.barrier_cluster_arrive_relaxed()
        prims.barrier_cluster_wait()
        # The CTAs of a pair allocate together, through each other's shared memory: both must have started.
        if warp == Role.ALLOCATOR:
            meet()
            prims.tcgen05_alloc(shared.tmem, TMEM_COLUMNS, group=BOTH)
            prims.tcgen05_relinquish_alloc_permit(group=BOTH)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        prims.barrier_cta_sync()
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        tmem = shared.tmem.load()
        follow_previous_kernel()

        if warp == Role.ACTIVATIONS:
            self.load_activations(shared, a_map, grid)
        elif warp == Role.WEIGHTS:
            self.load_weights(shared, b_map, grid)
        elif warp == Role.MULTIPLIER:
            self.multiply(shared, grid, tmem)
        else:
            self.finish_rows(shared, grid, tmem, warp, tensors)
        # Neither CTA may free its tensor memory while the other multiplies or signals its barriers, nor go while the
        # other frees, which a pair does together, too.
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
        prims.barrier_cluster_arrive()
        prims.barrier_cluster_wait()
        if warp == Role.ALLOCATOR:
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            meet()
            prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Float32), TMEM_COLUMNS, group=BOTH)
        prims.barrier_cluster_arrive_relaxed()
        prims.barrier_cluster_wait()

    def cluster(self) -> Cluster:
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        size = cute.arch.make_warp_uniform(cute.arch.block_in_cluster_dim()[0])
        return Cluster(
            rank=rank % PAIR,
            share=rank // PAIR,
            split=size // PAIR,
            number=cute.arch.block_idx()[0] // size,
            count=cute.arch.grid_dim()[0] // size,
        )

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self, shared_tile, tensor_map, coordinates, full) -> None:
        """One box into this CTA's shared memory, of which the leader's barrier is told."""
        prims.cp_async_bulk_tensor_shared_cluster_global(
            shared_tile, tensor_map.get_ptr(), coordinates, full, [], group=BOTH
        )

    @cute.jit
    def expect(self, full, cta_bytes: cutlass.Constexpr[int], rank: Int32):
        """The leader's barrier waits for the boxes of both CTAs."""
        if rank == 0:
            prims.mbarrier_arrive_expect_tx(full, PAIR * cta_bytes)

    @cute.jit
    def load_activations(self, shared: Shared, a_map, grid: PaddedGrid):
        """One thread: for every unit of every tile, the pixels under this CTA's rows and their halo."""
        config, spec = self.config, self.spec
        cluster = self.cluster()
        rank, tile = cluster.rank, cluster.number
        if prims.elect_sync():
            tiles = self.scheduler.count(grid)
            boxes, box_rows = config.a_boxes(spec), config.a_box_rows(spec)
            stage = PipelineState.writing(config.a_stages)
            while tile < tiles:
                place = self.scheduler.place(tile, grid, cluster.share, cluster.split)
                origin = grid.frame(place.n, place.t) + place.row + rank * config.cta_rows
                for unit in cutlass.range(place.first_unit, place.end_unit, 1, unroll=1):
                    pixel = origin + grid.tap_shift(*spec.tap_row(unit))
                    first_channel = spec.first_channel(unit)
                    for chunk in cutlass.range_constexpr(len(spec.unit_steps)):
                        for tap in cutlass.range_constexpr(config.a_loads(spec)):
                            wait(shared.a_empty.subview(stage.index), stage.phase)
                            full = shared.a_full.subview(stage.index)
                            self.expect(full, boxes * box_rows * ROW_BYTES, rank)
                            for box in cutlass.range_constexpr(boxes):
                                offset = stage.index * config.a_stage_bytes(spec) + box * box_rows * ROW_BYTES
                                coordinates = (first_channel + chunk * K_CHUNK, pixel + tap + box * box_rows)
                                self.load(shared.a.subview(offset), a_map, coordinates, full)
                            stage.advance()
                tile += cluster.count
            self.wait_until_unused(shared.a_empty, stage)

    @cute.jit
    def load_weights(self, shared: Shared, b_map, grid: PaddedGrid):
        """One thread: for every chunk of every unit, a stage per tap along W and block, with this CTA's half of it."""
        config, spec = self.config, self.spec
        cluster = self.cluster()
        rank, tile = cluster.rank, cluster.number
        if prims.elect_sync():
            tiles = self.scheduler.count(grid)
            stage = PipelineState.writing(config.b_stages)
            while tile < tiles:
                place = self.scheduler.place(tile, grid, cluster.share, cluster.split)
                for unit in cutlass.range(place.first_unit, place.end_unit, 1, unroll=1):
                    first_tap, first_channel = spec.first_tap(unit), spec.first_channel(unit)
                    for chunk in cutlass.range_constexpr(len(spec.unit_steps)):
                        for s in cutlass.range_constexpr(spec.w_taps):
                            for n in cutlass.range_constexpr(config.n_blocks):
                                wait(shared.b_empty.subview(stage.index), stage.phase)
                                full = shared.b_full.subview(stage.index)
                                self.expect(full, config.b_stage_bytes, rank)
                                row = place.channel + n * config.n_block + rank * config.b_rows
                                coordinates = (first_channel + chunk * K_CHUNK, first_tap + s, row)
                                self.load(
                                    shared.b.subview(stage.index * config.b_stage_bytes), b_map, coordinates, full
                                )
                                stage.advance()
                tile += cluster.count
            self.wait_until_unused(shared.b_empty, stage)

    @cute.jit
    def wait_until_unused(self, empty: cutlass.Array, stage: PipelineState):
        """Wait for the last arrivals, which come from the leader: it must not signal a CTA that has gone."""
        for _ in cutlass.range_constexpr(empty.shape[0]):
            wait(empty.subview(stage.index), stage.phase)
            stage.advance()

    # --- multiplying -------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, shared: Shared, grid: PaddedGrid, tmem: Int32):
        """One warp of the leader: all products of the pair, issued by one thread.

        The whole warp walks and waits, and elects the thread where it issues: with one thread walking alone, ptxas 13.0
        crashes on the kernel of the causal convolution.
        """
        config, spec = self.config, self.spec
        cluster = self.cluster()
        tile = cluster.number
        if cluster.rank == 0:
            tiles = self.scheduler.count(grid)
            a, b = PipelineState.reading(config.a_stages), PipelineState.reading(config.b_stages)
            accumulator = PipelineState.writing(config.accumulators)
            a_base, b_base = self.descriptor(shared.a), self.descriptor(shared.b)
            loads = config.a_loads(spec)
            while tile < tiles:
                place = self.scheduler.place(tile, grid, cluster.share, cluster.split)
                blocks = []
                for _ in cutlass.range_constexpr(config.blocks):
                    blocks.append((accumulator.index, accumulator.phase))
                    accumulator.advance()
                for unit in cutlass.range(place.first_unit, place.end_unit, 1, unroll=1):
                    started = unit > place.first_unit
                    for chunk in cutlass.range_constexpr(len(spec.unit_steps)):
                        for load in cutlass.range_constexpr(loads):
                            wait(shared.a_full.subview(a.index), a.phase)
                            for s in cutlass.range_constexpr(spec.w_taps // loads):
                                first = chunk == 0 and load == 0 and s == 0
                                for n in cutlass.range_constexpr(config.n_blocks):
                                    wait(shared.b_full.subview(b.index), b.phase)
                                    for m in cutlass.range_constexpr(config.m_blocks):
                                        index, phase = blocks[m * config.n_blocks + n]
                                        if cutlass.const_expr(first):  # noqa: SIM102 (the next is for the device)
                                            if unit == place.first_unit:
                                                wait(shared.acc_empty.subview(index), phase)
                                        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                                        row = m * BLOCK_ROWS + s
                                        if prims.elect_sync():
                                            self.issue(
                                                tmem + index * config.n_block,
                                                self.moved(
                                                    a_base, a.index * config.a_stage_bytes(spec) + row * ROW_BYTES
                                                ),
                                                self.moved(b_base, b.index * config.b_stage_bytes),
                                                spec.unit_steps[chunk],
                                                started if first else Boolean(True),
                                            )
                                    if prims.elect_sync():
                                        self.signal(shared.b_empty.subview(b.index), cluster)
                                    b.advance()
                            if prims.elect_sync():
                                self.signal(shared.a_empty.subview(a.index), cluster)
                            a.advance()
                for block in cutlass.range_constexpr(config.blocks):
                    if prims.elect_sync():
                        self.signal(shared.acc_full.subview(blocks[block][0]), cluster)
                tile += cluster.count

    def issue(self, block: Int32, a: Int64, b: Int64, steps: int, accumulate: Boolean) -> None:
        """The products of one stage of each operand, added to a block, or put there unless ``accumulate``.

        PTX ISA, tcgen05, "Instruction descriptor", ``.kind::f16``.
        """
        instruction = prims.Tcgen05InstrDesc.build(
            a_dtype=BFloat16, b_dtype=BFloat16, c_dtype=Float32, m_dim=BLOCK_M, n_dim=self.config.n_block
        )
        for k in range(steps):
            prims.tcgen05_mma(
                prims.Tcgen05MMAKind.F16,
                BOTH,
                prims.make_tmem_ptr(block, Float32),
                self.moved(a, k * K_STEP * ELEMENT_BYTES),
                self.moved(b, k * K_STEP * ELEMENT_BYTES),
                instruction,
                accumulate if k == 0 else Boolean(True),
            )

    def descriptor(self, tile: cutlass.Array) -> Int64:
        """Matrix descriptor of rows of 128 bytes that are swizzled in groups of eight.

        PTX ISA, tcgen05, "Shared memory descriptor": offsets in bytes here, in 16-byte units in the descriptor. The
        leading offset has no meaning for swizzled K-major rows that are no wider than the swizzle.
        """
        return prims.Tcgen05SmemDesc.build(
            tile,
            leading_byte_offset=UNUSED_OFFSET,
            stride_byte_offset=SWIZZLE_BYTES,
            layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B,
        )

    def moved(self, descriptor: Int64, offset: Int32) -> Int64:
        """Shared memory ends before the address field does, so adding to it never carries out of the field."""
        return descriptor + Int64(offset // DESCRIPTOR_UNIT)

    def signal(self, barrier, cluster: Cluster) -> None:
        """Arrive on this barrier of both CTAs when all products so far are done (PTX ISA, "tcgen05.commit")."""
        both = Int32((1 << PAIR) - 1) << cluster.leader
        prims.tcgen05_commit(barrier, multicast_mask=both, group=BOTH)

    # --- epilogue ----------------------------------------------------------------------------------------------------

    @cute.jit
    def finish_rows(self, shared: Shared, grid: PaddedGrid, tmem: Int32, warp: Int32, tensors: Addresses):
        """The epilogue: fill the padding pixels while the first tile is computed, then finish rows, one to a thread.

        A thread first moves its rows out of the accumulators, so that they are free for the next tile, rounded to BF16
        into columns of tensor memory that are its own. From there it takes a block of channels at a time, twice if
        there is a norm, and its warp stores them by way of shared memory.
        """
        config = self.config
        cluster = self.cluster()
        rank, tile = cluster.rank, cluster.number
        owner = warp * cluster.split // EPILOGUE_WARPS  # the share that finishes this warp's rows
        tiles = self.scheduler.count(grid)
        thread = cute.arch.thread_idx()[0]
        self.pad(grid, thread, tensors)
        accumulator = PipelineState.reading(config.accumulators)
        lanes = tmem + warp * (WARP * TMEM_LANE)
        staged = lanes + config.accumulators * config.n_block
        exchange = self.exchange_of(shared, cluster, warp)
        block = config.block_channels(self.spec)
        slots = StagingSlots(shared_address(exchange), thread % WARP, config.slot_bytes, block, self.spec.co)
        phase = Int32(0)  # of the exchange of partial sums: alternates with every block
        while tile < tiles:
            place = self.scheduler.place(tile, grid, cluster.share, cluster.split)
            for block in cutlass.range(config.blocks, unroll=1):
                wait(shared.acc_full.subview(accumulator.index), accumulator.phase)
                meet()
                prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                sums, columns = lanes + accumulator.index * config.n_block, staged + block * config.staged_columns
                if cutlass.const_expr(config.max_split == 1):  # noqa: SIM114 (the next one is for the device)
                    self.stage(sums, columns)
                elif cluster.split == 1:
                    self.stage(sums, columns)
                else:
                    self.add_shares(shared, exchange, sums, columns, cluster, owner, warp, phase)
                    phase = phase ^ 1
                prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
                if prims.elect_sync():
                    empty = shared.acc_empty.subview(accumulator.index)
                    leaders = prims.mapa(empty, cluster.leader)
                    # All that it says is that tensor memory was read, and the tcgen05.fence orders that. A release
                    # would wait until everything that the warp has stored is visible to the whole GPU.
                    prims.mbarrier_arrive(leaders, count=1, scope=prims.MemScope.CLUSTER, relaxed=True)
                accumulator.advance()
            prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
            if owner == cluster.share:
                for m in cutlass.range(config.m_blocks, unroll=1):
                    ho, wo = divide(place.row + rank * config.cta_rows + m * BLOCK_ROWS + thread, grid.w)
                    row = Row.at(grid, place.n, place.t, ho, wo)
                    columns = staged + m * (config.n_blocks * config.staged_columns)
                    if cutlass.const_expr(self.spec.epilogue.statistic):
                        self.finish_by_row(columns, slots, row, place.channel, tensors)
                    else:
                        self.finish_by_channel(columns, slots, row, place.channel, tensors)
            tile += cluster.count

    def exchange_of(self, shared: Shared, cluster: Cluster, warp: Int32) -> cutlass.Array:
        """The part of the exchange memory that this warp has in the CTA that finishes its rows."""
        smallest = self.config.exchange_bytes // EPILOGUE_WARPS
        return shared.exchange.subview(warp % (EPILOGUE_WARPS // cluster.split) * cluster.split * smallest)

    def stage(self, block: Int32, staged: Int32) -> None:
        """Round this thread's row of a block to BF16, two channels to a column."""
        for first in range(0, self.config.n_block, PART):
            sums = self.load_columns(block + first, Float32)
            self.put_staged(staged, first, [arithmetic.pack(sums[i], sums[i + 1]) for i in range(0, PART, 2)])

    @cute.jit
    def add_shares(
        self,
        shared: Shared,
        exchange: cutlass.Array,
        block: Int32,
        staged: Int32,
        cluster: Cluster,
        owner: Int32,
        warp: Int32,
        phase: Int32,
    ):
        """Add up a block over the pairs of the cluster, and stage the rows that this warp finishes.

        Every warp has an owner among the shares. In the other shares it sends its rows to the owner's shared memory;
        there they are added in the order of the shares, so that results do not depend on who comes first.

        The sums arrive where the slots of this warp are, and only of this warp: it says that it has room when all slots
        have been stored, and no lane fills its slot before all have read the sums.
        """
        empty, full = shared.partial_empty.subview(warp), shared.partial_full.subview(warp)
        lane = cute.arch.thread_idx()[0] % WARP
        pieces = exchange.subview(lane * CHUNK_BYTES)
        share_bytes = WARP * self.config.n_block * FP32_BYTES
        owner_rank = owner * PAIR + cluster.rank
        if owner != cluster.share:
            wait_cluster(empty, phase)
            meet()
            index = cluster.share - Int32(cluster.share > owner)  # the owner sends none
            self.send_row(pieces.subview(index * share_bytes), block, owner_rank)
            prims.bar_warp_sync(ALL_LANES)
            if prims.elect_sync():
                prims.mbarrier_arrive(prims.mapa(full, owner_rank), scope=prims.MemScope.CLUSTER)
        else:
            prims.bar_warp_sync(ALL_LANES)
            if prims.elect_sync():
                for other in cutlass.range(cluster.split, unroll=1):
                    if other != owner:
                        theirs = prims.mapa(empty, other * PAIR + cluster.rank)
                        prims.mbarrier_arrive(theirs, scope=prims.MemScope.CLUSTER)
            wait_cluster(full, phase)
            meet()
            for part in cutlass.range_constexpr(0, self.config.n_block, PART):
                self.put_staged(staged, part, self.total(pieces, share_bytes, block, part, cluster, owner))
            prims.bar_warp_sync(ALL_LANES)  # all lanes have read the sums

    def piece(self, column: int) -> int:
        """Where the piece with a column lies: four columns of a row, with those of the warp's other rows beside it."""
        return column // CHUNK_REGISTERS * (WARP * CHUNK_BYTES)

    def send_row(self, pieces: cutlass.Array, block: Int32, rank: Int32) -> None:
        """Store this thread's row of a block into the shared memory of another CTA."""
        for part in range(0, self.config.n_block, PART):
            sums = self.load_columns(block + part, Float32)
            for first in range(0, PART, CHUNK_REGISTERS):
                place = shared_pointer(pieces.subview(self.piece(part + first)), Float32)
                four = tuple(sums[first + index] for index in range(CHUNK_REGISTERS))
                prims.mapa(place, rank).store(cutlass.Vector.from_elements(four, dtype=Float32), alignment=CHUNK_BYTES)

    @cute.jit
    def total(
        self,
        pieces: cutlass.Array,
        share_bytes: cutlass.Constexpr[int],
        block: Int32,
        part: cutlass.Constexpr[int],
        cluster: Cluster,
        owner: Int32,
    ) -> arithmetic.Fragment:
        """Some columns of this thread's row, added up over all shares and rounded to BF16."""
        own = self.load_columns(block + part, Float32)
        sums = cutlass.Array(Float32, PART, space=cutlass.AddressSpace.rmem)
        for index in cutlass.range_constexpr(PART):
            sums[index] = Float32(0.0)
        for share in cutlass.range(cluster.split, unroll=1):
            if share == owner:
                for index in cutlass.range_constexpr(PART):
                    sums[index] = sums[index] + own[index]
            else:
                theirs = pieces.subview((share - Int32(share > owner)) * share_bytes)
                for first in cutlass.range_constexpr(0, PART, CHUNK_REGISTERS):
                    place = shared_pointer(theirs.subview(self.piece(part + first)), Float32)
                    four = prims.load_ext(place, count=CHUNK_REGISTERS)
                    for index in cutlass.range_constexpr(CHUNK_REGISTERS):
                        sums[first + index] = sums[first + index] + four[index]
        return [arithmetic.pack(sums[index], sums[index + 1]) for index in range(0, PART, 2)]

    def load_columns(self, columns: Int32, dtype: type, count: int = PART) -> cutlass.Vector:
        """This thread's row of some columns of tensor memory."""
        values = prims.tcgen05_ld("32x32b", cutlass.inttoptr(columns, TMEM, dtype), num=count)
        prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
        return values

    def put_staged(self, staged: Int32, channel: int, fragment: arithmetic.Fragment) -> None:
        vector = cutlass.Vector.from_elements(tuple(fragment), dtype=Int32)
        prims.tcgen05_st("32x32b", cutlass.inttoptr(staged + channel // 2, TMEM, Int32), vector)

    def get_staged(self, staged: Int32, channel: int, size: int) -> arithmetic.Fragment:
        values = self.load_columns(staged + channel // 2, Int32, size // 2)
        return [values[index] for index in range(size // 2)]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The steps of the epilogue over a block: first channel and size of each.

        What one load of tensor memory takes is a power of two.
        """
        channels, found, first = self.config.block_channels(self.spec), [], 0
        while first < channels:
            size = min(PART, 1 << (channels - first).bit_length() - 1)
            found.append((first, size))
            first += size
        return found

    @cute.jit
    def finish_by_channel(self, staged: Int32, slots: StagingSlots, row: Row, channel: Int32, tensors: Addresses):
        """The epilogue of this thread's row where no step has a statistic."""
        config, finisher = self.config, self.finisher
        # A row that is saved is no halo row, and its value is its result: one block of bytes for all destinations.
        destinations = finisher.saved_destinations(row, tensors) + finisher.destinations(row, tensors)
        for block in cutlass.range(config.n_blocks, unroll=1):
            columns, first = staged + block * config.staged_columns, channel + block * config.n_block
            for part, size in self.parts:
                main = self.get_staged(columns, part, size)
                span = finisher.span(row, first + part, 1, main, tensors)
                slots.put(part, finisher.result(finisher.value(main, span), None, span))
            slots.store(destinations, first)

    @cute.jit
    def finish_by_row(self, staged: Int32, slots: StagingSlots, row: Row, channel: Int32, tensors: Addresses):
        """The epilogue of this thread's row: up to the statistic, block by block, then the rest."""
        config, finisher = self.config, self.finisher
        saved, destinations = finisher.saved_destinations(row, tensors), finisher.destinations(row, tensors)
        sums = finisher.no_sums()
        for block in cutlass.range(config.n_blocks, unroll=1):
            columns, first = staged + block * config.staged_columns, channel + block * config.n_block
            for part, size in self.parts:
                main = self.get_staged(columns, part, size)
                value = finisher.value(main, finisher.span(row, first + part, 1, main, tensors))
                sums.add(finisher.statistic(value))
                self.put_staged(columns, part, value)
                if cutlass.const_expr(len(saved) > 0):
                    slots.put(part, value)
            if cutlass.const_expr(len(saved) > 0):
                slots.store(saved, first)
        prims.tcgen05_wait(prims.Tcgen05Wait.STORE)
        prepared = finisher.prepared(sums.values)
        for block in cutlass.range(config.n_blocks, unroll=1):
            columns, first = staged + block * config.staged_columns, channel + block * config.n_block
            for part, size in self.parts:
                value = self.get_staged(columns, part, size)
                span = finisher.span(row, first + part, 1, value, tensors)
                slots.put(part, finisher.result(value, prepared, span))
            slots.store(destinations, first)

    @cute.jit
    def pad(self, grid: PaddedGrid, thread: Int32, tensors: Addresses):
        """This CTA's share of the padding pixels; neighbouring lanes share a pixel."""
        finisher = self.finisher
        row_chunks = self.spec.co // CHUNK_CHANNELS
        lanes = row_chunks & -row_chunks  # the largest power of two that divides it
        pixels_at_once = BLOCK_ROWS // lanes
        index = cute.arch.block_idx()[0] * pixels_at_once + thread // lanes
        padding = finisher.padding_pixels(grid)
        while index < padding:
            finisher.pad(grid, index, thread % lanes, lanes, tensors)
            index += cute.arch.grid_dim()[0] * pixels_at_once
