"""Which cases the SM100 kernels are tested on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudnn_fused.testing.cases import BY_NAME, CHANNELS, Case, Skip
from tests.gpu.harness import pairwise
from tests.kernels.emulated import SCHEDULES

HISTORY = ZEROS = (0, 1, 2)
FLAGS = (False, True)
# A tile has 256 rows, 128 to a CTA. One pixel in a first and in a later chunk; a row just short of a CTA's share, and
# two just past it; samples and frames one after the other; several tiles with a tail.
EXTENTS = ((1, 1, 1, 1), (1, 3, 1, 1), (1, 1, 1, 127), (1, 2, 2, 129), (2, 1, 3, 5), (1, 1, 13, 29))
SMALL = ((1, 1, 1, 1),)  # for reductions that take long to emulate
LONG_REDUCTION = 640


def settings(variant: str, *, leading_zeros: bool) -> dict[str, Sequence[Any]]:
    """What can be chosen in a call of an operation."""
    operation = BY_NAME[variant]
    operands = {operand.name: operand for operand in operation.operands}
    options = {option.name for option in operation.options}
    chosen: dict[str, Sequence[Any]] = {"channels": CHANNELS[operation.name]}
    if "residual" in operands:
        chosen["skip"] = tuple(Skip) if operands["residual"].optional else (Skip.PLAIN, Skip.BIASED)
    if "previous" in operands:
        chosen["history"] = HISTORY
    if "history_frames" in options:
        chosen["caller_history"] = FLAGS
    if "input_bias" in operands:
        chosen["input_bias"] = chosen["save_input"] = FLAGS
    if leading_zeros and "leading_zero_frames" in options:
        chosen["leading_zero_frames"] = ZEROS
    return chosen


@dataclass(frozen=True)
class Entry:
    """A case, and how it is run: the emulator's schedule, the way of loading taps, which tile, and on how many
    multiprocessors, since with enough of them the smallest tile splits its reduction.
    """

    case: Case
    schedule: str
    shared_taps: bool
    tile: int
    multiprocessors: int

    @classmethod
    def of(cls, case: Case, turn: int) -> Entry:
        """Each of them in turn, out of step with one another."""
        return cls(case, SCHEDULES[turn % len(SCHEDULES)], turn % 3 < 2, turn // 2, 8 if turn % 5 == 2 else 2)

    def __str__(self) -> str:
        case = self.case
        flags = [name for name in ("caller_history", "input_bias", "save_input") if getattr(case, name)]
        return "-".join(
            [
                case.variant,
                "x".join(map(str, case.channels)),
                "x".join(map(str, case.result_extents)),
                case.skip.value,
                f"history{case.history}",
                f"zeros{case.leading_zero_frames}",
                *flags,
                self.schedule,
                "shared" if self.shared_taps else "aligned",
                f"tile{self.tile}",
                f"sm{self.multiprocessors}",
            ]
        )


def few(*variants: str) -> Iterator[Entry]:
    """Cases in which every pair of settings occurs."""
    turn = 0
    for variant in variants:
        for combination in pairwise(**settings(variant, leading_zeros=False)):
            case = Case(variant, 1, 1, 1, 1, **combination)
            extents = SMALL if max(case.channels) >= LONG_REDUCTION else EXTENTS
            case = case.at(*extents[turn % len(extents)])
            if "leading_zero_frames" in case.options:
                case = replace(case, leading_zero_frames=min(turn % 4, 2) if case.t > 1 else turn % 3)
            yield Entry.of(case, turn)
            turn += 1


def everything() -> Iterator[Entry]:
    """All settings."""
    turn = 0
    for variant in BY_NAME:
        factors = settings(variant, leading_zeros=True)
        for values in itertools.product(*factors.values()):
            case = Case(variant, 1, 1, 1, 1, **dict(zip(factors, values, strict=True)))
            if case.caller_history and not case.history:
                continue  # the same as without
            yield Entry.of(case.at(*EXTENTS[turn % len(EXTENTS)]), turn)
            turn += 1
