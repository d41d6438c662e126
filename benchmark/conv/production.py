"""The cases of ``--production``: the convolutions of WAN 2.2 encoding, and what they are expected to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cudnn_fused.testing.cases import Case, Skip

Extents = tuple[int, int, int, int]


@dataclass(frozen=True)
class Goal:
    """A bound for one figure of a row, a column of the table by its key."""

    figure: str
    bound: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True)
class Entry:
    """A case, where it occurs, and its goals."""

    case: Case
    origin: str
    goals: tuple[Goal, ...] = ()


FASTEST_RAW = (Goal("conv_ratio", 1.35), Goal("cublas_share", 0.93))
AS_FAST_AS_CONV = (Goal("conv_ratio", 1.0),)
NORM = (Goal("over_raw", 1.05, at_most=True), Goal("compile_ratio", 1.5))
BIAS_RESIDUAL = (Goal("over_raw", 1.08, at_most=True),)
STANDALONE = (Goal("copy_share", 0.85),)
CAUSAL = (Goal("conv_ratio", 2.0),)

LARGE: Extents = (4, 4, 320, 240)
LARGEST: Extents = (32, 4, 320, 240)
# Result extents of the stages of an encode: four videos of 480x640, and one of 480x832.
STAGES: dict[tuple[int, int], tuple[Extents, Extents]] = {
    (160, 160): (LARGE, (1, 4, 240, 416)),
    (160, 320): ((4, 4, 160, 120), (1, 4, 120, 208)),
    (320, 320): ((4, 4, 160, 120), (1, 4, 120, 208)),
    (320, 640): ((4, 2, 80, 60), (1, 2, 60, 104)),
    (640, 640): ((4, 2, 80, 60), (1, 2, 60, 104)),
}
DEEPEST: Extents = (1, 1, 30, 52)  # the last stage and the middle block, one latent frame of 480x832
RAW_GOALS: dict[tuple[int, int], tuple[Goal, ...]] = {
    (160, 160): FASTEST_RAW,
    (160, 320): (Goal("conv_ratio", 1.3),),
    (320, 320): (Goal("conv_ratio", 1.2),),
    (320, 640): AS_FAST_AS_CONV,
    (640, 640): AS_FAST_AS_CONV,
}
# The first chunk of a video has one frame and nothing before it, the second has one frame of history.
CHUNKS = {"first chunk": 2, "second chunk": 1, "later chunk": 0}


def production() -> Iterator[Entry]:
    """All cases, one operation after the other."""
    yield from _raw()
    yield from _encode()
    yield from _normalized()
    yield from _bias_residual()
    yield from _standalone()
    yield from _causal()


def _raw() -> Iterator[Entry]:
    for channels, stages in STAGES.items():
        for extents in stages:
            yield Entry(Case("conv3d_raw", *extents, channels), "bare convolution", RAW_GOALS[channels])
    yield Entry(Case("conv3d_raw", *LARGEST, (160, 160)), "bare convolution", FASTEST_RAW)


def _encode() -> Iterator[Entry]:
    """Every convolution of a 480x832 encode of batch 1, except those of later chunks that :func:`_raw` has."""
    layers = [(channels, stages[1]) for channels, stages in STAGES.items()] + [((640, 640), DEEPEST)]
    for chunk, zeros in CHUNKS.items():
        for channels, extents in layers:
            if zeros == 0 and extents is not DEEPEST:
                continue
            n, t, h, w = extents
            case = Case("conv3d_raw", n, 1 if zeros == 2 else t, h, w, channels, leading_zero_frames=zeros)
            yield Entry(case, f"480x832 encode, {chunk}", AS_FAST_AS_CONV)


def _normalized() -> Iterator[Entry]:
    for channels in ((160, 160), (160, 320), (320, 320)):
        for extents in STAGES[channels]:
            plain = Case("conv3d_rmsnorm_silu", *extents, channels)
            padded = Case("conv3d_rmsnorm_silu_pad", *extents, channels, history=2)
            yield Entry(plain, "generic", NORM)
            yield Entry(padded, "residual block, first convolution", NORM)
            # A block that changes the channels has a 1x1x1 convolution as its skip, whose bias is added here.
            skip = Skip.BIASED if channels == (320, 320) else Skip.PLAIN
            if channels != (160, 320):
                yield Entry(replace(padded, skip=skip), "residual block, second convolution", NORM)


def _bias_residual() -> Iterator[Entry]:
    for channels, stages in STAGES.items():
        for extents in stages:
            case = Case("conv3d_bias_residual_pad", *extents, channels, skip=Skip.PLAIN)
            yield Entry(case, "before downsampling", BIAS_RESIDUAL)
    yield Entry(
        Case("conv3d_bias_residual_pad", *DEEPEST, (640, 640), skip=Skip.PLAIN), "480x832 encode", BIAS_RESIDUAL
    )


def _standalone() -> Iterator[Entry]:
    for channels in (160, 320, 640):
        for extents in STAGES[min(channels, 320) if channels < 640 else 640, channels]:
            plain = Case("rmsnorm_silu_pad", *extents, (channels,), history=2)
            yield Entry(plain, "norm", STANDALONE)
            skip = replace(plain, input_bias=True, skip=Skip.PLAIN)
            yield Entry(skip, "norm behind a bare convolution", STANDALONE)


def _causal() -> Iterator[Entry]:
    for extents in (LARGE, (1, 4, 240, 416)):
        yield Entry(Case("causal_conv3d_with_cache", *extents, (12, 160), history=2), "input convolution", CAUSAL)
    first = Case("causal_conv3d_with_cache", 1, 1, 240, 416, (12, 160))
    yield Entry(first, "480x832 encode, first chunk", CAUSAL)


def tiny() -> Iterator[Entry]:
    """Small cases of every operation, for machines without a GPU."""
    extents = (2, 2, 3, 4)
    yield Entry(Case("conv3d_raw", *extents, (160, 160), leading_zero_frames=1), "tiny")
    for name in ("conv3d_rmsnorm_silu", "conv3d_rmsnorm_silu_pad"):
        yield Entry(Case(name, *extents, (160, 160)), "tiny")
        yield Entry(Case(name, *extents, (160, 160), skip=Skip.BIASED), "tiny")
    for history in (1, 2):
        for caller in (False, True):
            case = Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 4, (160, 320), history=history, caller_history=caller)
            yield Entry(case, "tiny")
    yield Entry(Case("conv3d_bias_residual_pad", *extents, (160, 160), skip=Skip.BIASED), "tiny")
    for channels in (160, 320, 640):
        yield Entry(Case("rmsnorm_silu_pad", *extents, (channels,), history=1, input_bias=True), "tiny")
    yield Entry(Case("rmsnorm_silu_pad", *extents, (160,), skip=Skip.PLAIN), "tiny")
    for history in (0, 1, 2):
        yield Entry(Case("causal_conv3d_with_cache", *extents, (12, 160), history=history), "tiny")
