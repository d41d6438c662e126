"""Running a compiled launcher under several orders of asynchronous work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptxemu.cutedsl.host import emulate

SCHEDULES = ("early", "late")


def run_under_schedules(
    call: Callable[[], Any],
    written: Sequence[torch.Tensor],
    check: Callable[[], None],
    schedules: Sequence[str] = SCHEDULES,
    **options: Any,
) -> None:
    """Runs `call` under each schedule, from the same initial values of what it writes, and checks the result.

    `options` are those of `emulate`.
    """
    initial = [tensor.clone() for tensor in written]
    for schedule in schedules:
        for tensor, value in zip(written, initial, strict=True):
            tensor.copy_(value)
        with emulate(schedule=schedule, **options) as emulation:
            call()
        if not emulation.launches:
            raise AssertionError("the call launched nothing")
        check()
