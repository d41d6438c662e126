"""The cases that `benchmark.emulator_vs_gpu` runs on a GPU are right in the emulator."""

from __future__ import annotations

import pytest

from benchmark import emulator_vs_gpu as script


@pytest.mark.parametrize("name", script.CASES)
def test_case(name: str) -> None:
    assert script.run_case(name, gpu=False)[0]


def test_a_case_that_fails_is_said_to() -> None:
    """The comparison is one that can fail."""
    case = script.row_shift_case(128)
    case.expected[3][5, 7] += 1
    with pytest.raises(AssertionError, match="output 3: 1 of 4096"):
        case.compare(script.emulated(case, script.compile_case(case), "early"), case.expected)


def test_a_case_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "CASE_SECONDS", 0.01)
    assert script.run_limited("arithmetic", gpu=False) == ("failed", "no answer in 0.01 s")
