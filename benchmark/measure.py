"""Measuring for the benchmarks: alternating timing, the machine's own rates, compilations, and JSON.

Times are medians over rounds in which the contenders take turns, forwards and backwards in alternation (A B C, C B A),
so that a card that warms up or slows down does so for all of them. What a turn is, the caller chooses: on a GPU one
replay of a CUDA Graph between two events, queued without waiting, which hides the host's time for a launch behind the
one before; or the calls themselves, with the host's time for their launches; on a CPU the host's clock.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from cudnn_fused.plan import PLANS

Call = Callable[[], object]

CUBLAS_SIZE = 8192
COPY_BYTES = 4 << 30
WARM_UP_TURNS = 3
TURN_MS = 2.0  # a turn should be this long, for events to resolve it
SHORTEST_MS = 1e-3  # of a call
MOST_LAUNCHES = 256  # of a turn
FLUSH_FACTOR = 3  # sets of operands together hold this many times the L2 cache
MOST_SETS = 32


# --- compilations --------------------------------------------------------------------------------------------------


@dataclass
class Compilations:
    """How often something was compiled: kernels by CuTe DSL, graphs by ``torch.compile``, plans by our functions."""

    kernels: int = 0
    graphs: int = 0
    plans: int = 0

    def __bool__(self) -> bool:
        return bool(self.kernels or self.graphs or self.plans)

    def __str__(self) -> str:
        return f"{self.kernels} kernels, {self.plans} plans and {self.graphs} graphs compiled"


@contextmanager
def counting_compilations() -> Iterator[Compilations]:
    """Count what is compiled inside the context, by any thread of this process."""
    count = Compilations()
    graphs, plans = _dynamo_frames(), PLANS.builds
    with _counting_kernels(count):
        try:
            yield count
        finally:
            count.graphs = _dynamo_frames() - graphs
            count.plans = PLANS.builds - plans


def _dynamo_frames() -> int:
    """How many frames TorchDynamo has set out to compile, those that hold no graph included."""
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


@contextmanager
def _counting_kernels(count: Compilations) -> Iterator[None]:
    if importlib.util.find_spec("cutlass") is None:
        yield
        return
    import cutlass.cute as cute

    compiler = type(cute.compile)
    original = compiler.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.kernels += 1
        return original(self, *args, **kwargs)

    compiler.__call__ = counted
    try:
        yield
    finally:
        compiler.__call__ = original


# --- timing --------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """Something to time. ``calls`` do the same work on different tensors and are made in turn."""

    name: str
    calls: Sequence[Call]


@dataclass
class Timing:
    """Milliseconds of one call, round by round, and what was compiled while they should have been taken.

    A contender that kept compiling has no rounds. ``discarded`` counts the turns in which something was compiled.
    """

    rounds: dict[str, list[float]] = field(default_factory=dict)
    compilations: Compilations = field(default_factory=Compilations)
    discarded: dict[str, int] = field(default_factory=dict)

    def ms(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def spread(self, name: str) -> float:
        """The interquartile range as a share of the median."""
        if len(self.rounds[name]) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds[name], n=4)
        return (high - low) / self.ms(name)


class Turn(Protocol):
    """A way to time the calls of a contender, which it is constructed with."""

    def __init__(self, contender: Contender) -> None: ...

    def take(self) -> Callable[[], float]:
        """Make the calls. Returns what gives the milliseconds of one."""


class HostTurn:
    """Calls timed by the host's clock: for the CPU."""

    def __init__(self, contender: Contender) -> None:
        self.calls = contender.calls

    def take(self) -> Callable[[], float]:
        start = time.perf_counter()
        for call in self.calls:
            call()
        elapsed = (time.perf_counter() - start) * 1e3 / len(self.calls)
        return lambda: elapsed


class EventTurn:
    """Calls launched one by one on an idle GPU, timed by events around them: what a caller waits for."""

    def __init__(self, contender: Contender) -> None:
        self.calls = contender.calls

    def take(self) -> Callable[[], float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for call in self.calls:
            call()
        end.record()
        torch.cuda.synchronize()
        elapsed = start.elapsed_time(end) / len(self.calls)
        return lambda: elapsed


class GraphTurn:
    """Calls captured in a CUDA Graph of about TURN_MS, timed by events around its replay.

    How long a call takes is estimated from a graph too: launched one by one, short ones would wait for the host.
    """

    def __init__(self, contender: Contender) -> None:
        calls = contender.calls
        self._warm_up(calls)
        self._capture(calls, 1)
        once = [self.take() for _ in range(WARM_UP_TURNS)]
        estimate = max(min(elapsed() for elapsed in once), SHORTEST_MS) * len(calls)
        self._capture(calls, max(1, round(min(TURN_MS / estimate, MOST_LAUNCHES / len(calls)))))
        self.take()

    @staticmethod
    def _warm_up(calls: Sequence[Call]) -> None:
        """Make every call once on a side stream, as PyTorch asks for before a capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, calls: Sequence[Call], rounds: int) -> None:
        """Capture all calls, ``rounds`` times in a row."""
        self.launches = rounds * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(rounds):
                for call in calls:
                    call()

    def take(self) -> Callable[[], float]:
        """Replay the graph. Returns what gives the milliseconds of one call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return start.elapsed_time(end) / self.launches

        return elapsed


def alternate(
    contenders: Sequence[Contender],
    rounds: int,
    turn: type[Turn],
    *,
    warm_up: int = 1,
    retries: int = 0,
    on_turn: Callable[[], object] = lambda: None,
) -> Timing:
    """Time the contenders in turn, after ``warm_up`` rounds in which everything is called and nothing counted.

    A turn in which something is compiled measures the compiler: it is not counted but taken again, up to ``retries``
    times in all for a contender. One that compiles more often than that is left out of the timing. ``on_turn`` is
    called after every turn, those of the warm-up included.
    """
    for _ in range(warm_up):
        for contender in contenders:
            for call in contender.calls:
                call()
            on_turn()
    timing = Timing(discarded={contender.name: 0 for contender in contenders})
    taken: dict[str, list[Callable[[], float]]] = {contender.name: [] for contender in contenders}
    with counting_compilations() as timing.compilations:
        turns: dict[str, Turn] = {}
        for contender in contenders:
            with counting_compilations() as meanwhile:
                turns[contender.name] = turn(contender)
            timing.discarded[contender.name] += bool(meanwhile)
        forwards = list(turns)
        for index in range(rounds):
            for name in forwards if index % 2 == 0 else reversed(forwards):
                reading = _reading(turns[name], name, timing.discarded, retries)
                if reading is not None:
                    taken[name].append(reading)
                on_turn()
    for name, readings in taken.items():
        if timing.discarded[name] <= retries:
            timing.rounds[name] = [elapsed() for elapsed in readings]
    return timing


def _reading(turn: Turn, name: str, discarded: dict[str, int], retries: int) -> Callable[[], float] | None:
    """A turn in which nothing was compiled, or None if too many were not so."""
    while discarded[name] <= retries:
        with counting_compilations() as meanwhile:
            reading = turn.take()
        if not meanwhile:
            return reading
        discarded[name] += 1
    return None


def operand_sets(set_bytes: int, device: torch.device) -> int:
    """How many sets of operands, used in turn, keep what was read last time out of the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_SETS, -(-FLUSH_FACTOR * cache // set_bytes)))


# --- the machine ---------------------------------------------------------------------------------------------------


def matmul_contender(device: torch.device, size: int = CUBLAS_SIZE) -> tuple[Contender, float]:
    """A square BF16 product of random matrices by cuBLAS, and its floating-point operations."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return Contender("cublas", [lambda: torch.mm(left, right, out=out)]), 2.0 * size**3


def copy_contender(device: torch.device, moved: int = COPY_BYTES) -> tuple[Contender, int]:
    """A device copy that reads and writes ``moved`` bytes together.

    It is an elementwise kernel, which changes the signs on the way: ``copy_`` in a CUDA Graph is a memory-copy node,
    and large ones moved 2.75 TB/s on an H200 where this kernel, like ``copy_`` outside of a graph, moved 4.27.
    """
    source = torch.randn(moved // 2 // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return Contender("copy", [lambda: torch.neg(source, out=target)]), 2 * source.numel() * source.element_size()


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cute_dsl": version("nvidia-cutlass-dsl"),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def write_json(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``header`` and ``rows`` as one JSON object."""
    path.write_text(json.dumps({**header, "rows": list(rows)}, indent=1) + "\n")
