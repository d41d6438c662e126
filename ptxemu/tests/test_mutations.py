"""Working kernels, broken by one edit of their PTX: each must be reported, or give a wrong result that a test sees.

A mutation names a pattern of the PTX and what stands in its place. It counts as caught if the emulator reports a fault
or the output is not the expected one under at least one schedule. `README.md` lists those that are not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda.bindings import driver

from ptxemu import EmulatorError, cross_compile, emulate
from ptxemu.cutedsl import peers
from ptxemu.cutedsl.samples import make_case
from torch_helpers import BF16, nan, require_peer, small_integers

SCHEDULES = (("early", 0), ("late", 0), ("newest", 0), ("random", 0), ("random", 1), ("random", 2), ("random", 3))
ROWS = {"sm90_row_shift": 230, "sm90_overlapping_rows": 130, "sm100_row_shift": 840}  # rings and buffers wrap
SM90, OVERLAP, SM100 = "sm90_row_shift", "sm90_overlapping_rows", "sm100_row_shift"
CUDNN, CUDNN_GATHER = "cudnn_conv3d", "cudnn_causal_conv3d"
CUDNN_CHANNELS = 192  # 160, padded to chunks of 64
CAUGHT, UNSEEN = True, False


@dataclass(frozen=True)
class Mutation:
    """One edit: the `nth` match of `pattern` becomes `replacement` (a template as for `re.sub`, or a function)."""

    name: str
    kernel: str
    pattern: str
    replacement: str | Callable[[re.Match], str] = ""
    nth: int = 0
    caught: bool = CAUGHT

    def apply(self, ptx: str) -> str:
        ptx = re.sub(r"^\s*//[^\n]*\n", "", ptx, flags=re.MULTILINE)  # comments would stand in the patterns' way
        matches = list(re.finditer(self.pattern, ptx, re.DOTALL | re.MULTILINE))
        assert len(matches) > self.nth, f"the PTX of {self.kernel} has {len(matches)} matches of {self.pattern!r}"
        match = matches[self.nth]
        new = self.replacement(match) if callable(self.replacement) else match.expand(self.replacement)
        assert new != match.group(), "the edit changes nothing"
        return ptx[: match.start()] + new + ptx[match.end() :]


def add(amount: int) -> Callable[[re.Match], str]:
    """The number in the group `number` plus `amount`."""
    return edit_number(lambda number: number + amount)


def flip(*bits: int) -> Callable[[re.Match], str]:
    """The number in the group `number` with these bits inverted."""
    return edit_number(lambda number: number ^ sum(1 << bit for bit in bits))


def edit_number(change: Callable[[int], int]) -> Callable[[re.Match], str]:
    def replace(match: re.Match) -> str:
        start, end = (position - match.start() for position in match.span("number"))
        return match.group()[:start] + str(change(int(match["number"]))) + match.group()[end:]

    return replace


def line(opcode: str) -> str:
    """A whole instruction, given by (a pattern of) its beginning."""
    return rf"^\t(?:@!?%p\d+ )?{opcode}[^\n]*;\n"


WAIT_LOOP = r"(mbarrier\.try_wait[^\n]*\n\tnot\.pred[^\n]*\n)\t@%p\d+ bra[^\n]*\n"
PARITY_FLIP = r"\txor\.b32 \t(%r\d+), \1, %r\d+;\n"
EXPECT = r"mov\.b32 \t%r\d+, (?P<number>\d+);\n\tmbarrier\.arrive\.expect_tx"
MULTICAST_COMMIT = r"\tmov\.b16 \t%rs\d+, (?P<number>3);\n\ttcgen05\.commit"
WGMMA_DESCRIPTOR = r"or\.b64 \t%rd\d+, %rd\d+, (?P<number>4611686293305360384);"
TCGEN05_DESCRIPTOR = r"or\.b64 \t%rd\d+, %rd\d+, (?P<number>4611756662049538048);"
INSTRUCTION_DESCRIPTOR = r"mov\.b32 \t%r\d+, (?P<number>269485200);"
IM2COL_OFFSET = r"cvt\.u16\.u32 \t(?P<offset>%rs\d+), %r\d+;"
NEXT_OFFSET = r"\g<0>\n\tadd.s16 \t\g<offset>, \g<offset>, 1;"
RELEASE = (
    r"\telect\.sync [^\n]*\n\tnot\.pred[^\n]*\n\t@[^\n]*\n[^@]*?mbarrier\.arrive\.release\.cluster[^\n]*\n\$L\w+:\n"
)


def barrier_init(offset: int) -> str:
    """The arrival count with which the barrier at this shared offset is initialised."""
    place = rf"\[%r\d+\+{offset}\]" if offset else r"\[%r\d+\]"
    return rf"mbarrier\.init\.shared\.b64 \t{place}, (?P<count>%r\d+);"


def with_count(number: int) -> Callable[[re.Match], str]:
    return lambda match: match.group().replace(match["count"], str(number))


def moved_forward(match: re.Match) -> str:
    """The group `moved` in front of the group `rest`."""
    return match["moved"] + match["rest"]


# Shared offsets of the barriers, as the kernels declare them.
FULL, EMPTY, SUMS_FULL = 0, 24, 48
ACC_FULL, ACC_EMPTY = 48, 64

MUTATIONS = [
    # Blackwell: descriptors
    Mutation("descriptor: stride between groups of eight rows doubled", SM100, TCGEN05_DESCRIPTOR, flip(38, 39)),
    Mutation("descriptor: 64-byte swizzle on a 128-byte tile", SM100, TCGEN05_DESCRIPTOR, flip(62, 63)),
    Mutation("descriptor: no swizzle", SM100, TCGEN05_DESCRIPTOR, flip(62)),
    Mutation("descriptor: base offset 1", SM100, TCGEN05_DESCRIPTOR, flip(49)),
    Mutation("descriptor: version field missing", SM100, TCGEN05_DESCRIPTOR, flip(46)),
    Mutation("descriptor of B: stride doubled", SM100, TCGEN05_DESCRIPTOR, flip(38, 39), nth=1),
    Mutation("instruction descriptor: N 48 instead of 64", SM100, INSTRUCTION_DESCRIPTOR, add(-(2 << 17))),
    Mutation("instruction descriptor: M 128 instead of 256", SM100, INSTRUCTION_DESCRIPTOR, add(-(8 << 24))),
    Mutation("instruction descriptor: A is F16", SM100, INSTRUCTION_DESCRIPTOR, flip(7)),
    Mutation("instruction descriptor: B negated", SM100, INSTRUCTION_DESCRIPTOR, flip(14)),
    Mutation("instruction descriptor: A transposed", SM100, INSTRUCTION_DESCRIPTOR, flip(15)),
    Mutation("tap one row too far", SM100, r"or\.b32 \t(%r\d+), (%r\d+), 8;", r"or.b32 \t\1, \2, 16;"),
    Mutation("K step 16 channels too far in A", SM100, r"or\.b32 \t(%r\d+), (%r\d+), 2;", r"or.b32 \t\1, \2, 4;"),
    Mutation(
        "tap of the weights one tile too far",
        SM100,
        r"mad\.lo\.s32 \t(%r\d+), (%r\d+), 768, 256;",
        r"mad.lo.s32 \t\1, \2, 768, 512;",
    ),
    Mutation("one MMA missing", SM100, line(r"tcgen05\.mma"), nth=5),
    Mutation(
        "first MMA of a tile accumulates",
        SM100,
        r"mov\.pred \t(%p\d+), 0;(?=\n\$L\w+:\n\t\.pragma)",
        r"mov.pred \t\1, -1;",
    ),
    Mutation(
        "first MMA accumulates on old values: never overwritten", SM100, r"(tcgen05\.mma[^;]*), %p\d+;", r"\1, 1;"
    ),
    # Blackwell: barriers
    Mutation("commit that frees a stage dropped", SM100, line(r"tcgen05\.commit")),
    Mutation("commit that announces the accumulator dropped", SM100, line(r"tcgen05\.commit"), nth=1),
    Mutation("stage freed in one CTA of the pair", SM100, MULTICAST_COMMIT, add(-2)),
    Mutation("accumulator announced to one CTA of the pair", SM100, MULTICAST_COMMIT, add(-2), nth=1),
    Mutation("producer does not wait for a free stage", SM100, WAIT_LOOP, r"\1"),
    Mutation("MMA does not wait for a free accumulator", SM100, WAIT_LOOP, r"\1", nth=1),
    Mutation("MMA does not wait for its operands", SM100, WAIT_LOOP, r"\1", nth=2),
    Mutation("epilogue does not wait for the accumulator", SM100, WAIT_LOOP, r"\1", nth=3),
    Mutation("producer's parity never flips", SM100, PARITY_FLIP),
    Mutation("operand parity never flips", SM100, PARITY_FLIP, nth=1),
    Mutation("MMA's accumulator parity never flips", SM100, PARITY_FLIP, nth=2),
    Mutation("epilogue's accumulator parity never flips", SM100, PARITY_FLIP, nth=3),
    Mutation("expect_tx 16 bytes short", SM100, EXPECT, add(-16)),
    Mutation("expect_tx 16 bytes long", SM100, EXPECT, add(16)),
    Mutation("expect_tx of one CTA only", SM100, EXPECT, edit_number(lambda number: number // 2)),
    Mutation("operand barrier wants one arrival more", SM100, barrier_init(FULL), with_count(2)),
    Mutation("stage barrier wants one arrival more", SM100, barrier_init(EMPTY), with_count(2)),
    Mutation("accumulator barrier wants one arrival less", SM100, barrier_init(ACC_EMPTY), with_count(7)),
    Mutation("accumulator barrier wants one arrival more", SM100, barrier_init(ACC_EMPTY), with_count(9)),
    Mutation(
        "second CTA signals its own barrier",
        SM100,
        r"and\.b32 \t(%r\d+), (%r\d+), -16777224;",
        r"and.b32 \t\1, \2, -8;",
    ),
    Mutation("accumulator released in the wrong CTA", SM100, r"(mapa[^\n]*), 0;", r"\1, 1;"),
    Mutation(
        "accumulator released before it is read",
        SM100,
        rf"(?P<rest>\ttcgen05\.ld.*?)(?P<moved>{RELEASE})",
        moved_forward,
    ),
    Mutation("barriers used before the cluster has initialised them", SM100, line(r"barrier\.cluster\.wait")),
    Mutation("a CTA may exit while the other signals its barriers", SM100, line(r"barrier\.cluster\.wait"), nth=1),
    # Blackwell: tensor memory and output
    Mutation(
        "tensor memory: load 32 columns off",
        SM100,
        r"add\.s32 \t(%r\d+), (%r\d+), 32;\n\ttcgen05\.ld",
        r"add.s32 \t\1, \2, 0;\n\ttcgen05.ld",
    ),
    Mutation(
        "tensor memory: accumulators 32 columns apart",
        SM100,
        r"shl\.b32 \t(%r\d+), (%r\d+), 6;(?=\n\tadd\.s32[^\n]*\n\tmov\.pred)",
        r"shl.b32 \t\1, \2, 5;",
    ),
    Mutation(
        "tensor memory: half the columns allocated",
        SM100,
        r"mov\.b32 \t(%r\d+), 128;\n\ttcgen05\.alloc",
        r"mov.b32 \t\1, 64;\n\ttcgen05.alloc",
    ),
    Mutation("tensor memory not freed", SM100, line(r"tcgen05\.dealloc")),
    Mutation(
        "tensor memory: every warp reads the lanes of warp 0",
        SM100,
        r"shl\.b32 \t(%r\d+), (%r\d+), 21;",
        r"shl.b32 \t\1, \2, 31;",
    ),
    Mutation(
        "waits for the tensor memory loads dropped",
        SM100,
        rf"{line(r'tcgen05.wait::ld')}(.*?){line(r'tcgen05.wait::ld')}",
        r"\1",
    ),
    Mutation("proxy fence before the output's bulk store dropped", SM100, line(r"fence\.proxy\.async")),
    Mutation("barrier before the output's bulk store dropped", SM100, line(r"barrier\.sync \t1, 128")),
    Mutation("output buffer reused while it is stored", SM100, line(r"cp\.async\.bulk\.wait_group\.read")),
    Mutation("other warps do not wait for the output buffer", SM100, line(r"barrier\.sync \t1, 128"), nth=1),
    Mutation(
        "output written with a 64-byte swizzle", SM100, r"and\.b32 \t(%r\d+), (%r\d+), 112;", r"and.b32 \t\1, \2, 48;"
    ),
    Mutation(
        "weights loaded from the wrong channels", SM100, r"add\.s32 \t(%r\d+), (%r\d+), 128;", r"add.s32 \t\1, \2, 192;"
    ),
    Mutation(
        "input loaded one row off",
        SM100,
        r"add\.s32 \t(%r\d+), (%r\d+), (%r\d+);\n\tmov\.b32 \t%r\d+, 0;\n\tmov\.pred",
        r"mad.lo.s32 \t\1, \2, 1, \3;\n\tadd.s32 \t\1, \1, 1;\n\tmov.b32 \t%r349, 0;\n\tmov.pred",
    ),
    Mutation(
        "tcgen05 fence after the accumulator's barrier dropped",
        SM100,
        line(r"tcgen05\.fence::after_thread_sync"),
        nth=4,
    ),
    # Hopper
    Mutation("wgmma descriptor: stride between groups of eight rows doubled", SM90, WGMMA_DESCRIPTOR, flip(38, 39)),
    Mutation("wgmma descriptor: 64-byte swizzle", SM90, WGMMA_DESCRIPTOR, flip(62, 63)),
    Mutation("wgmma descriptor: base offset 1", SM90, WGMMA_DESCRIPTOR, flip(49)),
    Mutation(
        "wgmma: tap one row too far",
        SM90,
        r"add\.s32 \t(%r\d+), (%r\d+), 128;\n\tadd\.s32 \t(%r\d+), (%r\d+), 8192;",
        r"add.s32 \t\1, \2, 256;\n\tadd.s32 \t\3, \4, 8192;",
    ),
    Mutation(
        "wgmma: K step of the weights too far", SM90, r"add\.s32 \t(%r\d+), (%r\d+), 8224;", r"add.s32 \t\1, \2, 8256;"
    ),
    Mutation("wgmma: wait dropped", SM90, line(r"wgmma\.wait_group")),
    Mutation("wgmma: commit dropped", SM90, line(r"wgmma\.commit_group")),
    Mutation("wgmma: fence dropped", SM90, line(r"wgmma\.fence")),
    Mutation("multicast to one CTA only", SM90, r"mov\.b16 \t(%rs\d+), 3;", r"mov.b16 \t\1, 1;"),
    Mutation(
        "multicast halves in the wrong order",
        SM90,
        r"mul\.lo\.s32 \t(%r\d+), (%r\d+), 5120;",
        r"mul.lo.s32 \t\1, \2, 4096;",
    ),
    Mutation("expect_tx counts this CTA's half only", SM90, EXPECT, add(-5120)),
    Mutation("stage barrier does not wait for the other CTA", SM90, barrier_init(EMPTY), with_count(1)),
    Mutation(
        "stage released in this CTA only", SM90, r"setp\.gt\.u32 \t(%p\d+), (%r\d+), 1;", r"setp.gt.u32 \t\1, \2, 0;"
    ),
    Mutation("producer does not wait for a free stage (Hopper)", SM90, WAIT_LOOP, r"\1"),
    Mutation("wgmma does not wait for its operands", SM90, WAIT_LOOP, r"\1", nth=1),
    Mutation("sums of the other CTA not waited for", SM90, WAIT_LOOP, r"\1", nth=2),
    Mutation("sums: remote store dropped", SM90, line(r"st\.shared::cluster")),
    Mutation(
        "sums: stored in the own CTA instead of the other",
        SM90,
        r"xor\.b32 \t(%r\d+), (%r\d+), 1;",
        r"xor.b32 \t\1, \2, 0;",
    ),
    Mutation("sums: barrier wants one arrival less", SM90, barrier_init(SUMS_FULL), with_count(127)),
    Mutation(
        "sums: barrier between the lanes of a warp dropped",
        SM90,
        line(r"barrier\.sync \t1, 128"),
        caught=UNSEEN,
    ),
    Mutation(
        "sums: one buffer instead of two",
        SM90,
        r"shl\.b32 \t(%r\d+), (%r\d+), 7;(?=\n\tadd\.s32)",
        r"mov.b32 \t\1, 0;",
    ),
    Mutation("proxy fence before the output's bulk store dropped (Hopper)", SM90, line(r"fence\.proxy\.async")),
    Mutation("output buffer reused while it is stored (Hopper)", SM90, line(r"cp\.async\.bulk\.wait_group\.read")),
    Mutation(
        "overlapping rows: tap 16 channels too far",
        OVERLAP,
        r"add\.s32 \t(%r\d+), (%r\d+), 32;",
        r"add.s32 \t\1, \2, 64;",
    ),
    # im2col
    Mutation("im2col: offset one pixel off", CUDNN, IM2COL_OFFSET, NEXT_OFFSET),
    Mutation("im2col: offset one frame off", CUDNN, IM2COL_OFFSET, NEXT_OFFSET, nth=2),
    Mutation("im2col: offsets of W and H exchanged", CUDNN, r"\{(%rs\d+), (%rs\d+), (%rs\d+)\}", r"{\2, \1, \3}"),
    Mutation(
        "im2col: W and H of the start pixel exchanged",
        CUDNN,
        r"(global\.im2col[^{]*\{%r\d+), (%r\d+), (%r\d+)",
        r"\1, \3, \2",
    ),
    Mutation(
        "im2col: output stored in the wrong channels",
        CUDNN,
        r"(im2col_no_offs[^{]*)\{(%r\d+), (%r\d+)",
        r"\1{\3, \3",
    ),
    Mutation("gather: proxy fence before the MMA dropped", CUDNN_GATHER, line(r"fence\.proxy\.async")),
    Mutation("gather: wait for the copies dropped", CUDNN_GATHER, line(r"cp\.async\.(?:wait|mbarrier)")),
]


@dataclass(frozen=True)
class Subject:
    """A compiled kernel on its operands: the call, what it writes, and what must stand there."""

    call: Callable[[], Any]
    output: torch.Tensor
    expected: torch.Tensor


@lru_cache(maxsize=4)
def subject(kernel: str) -> Subject:
    if kernel in (CUDNN, CUDNN_GATHER):
        require_peer("cudnn")
    if kernel == CUDNN:
        return cudnn_convolution()
    if kernel == CUDNN_GATHER:
        return cudnn_causal_convolution()
    case = make_case(kernel, ROWS[kernel])
    function = cross_compile(case.launcher, *case.samples(), arch=case.arch)
    output = case.output()
    return Subject(lambda: function(case.x, case.weight, output, case.rows, driver.CUstream(0)), output, case.expected)


def convolve(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A convolution without padding, NTHWC, of integers: every order of the sums gives this result."""
    return F.conv3d(input.float().permute(0, 4, 1, 2, 3), weight.float()).permute(0, 2, 3, 4, 1).to(BF16)


def taps_first(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """`[Co, Ci, 3, 3, 3]` as `[Co, 3, 3, 3, channels]`, padded with zeros."""
    return F.pad(weight.permute(0, 2, 3, 4, 1), (0, channels - weight.shape[1])).contiguous()


def cudnn_convolution() -> Subject:
    """cuDNN's convolution, whose loads and stores go through im2col maps."""
    input, weight = small_integers((1, 3, 14, 16, 160)), small_integers((160, 160, 3, 3, 3), -1, 2)
    output = nan(1, 1, 12, 14, 160)
    call = peers.cudnn_conv3d("raw", input, taps_first(weight, CUDNN_CHANNELS), output)
    return Subject(call, output, convolve(input, weight))


def cudnn_causal_convolution() -> Subject:
    """cuDNN's 12->160 convolution, whose producer warps gather pixels with ordinary copies."""
    padded = small_integers((1, 4, 7, 8, 16))
    padded[..., 12:] = 0
    weight = small_integers((160, 12, 3, 3, 3))
    output = nan(1, 2, 5, 6, 160)
    packed = F.pad(taps_first(weight, 16).reshape(160, -1), (0, 16))  # a 28th tap of zeros
    return Subject(peers.cudnn_causal_conv(padded, packed, output), output, convolve(padded[..., :12], weight))


def run(kernel: str, schedule: tuple[str, int], edit_ptx: Callable[[str], str] | None = None) -> torch.Tensor:
    tested = subject(kernel)
    tested.output.fill_(torch.nan)
    order, seed = schedule
    with emulate(schedule=order, seed=seed, edit_ptx=edit_ptx, tensor_fences=kernel == SM100):
        tested.call()
    return tested.output


def findings(mutation: Mutation) -> Iterator[tuple[tuple[str, int], str]]:
    """For each schedule that shows the mutation: the schedule, and the error or "wrong result"."""
    expected = subject(mutation.kernel).expected
    for schedule in SCHEDULES:
        try:
            output = run(mutation.kernel, schedule, mutation.apply)
        except EmulatorError as error:
            yield schedule, f"{type(error).__name__}: {error.reason}"
        else:
            if not torch.equal(output, expected):
                yield schedule, "wrong result"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kernel", [*ROWS, CUDNN, CUDNN_GATHER])
def test_samples_are_right_as_they_are(kernel: str, schedule: tuple[str, int]) -> None:
    assert torch.equal(run(kernel, schedule), subject(kernel).expected)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation(mutation: Mutation) -> None:
    found = next(findings(mutation), None)
    if mutation.caught:
        assert found, "no schedule shows it"
    else:
        assert found is None, f"seen after all: {found}; say so in the table"
