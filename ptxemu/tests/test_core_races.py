"""What the happens-before check finds, and what it must not find, in pipelines and in tensor memory."""

import numpy as np
import pytest

from core_gemms import WAIT_DONE, integers, run_gemm, tcgen05_text
from core_helpers import kernel, run
from ptxemu import BarrierMisuse, Order, OutOfBounds, RaceError, TensorMemoryMisuse, UninitializedRead

SCHEDULES = [order.value for order in Order]
LANES = np.arange(32)

# A ring of two buffers of 128 bytes between warp 1, which loads them by bulk copies, and warp 0, which sums them up.
# Full barriers at +0 and +8, empty ones at +16 and +24, buffers from +1024 on.
RING = """
    ld.param.b64 %rd0, [out]; ld.param.b64 %rd10, [source]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
    mov.b32 %r20, smem;
    setp.ne.b32 %p1, %r1, 0; @%p1 bra READY;
    mbarrier.init.shared.b64 [%r20], 1; mbarrier.init.shared.b64 [%r20+8], 1;
    mbarrier.init.shared.b64 [%r20+16], 32; mbarrier.init.shared.b64 [%r20+24], 32;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0; mov.b32 %r5, 0; mov.b32 %r6, 0; setp.eq.b32 %p3, %r2, 1; @%p3 bra PRODUCE;
    CONSUME: and.b32 %r7, %r5, 1; shr.u32 %r8, %r5, 1; and.b32 %r8, %r8, 1; shl.b32 %r9, %r7, 3;
    add.s32 %r10, %r20, %r9;
    FULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], %r8, 1000; @!%p4 bra FULL;
    shl.b32 %r11, %r7, 7; shl.b32 %r12, %r1, 2; add.s32 %r11, %r11, %r12; add.s32 %r11, %r11, %r20;
    ld.shared.b32 %r13, [%r11+1024]; add.s32 %r6, %r6, %r13;
    mbarrier.arrive.shared.b64 %rd9, [%r10+16];
    add.s32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 12; @%p5 bra CONSUME;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r6; bra END;
    PRODUCE: elect.sync %r3|%p6, -1; @!%p6 bra END;
    NEXT: and.b32 %r7, %r5, 1; shr.u32 %r8, %r5, 1; and.b32 %r8, %r8, 1; xor.b32 %r8, %r8, 1; shl.b32 %r9, %r7, 3;
    add.s32 %r10, %r20, %r9;
    EMPTY: mbarrier.try_wait.parity.shared.b64 %p4, [%r10+16], %r8, 1000; @!%p4 bra EMPTY;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r10], 128; shl.b32 %r11, %r7, 7; add.s32 %r11, %r11, %r20;
    add.s32 %r11, %r11, 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%rd10], 128, [%r10];
    add.s64 %rd10, %rd10, 128; add.s32 %r5, %r5, 1; setp.lt.u32 %p5, %r5, 12; @%p5 bra NEXT;
    END:
"""
SOURCE = np.arange(12 * 32, dtype=np.uint32)
TOTAL = SOURCE.reshape(12, 32).sum(axis=0)


def ring(old: str = "", new: str = "", **options: object) -> np.ndarray:
    assert old in RING
    out = np.zeros(32, np.uint32)
    run(
        kernel(RING.replace(old, new) if old else RING, (".u64 source", ".u64 out")), [SOURCE, out], block=64, **options
    )
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_correct_ring_has_no_race(schedule: str, seed: int):
    np.testing.assert_array_equal(ring(schedule=schedule, seed=seed), TOTAL)


EMPTY_WAIT = "EMPTY: mbarrier.try_wait.parity.shared.b64 %p4, [%r10+16], %r8, 1000; @!%p4 bra EMPTY;"
FULL_WAIT = "FULL: mbarrier.try_wait.parity.shared.b64 %p4, [%r10], %r8, 1000; @!%p4 bra FULL;"
BROKEN_RINGS = {
    "no wait for the release": (EMPTY_WAIT, ""),
    "no wait for the data": (FULL_WAIT, ""),
    "the buffer is released before it is read": (
        "ld.shared.b32 %r13, [%r11+1024]; add.s32 %r6, %r6, %r13;\n    mbarrier.arrive.shared.b64 %rd9, [%r10+16];",
        "mbarrier.arrive.shared.b64 %rd9, [%r10+16]; ld.shared.b32 %r13, [%r11+1024]; add.s32 %r6, %r6, %r13;",
    ),
    "buffers overlap": (
        "128; shl.b32 %r11, %r7, 7;",
        "128; shl.b32 %r11, %r7, 6;",
    ),
    "the release is relaxed": (
        "mbarrier.arrive.shared.b64 %rd9, [%r10+16];",
        "mbarrier.arrive.relaxed.cluster.shared.b64 %rd9, [%r10+16];",
    ),
    "the producer waits for the other parity": ("xor.b32 %r8, %r8, 1;", ""),
    "the other buffer is released": (
        "[%r10+16];\n    add.s32 %r5",
        "[%r10+16];\n    xor.b32 %r10, %r10, 8; add.s32 %r5",
    ),
}


@pytest.mark.parametrize("name", [name for name in BROKEN_RINGS if "other" not in name])
def test_broken_rings_are_reported(name: str):
    """Whatever the schedule: the checks do not need bad luck."""
    for schedule in SCHEDULES:
        with pytest.raises((RaceError, UninitializedRead, BarrierMisuse)):
            ring(*BROKEN_RINGS[name], schedule=schedule)


def test_a_race_names_both_accesses():
    with pytest.raises(RaceError) as caught:
        ring(*BROKEN_RINGS["no wait for the release"])
    text = str(caught.value)
    assert "a bulk copy to shared memory follows" in text
    assert "nothing orders the two" in text
    assert caught.value.location.ptx_text.startswith("cp.async.bulk")
    assert caught.value.location.warp == 1


def test_a_relaxed_arrival_after_a_release_fence_orders():
    arrive = "mbarrier.arrive.shared.b64 %rd9, [%r10+16];"
    fenced = "fence.acq_rel.cluster; mbarrier.arrive.relaxed.cluster.shared.b64 %rd9, [%r10+16];"
    np.testing.assert_array_equal(ring(arrive, fenced), TOTAL)


def test_checks_can_be_switched_off():
    np.testing.assert_array_equal(ring(*BROKEN_RINGS["the release is relaxed"], races=False), TOTAL)


def two_warps(body: str, **options: object) -> None:
    start = (
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; and.b32 %r3, %r1, 31; setp.eq.b32 %p1, %r2, 1;"
    )
    run(kernel(start + body), [0], block=64, **options)


def test_two_warps_that_write_one_word():
    with pytest.raises(RaceError, match="a write of shared memory follows a write by warp 0"):
        two_warps("shl.b32 %r4, %r3, 2; add.s32 %r5, %r20, %r4; st.shared.b32 [%r5], %r1;")


def test_two_warps_that_write_the_halves_of_a_word():
    two_warps(
        "shl.b32 %r4, %r3, 2; shl.b32 %r6, %r2, 1; add.s32 %r4, %r4, %r6; add.s32 %r5, %r20, %r4; "
        "cvt.u16.u32 %rs1, %r1; st.shared.b16 [%r5], %rs1;"
    )
    with pytest.raises(RaceError):
        two_warps("shl.b32 %r4, %r3, 2; add.s32 %r5, %r20, %r4; cvt.u16.u32 %rs1, %r1; st.shared.b16 [%r5], %rs1;")


def test_readers_need_no_order_but_a_later_writer_does():
    shared = (
        "shl.b32 %r4, %r3, 2; add.s32 %r5, %r20, %r4; @!%p1 st.shared.b32 [%r5], %r1; "
        "bar.sync 0; ld.shared.b32 %r6, [%r5];"
    )
    two_warps(shared)
    two_warps(shared + "bar.sync 0; @%p1 st.shared.b32 [%r5], %r1;")
    with pytest.raises(RaceError, match=r"of shared memory follows a (read|write) by warp"):
        two_warps(shared + "@%p1 st.shared.b32 [%r5], %r1;")


def test_a_reader_is_remembered_behind_a_later_one():
    """Warps 0 and 2 read; warp 1 is ordered after warp 2's read only, and writes."""
    body = """
    shl.b32 %r4, %r3, 2; add.s32 %r5, %r20, %r4; setp.eq.b32 %p2, %r2, 0; setp.eq.b32 %p3, %r2, 2;
    @%p2 st.shared.b32 [%r5], %r1; bar.sync 0; @%p1 bra WRITE; @%p3 bra SECOND; ld.shared.b32 %r6, [%r5];
    bar.sync 2, 64; bra END;
    SECOND: bar.sync 2, 64; ld.shared.b32 %r6, [%r5]; bar.sync 1, 64; bra END;
    WRITE: bar.sync 1, 64; st.shared.b32 [%r5], %r1; END:
    """
    start = (
        "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; and.b32 %r3, %r1, 31; setp.eq.b32 %p1, %r2, 1;"
    )
    run(kernel(start + body), [0], block=96)
    first = "@%p3 bra SECOND; ld.shared.b32 %r6, [%r5]; bar.sync 2, 64;"
    assert first in " ".join(body.split())
    unordered = " ".join(body.split()).replace(first, "@%p3 bra SECOND; bar.sync 2, 64; ld.shared.b32 %r6, [%r5];")
    with pytest.raises(RaceError):
        run(kernel(start + unordered), [0], block=96)


# Tensor memory, by loads and stores of four warps.

TENSOR = """
    ld.param.b64 %rd0, [out]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; setp.ne.b32 %p2, %r2, 0;
    @%p2 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32; ALLOCATED: bar.sync 0;
    ld.shared.b32 %r24, [%r20]; shl.b32 %r25, %r2, 21; add.s32 %r26, %r24, %r25; add.s32 %r5, %r1, 1000;
    mov.b32 %r6, %r1;
"""
TENSOR_END = """
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r7; bar.sync 0; @%p2 bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 32; END:
"""
ST = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r26], {%r5, %r6};"
LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r7, %r8}, [%r26];"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"


def tensor(body: str, **options: object) -> np.ndarray:
    out = np.zeros(128, np.uint32)
    run(kernel(TENSOR + body + TENSOR_END), [out], block=128, **options)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_memory_round_trip(schedule: str):
    np.testing.assert_array_equal(tensor(ST + WAIT_ST + LD + WAIT_LD, schedule=schedule), np.arange(1000, 1128))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (ST + LD + WAIT_LD + WAIT_ST, RaceError, r"a read of tensor memory follows a write by a tcgen05\.st"),
        (
            ST + WAIT_ST + LD + ST + WAIT_LD + WAIT_ST,
            RaceError,
            r"a write of tensor memory follows a read by a tcgen05\.ld",
        ),
        (LD + WAIT_LD, UninitializedRead, "tcgen05.ld of 64 cells"),
        (ST.replace("%r26", "%r24") + WAIT_ST, (RaceError, TensorMemoryMisuse), ""),
        (ST.replace("[%r26]", "[%r26+31]") + WAIT_ST, OutOfBounds, "columns 31 to 32"),
    ],
)
def test_misused_tensor_memory(body: str, error: type, message: str):
    with pytest.raises(error, match=message or None):
        tensor(body)


def test_lanes_of_another_quarter_may_be_taken_modulo_32():
    """Every warp names lane 0; by the ISA that is undefined for all but the first."""
    body = (ST + WAIT_ST + LD + WAIT_LD).replace("%r26", "%r24")
    with pytest.raises(TensorMemoryMisuse, match="reaches lanes 96 to 127, not 32 from 0 on"):
        tensor(body)
    np.testing.assert_array_equal(tensor(body, relative_lanes=True), np.arange(1000, 1128))


def test_a_store_that_is_not_waited_for_is_lost_when_it_comes_late():
    with pytest.raises(UninitializedRead):
        tensor(ST + LD + WAIT_LD + WAIT_ST, races=False, schedule="late")


# A product on tensor memory, as in `core_gemms`: the fences that the ISA asks for, which are checked on demand.


def fenced(old: str = "", new: str = "", **options: object) -> None:
    text = tcgen05_text(64, 1)
    assert old in text
    a, b = integers(128, 1), integers(64, 2)
    out, _ = run_gemm(text.replace(old, new) if old else text, a, b, **options)
    np.testing.assert_array_equal(out, a @ b.T)


AFTER_DONE = WAIT_DONE + "    tcgen05.fence::after_thread_sync;\n"


def test_a_product_with_its_fences():
    fenced(tensor_fences=True)


def test_a_missing_fence_after_a_wait():
    fenced(AFTER_DONE, WAIT_DONE)
    message = r"a read of tensor memory follows a write by the tensor core.*without a tcgen05\.fence"
    with pytest.raises(RaceError, match=message):
        fenced(AFTER_DONE, WAIT_DONE, tensor_fences=True)


# Warps 0 and 1 exchange through tensor memory by a barrier: warp 1's quarter is out of reach, so warp 4 reads what
# warp 0 wrote.
EXCHANGE = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; ld.param.b64 %rd0, [out]; setp.ne.b32 %p2, %r2, 0;
    setp.ne.b32 %p3, %r2, 4;
    @%p2 bra OTHER; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32; OTHER: bar.sync 0;
    ld.shared.b32 %r26, [%r20];
    mov.b32 %r5, %r1; mov.b32 %r6, %r1;
    @%p2 bra WAITING; tcgen05.st.sync.aligned.32x32b.x2.b32 [%r26], {%r5, %r6}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    WAITING: bar.sync 0; @%p3 bra READ;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r7, %r8}, [%r26]; tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    and.b32 %r9, %r1, 31; mul.wide.u32 %rd2, %r9, 4; add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r7;
    READ: bar.sync 0; @%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r26, 32; END:
"""


@pytest.mark.parametrize("dropped", ["", "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"])
@pytest.mark.parametrize("asked", [False, True])
def test_fences_around_a_barrier(dropped: str, asked: bool):
    out = np.zeros(32, np.uint32)
    text = kernel(EXCHANGE.replace(dropped, "") if dropped else EXCHANGE)
    if dropped and asked:
        with pytest.raises(RaceError, match=r"a read of tensor memory follows a write by a tcgen05\.st of warp 0"):
            run(text, [out], block=160, tensor_fences=True)
        return
    run(text, [out], block=160, tensor_fences=asked)
    np.testing.assert_array_equal(out, LANES)


# Two CTAs that touch each other: the other must have started, and must not have left.

MEETING = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
LEAVING = "barrier.cluster.arrive; barrier.cluster.wait;"
TOUCHES = {
    "store": "st.shared::cluster.b32 [%r11+64], %r1;",
    "load": "ld.shared::cluster.b32 %r12, [%r11+64];",
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];",
    "allocation": "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r20+32], 32; "
    f"ld.shared.b32 %r24, [%r20+32]; {LEAVING} tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r24, 32;",
    "copy": "@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11+128], [%rd10], 16, [%r11];",
    "commit": "@%p4 tcgen05.commit.cta_group::2.mbarrier::arrive::one"
    ".shared::cluster.multicast::cluster.b64 [%r20], 3;",
}


def touching(name: str, before: str, **options: object) -> None:
    """Each CTA of two has a barrier and a written word, and touches those of the other."""
    count = {"arrival": 32, "commit": 2}.get(name, 1)
    body = f"""
    ld.param.b64 %rd10, [source]; mov.u32 %r1, %tid.x; mov.b32 %r20, smem; setp.eq.b32 %p4, %r1, 0;
    @%p4 mbarrier.init.shared.b64 [%r20], {count}; st.shared.b32 [%r20+64], 7; fence.mbarrier_init.release.cluster;
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mapa.shared::cluster.u32 %r11, %r20, %r3; bar.sync 0;
    {before} {"@%p4 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r20], 16;" if name == "copy" else ""}
    {TOUCHES[name]} {LEAVING}
    """
    source = np.zeros(4, np.uint32)
    run(kernel(body, (".u64 source",)), [source], grid=2, cluster=2, uninitialized="poison", **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["arrival", "allocation"])
def test_a_cta_that_has_started_may_be_touched(name: str, schedule: str):
    touching(name, MEETING, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", TOUCHES)
def test_a_cta_that_may_not_have_started_is_not_to_be_touched(name: str, schedule: str):
    with pytest.raises(RaceError, match=r"is touched with no barrier\.cluster in between: has it started"):
        touching(name, "", schedule=schedule)


def test_a_cta_must_not_leave_while_its_pair_multiplies_with_its_memory():
    """The second CTA loads its halves and goes; only the first hears when the products are done."""
    text = tcgen05_text(64, 2)
    multicast = ".shared::cluster.multicast::cluster.b64 [%r20+8], %rs1;"
    assert multicast in text
    text = text.replace(multicast, ".shared::cluster.b64 [%r20+8];")
    start, _, end = text.partition("ISSUED:\n")
    a, b = integers(256, 1), integers(64, 2)
    with pytest.raises(RaceError, match=r"CTA 1, which has exited|CTA 1 of the cluster exits while the tensor core"):
        run_gemm(f"{start}ISSUED: setp.ne.b32 %p7, %r3, 0; @%p7 bra END;\n{end}", a, b, ctas=2)


# Warp 4 waits on an mbarrier for what warp 0 has put into tensor memory and, at +64, into shared memory.
SIGNAL = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; ld.param.b64 %rd0, [out]; setp.ne.b32 %p2, %r2, 0;
    setp.ne.b32 %p3, %r2, 4; setp.eq.b32 %p4, %r1, 0; @%p4 mbarrier.init.shared.b64 [%r20+8], 32;
    fence.mbarrier_init.release.cluster;
    @%p2 bra OTHER; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32; OTHER: bar.sync 0;
    ld.shared.b32 %r26, [%r20]; mov.b32 %r5, %r1; mov.b32 %r6, %r1; mov.b32 %r8, 7;
    @%p2 bra WAITING; st.shared.b32 [%r20+64], %r8;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r26], {%r5, %r6}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync;
    mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd9, [%r20+8];
    WAITING: @%p3 bra READ;
    POLL: mbarrier.try_wait.parity.shared.b64 %p5, [%r20+8], 0, 1000; @!%p5 bra POLL; bar.warp.sync -1;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r7, %r9}, [%r26]; tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync;
    and.b32 %r9, %r1, 31; mul.wide.u32 %rd2, %r9, 4; add.s64 %rd1, %rd0, %rd2; st.global.b32 [%rd1], %r7;
    READ: bar.sync 0; @%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r26, 32; END:
"""


@pytest.mark.parametrize("fences_count", [True, False])
def test_a_relaxed_signal_orders_tensor_memory(fences_count: bool):
    out = np.zeros(32, np.uint32)
    run(kernel(SIGNAL), [out], block=160, tensor_fences=fences_count)
    np.testing.assert_array_equal(out, LANES)


def test_a_relaxed_signal_needs_the_fence_of_tensor_memory():
    text = kernel(SIGNAL.replace("tcgen05.fence::before_thread_sync;", "", 1))
    with pytest.raises(RaceError, match=r"a read of tensor memory follows a write by a tcgen05\.st of warp 0"):
        run(text, [np.zeros(32, np.uint32)], block=160, tensor_fences=True)


def test_a_relaxed_signal_orders_nothing_else():
    text = kernel(SIGNAL.replace("POLL; bar.warp.sync -1;", "POLL; bar.warp.sync -1; ld.shared.b32 %r30, [%r20+64];"))
    with pytest.raises(RaceError, match="a read of shared memory follows a write by warp 0"):
        run(text, [np.zeros(32, np.uint32)], block=160)
