"""Divergence and reconvergence, warp-wide instructions, loops, exits, special registers."""

import numpy as np
import pytest

from core_helpers import PER_THREAD, kernel, per_thread, run
from ptxemu import Deadlock, DivergenceError, KernelTrap, launch

LANES = np.arange(32)


def test_loop_with_a_trip_count_of_its_own_in_every_lane():
    body = """
    mov.b32 %r0, 0; mov.b32 %r2, 0;
    LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra END;
    add.s32 %r0, %r0, %r2; add.s32 %r2, %r2, 1; bra LOOP;
    END:
    """
    np.testing.assert_array_equal(per_thread(body), LANES * (LANES - 1) // 2)


def test_branches_meet_again_and_merge_registers():
    body = """
    mov.b32 %r0, 100; and.b32 %r2, %r1, 1; setp.eq.b32 %p1, %r2, 0;
    @%p1 bra EVEN; mov.b32 %r3, 1; mov.b32 %r0, 7; bra JOIN;
    EVEN: mov.b32 %r3, 2;
    JOIN: elect.sync %r4|%p2, -1; selp.b32 %r5, 1000, 0, %p2;
    add.s32 %r0, %r0, %r3; add.s32 %r0, %r0, %r5;
    """
    expected = np.where(LANES % 2 == 0, 102, 8) + np.where(LANES == 0, 1000, 0)
    np.testing.assert_array_equal(per_thread(body), expected)


def test_code_of_one_elected_lane():
    body = """
    mov.b32 %r0, 5; mov.b32 %r2, 6;
    elect.sync %r4|%p2, -1; not.pred %p3, %p2; @%p3 bra SKIP; mov.b32 %r0, 9; add.s32 %r2, %r2, 1;
    SKIP: add.s32 %r0, %r0, %r2;
    """
    np.testing.assert_array_equal(per_thread(body), np.where(LANES == 0, 16, 11))


def test_predicated_instructions_keep_other_lanes():
    body = """
    mov.b32 %r0, 1; setp.gt.u32 %p1, %r1, 20; @%p1 mov.b32 %r0, 2; @!%p1 add.s32 %r0, %r0, %r1;
    @%p1 mov.b64 %rd9, {%r1, %r1}; @!%p1 mov.b64 %rd9, {%r0, %r0}; mov.b64 {%r5, %r6}, %rd9; add.s32 %r0, %r5, %r6;
    """
    np.testing.assert_array_equal(per_thread(body), np.where(LANES > 20, 2 * LANES, 2 * (1 + LANES)))


def test_predicated_stores_write_active_lanes_only():
    body = (
        PER_THREAD + "setp.lt.u32 %p1, %r1, 9; @%p1 st.global.b32 [%rd1], %r1; setp.lt.u32 %p2, %r1, 0; "
        "@%p2 st.global.b32 [%rd1], 7;"
    )
    out = np.full(32, 99, np.uint32)
    run(kernel(body), [out])
    np.testing.assert_array_equal(out, np.where(LANES < 9, LANES, 99))


def test_lanes_may_leave_early():
    body = (
        PER_THREAD
        + "st.global.b32 [%rd1], 1; setp.gt.u32 %p1, %r1, 9; @%p1 exit; bar.warp.sync 0x3FF; st.global.b32 [%rd1], 2;"
    )
    out = np.zeros(32, np.uint32)
    run(kernel(body), [out])
    np.testing.assert_array_equal(out, np.where(LANES > 9, 1, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("shfl.sync.idx.b32 %r0, %r1, 3, 31, -1;", np.full(32, 3)),
        ("shfl.sync.bfly.b32 %r0, %r1, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.up.b32 %r0, %r1, 4, 0, -1;", np.where(LANES < 4, LANES, LANES - 4)),
        ("shfl.sync.down.b32 %r0, %r1, 4, 31, -1;", np.where(LANES > 27, LANES, LANES + 4)),
        # segments of eight lanes: mask 0b11000 in bits 8 to 12 of the clamp
        ("shfl.sync.down.b32 %r0, %r1, 3, 0x181F, -1;", np.where(LANES % 8 > 4, LANES, LANES + 3)),
        ("shfl.sync.idx.b32 %r0, %r1, 2, 0x181F, -1;", LANES // 8 * 8 + 2),
        ("shfl.sync.down.b32 %r2|%p2, %r1, 4, 31, -1; selp.b32 %r0, 1, 0, %p2;", (LANES <= 27).astype(int)),
        ("setp.gt.u32 %p1, %r1, 27; vote.sync.ballot.b32 %r0, %p1, -1;", np.full(32, 0xF0000000)),
        ("setp.gt.u32 %p1, %r1, 27; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2;", np.ones(32)),
        ("setp.gt.u32 %p1, %r1, 27; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2;", np.zeros(32)),
        ("redux.sync.add.u32 %r0, %r1, -1;", np.full(32, 496)),
        ("sub.s32 %r2, %r1, 9; redux.sync.min.s32 %r0, %r2, -1;", np.full(32, 0xFFFFFFF7)),
        ("mov.u32 %r0, %laneid;", LANES),
        ("mov.u32 %r0, %lanemask_lt;", (1 << LANES) - 1),
        ("mov.u32 %r0, %ntid.x;", np.full(32, 32)),
    ],
)
def test_warp_wide_instructions(text: str, expected: np.ndarray):
    np.testing.assert_array_equal(per_thread(text), expected.astype(np.uint32))


def test_groups_of_lanes_with_masks_of_their_own():
    """Four groups of eight lanes shuffle in one instruction; what a lane reads from another group is undefined."""
    body = """
    shr.u32 %r2, %r1, 3; shl.b32 %r2, %r2, 3; shl.b32 %r3, 0xFF, %r2;
    shfl.sync.down.b32 %r0, %r1, 4, 31, %r3;
    """
    result = per_thread(body)
    inside, other_group = LANES % 8 < 4, (LANES % 8 >= 4) & (LANES < 28)
    np.testing.assert_array_equal(result[inside], (LANES + 4)[inside])
    assert not np.isin(result[other_group], LANES).any()


def test_lanes_that_never_come_are_a_deadlock():
    with pytest.raises(Deadlock, match="which have not reached this instruction"):
        per_thread("setp.lt.u32 %p1, %r1, 16; @%p1 bra LOOP; bar.warp.sync -1; bra END; LOOP: bar.sync 1, 64; END:")


def test_a_lane_outside_its_own_member_mask():
    with pytest.raises(DivergenceError, match="outside the member mask"):
        per_thread("shfl.sync.idx.b32 %r0, %r1, 0, 31, 0xF;")


def test_trap():
    with pytest.raises(KernelTrap) as caught:
        run(
            kernel("mov.u32 %r1, %tid.x; setp.eq.b32 %p1, %r1, 40; @%p1 bra BAD; bra END; BAD: trap; END:"),
            [0],
            block=64,
        )
    assert caught.value.location.warp == 1


def test_block_and_grid_indices():
    body = """
    ld.param.b64 %rd0, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %cluster_ctarank;
    mov.u32 %r4, %clusterid.x; mov.u32 %r5, %nctaid.x; mad.lo.u32 %r6, %r2, 64, %r1; mul.wide.u32 %rd2, %r6, 4;
    add.s64 %rd1, %rd0, %rd2; mad.lo.u32 %r7, %r4, 10, %r3; mad.lo.u32 %r7, %r5, 100, %r7; st.global.b32 [%rd1], %r7;
    """
    out = np.zeros(4 * 64, np.uint32)
    run(kernel(body), [out], block=64, grid=4, cluster=2)
    np.testing.assert_array_equal(out, 400 + np.repeat([0, 1, 10, 11], 64))


SPECIAL = [
    "laneid",
    "warpid",
    "nwarpid",
    "smid",
    "nsmid",
    "gridid",
    "clock",
    "clock_hi",
    "globaltimer_lo",
    "globaltimer_hi",
    "cluster_ctarank",
    "cluster_nctarank",
    "is_explicit_cluster",
    "lanemask_eq",
    "lanemask_le",
    "lanemask_lt",
    "lanemask_ge",
    "lanemask_gt",
    "dynamic_smem_size",
    "total_smem_size",
] + [
    f"{name}.{axis}"
    for name in ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
    for axis in "xyz"
]


@pytest.mark.parametrize("name", SPECIAL)
def test_every_special_register_can_be_read(name: str):
    per_thread(
        f"setp.ne.b32 %p1, 0, 0; mov.b32 %r0, %{name};"
        if name != "is_explicit_cluster"
        else f"mov.pred %p1, %{name}; selp.b32 %r0, 1, 0, %p1;"
    )


def test_clocks_only_grow():
    body = "mov.u64 %rd5, %clock64; mov.u64 %rd6, %globaltimer; setp.gt.u64 %p1, %rd6, %rd5; selp.b32 %r0, 1, 0, %p1;"
    assert per_thread(body).all()


def test_three_dimensional_blocks():
    body = """
    ld.param.b64 %rd0, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mad.lo.u32 %r4, %r3, 3, %r2; mad.lo.u32 %r4, %r4, 5, %r1; mul.wide.u32 %rd2, %r4, 4; add.s64 %rd1, %rd0, %rd2;
    st.global.b32 [%rd1], %r4;
    """
    out = np.zeros(60, np.uint32)
    launch(kernel(body), "k", 1, (5, 3, 4), 1, 0, [out])
    np.testing.assert_array_equal(out, np.arange(60))


def test_lines_are_counted_as_if_lanes_met_again_at_once():
    body = (
        PER_THREAD
        + """
    setp.lt.u32 %p1, %r1, 9;
    @%p1 bra FAR;
    JOIN:
    add.s32 %r2, %r1, 5;
    st.global.b32 [%rd1], %r2;
    ret;
    FAR:
    add.s32 %r1, %r1, 100;
    bra JOIN;
    """
    )
    out, ptx = np.zeros(64, np.uint32), kernel(body)
    counts = run(ptx, [out], block=64).counts
    lanes = np.arange(64)
    np.testing.assert_array_equal(out, np.where(lanes < 9, lanes + 105, lanes + 5))
    line = {text.strip(): number for number, text in enumerate(ptx.splitlines(), 1)}
    issued = [counts.lines[warp][line["add.s32 %r2, %r1, 5;"]] for warp in (0, 1)]
    assert issued == [1, 1]
    assert [counts.lines[warp][line["add.s32 %r1, %r1, 100;"]] for warp in (0, 1)] == [1, 0]
    assert counts.opcodes["st.global.b32"] == 3  # the lanes of one warp come here apart
