"""Matrix products by wgmma and tcgen05, under every schedule; their counts; what is wrong with broken ones."""

import numpy as np
import pytest

from core_gemms import DEPTH, WAIT_DONE, WAIT_FULL, integers, run_gemm, tcgen05_text, wgmma_text
from core_helpers import kernel, run
from ptxemu import (
    BarrierMisuse,
    Deadlock,
    DescriptorError,
    DivergenceError,
    EmulatorError,
    Order,
    OutOfBounds,
    RaceError,
    TensorMemoryMisuse,
    UninitializedRead,
)

SCHEDULES = [order.value for order in Order]
FORMS = {"wgmma": (64, 1), "tcgen05": (128, 1), "tcgen05 pair": (256, 2)}


def text_of(form: str, n: int = 64) -> str:
    return wgmma_text(n) if form == "wgmma" else tcgen05_text(n, FORMS[form][1])


def operands(form: str, n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    return integers(FORMS[form][0], 1), integers(n, 2)


def broken(form: str, old: str, new: str, **options: object) -> np.ndarray:
    text = text_of(form)
    assert old in text
    a, b = operands(form)
    out, _ = run_gemm(text.replace(old, new), a, b, ctas=FORMS[form][1], **options)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [32, 64])
def test_products_of_integers_are_exact(form: str, schedule: str, n: int):
    a, b = operands(form, n)
    out, _ = run_gemm(text_of(form, n), a, b, ctas=FORMS[form][1], schedule=schedule, seed=3)
    np.testing.assert_array_equal(out, a @ b.T)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("form", FORMS)
def test_a_need_not_be_in_shared_memory(form: str, schedule: str):
    """A from registers (wgmma) or tensor memory (tcgen05)."""
    a, b = operands(form)
    text = (
        wgmma_text(64, a_in_registers=True)
        if form == "wgmma"
        else tcgen05_text(64, FORMS[form][1], a_in_tensor_memory=True)
    )
    out, report = run_gemm(text, a, b, ctas=FORMS[form][1], schedule=schedule, seed=1)
    np.testing.assert_array_equal(out, a @ b.T)
    assert report.counts.macs_issued == a.shape[0] * 64 * DEPTH


@pytest.mark.parametrize("form", FORMS)
def test_every_step_of_sixteen_is_rounded_once(form: str):
    """The documented rule, on values whose sums are not exact."""
    a, b = (np.ldexp(values, np.arange(DEPTH) % 23) for values in operands(form))
    expected = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for first in range(0, DEPTH, 16):
        step = slice(first, first + 16)
        expected = (expected + a[:, step].astype(np.float64) @ b[:, step].T.astype(np.float64)).astype(np.float32)
    out, _ = run_gemm(text_of(form), a, b, ctas=FORMS[form][1])
    np.testing.assert_array_equal(out, expected)
    assert not np.array_equal(out, (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_counts(form: str):
    a, b = operands(form)
    _, report = run_gemm(text_of(form), a, b, ctas=FORMS[form][1])
    counts = report.counts
    assert counts.macs_issued == counts.macs_useful == a.shape[0] * 64 * DEPTH
    assert counts.bytes["global to shared"] == (a.size + b.size) * 2
    assert counts.bytes["registers to global"] == a.shape[0] * 64 * 4
    assert counts.bytes["shared to tensor core"] == (a.size + b.size) * 2
    products = sum(number for name, number in counts.opcodes.items() if name.startswith(("wgmma.mma", "tcgen05.mma")))
    assert products == (4 * 4 if form == "wgmma" else 4)
    assert counts.instructions["tensor"] >= products
    assert f"{counts.macs_issued:,}" in str(counts)


def test_rows_of_fill_are_issued_but_not_useful():
    """B has 40 rows of data; the box of 64 is filled up with zeros."""
    a, b = operands("tcgen05")
    out, report = run_gemm(tcgen05_text(64, 1), a, b[:40], n=64)
    np.testing.assert_array_equal(out[:, :40], a @ b[:40].T)
    assert not out[:, 40:].any()
    assert report.counts.macs_issued == 128 * 64 * DEPTH
    assert report.counts.macs_useful == 128 * 40 * DEPTH


@pytest.mark.parametrize(
    ("form", "old", "new", "error", "message"),
    [
        ("wgmma", "[%r20], 1;\n", "[%r20], 2;\n", Deadlock, "2 arrivals pending"),
        (
            "wgmma",
            "expect_tx.shared.b64 %rd9, [%r20], 16384",
            "expect_tx.shared.b64 %rd9, [%r20], 16400",
            Deadlock,
            "16 bytes outstanding",
        ),
        ("wgmma", "[%r20], 16384;\n", "[%r20], 8192;\n", RaceError, "follows a write by a bulk copy"),
        ("tcgen05", "tcgen05.dealloc", "//", TensorMemoryMisuse, "not freed at the end: 64 columns at 0"),
        ("tcgen05", "%r24, 64;\n", "%r24, 32;\n", TensorMemoryMisuse, "32 columns freed"),
        ("tcgen05", "[%r23], 64;", "[%r23], 48;", TensorMemoryMisuse, "48 columns"),
        ("tcgen05", "[%r23], 64;", "[%r23], 32;", OutOfBounds, "columns 0 to 63"),
        ("tcgen05", "setp.ne.b32 %p4, 0, 0", "setp.ne.b32 %p4, 1, 0", UninitializedRead, "accumulation"),
        ("tcgen05", "add.s32 %r42, %r41, 32;", "add.s32 %r42, %r41, 64;", OutOfBounds, "tcgen05.ld"),
        ("tcgen05", "shl.b32 %r41, %r2, 21", "mul.lo.s32 %r41, %r2, 1048576", EmulatorError, "lanes"),
        (
            "tcgen05 pair",
            "mov.b16 %rs1, 3",
            "mov.b16 %rs1, 1",
            Deadlock,
            "parity 0 of the mbarrier at offset 1032 of the cluster's CTA 1",
        ),
        ("tcgen05 pair", "sub.s32 %r26, %r20, %r25", "mov.b32 %r26, %r20", Deadlock, "20480 bytes outstanding"),
    ],
)
def test_broken_products_are_reported(form: str, old: str, new: str, error: type, message: str):
    with pytest.raises(error, match=message):
        broken(form, old, new)


@pytest.mark.parametrize(
    ("form", "old", "new", "message"),
    [
        ("wgmma", WAIT_FULL, "", "the tensor core's read of shared memory follows a write by a bulk copy"),
        ("tcgen05", WAIT_FULL, "", "the tensor core's read of shared memory follows a write by a bulk copy"),
        (
            "tcgen05",
            WAIT_DONE,
            "",
            "tcgen05.ld of .* that nothing wrote|a read of tensor memory follows a write by the tensor core",
        ),
        ("tcgen05", "tcgen05.wait::ld.sync.aligned;", "", "tcgen05.dealloc follows a read by a tcgen05.ld"),
    ],
)
def test_missing_waits_are_races(form: str, old: str, new: str, message: str):
    with pytest.raises((RaceError, UninitializedRead), match=message):
        broken(form, old, new)


def test_missing_waits_give_wrong_results_when_work_completes_late():
    """What the race check says shows without it, too, once nothing completes early."""
    with pytest.raises(UninitializedRead, match=r"tcgen05\.ld"):
        broken("tcgen05", WAIT_DONE, "", races=False, schedule="late")
    with pytest.raises(UninitializedRead, match="tensor core's read"):
        broken("tcgen05", WAIT_FULL, "", races=False, schedule="newest")


def test_accumulators_of_wgmma_are_undefined_until_the_wait():
    assert np.isnan(broken("wgmma", "wgmma.wait_group.sync.aligned 0;", "", schedule="late")).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_swizzle_that_contradicts_the_copy(schedule: str):
    high = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16
    other = 4 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16
    with pytest.raises(DescriptorError, match="says swizzle B64; a tensor map with swizzle B128 has written it"):
        broken("tcgen05", str(high), str(other), schedule=schedule)


def test_malformed_descriptors():
    high = 2 << 61 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16
    for wrong in (high | 1 << 47, high | 5 << 61, high & ~(1 << 46)):
        with pytest.raises(DescriptorError, match="descriptor") as caught:
            broken("tcgen05", str(high), str(wrong))
        assert caught.value.location.ptx_text.startswith("tcgen05.mma")


def test_a_shifted_start_address_shifts_rows():
    """The swizzle depends on absolute addresses: starting one row later reads the rows below."""
    a, b = operands("wgmma")
    out = broken("wgmma", "add.s32 %r40, %r20, 1024;", "add.s32 %r40, %r20, 1152;")
    expected = (a @ b.T).copy()
    steps = np.zeros_like(expected)
    shifted = np.vstack([a[1:], b[:1]])
    steps[:] = expected - a[:, :16] @ b[:, :16].T + shifted[:, :16] @ b[:, :16].T
    np.testing.assert_array_equal(out, steps)


WAITED = "wgmma.wait_group.sync.aligned 0;\n"
# Every thread clears 64 bytes of A, 1024 bytes into shared memory.
CLEAR_A = "".join(
    [
        "shl.b32 %r45, %r1, 6; add.s32 %r45, %r45, %r20;",
        *(f"st.shared.b32 [%r45+{1024 + 4 * i}], 0;" for i in range(16)),
    ]
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operands_are_read_again_when_they_have_changed(schedule: str):
    """The same four products once more, after A was cleared: they add nothing."""
    text = text_of("wgmma")
    products = text[text.index("wgmma.fence") : text.index(WAITED)]
    assert "setp.ne.b32 p, 0, 0" in products
    products = products.replace("setp.ne.b32 p, 0, 0", "setp.ne.b32 p, 1, 0")
    again = f"{WAITED} bar.sync 0; {CLEAR_A} fence.proxy.async; bar.sync 0; {products} {WAITED}"
    a, b = operands("wgmma")
    np.testing.assert_array_equal(broken("wgmma", WAITED, again, schedule=schedule), a @ b.T)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("bar.sync 0;", r"without a fence\.proxy\.async in between"),
        ("fence.proxy.async;", "nothing orders the two"),
        ("bar.sync 0; fence.proxy.async;", None),
    ],
)
def test_what_one_warp_stores_all_warps_must_know_before_they_multiply(order: str, message: str | None):
    """Warp 0 stores to A: it takes a fence and a barrier."""
    store = f"setp.ne.b32 %p5, %r2, 0; @%p5 bra STORED; {CLEAR_A} STORED: {order}\n    wgmma.fence"
    if message is None:
        broken("wgmma", "wgmma.fence", store)
        return
    with pytest.raises(RaceError, match=message):
        broken("wgmma", "wgmma.fence", store)


def test_warps_of_a_warpgroup_must_agree():
    with pytest.raises(DivergenceError, match="different wgmmas"):
        broken(
            "wgmma",
            "add.s32 %r40, %r20, 1056;",
            "add.s32 %r40, %r2, 1056; shl.b32 %r40, %r40, 4; add.s32 %r40, %r40, %r20;",
        )


def test_over_arrival():
    line = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+8];\n"
    with pytest.raises(BarrierMisuse, match=r"outstanding|arrivals are more"):
        broken("tcgen05", line, line + "    mbarrier.arrive.shared.b64 %rd9, [%r20+8], 2;\n")


ALLOCATIONS = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r20, smem; shl.b32 %r3, %r2, 2; add.s32 %r20, %r20, %r3;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 512; ld.shared.b32 %r4, [%r20];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_allocation_waits_until_columns_are_free(schedule: str):
    run(kernel(ALLOCATIONS), [0], block=128, schedule=schedule)


def test_an_allocation_that_is_never_served_is_a_deadlock():
    kept = ALLOCATIONS.replace("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;", "bar.sync 0;")
    with pytest.raises(Deadlock, match="512 free columns of tensor memory"):
        run(kernel(kept), [0], block=64)
