"""Loads and stores in every space, their bounds, alignment and initialisation; atomics; distributed shared memory."""

import struct

import numpy as np
import pytest
import torch

from core_helpers import DYNAMIC_SHARED, PER_THREAD, kernel, per_thread, run
from ptxemu import LaunchError, Misaligned, OutOfBounds, UninitializedRead, launch

LANES = np.arange(32)


@pytest.mark.parametrize("space", ["global", "generic"])
@pytest.mark.parametrize(
    ("kind", "vector"), [("b8", 1), ("b16", 1), ("b32", 1), ("b64", 1), ("b32", 2), ("b32", 4), ("b64", 2), ("b16", 4)]
)
def test_copies(space: str, kind: str, vector: int):
    """Every width, as one access per lane."""
    size = int(kind[1:]) // 8
    prefix = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}[size]
    registers = ", ".join(f"{prefix}{10 + n}" for n in range(vector))
    registers = f"{{{registers}}}" if vector > 1 else registers
    suffix = ("" if space == "generic" else ".global") + (f".v{vector}" if vector > 1 else "") + f".{kind}"
    body = f"""
    ld.param.b64 %rd0, [out]; ld.param.b64 %rd3, [source]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, {size * vector};
    add.s64 %rd1, %rd0, %rd2; add.s64 %rd4, %rd3, %rd2; ld{suffix} {registers}, [%rd4]; st{suffix} [%rd1], {registers};
    """
    source = np.random.default_rng(0).integers(0, 256, 32 * size * vector, np.uint8)
    out = np.zeros_like(source)
    run(kernel(body, (".u64 out", ".u64 source")), [out, source])
    np.testing.assert_array_equal(out, source)


def test_signed_bytes_extend_to_the_register():
    source = np.array([-5] * 32, np.int8)
    body = PER_THREAD + "ld.param.b64 %rd3, [source]; ld.global.s8 %r5, [%rd3+1]; st.global.b32 [%rd1], %r5;"
    out = np.zeros(32, np.uint32)
    run(kernel(body, (".u64 out", ".u64 source")), [out, source])
    assert (out == 0xFFFFFFFB).all()


def test_parameters():
    body = (
        PER_THREAD
        + """
    ld.param.b32 %r2, [a+4]; ld.param.v2.b8 {%rs1, %rs2}, [a+8]; cvt.u32.u16 %r3, %rs2; ld.param.f32 %r4, [b];
    mov.b64 %rd5, a; cvta.param.u64 %rd5, %rd5; ld.u32 %r6, [%rd5];
    add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r6; cvt.rzi.s32.f32 %r4, %r4; add.s32 %r2, %r2, %r4;
    st.global.b32 [%rd1], %r2;
    """
    )
    out = np.zeros(32, np.uint32)
    run(
        kernel(body, (".u64 out", ".align 4 .b8 a[12]", ".f32 b")), [out, struct.pack("<IIBBxx", 1000, 200, 9, 30), 4.5]
    )
    assert (out == 1234).all()


def test_torch_tensors_and_numpy_scalars():
    out = torch.zeros(32, dtype=torch.bfloat16)
    body = """
    ld.param.b64 %rd0, [out]; ld.param.b16 %rs1, [value]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 2;
    add.s64 %rd1, %rd0, %rd2;
    st.global.b16 [%rd1], %rs1;
    """
    run(kernel(body, (".u64 out", ".u16 value")), [out, np.uint16(0x3FC0)])
    assert (out == 1.5).all()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "has 1 parameters, 0 arguments"),
        ([b"1234"], "argument 0 has 4 bytes, its parameter 8"),
        (["text"], "str is neither a NumPy array nor a torch tensor"),
        ([np.float32(1)], "argument 0 has 4 bytes"),
    ],
)
def test_arguments_that_do_not_fit(args: list, message: str):
    with pytest.raises(LaunchError, match=message):
        run(kernel(""), args)


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        (((3, 1, 1), 32, (2, 1, 1), 0), "no multiple of cluster"),
        ((1, 2048, 1, 0), "at most 1024 threads"),
        ((1, 32, 1, 1 << 20), "bytes of dynamic shared memory"),
        ((0, 32, 1, 0), "positive sizes"),
    ],
)
def test_dimensions_that_do_not_fit(dimensions: tuple, message: str):
    with pytest.raises(LaunchError, match=message):
        launch(kernel(""), "k", *dimensions, [0])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "st.global.b32 [%rd1+4], 1;",
            OutOfBounds,
            "128 bytes into a tensor of 128|124 bytes into a tensor of 128|into a tensor",
        ),
        ("add.s64 %rd1, %rd1, -4; ld.global.b32 %r5, [%rd1];", OutOfBounds, "global bytes"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd0+8];", Misaligned, "not a multiple of 16"),
        ("ld.global.b64 %rd5, [%rd0+4];", Misaligned, "not a multiple of 8"),
        ("mov.b64 %rd5, 64; st.global.b32 [%rd5], 1;", OutOfBounds, "lies below every tensor"),
        ("mov.b32 %r5, smem; ld.shared.b32 %r6, [%r5];", UninitializedRead, "at offset 1024"),
        ("mov.b32 %r5, smem; st.shared.b32 [%r5+4096], 1;", OutOfBounds, r"shared bytes 5120\.\.5124 of 5120"),
        ("mov.b32 %r5, 512; st.shared.b32 [%r5], 1;", OutOfBounds, "system reserves"),
        ("mov.b32 %r5, smem; st.shared.b32 [%r5+2], 1;", Misaligned, "offset 1026"),
        ("mov.b32 %r5, smem; st.shared.b16 [%r5], 1; ld.shared.b32 %r6, [%r5];", UninitializedRead, "load of shared"),
        ("mov.b32 %r5, 0x1000400; st.shared.b32 [%r5], 1;", OutOfBounds, "belongs to CTA 1"),
    ],
)
def test_bad_accesses(text: str, error: type, message: str):
    out = np.zeros(32, np.uint32)
    with pytest.raises(error, match=message) as caught:
        run(kernel(PER_THREAD + text), [out])
    assert caught.value.location.kernel == "k"
    assert caught.value.location.warp == 0
    assert caught.value.location.ptx_text in text


def test_inactive_lanes_may_hold_bad_addresses():
    body = (
        PER_THREAD + "setp.lt.u32 %p1, %r1, 4; mul.wide.u32 %rd5, %r1, 64; add.s64 %rd5, %rd0, %rd5; "
        "@%p1 st.global.b32 [%rd5+8], %r1;"
    )
    out = np.zeros(52, np.uint32)
    run(kernel(body), [out])
    assert out[2::16].tolist() == [0, 1, 2, 3]


def test_lanes_of_one_access_in_different_tensors():
    body = (
        PER_THREAD
        + """
    ld.param.b64 %rd3, [other]; add.s64 %rd4, %rd3, %rd2; and.b32 %r2, %r1, 1; setp.eq.b32 %p1, %r2, 0;
    selp.b64 %rd5, %rd1, %rd4, %p1; st.global.b32 [%rd5], %r1; ld.global.b32 %r6, [%rd5]; add.s32 %r6, %r6, 100;
    st.global.b32 [%rd5], %r6;
    """
    )
    out, other = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    run(kernel(body, (".u64 out", ".u64 other")), [out, other])
    np.testing.assert_array_equal(out, np.where(LANES % 2 == 0, LANES + 100, 0))
    np.testing.assert_array_equal(other, np.where(LANES % 2, LANES + 100, 0))


def test_unwritten_memory_as_poison():
    out = np.zeros(32, np.uint32)
    text = kernel(PER_THREAD + "mov.b32 %r5, smem; ld.shared.b32 %r6, [%r5+8]; st.global.b32 [%rd1], %r6;")
    report = run(text, [out], uninitialized="poison")
    assert np.isnan(out.view(np.float32)).all()
    assert ["offset 1032" in warning for warning in report.warnings] == [True]


def test_shared_memory_round_trip_through_another_lane():
    body = """
    mov.b32 %r5, smem; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6; st.shared.b32 [%r7], %r1; bar.warp.sync -1;
    xor.b32 %r6, %r6, 124; add.s32 %r7, %r5, %r6; ld.shared.b32 %r0, [%r7];
    """
    np.testing.assert_array_equal(per_thread(body), 31 - LANES)


LOCAL = "{ .local .align 16 .b8 depot[64]; mov.b64 %rd20, depot; cvta.local.u64 %rd21, %rd20;"


@pytest.mark.parametrize("address", ["local.b32 %r5, [%rd20+4]", "b32 %r5, [%rd21+4]"])
def test_local_memory_is_each_threads_own(address: str):
    """Uniform addresses name another place in every lane; indices may differ between lanes."""
    body = f"""
    {LOCAL} st.local.b32 [%rd20+4], %r1; and.b32 %r2, %r1, 3; mul.wide.u32 %rd5, %r2, 8; add.s64 %rd6, %rd21, %rd5;
    add.s32 %r3, %r1, 100; st.b64 [%rd6+16], %rd5; ld.{address}; ld.local.b64 %rd7, [%rd6+16]; cvt.u32.u64 %r6, %rd7;
    mad.lo.u32 %r0, %r5, 64, %r6; }}
    """
    np.testing.assert_array_equal(per_thread(body), LANES * 64 + LANES % 4 * 8)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ld.local.b32 %r0, [%rd20];", UninitializedRead),
        ("st.local.b32 [%rd20+64], %r1;", OutOfBounds),
        ("st.local.b32 [%rd20+2], %r1;", Misaligned),
    ],
)
def test_bad_accesses_to_local_memory(text: str, error: type):
    with pytest.raises(error, match="local"):
        per_thread(f"{LOCAL} {text} }}")


def test_generic_shared_addresses():
    body = """
    mov.b32 %r5, smem; cvt.u64.u32 %rd5, %r5; cvta.shared.u64 %rd5, %rd5; mul.wide.u32 %rd6, %r1, 4;
    add.s64 %rd6, %rd5, %rd6;
    st.b32 [%rd6], %r1; cvta.to.shared.u64 %rd7, %rd6; cvt.u32.u64 %r7, %rd7; ld.shared.b32 %r0, [%r7];
    """
    np.testing.assert_array_equal(per_thread(body), LANES)


def test_matrix_moves():
    """stmatrix then ldmatrix gives the registers back; a transposed load exchanges rows and columns."""
    body = """
    mov.b32 %r5, smem; shl.b32 %r6, %r1, 4; add.s32 %r7, %r5, %r6;
    shl.b32 %r10, %r1, 1; add.s32 %r11, %r10, 1; shl.b32 %r11, %r11, 16; or.b32 %r10, %r10, %r11;
    add.s32 %r12, %r10, 0x400040; add.s32 %r13, %r10, 0x800080; add.s32 %r14, %r10, 0xC000C0;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7], {%r10, %r12, %r13, %r14}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r20, %r21, %r22, %r23}, [%r7];
    """
    # Lane 4g + q holds elements (g, 2q) and (g, 2q + 1), which are numbered 8g + 2q and 8g + 2q + 1.
    row, column = LANES // 4, LANES % 4 * 2
    for register, first in (("%r20", 0), ("%r23", 192)):
        result = per_thread(body + f"mov.b32 %r0, {register};")
        low, high = 8 * column + row + first, 8 * (column + 1) + row + first
        np.testing.assert_array_equal(result, low | high << 16)


def test_atomics():
    counter = np.array([5, 0, 0xFFFFFFFF, 7], np.uint32)
    body = (
        PER_THREAD
        + """
    ld.param.b64 %rd3, [counter]; atom.global.add.u32 %r0, [%rd3], %r1; red.global.max.s32 [%rd3+4], %r1;
    red.global.and.b32 [%rd3+8], 0xFF; atom.global.cas.b32 %r2, [%rd3+12], 7, %r1; st.global.b32 [%rd1], %r0;
    """
    )
    out = np.zeros(32, np.uint32)
    run(kernel(body, (".u64 out", ".u64 counter")), [out, counter])
    np.testing.assert_array_equal(out, 5 + np.cumsum(LANES) - LANES)
    assert counter.tolist() == [5 + 496, 31, 0xFF, 0]


def test_float_atomics_in_shared_memory():
    body = """
    mov.b32 %r5, smem; setp.eq.b32 %p1, %r1, 0; @%p1 st.shared.b32 [%r5], 0; bar.warp.sync -1;
    atom.shared.add.f32 %r6, [%r5], 0f3F000000; bar.warp.sync -1; ld.shared.b32 %r0, [%r5];
    """
    assert (per_thread(body).view(np.float32) == 16).all()


def test_distributed_shared_memory():
    """Each CTA writes into the memory of the other, which has started; the barrier of the cluster makes it visible."""
    body = """
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mov.b32 %r5, smem; shl.b32 %r6, %r1, 2;
    add.s32 %r7, %r5, %r6; mapa.shared::cluster.u32 %r8, %r7, %r3; mad.lo.u32 %r9, %r2, 100, %r1;
    st.shared::cluster.b32 [%r8], %r9; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.b32 %r10, [%r7]; ld.param.b64 %rd0, [out]; mad.lo.u32 %r11, %r2, 32, %r1; mul.wide.u32 %rd2, %r11, 4;
    add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r10;
    """
    out = np.zeros(64, np.uint32)
    run(kernel(body), [out], grid=2, cluster=2)
    np.testing.assert_array_equal(out, np.concatenate([100 + LANES, LANES]))


def test_constants_of_the_module():
    text = kernel(
        PER_THREAD
        + "mov.b64 %rd5, table; add.s64 %rd5, %rd5, %rd2; ld.global.b32 %r5, [%rd5]; st.global.b32 [%rd1], %r5;",
        extra=f".global .align 4 .b32 table[32] = {{{', '.join(str(n * n) for n in range(32))}}};\n",
    )
    out = np.zeros(32, np.uint32)
    run(text, [out])
    np.testing.assert_array_equal(out, LANES**2)


def test_static_shared_variables_come_first():
    text = kernel(
        PER_THREAD + "mov.b32 %r5, fixed; mov.b32 %r6, smem; sub.s32 %r7, %r6, %r5; st.global.b32 [%rd1], %r7;",
        extra=".shared .align 16 .b8 fixed[48];\n",
    )
    out = np.zeros(32, np.uint32)
    run(text, [out])
    assert (out == 2048 - DYNAMIC_SHARED).all()
