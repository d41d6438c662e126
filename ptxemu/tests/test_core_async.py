"""Bulk tensor copies, bulk copies and their groups, cp.async, st.async: data, order and misuse."""

import numpy as np
import pytest

from core_helpers import kernel, run
from ptxemu import (
    BarrierMisuse,
    DataType,
    Deadlock,
    DescriptorError,
    DivergenceError,
    EmulatorError,
    Misaligned,
    Order,
    OutOfBounds,
    RaceError,
    Swizzle,
    TensorMap,
    UninitializedRead,
)

SCHEDULES = [order.value for order in Order]
SEEDS = range(3)
MAP_AND_OUT = (".align 64 .b8 map[128]", ".u64 out")

START = """
    ld.param.b64 %rd0, [out]; mov.u32 %r1, %tid.x; mov.b32 %r20, smem; mov.u32 %r3, %cluster_ctarank;
    add.s32 %r21, %r20, 1024;
    mov.b64 %rd10, map; mul.wide.u32 %rd2, %r1, 4; shl.b32 %r4, %r1, 2; add.s32 %r5, %r21, %r4;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive; barrier.cluster.wait; bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p20, [%r20], 0, 1000; @!%p20 bra WAIT;"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd10, {%r30, %r31}], [%r21];"


def dump(words: int) -> str:
    """Each thread copies words from shared memory + 1024 to the CTA's part of out."""
    text = (
        f"mul.lo.s32 %r6, %r3, {4 * words}; cvt.u64.u32 %rd3, %r6; add.s64 %rd1, %rd0, %rd3; add.s64 %rd1, %rd1, %rd2;"
    )
    for first in range(0, words, 32):
        text += f"ld.shared.b32 %r7, [%r5+{4 * first}]; st.global.b32 [%rd1+{4 * first}], %r7;"
    return text


def source(rows: int = 40, columns: int = 64) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)


def load_body(x: int, y: int, size: int, after: str = "", suffix: str = "", barrier: str = "%r20") -> str:
    return (
        START + f"@%p1 bra ISSUED; mov.b32 %r30, {x}; mov.b32 %r31, {y}; "
        f"mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], {size};"
        + f"{LOAD}{suffix} [%r21], [%rd10, {{%r30, %r31}}], [{barrier}]{after}; ISSUED: {WAIT}"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (16, 5), (-8, -3), (56, 36)])
def test_tensor_loads(swizzle: Swizzle, x: int, y: int, schedule: str):
    data = source()
    columns = {Swizzle.NONE: 64, Swizzle.B32: 16, Swizzle.B64: 32, Swizzle.B128: 64}[swizzle]
    tensor_map = TensorMap.over(data, DataType.UINT16, (columns, 8), swizzle=swizzle)
    size = columns * 8 * 2
    out = np.zeros(size // 4, np.uint32)
    report = run(
        kernel(load_body(x, y, size) + dump(size // 4), MAP_AND_OUT),
        [tensor_map, out],
        memory=[data],
        schedule=schedule,
    )
    padded = np.zeros((60, 200), np.uint16)
    padded[10:50, 60:124] = data
    box = padded[10 + y : 18 + y, 60 + x : 60 + x + columns]
    # The 16-byte chunk at byte a of the dense box lies at a ^ (a >> 3 & mask): the box starts on a 1024-byte boundary.
    chunks = np.ascontiguousarray(box).view(np.uint8).reshape(-1, 16)
    mask = {Swizzle.NONE: 0, Swizzle.B32: 0x10, Swizzle.B64: 0x30, Swizzle.B128: 0x70}[swizzle]
    start = np.arange(chunks.shape[0]) * 16
    expected = np.empty_like(chunks)
    expected[(start ^ (start >> 3 & mask)) // 16] = chunks
    np.testing.assert_array_equal(out.view(np.uint8), expected.reshape(-1))
    inside = (10 + np.arange(y, y + 8) >= 10) & (np.arange(y, y + 8) < 40)
    assert (
        report.counts.bytes["global to shared"]
        == inside.sum() * 2 * ((np.arange(x, x + columns) >= 0) & (np.arange(x, x + columns) < 64)).sum()
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast(schedule: str):
    """CTA 0 loads the same box into both CTAs; each waits on its own mbarrier."""
    data = source()
    tensor_map = TensorMap.over(data, DataType.UINT16, (64, 8))
    body = (
        START + "@%p1 bra ISSUED; mov.b32 %r30, 0; mov.b32 %r31, 4; mov.b16 %rs1, 3; "
        "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 1024;" + f"setp.ne.b32 %p3, %r3, 0; @%p3 bra ISSUED; "
        f"{LOAD}.multicast::cluster [%r21], [%rd10, {{%r30, %r31}}], [%r20], %rs1; "
        f"ISSUED: {WAIT}" + dump(256) + "barrier.cluster.arrive; barrier.cluster.wait;"
    )
    out = np.zeros(512, np.uint32)
    report = run(kernel(body, MAP_AND_OUT), [tensor_map, out], memory=[data], grid=2, cluster=2, schedule=schedule)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(2, 8, 64), np.stack([data[4:12]] * 2))
    assert report.counts.bytes["global to shared"] == 1024
    assert report.counts.bytes["written to shared by bulk copies"] == 2048


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (load_body(0, 0, 1024).replace("[%r21]", "[%r21+16]"), Misaligned, "not a multiple of 128"),
        (load_body(0, 0, 1024).replace("[%r21]", "[%r21+8192]"), OutOfBounds, "bulk copy of shared bytes"),
        (load_body(0, 0, 1024, barrier="%r20+8"), BarrierMisuse, "no mbarrier"),
        (load_body(0, 0, 1008), EmulatorError, "outstanding"),
        (load_body(0, 0, 1040), Deadlock, "16 bytes outstanding"),
        (
            load_body(0, 0, 1024).replace("mov.b64 %rd10, map", "mov.b64 %rd10, out"),
            DescriptorError,
            "no tensor map at",
        ),
        (load_body(0, 0, 1024).replace("@%p1 bra ISSUED;", ""), EmulatorError, ""),
        (
            load_body(0, 0, 1024).replace(WAIT, "").replace("ISSUED:", "ISSUED: bar.sync 0;"),
            RaceError,
            "nothing orders",
        ),
        (
            load_body(0, 0, 1024, ", {%rs1, %rs2}")
            .replace(".2d.", ".4d.")
            .replace(".tile.", ".im2col.")
            .replace("%r30, %r31}", "%r30, %r31, %r30, %r30}"),
            DescriptorError,
            "tiled copy through an im2col map, or the reverse",
        ),
    ],
)
def test_bad_tensor_loads(body: str, error: type, message: str):
    data = source()
    tensor_map = TensorMap.over(data, DataType.UINT16, (64, 8))
    with pytest.raises(error, match=message or None):
        run(kernel(body + dump(256), MAP_AND_OUT), [tensor_map, np.zeros(256, np.uint32)], memory=[data])


def test_a_tensor_that_is_not_registered_is_out_of_bounds():
    data = source()
    tensor_map = TensorMap(data.ctypes.data, DataType.UINT16, (64, 40), (128,), (64, 8))
    with pytest.raises(OutOfBounds, match="bulk access of global bytes"):
        run(kernel(load_body(0, 0, 1024) + dump(256), MAP_AND_OUT), [tensor_map, np.zeros(256, np.uint32)])


# Stores. %r30, %r31: coordinates; the box is 64 x 2 of 16 bits, 256 bytes, written by the first 32 threads.

FILL = "add.s32 %r8, %r1, 1000; st.shared.b32 [%r5], %r8; add.s32 %r8, %r8, 32; st.shared.b32 [%r5+128], %r8;"
FENCE = "fence.proxy.async.shared::cta;"
STORED = f"@%p1 bra DONE; mov.b32 %r30, 0; mov.b32 %r31, 3; {STORE} cp.async.bulk.commit_group;"
FINISH = "cp.async.bulk.wait_group 0; DONE:"


def store(body: str, **options: object) -> np.ndarray:
    data = np.zeros((8, 64), np.uint16)
    tensor_map = TensorMap.over(data, DataType.UINT16, (64, 2))
    run(kernel(START + body, MAP_AND_OUT), [tensor_map, np.zeros(1, np.uint32)], memory=[data], **options)
    return data


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_stores(schedule: str):
    data = store(FILL + FENCE + "bar.sync 0;" + STORED + FINISH, schedule=schedule)
    np.testing.assert_array_equal(data[3:5].reshape(-1).view(np.uint32), np.arange(1000, 1064))
    assert not data[:3].any()
    assert not data[5:].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waiting_for_the_read_releases_the_source(schedule: str):
    again = "cp.async.bulk.wait_group.read 0; DONE: bar.sync 0; st.shared.b32 [%r5], 0;"
    data = store(FILL + FENCE + "bar.sync 0;" + STORED + again, schedule=schedule)
    np.testing.assert_array_equal(data[3:5].reshape(-1).view(np.uint32), np.arange(1000, 1064))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            FILL + "bar.sync 0;" + STORED + FINISH,
            "a bulk store's read .* follows a write by warp 0 .* without a fence.proxy.async",
        ),
        (
            FILL + FENCE + "bar.sync 0;" + STORED + "DONE: bar.sync 0; st.shared.b32 [%r5], 0;",
            "a write .* follows a read by a bulk copy",
        ),
        (
            FILL
            + FENCE
            + "bar.sync 0;"
            + STORED
            + "cp.async.bulk.wait_group.read 1; DONE: bar.sync 0; st.shared.b32 [%r5], 0;",
            "a write .* follows a read by a bulk copy",
        ),
    ],
)
def test_unordered_stores_are_races(body: str, message: str):
    with pytest.raises(RaceError, match=message):
        store(body)


@pytest.mark.parametrize("end", ["DONE:", "cp.async.bulk.wait_group.read 1; DONE:"])
def test_a_cta_may_not_exit_before_its_stores_have_read(end: str):
    with pytest.raises(RaceError, match="exits while a bulk store of warp 0 may still read"):
        store(FILL + FENCE + "bar.sync 0;" + STORED + end)
    store(FILL + FENCE + "bar.sync 0;" + STORED + "cp.async.bulk.wait_group.read 0; DONE:")


def test_early_reuse_of_a_source_gives_wrong_results_when_stores_come_late():
    body = FILL + FENCE + "bar.sync 0;" + STORED + "DONE: bar.sync 0; st.shared.b32 [%r5], 0;"
    assert not store(body, schedule="late", races=False)[3].any()
    assert store(body, schedule="early", races=False)[3].any()


def test_another_thread_cannot_wait_for_a_group():
    """Groups belong to threads: lane 1 has none, so its wait orders nothing."""
    body = (
        FILL
        + FENCE
        + "bar.sync 0;"
        + STORED
        + "DONE: setp.ne.b32 %p3, %r1, 1; @%p3 bra ALL; cp.async.bulk.wait_group 0; "
        "ALL: bar.sync 0; st.shared.b32 [%r5], 0;"
    )
    with pytest.raises(RaceError):
        store(body)
    assert not store(body, schedule="late", races=False)[3].any()


def test_the_lane_that_issued_must_wait():
    """Lane 3 issues; the wait of lane 0 orders nothing, its own does."""
    body = FILL + FENCE + "bar.sync 0; setp.ne.b32 %p1, %r1, 3;" + STORED
    end = "DONE: setp.ne.b32 %p3, %r1, {lane}; @%p3 bra ALL; cp.async.bulk.wait_group 0; ALL: bar.sync 0;"
    store(body + end.format(lane=3))
    with pytest.raises(RaceError):
        store(body + end.format(lane=0))


def test_stores_by_several_lanes_are_several_stores():
    body = (
        FILL
        + FENCE
        + "bar.sync 0; mov.b32 %r30, 0; shl.b32 %r31, %r1, 1; setp.gt.u32 %p1, %r1, 2; "
        + STORED.replace("mov.b32 %r30, 0; mov.b32 %r31, 3;", "")
        + FINISH
    )
    data = store(body)
    np.testing.assert_array_equal(data[:6].reshape(3, -1).view(np.uint32), np.stack([np.arange(1000, 1064)] * 3))


def test_a_store_of_unwritten_memory():
    with pytest.raises(UninitializedRead, match="bulk store of shared memory that nothing wrote"):
        store(STORED + FINISH)


def test_reductions_add():
    data = np.full((8, 64), 5, np.uint16)
    tensor_map = TensorMap.over(data, DataType.UINT16, (64, 2))
    reduce = STORED.replace(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile", "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile"
    )
    run(
        kernel(START + FILL + FENCE + "bar.sync 0;" + reduce + FINISH, MAP_AND_OUT),
        [tensor_map, np.zeros(1, np.uint32)],
        memory=[data],
    )
    np.testing.assert_array_equal(data[3:5].reshape(-1), np.arange(1000, 1064, dtype=np.uint32).view(np.uint16) + 5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copies_of_plain_bytes(schedule: str):
    data, copied = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    body = (
        START.replace("mov.b64 %rd10, map;", "ld.param.b64 %rd10, [source];")
        + "@%p1 bra DONE; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 1024;"
        + f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%rd10], 1024, [%r20]; {WAIT}"
        + "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r21+256], 512; cp.async.bulk.commit_group; "
        "cp.async.bulk.wait_group 0; DONE:"
    )
    run(kernel(body, (".u64 source", ".u64 out")), [data, copied], schedule=schedule)
    np.testing.assert_array_equal(copied[:128], data[64:192])
    assert not copied[128:].any()


# cp.async: each thread copies 16 bytes.

COPY = """
    ld.param.b64 %rd10, [source]; shl.b32 %r6, %r1, 4; add.s32 %r7, %r21, %r6; cvt.u64.u32 %rd4, %r6;
    add.s64 %rd5, %rd10, %rd4;
    cp.async.cg.shared.global [%r7], [%rd5], 16;
"""
READ = "ld.shared.b32 %r9, [%r7+4]; add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r9;"


def copy(body: str, **options: object) -> np.ndarray:
    data, out = np.arange(128, dtype=np.uint32), np.zeros(32, np.uint32)
    start = START.replace("mov.b64 %rd10, map;", "")
    run(kernel(start + body, (".u64 source", ".u64 out")), [data, out], **options)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "wait",
    [
        "cp.async.commit_group; cp.async.wait_group 0;",
        "cp.async.wait_all;",
        f"cp.async.mbarrier.arrive.noinc.shared.b64 [%r20]; {WAIT}".replace("COUNT", "32"),
    ],
)
def test_cp_async(wait: str, schedule: str):
    body = COPY + wait + READ
    if "noinc" in wait:
        body = (
            "setp.ne.b32 %p1, %r1, 0; @%p1 bra AGAIN; mbarrier.inval.shared.b64 [%r20]; "
            "mbarrier.init.shared.b64 [%r20], 32; AGAIN: bar.sync 0;" + body
        )
    np.testing.assert_array_equal(copy(body, schedule=schedule), 4 * np.arange(32) + 1)


def test_cp_async_fills_with_zeros():
    body = (
        COPY.replace("[%rd5], 16;", "[%rd5], 16, 4;")
        + "cp.async.wait_all; ld.shared.b32 %r9, [%r7]; ld.shared.b32 %r8, [%r7+4]; add.s32 %r9, %r9, %r8;"
    )
    np.testing.assert_array_equal(copy(body + READ.replace("ld.shared.b32 %r9, [%r7+4];", "")), 4 * np.arange(32))


def test_cp_async_without_its_wait_is_a_race():
    with pytest.raises(RaceError, match=r"follows a write by a cp\.async of warp 0"):
        copy(COPY + "cp.async.commit_group; cp.async.wait_group 1;" + READ)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_st_async(schedule: str):
    """CTA 1 stores into CTA 0, which waits for the bytes."""
    body = (
        START
        + f"""
    setp.eq.b32 %p3, %r3, 1; @%p3 bra SEND;
    @%p1 bra EXPECTED; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 512; EXPECTED: {WAIT} {dump(128)} bra END;
    SEND: shl.b32 %r6, %r1, 4; add.s32 %r7, %r21, %r6; mapa.shared::cluster.u32 %r8, %r7, 0;
    mapa.shared::cluster.u32 %r9, %r20, 0;
    {{ .reg .v4 .b32 v; mov.b32 v.x, %r1; mov.b32 v.y, 1; mov.b32 v.z, 2; mov.b32 v.w, 3;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r8], v, [%r9]; }}
    END: barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    out = np.zeros(128, np.uint32)
    run(kernel(body.replace("mov.b64 %rd10, map;", ""), (".u64 out",)), [out], grid=2, cluster=2, schedule=schedule)
    np.testing.assert_array_equal(
        out.reshape(32, 4), np.stack([np.arange(32), *(np.full(32, n) for n in (1, 2, 3))], axis=1)
    )


def test_matrix_multiplies_by_several_lanes_are_refused():
    with pytest.raises(DivergenceError, match="by several lanes"):
        run(
            kernel(
                START.replace("mov.b64 %rd10, map;", "")
                + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20];",
                (".u64 out",),
            ),
            [0],
        )
