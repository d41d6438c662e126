"""The emulator against a Hopper GPU: the same compiled functions, run on both, compared bit for bit.

    python -m benchmark.emulator_vs_gpu              # in each case the emulator first, then the GPU
    python -m benchmark.emulator_vs_gpu --cpu-only   # the emulator against PyTorch

Each case is compiled once for sm_90a; the emulator runs that function's PTX and host code, the GPU its machine code. On
small integers every sum is exact, so the results must be equal bit for bit. On random data the order of additions
inside one tensor-core instruction is the hardware's own: the emulator adds the 16 products of a K step and the
accumulator exactly and rounds once to FP32 (nearest), and the case "random data" measures how far the GPU is from that,
in units of 2**-24 times the sum of the absolute products that entered the element. The approximate functions of the GPU
are compared within the errors that the PTX ISA documents.

Every case runs in a process of its own with a time limit, several at once, so that a kernel which hangs costs its case
only. What differs from PyTorch in the emulator is not tried on the GPU. The table is printed last; the exit status is 1
if anything differs.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import Any

import cutlass
import torch
from cuda.bindings import driver
from cutlass import BFloat16, Float32, Int8, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from ptxemu import emulate
from ptxemu.cutedsl.samples import make_case

ARCH = "sm_90a"
CASE_SECONDS = 120
SCHEDULES = ("early", "late", "random")

# --- one wgmma tile, with everything in its descriptors open ---------------------------------------------------------

ROWS, COLUMNS, DEPTH = 64, 64, 64
TILE_ROWS = 80  # of A in shared memory: a start address may lie up to 16 rows into it
ACCUMULATORS = ROWS * COLUMNS // 128
LAYOUT_CODES = {16: 0, 128: 1, 64: 2, 32: 3}  # by the bytes of a row: no swizzle, 128, 64 and 32 bytes
SWIZZLES = {
    16: cuda.TensorMapSwizzle.none,
    32: cuda.TensorMapSwizzle.s32b,
    64: cuda.TensorMapSwizzle.s64b,
    128: cuda.TensorMapSwizzle.s128b,
}
SHARED, REGISTERS = cutlass.AddressSpace.smem, cutlass.AddressSpace.rmem


def _struct() -> ir.Type:
    return llvm.StructType.get_literal([ir.F32Type.get()] * ACCUMULATORS)


def _wgmma(value: ir.Value, a: Int64, b: Int64) -> ir.Value:
    shape = ir.Attribute.parse(f"#nvvm.shape<m = {ROWS}, n = {COLUMNS}, k = 16>")
    types = (nvvm.WGMMATypes.bf16, nvvm.WGMMATypes.bf16, nvvm.WGMMATypes.f32)
    scales = (nvvm.WGMMAScaleOut.one, nvvm.WGMMAScaleIn.one, nvvm.WGMMAScaleIn.one)
    layouts = (nvvm.MMALayout.row, nvvm.MMALayout.col)
    return nvvm.wgmma_mma_async(_struct(), value, a.ir_value(), b.ir_value(), shape, *types, *scales, *layouts)


@cute.kernel
def _tile_kernel(
    map_a: cutlass.GridConstant[cuda.TensorMap],
    map_b: cutlass.GridConstant[cuda.TensorMap],
    out: cute.Tensor,
    shift: Int32,
    base_offset: Int32,
    span: cutlass.Constexpr[int],
):
    """out[64, 64] = a[shift : shift + 64] @ b.T in FP32, from shared-memory rows of `span` bytes."""
    boxes = DEPTH * 2 // span
    a_bytes, b_bytes = TILE_ROWS * span, COLUMNS * span
    tidx, _, _ = cute.arch.thread_idx()
    barrier = cutlass.Array(Int64, 1, space=SHARED)
    sA = cutlass.Array(Int8, TILE_ROWS * DEPTH * 2, space=SHARED, alignment=1024)
    sB = cutlass.Array(Int8, COLUMNS * DEPTH * 2, space=SHARED, alignment=1024)
    if tidx == 0:
        prims.mbarrier_init(barrier, 1)
    prims.fence_mbarrier_init()
    cute.arch.sync_threads()
    if tidx == 0:
        prims.mbarrier_arrive_expect_tx(barrier, (TILE_ROWS + COLUMNS) * DEPTH * 2)
        for box in cutlass.range_constexpr(boxes):
            place = (box * span // 2, 0)
            prims.cp_async_bulk_tensor_shared_cluster_global(
                sA.subview(box * a_bytes), map_a.get_ptr(), place, barrier, []
            )
            prims.cp_async_bulk_tensor_shared_cluster_global(
                sB.subview(box * b_bytes), map_b.get_ptr(), place, barrier, []
            )
    while not prims.mbarrier_try_wait_parity(barrier, Int32(0), time_limit=10_000_000):
        pass
    a_start = cute.arch.make_warp_uniform(sA.data_ptr().toint().to(Int32))
    b_start = cute.arch.make_warp_uniform(sB.data_ptr().toint().to(Int32))
    value = llvm.UndefOp(_struct()).result
    for i in cutlass.range_constexpr(ACCUMULATORS):
        value = llvm.insertvalue(value, Float32(0.0).ir_value(), [i])
    prims.wgmma_fence_aligned()
    for step in cutlass.range_constexpr(DEPTH // 16):
        # A K=16 step is 32 bytes of a row. Without a swizzle these are two boxes of 16, one leading offset apart.
        box, within = step * 32 // span, step * 32 % span
        a = _descriptor(a_start + shift * span + (box * a_bytes + within), span, a_bytes)
        b = _descriptor(b_start + (box * b_bytes + within), span, b_bytes)
        value = _wgmma(value, a | (Int64(base_offset) << 49), b)
    prims.wgmma_commit_group_sync_aligned()
    prims.wgmma_wait_group_sync_aligned(0)
    row = tidx // 32 * 16 + tidx % 32 // 4
    pointer = out.iterator.raw_ptr()
    for i in cutlass.range_constexpr(ACCUMULATORS):
        column = i // 4 * 8 + tidx % 4 * 2 + i % 2
        element = Float32(llvm.extractvalue(ir.F32Type.get(), value, [i]))
        (pointer + (row + i // 2 % 2 * 8) * COLUMNS + column).store(element)


def _descriptor(address: Int32, span: int, box_bytes: int) -> Int64:
    leading = box_bytes if span == 16 else 16
    constant = LAYOUT_CODES[span] << 62 | (8 * span >> 4) << 32 | (leading >> 4) << 16
    return Int64(constant) | Int64((address & 0x3FFFF) >> 4)


class Tile:
    """Launcher of the tile kernel for rows of `span` bytes in shared memory."""

    def __init__(self, span: int):
        self.span = span

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, shift: Int32, base_offset: Int32, stream):
        maps = []
        for tensor, rows in ((a, TILE_ROWS), (b, COLUMNS)):
            maps.append(
                cuda.create_tensor_map_tiled(
                    global_address=tensor.iterator.toint(),
                    dtype=BFloat16,
                    global_dims=(DEPTH, rows),
                    global_strides=(DEPTH * 2 // 16,),
                    box_dims=(self.span // 2, rows),
                    swizzle=SWIZZLES[self.span],
                )
            )
        _tile_kernel(maps[0], maps[1], out, shift, base_offset, self.span).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )


# --- arithmetic ------------------------------------------------------------------------------------------------------

EXACT_OPERATIONS = ("a / b", "a * b + c in one rounding", "BF16 of a")
APPROXIMATE_OPERATIONS = {"exp2": 2, "reciprocal": 1}  # and the ulps that the PTX ISA allows
OPERATIONS = (*EXACT_OPERATIONS, *APPROXIMATE_OPERATIONS)
VALUES = 1 << 14
THREADS = 128


@cute.kernel
def _arithmetic_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor):
    """out[operation, i]"""
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    i = bidx * THREADS + tidx
    x, y, z = a[i], b[i], c[i]
    results = (
        x / y,
        x * y + z,  # the compiler contracts it
        x.to(BFloat16).to(Float32),
        cute.math.exp2(y, fastmath=True),
        cute.arch.rcp_approx(x),
    )
    for operation in cutlass.range_constexpr(len(results)):
        out[operation, i] = results[operation]


@cute.jit
def _arithmetic(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, stream):
    _arithmetic_kernel(a, b, c, out).launch(grid=(VALUES // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream)


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A function to compile, the arguments of each of its calls, and how the outputs of two machines are compared.

    `calls` holds tuples of tensors and integers; the output is the tensor full of NaN. `expected` is what PyTorch says,
    or None. `compare` takes two lists of outputs and returns a remark, or raises an AssertionError.
    """

    function: Any
    samples: tuple[Any, ...]
    calls: list[tuple[Any, ...]]
    compare: Callable[[list[torch.Tensor], list[torch.Tensor]], str]
    expected: list[torch.Tensor] | None


def fake(*shape: Any, dtype: Any = BFloat16) -> Any:
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(torch.bfloat16)


def equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Bit for bit, NaN included."""
    for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        kind = torch.int32 if mine.dtype == torch.float32 else torch.int16
        differing = (mine.contiguous().view(kind) != theirs.contiguous().view(kind)).sum().item()
        assert differing == 0, f"output {position}: {differing} of {mine.numel()} elements differ"
    return "equal"


def sample_case(name: str, rows: int) -> Case:
    """A sample kernel: pipelines, multicast, distributed shared memory, shifted or overlapping rows, bulk stores."""
    case = make_case(name, rows)
    return Case(case.launcher, case.samples(), [(case.x, case.weight, case.output(), rows)], equal, [case.expected])


def tile_call(a: torch.Tensor, b: torch.Tensor, shift: int, base_offset: int) -> tuple[Any, ...]:
    return a, b, torch.full((ROWS, COLUMNS), torch.nan), shift, base_offset


def tile_samples() -> tuple[Any, ...]:
    tensors = (fake(TILE_ROWS, DEPTH), fake(COLUMNS, DEPTH), fake(ROWS, COLUMNS, dtype=Float32))
    return *tensors, Int32(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=False)


def row_shift_case(span: int) -> Case:
    """Start addresses 0 to 9 rows into a tile, base offset 0."""
    a, b = integers(TILE_ROWS, DEPTH), integers(COLUMNS, DEPTH)
    shifts = range(10)
    expected = [a[s : s + ROWS].float() @ b.float().T for s in shifts]
    return Case(Tile(span), tile_samples(), [tile_call(a, b, s, 0) for s in shifts], equal, expected)


def base_offset_case() -> Case:
    """Every base offset with start addresses 0 to 3 rows into a 128-byte-swizzled tile, whatever its meaning."""
    a, b = integers(TILE_ROWS, DEPTH), integers(COLUMNS, DEPTH)
    calls = [tile_call(a, b, shift, offset) for offset in range(8) for shift in range(4)]
    return Case(Tile(128), tile_samples(), calls, equal, None)


def random_case() -> Case:
    """Random data, where the additions inside an instruction round in the hardware's own way."""
    a, b = torch.randn(TILE_ROWS, DEPTH).to(torch.bfloat16), torch.randn(COLUMNS, DEPTH).to(torch.bfloat16)
    magnitude = a[:ROWS].float().abs() @ b.float().abs().T
    truth = (a[:ROWS].double() @ b.double().T).float()

    def compare(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
        units = ((actual[0] - expected[0]).abs() / (magnitude * 2.0**-24)).max().item()
        differing = (actual[0] != expected[0]).float().mean().item()
        assert units <= RANDOM_UNITS, f"off by {units:.2f} units"
        return f"up to {units:.2f} units; {differing:.1%} of the FP32 values differ"

    return Case(Tile(128), tile_samples(), [tile_call(a, b, 0, 0)], compare, [truth])


RANDOM_UNITS = 4.0  # of 2**-24 of the absolute sum: one for each K step, in which low bits are cut off


def arithmetic_case() -> Case:
    """IEEE operations bit for bit, approximations within the documented error."""
    a, b, c = ((torch.randn(VALUES) * 2.0 ** torch.randint(-10, 6, (VALUES,))).clamp(-120, 120) for _ in range(3))
    samples = [fake(VALUES, dtype=Float32) for _ in range(3)]
    fused = (a.double() * b.double() + c.double()).float()  # the product is exact in FP64, the sum all but exact
    exact = torch.stack((a / b, fused, a.to(torch.bfloat16).float()))
    approximate = torch.stack((b.double().exp2().float(), (1 / a.double()).float()))

    def compare(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
        remarks = []
        for position, name in enumerate(OPERATIONS):
            mine, theirs = (outputs[0][position].view(torch.int32).long() for outputs in (actual, expected))
            distance = (mine - theirs).abs().max().item()
            allowed = 2 * APPROXIMATE_OPERATIONS.get(name, 0)  # both sides may be off, in opposite directions
            assert distance <= allowed, f"{name}: {distance} ulp"
            remarks.append(f"{name} {distance}")
        return "ulps: " + ", ".join(remarks)

    call = (a, b, c, torch.full((len(OPERATIONS), VALUES), torch.nan))
    signature = (*samples, fake(len(OPERATIONS), VALUES, dtype=Float32), make_fake_stream(use_tvm_ffi_env_stream=False))
    return Case(_arithmetic, signature, [call], compare, [torch.cat((exact, approximate))])


CASES: dict[str, Callable[[], Case]] = {
    "row shifts 0-9, 128-byte swizzle": lambda: row_shift_case(128),
    "row shifts 0-9, 64-byte swizzle": lambda: row_shift_case(64),
    "row shifts 0-9, 32-byte swizzle": lambda: row_shift_case(32),
    "row shifts 0-9, no swizzle": lambda: row_shift_case(16),
    "base offsets 0-7": base_offset_case,
    "multicast, distributed shared memory": lambda: sample_case("sm90_row_shift", 410),
    "overlapping tensor-map rows": lambda: sample_case("sm90_overlapping_rows", 200),
    "arithmetic": arithmetic_case,
    "random data": random_case,
}


# --- running ---------------------------------------------------------------------------------------------------------


def compile_case(case: Case) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        options = f"--gpu-arch {ARCH} --keep-ptx --dump-dir {directory}"
        return cute.compile(case.function, *case.samples, options=options)


def emulated(case: Case, compiled: Any, schedule: str) -> list[torch.Tensor]:
    outputs = []
    for call in case.calls:
        arguments = [value.clone() if isinstance(value, torch.Tensor) else value for value in call]
        with emulate(schedule=schedule):
            compiled(*arguments, driver.CUstream(0))
        outputs.append(next(a for a, value in zip(arguments, call, strict=True) if is_output(value)))
    return outputs


def on_gpu(case: Case, compiled: Any) -> list[torch.Tensor]:
    outputs = []
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    for call in case.calls:
        arguments = [value.cuda() if isinstance(value, torch.Tensor) else value for value in call]
        compiled(*arguments, stream)
        torch.cuda.synchronize()
        outputs.append(next(a.cpu() for a, value in zip(arguments, call, strict=True) if is_output(value)))
    return outputs


def is_output(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.isnan().all())


def run_case(name: str, gpu: bool) -> tuple[str, str]:
    """The remarks of the CPU check and of the comparison with the GPU."""
    torch.manual_seed(0)
    case = CASES[name]()
    compiled = compile_case(case)
    outputs = emulated(case, compiled, SCHEDULES[0])
    for schedule in SCHEDULES[1:]:
        equal(emulated(case, compiled, schedule), outputs)
    on_cpu = case.compare(outputs, case.expected) if case.expected is not None else "not compared"
    return on_cpu, case.compare(on_gpu(case, compiled), outputs) if gpu else "-"


def _child(name: str, gpu: bool, answer: Any) -> None:
    try:
        answer.send(run_case(name, gpu))
    except BaseException as error:
        traceback.print_exc()
        answer.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0][:100]))


def run_limited(name: str, gpu: bool) -> tuple[str, str]:
    """`run_case` in a process of its own, ended after `CASE_SECONDS`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, gpu, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(CASE_SECONDS) else ("failed", f"no answer in {CASE_SECONDS} s")
    except EOFError:
        result = ("failed", "the process died")
    process.join(timeout=1 if result[0] == "failed" else 30)
    if process.is_alive():
        process.kill()
        process.join()
    return result


def has_gpu() -> bool:
    """Whether there is a Hopper GPU, asked in a way that does not initialise CUDA in this process."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    major, device = ctypes.c_int(0), ctypes.c_int(0)
    compute_capability_major = 75
    return (
        library.cuInit(0) == 0
        and library.cuDeviceGet(ctypes.byref(device), 0) == 0
        and library.cuDeviceGetAttribute(ctypes.byref(major), compute_capability_major, device) == 0
        and major.value == 9
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-only", action="store_true", help="do not use a GPU")
    parser.add_argument("--case", choices=CASES, help="run one case")
    options = parser.parse_args()
    gpu = not options.cpu_only and has_gpu()
    names = [options.case] if options.case else list(CASES)

    workers = max(1, (os.cpu_count() or 1) // 2)
    with ThreadPoolExecutor(workers) as pool:
        rows = dict(zip(names, pool.map(lambda name: run_limited(name, gpu), names), strict=True))
    failed = any(result[0] == "failed" for result in rows.values())

    card = torch.cuda.get_device_name() if gpu else "no Hopper GPU used"
    print(f"\n{date.today()}, {card}, torch {torch.__version__}, CuTe DSL {cutlass.__version__}\n")
    print("| case | emulator against PyTorch | GPU against emulator |")
    print("|---|---|---|")
    for name, (cpu_remark, gpu_remark) in rows.items():
        print(f"| {name} | {cpu_remark} | {gpu_remark} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
