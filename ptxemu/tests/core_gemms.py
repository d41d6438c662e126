"""Small matrix products in handwritten PTX, for sm_90a and sm_100a: D = A B^T with A [M, 64] and B [N, 64] in BF16.

Both operands arrive by bulk tensor copies with the 128-byte swizzle; D leaves as FP32. The texts are plain so that
tests can break them by replacing a line.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from core_helpers import bf16_bits, kernel
from ptxemu import DataType, Report, Swizzle, TensorMap, launch

DEPTH = 64
ROW_BYTES = DEPTH * 2
PARAMETERS = (".align 64 .b8 map_a[128]", ".align 64 .b8 map_b[128]", ".u64 out")

# %r20 shared base; +0 mbarrier of the loads, +8 mbarrier of the MMAs, +16 address in tensor memory, A from +1024 on.
_START = """
    ld.param.b64 %rd0, [out]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem;
    mov.u32 %r3, %cluster_ctarank;
    mov.b64 %rd10, map_a; mov.b64 %rd11, map_b;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r20], 1;
    mbarrier.init.shared.b64 [%r20+8], 1;
    fence.mbarrier_init.release.cluster;
    READY:
"""


def _load(register: str, name: str, row: str, barrier: str, suffix: str) -> str:
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return f"    {copy}{suffix} [{register}], [{name}, {{%r30, {row}}}], [{barrier}];\n"


def wait(barrier: str, label: str) -> str:
    """Waits for the first phase of an mbarrier."""
    test = f"mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p20, [{barrier}], 0, 1000;"
    return f"    {label}: {test} @!%p20 bra {label};\n"


WAIT_FULL, WAIT_DONE = wait("%r20", "FULL"), wait("%r20+8", "DONE")


def wgmma_text(n: int, a_in_registers: bool = False) -> str:
    """sm_90a: one warpgroup, M = 64. A in registers is read from global memory, parameter `a`."""
    high = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    registers = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    body = _START + "    bar.sync 0;\n    @%p1 bra LOADED;\n    mov.b32 %r30, 0; mov.b32 %r31, 0;\n"
    body += f"    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], {(64 + n) * ROW_BYTES};\n"
    body += "    add.s32 %r21, %r20, 1024;\n" + _load("%r21", "%rd10", "%r31", "%r20", "")
    body += f"    add.s32 %r22, %r20, {1024 + 64 * ROW_BYTES};\n" + _load("%r22", "%rd11", "%r31", "%r20", "")
    body += "    LOADED:\n" + WAIT_FULL
    for i in range(n // 2):
        body += f"    mov.b32 %r{100 + i}, 0;\n"
    if a_in_registers:
        # Thread 32 w + 4 g + q, register 2 b + h of a step: row 16 w + 8 h + g, columns 8 b + 2 q and the next.
        body += (
            "    ld.param.b64 %rd30, [a]; and.b32 %r4, %r1, 31; shr.u32 %r5, %r4, 2; "
            "shl.b32 %r6, %r2, 4; add.s32 %r5, %r5, %r6;\n"
        )
        body += (
            f"    mul.lo.s32 %r5, %r5, {ROW_BYTES}; and.b32 %r7, %r1, 3; shl.b32 %r7, %r7, 2; add.s32 %r5, %r5, %r7;\n"
        )
        body += "    cvt.u64.u32 %rd2, %r5; add.s64 %rd30, %rd30, %rd2;\n"
        for step in range(DEPTH // 16):
            for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
                body += (
                    f"    ld.global.b32 %r{50 + 4 * step + 2 * b + h}, "
                    f"[%rd30+{32 * step + 16 * b + 8 * h * ROW_BYTES}];\n"
                )
    body += "    wgmma.fence.sync.aligned;\n"
    for step in range(DEPTH // 16):
        for register, first in (("%rd20", 1024), ("%rd21", 1024 + 64 * ROW_BYTES)):
            body += f"    add.s32 %r40, %r20, {first + 32 * step}; shr.u32 %r40, %r40, 4; and.b32 %r40, %r40, 16383;\n"
            body += f"    cvt.u64.u32 {register}, %r40; or.b64 {register}, {register}, {high};\n"
        body += f"    {{ .reg .pred p; setp.ne.b32 p, {int(step > 0)}, 0;\n"
        body += f"    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, "
        if a_in_registers:
            body += f"{{{', '.join(f'%r{50 + 4 * step + i}' for i in range(4))}}}, %rd21, p, 1, 1, 0;\n    }}\n"
        else:
            body += "%rd20, %rd21, p, 1, 1, 0, 0;\n    }\n"
    body += "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n"
    # Thread 32 w + 4 g + q, register 4 b + 2 h + e: row 16 w + 8 h + g, column 8 b + 2 q + e.
    body += (
        "    and.b32 %r4, %r1, 31; shr.u32 %r5, %r4, 2; shl.b32 %r6, %r2, 4; "
        "add.s32 %r5, %r5, %r6; and.b32 %r7, %r1, 3;\n"
    )
    body += (
        f"    mul.lo.s32 %r5, %r5, {4 * n}; shl.b32 %r7, %r7, 3; add.s32 %r5, %r5, %r7; "
        f"cvt.u64.u32 %rd2, %r5; add.s64 %rd1, %rd0, %rd2;\n"
    )
    for block in range(n // 8):
        for h in range(2):
            first = 100 + 4 * block + 2 * h
            body += f"    st.global.v2.b32 [%rd1+{32 * block + 8 * h * 4 * n}], {{%r{first}, %r{first + 1}}};\n"
    return kernel(body, (*PARAMETERS, ".u64 a") if a_in_registers else PARAMETERS, "sm_90a")


def tcgen05_text(n: int, group: int, a_in_tensor_memory: bool = False) -> str:
    """sm_100a: four warps a CTA; M = 128 with one CTA, 256 with a pair, which splits the rows of A and of B.

    A in tensor memory (columns 64 to 95) is read from global memory, parameter `a`.
    """
    m, columns = 128 * group, n // group
    allocated = 128 if a_in_tensor_memory else 64
    description = 1 << 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | (m >> 4) << 24
    high = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16
    suffix = f".cta_group::{group}"
    body = _START + "    barrier.cluster.arrive; barrier.cluster.wait;\n"
    body += "    setp.ne.b32 %p2, %r2, 0; @%p2 bra ALLOCATED;\n    add.s32 %r23, %r20, 16;\n"
    body += (
        f"    tcgen05.alloc{suffix}.sync.aligned.shared::cta.b32 [%r23], {allocated};\n"
        f"    ALLOCATED:\n    bar.sync 0;\n"
    )
    body += "    barrier.cluster.arrive; barrier.cluster.wait;\n    ld.shared.b32 %r24, [%r20+16];\n"
    if a_in_tensor_memory:
        words = [f"%r{100 + i}" for i in range(DEPTH // 2)]
        body += (
            f"    ld.param.b64 %rd30, [a]; shl.b32 %r5, %r3, 7; add.s32 %r5, %r5, %r1; "
            f"mul.wide.u32 %rd2, %r5, {ROW_BYTES};\n"
        )
        body += "    add.s64 %rd30, %rd30, %rd2;\n"
        for i in range(0, len(words), 4):
            body += f"    ld.global.v4.b32 {{{', '.join(words[i : i + 4])}}}, [%rd30+{4 * i}];\n"
        body += "    shl.b32 %r41, %r2, 21; add.s32 %r41, %r41, %r24; add.s32 %r41, %r41, 64;\n"
        body += (
            f"    tcgen05.st.sync.aligned.32x32b.x32.b32 [%r41], {{{', '.join(words)}}};\n"
            f"    tcgen05.wait::st.sync.aligned;\n"
        )
        body += (
            "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n"
            "    barrier.cluster.arrive; barrier.cluster.wait;\n"
        )
    body += "    @%p1 bra ISSUED;\n"
    body += "    setp.ne.b32 %p3, %r3, 0; @%p3 bra FOLLOW;\n"
    body += f"    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], {(m + n) * ROW_BYTES};\n    FOLLOW:\n"
    body += "    and.b32 %r25, %r20, -16777216; sub.s32 %r26, %r20, %r25; mov.b32 %r30, 0;\n"
    body += f"    shl.b32 %r31, %r3, 7; mul.lo.s32 %r32, %r3, {columns};\n    add.s32 %r21, %r20, 1024;\n"
    body += _load("%r21", "%rd10", "%r31", "%r26", suffix)
    body += f"    add.s32 %r22, %r20, {1024 + 128 * ROW_BYTES};\n" + _load("%r22", "%rd11", "%r32", "%r26", suffix)
    body += "    @%p3 bra ISSUED;\n" + WAIT_FULL + "    tcgen05.fence::after_thread_sync;\n"
    for step in range(DEPTH // 16):
        for register, first in (("%rd20", 1024), ("%rd21", 1024 + 128 * ROW_BYTES)):
            body += f"    add.s32 %r40, %r20, {first + 32 * step}; shr.u32 %r40, %r40, 4; and.b32 %r40, %r40, 16383;\n"
            body += f"    cvt.u64.u32 {register}, %r40; or.b64 {register}, {register}, {high};\n"
        body += f"    setp.ne.b32 %p4, {int(step > 0)}, 0;\n"
        if a_in_tensor_memory:
            body += f"    add.s32 %r40, %r24, {64 + 8 * step};\n"
        a = "[%r40]" if a_in_tensor_memory else "%rd20"
        body += f"    tcgen05.mma{suffix}.kind::f16 [%r24], {a}, %rd21, {description}, %p4;\n"
    commit = f"tcgen05.commit{suffix}.mbarrier::arrive::one.shared::cluster"
    if group == 1:
        body += f"    {commit}.b64 [%r20+8];\n"
    else:
        body += f"    mov.b16 %rs1, 3;\n    {commit}.multicast::cluster.b64 [%r20+8], %rs1;\n"
    body += "    ISSUED:\n" + WAIT_DONE + "    tcgen05.fence::after_thread_sync;\n"
    body += "    shl.b32 %r41, %r2, 21; add.s32 %r41, %r41, %r24; shl.b32 %r5, %r3, 7; add.s32 %r5, %r5, %r1;\n"
    body += f"    mul.lo.s32 %r5, %r5, {4 * n}; cvt.u64.u32 %rd2, %r5; add.s64 %rd1, %rd0, %rd2;\n"
    for part in range(n // 32):
        registers = [f"%r{100 + i}" for i in range(32)]
        body += f"    add.s32 %r42, %r41, {32 * part};\n"
        body += (
            f"    tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{', '.join(registers)}}}, [%r42];\n"
            f"    tcgen05.wait::ld.sync.aligned;\n"
        )
        for i in range(0, 32, 4):
            body += f"    st.global.v4.b32 [%rd1+{128 * part + 4 * i}], {{{', '.join(registers[i : i + 4])}}};\n"
    body += (
        "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    barrier.cluster.arrive; barrier.cluster.wait;\n"
        "    @%p2 bra END;\n"
    )
    body += (
        f"    tcgen05.relinquish_alloc_permit{suffix}.sync.aligned;\n"
        f"    tcgen05.dealloc{suffix}.sync.aligned.b32 %r24, {allocated};\n    END:\n"
    )
    return kernel(body, (*PARAMETERS, ".u64 a") if a_in_tensor_memory else PARAMETERS, "sm_100a")


def _map(values: np.ndarray, rows: int) -> tuple[np.ndarray, TensorMap]:
    bits = bf16_bits(values)
    return bits, TensorMap.over(bits, DataType.BFLOAT16, (DEPTH, rows), swizzle=Swizzle.B128)


def run_gemm(
    text: str, a: np.ndarray, b: np.ndarray, *, ctas: int = 1, n: int | None = None, **options: Any
) -> tuple[np.ndarray, Report]:
    """D and the report; A and B hold values that BF16 holds exactly. `n`: the rows of B's box, if not those of B."""
    n = n or b.shape[0]
    bits_a, map_a = _map(a, a.shape[0] // ctas)
    bits_b, map_b = _map(b, n // ctas)
    out = np.full((a.shape[0], n), np.nan, np.float32)
    shared = 2048 + (a.shape[0] + n) // ctas * ROW_BYTES
    args = [map_a, map_b, out] + ([bits_a] if ".u64 a" in text else [])
    report = launch(text, "k", ctas, 128, ctas, shared, args, memory=[bits_a, bits_b], **options)
    return out, report


def integers(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, (rows, DEPTH)).astype(np.float32)
