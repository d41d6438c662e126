"""mbarriers, named barriers, the barrier of a cluster; their misuse; deadlocks."""

import numpy as np
import pytest

from core_helpers import PER_THREAD, kernel, run
from ptxemu import BarrierMisuse, Deadlock, Order, RaceError

SCHEDULES = [order.value for order in Order]
LANES = np.arange(32)

# Warp 0's lane 0 initialises a barrier at smem for `count` arrivals; then the CTA meets.
INIT = (
    PER_THREAD
    + """
    mov.b32 %r20, smem; setp.ne.b32 %p1, %r1, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r20], COUNT;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0; shr.u32 %r2, %r1, 5;
    """
)


def wait(parity: str, barrier: str = "%r20", label: str = "WAIT") -> str:
    return (
        f"{{ {label}: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p20, [{barrier}], {parity}, 1000; "
        f"@!%p20 bra {label}; }}"
    )


def with_barrier(body: str, count: int = 1) -> str:
    return kernel(INIT.replace("COUNT", str(count)) + body)


def one_lane(instruction: str, label: str = "SKIP") -> str:
    return f"{{ elect.sync _|%p10, -1; @!%p10 bra {label}; {instruction} {label}: }}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_producer_and_consumer(schedule: str, seed: int):
    """Warp 1 stores and arrives; warp 0 waits, loads, releases: twenty rounds through one buffer, in both parities."""
    body = f"""
    add.s32 %r21, %r20, 8; setp.ne.b32 %p2, %r1, 32; @%p2 bra READY2; mbarrier.init.shared.b64 [%r21], 32;
    READY2: bar.sync 0; shl.b32 %r3, %r1, 2; and.b32 %r3, %r3, 127; add.s32 %r4, %r20, %r3;
    mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0; setp.eq.b32 %p3, %r2, 1; @%p3 bra PRODUCE;
    CONSUME: and.b32 %r8, %r5, 1; {wait("%r8", label="FULL")} ld.shared.b32 %r9, [%r4+64]; mad.lo.s32 %r6, %r6, 3, %r9;
    mbarrier.arrive.shared.b64 %rd9, [%r21]; add.s32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, 20; @%p4 bra CONSUME;
    st.global.b32 [%rd1], %r6; bra END;
    PRODUCE: and.b32 %r8, %r5, 1; xor.b32 %r8, %r8, 1; {wait("%r8", "%r21", "EMPTY")}
    add.s32 %r9, %r5, %r1; st.shared.b32 [%r4+64], %r9; mbarrier.arrive.shared.b64 %rd9, [%r20]; add.s32 %r5, %r5, 1;
    setp.lt.u32 %p4, %r5, 20; @%p4 bra PRODUCE;
    END:
    """
    out = np.zeros(64, np.uint32)
    run(with_barrier(body, 32), [out], block=64, schedule=schedule, seed=seed)
    expected = np.zeros(32, np.uint32)
    for step in range(20):
        expected = expected * np.uint32(3) + np.uint32(step) + (LANES + 32).astype(np.uint32)
    np.testing.assert_array_equal(out[:32], expected)


def test_a_fresh_barrier_passes_parity_one():
    out = np.zeros(32, np.uint32)
    run(with_barrier(wait("1") + "st.global.b32 [%rd1], 1;"), [out])
    assert out.all()


def test_states_of_arrivals():
    body = """
    mbarrier.arrive.shared.b64 %rd9, [%r20]; bar.warp.sync -1;
    WAIT: mbarrier.try_wait.shared.b64 %p2, [%r20], %rd9; @!%p2 bra WAIT; st.global.b32 [%rd1], 1;
    """
    out = np.zeros(32, np.uint32)
    run(with_barrier(body, 32), [out])
    assert out.all()


def test_test_wait_does_not_block():
    body = "mbarrier.test_wait.parity.shared.b64 %p2, [%r20], 0; selp.b32 %r5, 7, 8, %p2; st.global.b32 [%rd1], %r5;"
    out = np.zeros(32, np.uint32)
    run(with_barrier(body), [out])
    assert (out == 8).all()


def test_polling_lets_others_run():
    body = """
    setp.eq.b32 %p3, %r2, 1; @%p3 bra SIGNAL;
    POLL: mbarrier.test_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra POLL; st.global.b32 [%rd1], 1; bra END;
    SIGNAL: mbarrier.arrive.shared.b64 %rd9, [%r20]; END:
    """
    out = np.zeros(64, np.uint32)
    run(with_barrier(body, 32), [out], block=64)
    assert out[:32].all()


def test_polling_global_memory_lets_others_run():
    body = (
        PER_THREAD
        + """
    setp.eq.b32 %p3, %r1, 32; @%p3 bra SIGNAL; setp.gt.u32 %p4, %r1, 31; @%p4 bra END;
    POLL: ld.acquire.gpu.global.b32 %r5, [%rd0+252]; setp.ne.b32 %p2, %r5, 77; @%p2 bra POLL;
    st.global.b32 [%rd1], 1; bra END;
    SIGNAL: st.release.gpu.global.b32 [%rd0+252], 77; END:
    """
    )
    out = np.zeros(64, np.uint32)
    run(kernel(body), [out], block=64)
    assert out[:32].all()


def test_a_cta_may_wait_for_a_later_one():
    """The second cluster starts when the first cannot go on."""
    body = """
    ld.param.b64 %rd0, [out]; mov.u32 %r2, %ctaid.x; setp.eq.b32 %p3, %r2, 1; @%p3 bra SIGNAL;
    POLL: ld.acquire.gpu.global.b32 %r5, [%rd0]; setp.ne.b32 %p2, %r5, 77; @%p2 bra POLL; st.global.b32 [%rd0+4], 1;
    bra END;
    SIGNAL: st.release.gpu.global.b32 [%rd0], 77; END:
    """
    out = np.zeros(2, np.uint32)
    run(kernel(body), [out], grid=2)
    assert out.tolist() == [77, 1]


def test_peeking_waits_may_fail():
    """A wait that cannot succeed before this warp itself goes on returns False in the end."""
    body = f"""
    mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; selp.b32 %r5, 1, 2, %p2;
    {one_lane("mbarrier.arrive.shared.b64 %rd9, [%r20];")} {wait("0")} st.global.b32 [%rd1], %r5;
    """
    out = np.zeros(32, np.uint32)
    report = run(with_barrier(body), [out])
    assert (out == 2).all()
    assert report.counts.barrier_timeouts == 1


@pytest.mark.parametrize(
    ("body", "count", "message"),
    [
        ("mbarrier.arrive.shared.b64 %rd9, [%r20];", 31, "arrivals are more than"),
        ("mbarrier.arrive.shared.b64 %rd9, [%r20+8];", 1, "no mbarrier was initialised at offset 1032"),
        ("mbarrier.init.shared.b64 [%r20], 1;", 1, "mbarrier.init of the live mbarrier"),
        ("mbarrier.init.shared.b64 [%r20+8], 0;", 1, "with a count of 0"),
        ("st.shared.b32 [%r20], 0;", 1, "a store to the live mbarrier"),
        (one_lane("mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 2000000;"), 2, "leaves its range"),
        (one_lane("mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r20], 64;"), 2, "outstanding at the end"),
        ("barrier.cluster.wait;", 1, "without a barrier.cluster.arrive"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", 1, "twice without"),
        ("bar.sync 1, 40;", 1, "not a multiple of the warp size"),
        ("bar.sync 16;", 1, "no barrier 16"),
        ("mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 2;", 1, "2 is no phase parity"),
    ],
)
def test_misuse(body: str, count: int, message: str):
    with pytest.raises(BarrierMisuse, match=message):
        run(with_barrier(body, count), [np.zeros(32, np.uint32)])


def test_an_invalidated_barrier_may_be_initialised_again():
    again = "mbarrier.inval.shared.b64 [%r20]; mbarrier.init.shared.b64 [%r20], 1;"
    run(with_barrier(one_lane(again)), [np.zeros(32, np.uint32)])


def test_remote_arrival():
    body = f"""
    mov.u32 %r10, %cluster_ctarank; barrier.cluster.arrive; barrier.cluster.wait; setp.eq.b32 %p3, %r10, 1;
    @%p3 bra SIGNAL;
    {wait("0")} st.global.b32 [%rd1], 1; bra END;
    SIGNAL: mapa.shared::cluster.u32 %r11, %r20, 0; cvt.u64.u32 %rd11, %r11;
    {one_lane("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%rd11], 1;")}
    END: barrier.cluster.arrive; barrier.cluster.wait;
    """
    out = np.zeros(32, np.uint32)
    run(with_barrier(body), [out], grid=2, cluster=2)
    assert out.all()


def test_named_barriers():
    """Warps 0 and 1 meet at barrier 1, warps 1 and 2 at barrier 2, where warp 2 only arrives."""
    body = (
        PER_THREAD
        + """
    shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; shl.b32 %r3, %r1, 2; add.s32 %r4, %r20, %r3;
    setp.eq.b32 %p1, %r2, 1; @%p1 bra ONE; setp.eq.b32 %p2, %r2, 2; @%p2 bra TWO;
    st.shared.b32 [%r4], %r1; bar.sync 1, 64; bra END;
    TWO: st.shared.b32 [%r4], %r1; bar.arrive 2, 64; bra END;
    ONE: bar.sync 1, 64; barrier.sync.aligned 2, 64; ld.shared.b32 %r5, [%r4+-128]; ld.shared.b32 %r6, [%r4+128];
    add.s32 %r5, %r5, %r6; st.global.b32 [%rd1], %r5;
    END:
    """
    )
    out = np.zeros(96, np.uint32)
    run(kernel(body), [out], block=96)
    np.testing.assert_array_equal(out[32:64], 2 * LANES + 64)


def test_aligned_barriers_need_the_whole_warp():
    """Two halves of a warp at two barrier instructions: allowed without .aligned, which bar.sync implies."""
    body = """
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW; barrier.sync 1, 32; bra END;
    LOW: barrier.sync 1, 32; END:
    """
    run(kernel(body), [0])
    for aligned in ("bar.sync", "barrier.sync.aligned"):
        with pytest.raises(Deadlock, match="have not reached this instruction"):
            run(kernel(body.replace("barrier.sync", aligned)), [0])


def test_a_missing_named_barrier_is_a_race():
    body = (
        PER_THREAD
        + """
    mov.b32 %r20, smem; shl.b32 %r3, %r1, 2; add.s32 %r4, %r20, %r3; shr.u32 %r2, %r1, 5; setp.eq.b32 %p1, %r2, 1;
    @%p1 bra ONE;
    st.shared.b32 [%r4], %r1; bra END; ONE: ld.shared.b32 %r5, [%r4+-128]; END:
    """
    )
    with pytest.raises(RaceError, match=r"a read of shared memory follows a write by warp 0 .*nothing orders the two"):
        run(kernel(body), [np.zeros(64, np.uint32)], block=64)


def test_a_deadlock_lists_every_warp():
    body = """
    setp.eq.b32 %p3, %r2, 1; @%p3 bra OTHER;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra WAIT; bra END;
    OTHER: bar.sync 3, 64; END:
    """
    with pytest.raises(Deadlock) as caught:
        run(with_barrier(body), [np.zeros(64, np.uint32)], block=64)
    text = str(caught.value)
    assert "CTA 0 warp 0: line" in text
    assert "parity 0 of the mbarrier at offset 1024" in text
    assert "1 of 1 arrivals pending" in text
    assert "barrier 3 (32 of 64 threads are there)" in text


def test_polling_for_ever_is_a_deadlock():
    with pytest.raises(Deadlock, match="nothing"):
        run(
            with_barrier("POLL: mbarrier.test_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra POLL;"),
            [np.zeros(32, np.uint32)],
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waiting_is_not_counted_as_execution(schedule: str):
    """The first warp waits for the second, which comes through a loop."""
    body = (
        PER_THREAD
        + """
    mov.b32 %r3, 0;
    setp.lt.u32 %p1, %r1, 32; @%p1 bra MEET;
    LOOP: add.s32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 500; @%p2 bra LOOP;
    MEET:
    bar.sync 0;
    st.global.b32 [%rd1], %r3;
    """
    )
    out, ptx = np.zeros(64, np.uint32), kernel(body)
    counts = run(ptx, [out], block=64, schedule=schedule).counts
    np.testing.assert_array_equal(out, np.repeat([0, 500], 32))
    line = {text.strip(): number for number, text in enumerate(ptx.splitlines(), 1)}
    for text in ("bar.sync 0;", "st.global.b32 [%rd1], %r3;"):
        assert [counts.lines[warp][line[text]] for warp in (0, 1)] == [1, 1], text
    assert counts.opcodes["bar.sync"] == counts.opcodes["st.global.b32"] == 2
