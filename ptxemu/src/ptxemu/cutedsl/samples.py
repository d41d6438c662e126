"""Two small kernels that use what the kernels of this package use, one for each architecture.

Both convolve along rows, `out[p, c] = sum over s, k of weight[c, s, k] * x[p + s, k]` with s in 0..2 and rows past the
end counting as zeros. They are what the emulator's own tests break on purpose, and what `benchmark/emulator_vs_gpu.py`
runs on a GPU as well. They are written to be read, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
import torch.nn.functional as F
from cutlass import BFloat16, Float32, Int8, Int16, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

TAPS = 3
CHUNK = 64  # channels of one 128-byte row of shared memory
CHUNK_BYTES = 128
K16_STEPS = CHUNK // 16
K16_BYTES = 32
STAGES = 3
WARPGROUP = 128
SHARED = cutlass.AddressSpace.smem
REGISTERS = cutlass.AddressSpace.rmem
EPILOGUE_BARRIER = 1
SWIZZLE_128B = cutlass.Swizzle(3, 4, 3)
EIGHT_ROWS_BYTES = 8 * CHUNK_BYTES  # the stride between groups of eight rows in a K-major tile


@dataclass(frozen=True)
class Case:
    """One launch of a sample: the launcher, its operands in small integers (every sum is exact) and the result."""

    launcher: RowConvSm90 | RowConvSm100
    arch: str
    x: torch.Tensor
    weight: torch.Tensor
    expected: torch.Tensor
    rows: int

    def output(self) -> torch.Tensor:
        return torch.full_like(self.expected, torch.nan)

    def samples(self) -> tuple[Any, ...]:
        """What `cute.compile` takes after the launcher. The number of rows stays open."""
        tensors = (_sample(None, self.x.shape[1]), _sample(*self.weight.shape), _sample(None, self.expected.shape[1]))
        return *tensors, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=False)


def _sample(rows: int | None, columns: int) -> Any:
    shape = (cute.sym_int() if rows is None else rows, columns)
    return make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=16)


def make_case(name: str, rows: int) -> Case:
    """The sample `name`, one of `SAMPLES`, on `rows` rows."""
    launcher = SAMPLES[name]
    channels, overlapping = launcher.channels, getattr(launcher, "overlapping", False)
    hopper = isinstance(launcher, RowConvSm90)
    outputs = 2 * SM90_OUTPUTS if hopper else SM100_OUTPUTS
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-2, 3, (rows, channels), generator=generator).to(torch.bfloat16)
    weight = torch.randint(-1, 2, (outputs, TAPS, channels), generator=generator).to(torch.bfloat16)
    expected = reference(x, weight)
    if hopper:
        expected = expected + expected.sum(1, keepdim=True)
    weight = weight.reshape(outputs, -1)
    if overlapping:
        x, weight = F.pad(x, (0, 0, 0, CHUNK // channels - 1)), F.pad(weight, (0, channels))
    arch = "sm_90a" if hopper else "sm_100a"
    return Case(launcher, arch, x.contiguous(), weight.contiguous(), expected.to(torch.bfloat16), rows)


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[rows, channels]` and `[outputs, 3, channels]` to FP32 `[rows, outputs]`."""
    padded = F.pad(x.float(), (0, 0, 0, TAPS - 1))
    return sum(padded[s : s + x.shape[0]] @ weight[:, s].float().T for s in range(TAPS))


@cute.jit
def _wait(barrier, parity):
    while not prims.mbarrier_try_wait_parity(barrier, parity, time_limit=10_000_000):
        pass


# --- Hopper ----------------------------------------------------------------------------------------------------------

SM90_ROWS = 64  # rows of a tile, one wgmma high
SM90_OUTPUTS = 64  # output channels of a CTA; the other CTA of the cluster has the other half
SM90_A_HALF = 40  # rows of A that a CTA loads for both; two halves hold the tile's 64 + 2 rows
SM90_A_BYTES = 2 * SM90_A_HALF * CHUNK_BYTES
SM90_B_BYTES = SM90_OUTPUTS * CHUNK_BYTES
SM90_ACCUMULATORS = SM90_ROWS * SM90_OUTPUTS // WARPGROUP
SM90_PRODUCER_WARP = 4
QUAD = 4  # lanes that share a row of a wgmma fragment


@dataclass(frozen=True)
class Step:
    """One K=16 step on a chunk: the row of A it starts at, and the K16 steps into the tiles of A and B."""

    row: int
    a: int
    tap: int
    b: int


def _row_shifted_steps() -> list[Step]:
    """A tap is a start address one row further on."""
    return [Step(s, k, s, k) for s in range(TAPS) for k in range(K16_STEPS)]


def _overlapping_steps() -> list[Step]:
    """With 16 channels a row of the map spans four pixels, so that a tap is the next K16 step of the same row."""
    return [Step(0, s, 0, s) for s in range(TAPS)]


def _accumulators_type() -> ir.Type:
    return llvm.StructType.get_literal([ir.F32Type.get()] * SM90_ACCUMULATORS)


def _wgmma(accumulators: ir.Value, a: Int64, b: Int64) -> ir.Value:
    shape = ir.Attribute.parse(f"#nvvm.shape<m = {SM90_ROWS}, n = {SM90_OUTPUTS}, k = 16>")
    types = (nvvm.WGMMATypes.bf16, nvvm.WGMMATypes.bf16, nvvm.WGMMATypes.f32)
    scales = (nvvm.WGMMAScaleOut.one, nvvm.WGMMAScaleIn.one, nvvm.WGMMAScaleIn.one)
    layouts = (nvvm.MMALayout.row, nvvm.MMALayout.col)
    operands = (accumulators, a.ir_value(), b.ir_value())
    return nvvm.wgmma_mma_async(_accumulators_type(), *operands, shape, *types, *scales, *layouts)


def _wgmma_descriptor(address: Int32) -> Int64:
    swizzle_128b, leading = 1 << 62, 1 << 16
    return Int64(swizzle_128b | (EIGHT_ROWS_BYTES >> 4) << 32 | leading) | Int64((address & 0x3FFFF) >> 4)


@cute.kernel
def _sm90_kernel(
    map_x: cutlass.GridConstant[cuda.TensorMap],
    map_w: cutlass.GridConstant[cuda.TensorMap],
    map_out: cutlass.GridConstant[cuda.TensorMap],
    rows: Int32,
    chunks: cutlass.Constexpr[int],
    overlapping: cutlass.Constexpr[bool],
):
    """A cluster of two CTAs on one tile of rows, 64 output channels each.

    A is loaded by halves and multicast. The sum over all channels of a row, both CTAs' together, is added to each of
    the row's outputs: the partial sums meet in distributed shared memory.
    """
    steps = _overlapping_steps() if overlapping else _row_shifted_steps()
    taps_loaded = 1 if overlapping else TAPS
    stage_bytes = SM90_A_BYTES + taps_loaded * SM90_B_BYTES
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    full = cutlass.Array(Int64, STAGES, space=SHARED)
    empty = cutlass.Array(Int64, STAGES, space=SHARED)
    sums_full = cutlass.Array(Int64, 2, space=SHARED)
    sums = cutlass.Array(Float32, 2 * 2 * SM90_ROWS, space=SHARED, alignment=16)  # [slot][CTA][row]
    sA = cutlass.Array(Int8, STAGES * SM90_A_BYTES, space=SHARED, alignment=1024)
    sB = cutlass.Array(Int8, STAGES * taps_loaded * SM90_B_BYTES, space=SHARED, alignment=1024)
    sOut = cutlass.Array(BFloat16, SM90_ROWS * SM90_OUTPUTS, space=SHARED, alignment=1024)
    if warp == 0 and prims.elect_sync():
        for i in cutlass.range_constexpr(STAGES):
            prims.mbarrier_init(full.subview(i), 1)
            prims.mbarrier_init(empty.subview(i), 2)  # the consumers of both CTAs
        for i in cutlass.range_constexpr(2):
            prims.mbarrier_init(sums_full.subview(i), WARPGROUP)
    prims.fence_mbarrier_init()
    prims.barrier_cluster_arrive_relaxed()
    prims.barrier_cluster_wait()

    tiles = (rows + SM90_ROWS - 1) // SM90_ROWS
    stage = Int32(0)
    if warp == SM90_PRODUCER_WARP:
        parity = Int32(1)
        tile = Int32(bidx // 2)
        while tile < tiles:
            for chunk in cutlass.range(chunks, unroll=1):
                _wait(empty.subview(stage), parity)
                if prims.elect_sync():
                    prims.mbarrier_arrive_expect_tx(full.subview(stage), stage_bytes)
                    prims.cp_async_bulk_tensor_shared_cluster_global(
                        sA.subview(stage * SM90_A_BYTES + rank * (SM90_A_BYTES // 2)),
                        map_x.get_ptr(),
                        (chunk * CHUNK, tile * SM90_ROWS + rank * SM90_A_HALF),
                        full.subview(stage),
                        [],
                        multicast_mask=Int16(3),
                    )
                    for tap in cutlass.range_constexpr(taps_loaded):
                        prims.cp_async_bulk_tensor_shared_cluster_global(
                            sB.subview((stage * taps_loaded + tap) * SM90_B_BYTES),
                            map_w.get_ptr(),
                            ((tap * chunks + chunk) * CHUNK, rank * SM90_OUTPUTS),
                            full.subview(stage),
                            [],
                        )
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += grid // 2
    else:
        a_start = cute.arch.make_warp_uniform(sA.data_ptr().toint().to(Int32))
        b_start = cute.arch.make_warp_uniform(sB.data_ptr().toint().to(Int32))
        accumulators = cutlass.Array(Float32, SM90_ACCUMULATORS, space=REGISTERS)
        lane = tidx % 32
        parity = Int32(0)
        slot = Int32(0)
        slot_parity = Int32(0)
        tile = Int32(bidx // 2)
        while tile < tiles:
            for i in cutlass.range_constexpr(SM90_ACCUMULATORS):
                accumulators[i] = Float32(0.0)
            for _chunk in cutlass.range(chunks, unroll=1):
                _wait(full.subview(stage), parity)
                prims.wgmma_fence_aligned()
                value = llvm.UndefOp(_accumulators_type()).result
                for i in cutlass.range_constexpr(SM90_ACCUMULATORS):
                    value = llvm.insertvalue(value, accumulators[i].ir_value(), [i])
                for step in cutlass.range_constexpr(len(steps)):
                    s = steps[step]
                    a = a_start + stage * SM90_A_BYTES + (s.row * CHUNK_BYTES + s.a * K16_BYTES)
                    b = b_start + (stage * taps_loaded + s.tap) * SM90_B_BYTES + s.b * K16_BYTES
                    value = _wgmma(value, _wgmma_descriptor(a), _wgmma_descriptor(b))
                for i in cutlass.range_constexpr(SM90_ACCUMULATORS):
                    accumulators[i] = Float32(llvm.extractvalue(ir.F32Type.get(), value, [i]))
                prims.wgmma_commit_group_sync_aligned()
                prims.wgmma_wait_group_sync_aligned(0)
                if tidx < 2:
                    prims.mbarrier_arrive(prims.mapa(empty.subview(stage), tidx), scope=prims.MemScope.CLUSTER)
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    parity = parity ^ 1

            # A thread holds the columns 8 j + 2 (lane % 4) + {0, 1} of the rows r and r + 8.
            for half in cutlass.range_constexpr(2):
                row = warp * 16 + half * 8 + lane // QUAD
                total = Float32(0.0)
                for j in cutlass.range_constexpr(SM90_ACCUMULATORS // 4):
                    total += accumulators[j * 4 + half * 2] + accumulators[j * 4 + half * 2 + 1]
                total += cute.arch.shuffle_sync_bfly(total, offset=1)
                total += cute.arch.shuffle_sync_bfly(total, offset=2)
                if lane % QUAD == 0:
                    place = sums.subview((slot * 2 + rank) * SM90_ROWS + row)
                    place.data_ptr().store(total)
                    prims.mapa(place, rank ^ 1).data_ptr().store(total)
            prims.mbarrier_arrive(prims.mapa(sums_full.subview(slot), rank ^ 1), scope=prims.MemScope.CLUSTER)
            while not prims.mbarrier_try_wait_parity(
                sums_full.subview(slot), slot_parity, scope=prims.MBarrierScope.CLUSTER, order=prims.MemOrder.ACQUIRE
            ):
                pass
            prims.barrier_cta_sync(EPILOGUE_BARRIER, thread_count=WARPGROUP)  # this CTA's own sums are there, too

            for half in cutlass.range_constexpr(2):
                row = warp * 16 + half * 8 + lane // QUAD
                place = sums.subview(slot * 2 * SM90_ROWS + row)
                total = place.data_ptr().load() + (place.data_ptr() + SM90_ROWS).load()
                for j in cutlass.range_constexpr(SM90_ACCUMULATORS // 4):
                    pair = cutlass.Array(BFloat16, 2, space=REGISTERS)
                    pair[0] = (accumulators[j * 4 + half * 2] + total).to(BFloat16)
                    pair[1] = (accumulators[j * 4 + half * 2 + 1] + total).to(BFloat16)
                    target = sOut.subview(row * SM90_OUTPUTS + j * 8 + (lane % QUAD) * 2)
                    target.data_ptr().store_swizzled(pair.load(0, 2), alignment=4, swizzle=SWIZZLE_128B)
            cute.arch.fence_view_async_shared()
            prims.barrier_cta_sync(EPILOGUE_BARRIER, thread_count=WARPGROUP)
            if tidx == 0:
                coordinates = (rank * SM90_OUTPUTS, tile * SM90_ROWS)
                prims.cp_async_bulk_tensor_global_shared_cta(map_out.get_ptr(), sOut, coordinates)
                prims.cp_async_bulk_commit_group()
                prims.cp_async_bulk_wait_group(0, read=True)
            prims.barrier_cta_sync(EPILOGUE_BARRIER, thread_count=WARPGROUP)
            slot = slot ^ 1
            if slot == 0:
                slot_parity = slot_parity ^ 1
            tile += grid // 2
        if tidx == 0:
            prims.cp_async_bulk_wait_group(0, read=False)
    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()


class RowConvSm90:
    """`out = B(conv + sum of the row's 128 conv values)`, BF16 `[rows, 128]`, on `clusters` pairs of CTAs.

    x is `[rows, channels]`, the weight `[128, 3 * channels]`. With `overlapping`, channels is 16 and the rows of the
    tensor map span four pixels each and overlap: x then has three more rows, of zeros, and the weight is `[128, 64]`,
    its last 16 columns zero.
    """

    def __init__(self, channels: int, *, overlapping: bool = False, clusters: int = 1):
        self.channels, self.overlapping, self.clusters = channels, overlapping, clusters
        self.chunks = 1 if overlapping else channels // CHUNK

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, rows: Int32, stream):
        outputs = 2 * SM90_OUTPUTS
        depth = CHUNK if self.overlapping else TAPS * self.channels
        map_x = _row_map(x, CHUNK if self.overlapping else self.channels, rows, self.channels, SM90_A_HALF)
        map_w = _row_map(weight, depth, outputs, depth, SM90_OUTPUTS)
        map_out = _row_map(out, outputs, rows, outputs, SM90_ROWS)
        _sm90_kernel(map_x, map_w, map_out, rows, self.chunks, self.overlapping).launch(
            grid=(2 * self.clusters, 1, 1), block=(WARPGROUP + 32, 1, 1), cluster=(2, 1, 1), stream=stream
        )


def _row_map(tensor: cute.Tensor, columns: int, rows: Int32, pitch: int, box_rows: int) -> cuda.TensorMap:
    """A 128-byte-swizzled map of BF16 `[rows, columns]` with `pitch` elements from row to row, 64 columns to a box."""
    return cuda.create_tensor_map_tiled(
        global_address=tensor.iterator.toint(),
        dtype=BFloat16,
        global_dims=(columns, rows),
        global_strides=(pitch * 2 // 16,),
        box_dims=(CHUNK, box_rows),
        swizzle=cuda.TensorMapSwizzle.s128b,
    )


# --- Blackwell -------------------------------------------------------------------------------------------------------

SM100_ROWS = 128  # rows of a CTA; the pair's MMA is 256 high
SM100_OUTPUTS = 64
SM100_A_BOX = SM100_ROWS + TAPS - 1
SM100_A_BYTES = (SM100_ROWS + 8) * CHUNK_BYTES  # the box in whole groups of eight rows
SM100_B_ROWS = SM100_OUTPUTS // 2  # each CTA of a pair holds half of the output channels
SM100_B_BYTES = SM100_B_ROWS * CHUNK_BYTES
SM100_ACCUMULATORS = 2
SM100_COLUMNS = SM100_ACCUMULATORS * SM100_OUTPUTS
SM100_EPILOGUE_WARPS = 4
SM100_MMA_WARP = 4
SM100_PRODUCER_WARP = 5
SM100_LOAD_COLUMNS = 32
ALLOCATION_BARRIER = 2


@cute.kernel
def _sm100_kernel(
    map_x: cutlass.GridConstant[cuda.TensorMap],
    map_w: cutlass.GridConstant[cuda.TensorMap],
    map_out: cutlass.GridConstant[cuda.TensorMap],
    rows: Int32,
    chunks: cutlass.Constexpr[int],
):
    """A pair of CTAs on 256 rows: one warp loads, one issues MMAs, four move accumulators to the output."""
    pair = prims.CTAGroup.CTA_2
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    full = cutlass.Array(Int64, STAGES, space=SHARED)
    empty = cutlass.Array(Int64, STAGES, space=SHARED)
    acc_full = cutlass.Array(Int64, SM100_ACCUMULATORS, space=SHARED)
    acc_empty = cutlass.Array(Int64, SM100_ACCUMULATORS, space=SHARED)
    tmem_slot = cutlass.Array(Int32, 1, space=SHARED)
    sA = cutlass.Array(Int8, STAGES * SM100_A_BYTES, space=SHARED, alignment=1024)
    sB = cutlass.Array(Int8, STAGES * TAPS * SM100_B_BYTES, space=SHARED, alignment=1024)
    sOut = cutlass.Array(BFloat16, SM100_ROWS * SM100_OUTPUTS, space=SHARED, alignment=1024)
    if warp == 0 and prims.elect_sync():
        for i in cutlass.range_constexpr(STAGES):
            prims.mbarrier_init(full.subview(i), 1)
            prims.mbarrier_init(empty.subview(i), 1)
        for i in cutlass.range_constexpr(SM100_ACCUMULATORS):
            prims.mbarrier_init(acc_full.subview(i), 1)
            prims.mbarrier_init(acc_empty.subview(i), 2 * SM100_EPILOGUE_WARPS)  # of both CTAs
    prims.fence_mbarrier_init()
    prims.barrier_cluster_arrive_relaxed()
    prims.barrier_cluster_wait()

    tiles = (rows + 2 * SM100_ROWS - 1) // (2 * SM100_ROWS)
    stage = Int32(0)
    tile = Int32(bidx // 2)
    if warp == SM100_PRODUCER_WARP:
        parity = Int32(1)
        while tile < tiles:
            for chunk in cutlass.range(chunks, unroll=1):
                _wait(empty.subview(stage), parity)
                if prims.elect_sync():
                    if rank == 0:  # the leader's barrier counts the bytes of both CTAs
                        both = 2 * (SM100_A_BOX * CHUNK_BYTES + TAPS * SM100_B_BYTES)
                        prims.mbarrier_arrive_expect_tx(full.subview(stage), both)
                    prims.cp_async_bulk_tensor_shared_cluster_global(
                        sA.subview(stage * SM100_A_BYTES),
                        map_x.get_ptr(),
                        (chunk * CHUNK, (tile * 2 + rank) * SM100_ROWS),
                        full.subview(stage),
                        [],
                        group=pair,
                    )
                    for tap in cutlass.range_constexpr(TAPS):
                        prims.cp_async_bulk_tensor_shared_cluster_global(
                            sB.subview((stage * TAPS + tap) * SM100_B_BYTES),
                            map_w.get_ptr(),
                            ((tap * chunks + chunk) * CHUNK, rank * SM100_B_ROWS),
                            full.subview(stage),
                            [],
                            group=pair,
                        )
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += grid // 2
    elif warp == SM100_MMA_WARP:
        prims.barrier_cta_sync(ALLOCATION_BARRIER, thread_count=32 * (SM100_EPILOGUE_WARPS + 1))
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        tmem = tmem_slot.load()
        instruction = prims.Tcgen05InstrDesc.build(
            a_dtype=BFloat16, b_dtype=BFloat16, c_dtype=Float32, m_dim=2 * SM100_ROWS, n_dim=SM100_OUTPUTS
        )
        layout = {"leading_byte_offset": 16, "stride_byte_offset": EIGHT_ROWS_BYTES, "layout": 2}
        a_start = prims.Tcgen05SmemDesc.build(sA, **layout)
        b_start = prims.Tcgen05SmemDesc.build(sB, **layout)
        if rank == 0:
            parity = Int32(0)
            acc = Int32(0)
            acc_parity = Int32(1)
            while tile < tiles:
                _wait(acc_empty.subview(acc), acc_parity)
                prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                target = prims.make_tmem_ptr(tmem + acc * SM100_OUTPUTS, Float32)
                for chunk in cutlass.range(chunks, unroll=1):
                    _wait(full.subview(stage), parity)
                    prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
                    for tap in cutlass.range_constexpr(TAPS):
                        for k in cutlass.range_constexpr(K16_STEPS):
                            if prims.elect_sync():
                                a = stage * (SM100_A_BYTES >> 4) + ((tap * CHUNK_BYTES + k * K16_BYTES) >> 4)
                                b = (stage * TAPS + tap) * (SM100_B_BYTES >> 4) + (k * K16_BYTES >> 4)
                                prims.tcgen05_mma(
                                    prims.Tcgen05MMAKind.F16,
                                    pair,
                                    target,
                                    a_start + Int64(a),
                                    b_start + Int64(b),
                                    instruction,
                                    (chunk > 0) | (tap > 0) | (k > 0),
                                )
                    if prims.elect_sync():
                        prims.tcgen05_commit(empty.subview(stage), multicast_mask=Int32(3), group=pair)
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        parity = parity ^ 1
                if prims.elect_sync():
                    prims.tcgen05_commit(acc_full.subview(acc), multicast_mask=Int32(3), group=pair)
                acc += 1
                if acc == SM100_ACCUMULATORS:
                    acc = Int32(0)
                    acc_parity = acc_parity ^ 1
                tile += grid // 2
    else:
        if warp == 0:
            prims.tcgen05_alloc(tmem_slot, SM100_COLUMNS, group=pair)
        prims.barrier_cta_sync(ALLOCATION_BARRIER, thread_count=32 * (SM100_EPILOGUE_WARPS + 1))
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        tmem = tmem_slot.load()
        acc = Int32(0)
        acc_parity = Int32(0)
        while tile < tiles:
            _wait(acc_full.subview(acc), acc_parity)
            prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
            for part in cutlass.range_constexpr(SM100_OUTPUTS // SM100_LOAD_COLUMNS):
                column = tmem + acc * SM100_OUTPUTS + part * SM100_LOAD_COLUMNS
                source = cutlass.inttoptr((warp * 32 << 16) + column, 6, Float32)
                values = prims.tcgen05_ld("32x32b", source, num=SM100_LOAD_COLUMNS)
                prims.tcgen05_wait(prims.Tcgen05Wait.LOAD)
                rounded = values.to(BFloat16)
                for vector in cutlass.range_constexpr(SM100_LOAD_COLUMNS // 8):
                    place = sOut.subview(tidx * SM100_OUTPUTS + part * SM100_LOAD_COLUMNS + vector * 8)
                    eight = rounded[vector * 8 : vector * 8 + 8]
                    place.data_ptr().store_swizzled(eight, alignment=16, swizzle=SWIZZLE_128B)
            prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
            if prims.elect_sync():
                leader = prims.mapa(acc_empty.subview(acc), Int32(0))
                prims.mbarrier_arrive(leader, count=1, scope=prims.MemScope.CLUSTER)
            cute.arch.fence_view_async_shared()
            prims.barrier_cta_sync(EPILOGUE_BARRIER, thread_count=WARPGROUP)
            if tidx == 0:
                coordinates = (Int32(0), (tile * 2 + rank) * SM100_ROWS)
                prims.cp_async_bulk_tensor_global_shared_cta(map_out.get_ptr(), sOut, coordinates)
                prims.cp_async_bulk_commit_group()
                prims.cp_async_bulk_wait_group(0, read=True)
            prims.barrier_cta_sync(EPILOGUE_BARRIER, thread_count=WARPGROUP)
            acc += 1
            if acc == SM100_ACCUMULATORS:
                acc = Int32(0)
                acc_parity = acc_parity ^ 1
            tile += grid // 2
        if tidx == 0:
            prims.cp_async_bulk_wait_group(0, read=False)
        prims.tcgen05_fence(prims.Tcgen05Fence.BEFORE_THREAD_SYNC)
    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()
    if warp == 0:
        prims.tcgen05_fence(prims.Tcgen05Fence.AFTER_THREAD_SYNC)
        prims.tcgen05_relinquish_alloc_permit(group=pair)
        prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem_slot.load(), Float32), SM100_COLUMNS, group=pair)


class RowConvSm100:
    """`out = B(conv)`, BF16 `[rows, 64]`, on `clusters` pairs of CTAs.

    x is `[rows, channels]`, the weight `[64, 3 * channels]`.
    """

    def __init__(self, channels: int, *, clusters: int = 1):
        self.channels, self.clusters, self.chunks = channels, clusters, channels // CHUNK

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, rows: Int32, stream):
        depth = TAPS * self.channels
        map_x = _row_map(x, self.channels, rows, self.channels, SM100_A_BOX)
        map_w = _row_map(weight, depth, SM100_OUTPUTS, depth, SM100_B_ROWS)
        map_out = _row_map(out, SM100_OUTPUTS, rows, SM100_OUTPUTS, SM100_ROWS)
        _sm100_kernel(map_x, map_w, map_out, rows, self.chunks).launch(
            grid=(2 * self.clusters, 1, 1),
            block=(32 * (SM100_EPILOGUE_WARPS + 2), 1, 1),
            cluster=(2, 1, 1),
            stream=stream,
        )


SAMPLES = {
    "sm90_row_shift": RowConvSm90(128),
    "sm90_overlapping_rows": RowConvSm90(16, overlapping=True),
    "sm100_row_shift": RowConvSm100(128),
}
