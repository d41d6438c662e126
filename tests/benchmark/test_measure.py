"""Alternating timing, and profiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark import measure
from benchmark.e2e import profiling
from benchmark.measure import Contender, EventTurn, HostTurn, alternate


class FakeEvent:
    """A CUDA event on a clock that the calls advance."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


@pytest.fixture
def fake_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("fake_events")
def test_order_alternates_and_warmup_is_not_timed() -> None:
    calls: list[str] = []

    def run(name: str, milliseconds: float) -> None:
        calls.append(name)
        FakeEvent.now += 100 if len(calls) <= 4 else milliseconds

    turns: list[int] = []
    contenders = [Contender("a", [lambda: run("a", 2.0)]), Contender("b", [lambda: run("b", 3.0)])]
    timing = alternate(contenders, 3, EventTurn, warm_up=2, on_turn=lambda: turns.append(len(calls)))
    assert calls == list("abab" + "abbaab")
    assert turns == list(range(1, 11))
    assert timing.rounds["a"] == [2.0] * 3
    assert timing.ms("b") == 3.0


@pytest.mark.usefixtures("fake_events")
def test_turns_that_compile_are_reported_and_not_timed() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    shapes = iter([1, 2, 3, 4, 4, 4, 4])  # the first is warm-up; each new one makes TorchDynamo compile

    def run() -> None:
        compiled(torch.zeros(next(shapes)))
        FakeEvent.now += 1

    timing = alternate([Contender("run", [run])], 3, EventTurn, retries=3)
    assert timing.rounds["run"] == [1.0] * 3
    assert timing.discarded["run"] == 3
    assert timing.compilations.graphs == 3


def test_what_compiles_without_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does not is timed beside it."""
    plans = SimpleNamespace(builds=0)
    monkeypatch.setattr(measure, "PLANS", plans)

    def make_a_plan() -> None:
        plans.builds += 1

    timing = alternate([Contender("ours", [make_a_plan]), Contender("other", [int])], 4, HostTurn, retries=2)
    assert list(timing.rounds) == ["other"]
    assert len(timing.rounds["other"]) == 4
    assert timing.discarded == {"ours": 3, "other": 0}


def test_profile_on_a_cpu(tmp_path: Path) -> None:
    left = torch.ones(64, 64)
    path = tmp_path / "profile.md"
    profiling.write_kernel_shares({"product": lambda: left @ left}, torch.device("cpu"), path)
    lines = path.read_text().splitlines()
    assert lines[0].startswith("## product: ")
    shares = {line.split("`")[1]: float(line.split("|")[1].strip(" %")) for line in lines if "`" in line}
    assert "aten::mm" in shares
    assert sum(shares.values()) == pytest.approx(100, abs=1)


def test_a_profiler_that_sees_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([[], [], ["aten::mm"]])

    class Profiler:
        def __init__(self, activities: object) -> None:
            self.names = next(seen)

        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: object) -> None: ...

        def key_averages(self) -> list[SimpleNamespace]:
            kind = torch.autograd.DeviceType.CPU
            return [SimpleNamespace(key=n, count=1, device_type=kind, self_cpu_time_total=5.0) for n in self.names]

    monkeypatch.setattr(profiling, "profile", Profiler)
    calls: list[int] = []
    assert profiling.kernel_shares(lambda: calls.append(1), torch.device("cpu")) == [("aten::mm", 1, 5.0)]
    assert len(calls) == 3
    seen = iter([[]] * 9)
    with pytest.raises(RuntimeError, match="recorded nothing on cpu in 3 runs"):
        profiling.kernel_shares(lambda: None, torch.device("cpu"))
