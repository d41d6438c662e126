"""``python -m cudnn_fused.doctor`` and the findings it keeps."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cudnn_fused import doctor, hardware_quirks, user_cache
from cudnn_fused.backends import REFERENCE
from cudnn_fused.doctor import (
    ALIGNED,
    AS_CHOSEN,
    BEGIN,
    CASES,
    END,
    ONLY,
    SHARED,
    Line,
    conclude,
    examine,
    examine_all,
    examine_apart,
    right_way,
)
from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.select import FixedTiling
from cudnn_fused.kernels.conv.tile_sm90 import TILES as SM90_TILES
from cudnn_fused.kernels.conv.tile_sm100 import PAIR, TILES, Sm100Tiling
from cudnn_fused.kernels.lowering import ConvCall
from cudnn_fused.kernels.sm100 import sm100 as backend
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.targets import SM90, SM100
from cudnn_fused.testing.cases import Case, make_inputs, make_outputs, make_problem
from ptxemu import emulate
from tests.kernels.emulated import sm100

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MODEL = "Some GPU"
TINY = Case("conv3d_raw", 1, 1, 1, 1, (160, 160))
EIGHT = DeviceSpec("sm_100a", 8)
PATIENCE = 30.0
LITTLE_PATIENCE = 1.0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "ptxemu" / "src"))))  # for processes
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))


@contextlib.contextmanager
def plainly(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    yield


class Stubborn:
    """A backend that does ``what`` in place of its work."""

    def __init__(self, what: Callable[..., None]) -> None:
        self.what = what

    workspace_bytes = 0

    def can_implement(self, problem: object) -> str | None:
        return None

    def compile(self, problem: object) -> Stubborn:
        return self

    def __call__(self, *arguments: object) -> None:
        self.what(*arguments)


class Unable(Stubborn):
    def can_implement(self, problem: object) -> str | None:
        return "not with this tile"


def fail(*_: object) -> None:
    raise RuntimeError("no such luck\nand more")


# --- examining -----------------------------------------------------------------------------------------------------


def test_every_operation_is_examined() -> None:
    assert {case.variant for case in CASES} == {operation.name for operation in OPERATIONS}


@pytest.mark.parametrize("way", [SHARED, ALIGNED])
def test_right_kernels_agree(way: str) -> None:
    kernels = sm100(shared_taps=way == SHARED)
    line = examine(TINY, way, AS_CHOSEN, kernels, CPU, lambda tensors: emulate(memory=tensors))
    assert line is not None
    assert not line.faults
    assert str(line).endswith("agrees")


def test_results_that_are_missing_are_faults() -> None:
    line = examine(TINY, ONLY, AS_CHOSEN, Stubborn(lambda *_: None), CPU, plainly)
    assert line.faults == ("output: 160 of 160 elements differ from the reference",)


def test_errors_are_faults() -> None:
    assert examine(TINY, ONLY, AS_CHOSEN, Stubborn(fail), CPU, plainly).faults == ("RuntimeError: no such luck",)


def test_a_configuration_that_cannot_serve_is_passed_over_and_production_is_not() -> None:
    unable = Unable(fail)
    assert examine(TINY, ONLY, "512x160", unable, CPU, plainly) is None
    assert examine(TINY, ONLY, AS_CHOSEN, unable, CPU, plainly).faults == ("not with this tile",)


def test_the_reference_agrees_with_itself() -> None:
    for case in CASES:
        assert not examine(case.at(1, 1, 1, 1), ONLY, AS_CHOSEN, REFERENCE, CPU, plainly).faults


def test_nothing_follows_a_lost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "still_usable", lambda device: False)
    records = list(examine_all(SHARED, [(AS_CHOSEN, Stubborn(fail))], CPU, plainly, [TINY, TINY]))
    assert [next(iter(record)) for record in records] == ["begins", "line", "begins"]
    assert "the CUDA context is lost" in records[-1]["begins"]


# --- what production may choose ------------------------------------------------------------------------------------


def configurations(way: str) -> list[tuple[str, FixedTiling]]:
    return [(name, kernels.tiling_of(EIGHT)) for name, kernels in doctor.configurations_of(way, SM100)[1:]]


@pytest.mark.parametrize("way", [SHARED, ALIGNED])
def test_every_tile_and_split_is_a_configuration(way: str) -> None:
    names, found = zip(*configurations(way), strict=True)
    assert len(set(names)) == len(names)
    expected = [(tile.tile_m, tile.tile_n, split) for tile in TILES for split in tile.splits]
    assert [(one.tiles[0].tile_m, one.tiles[0].tile_n, one.split) for one in found] == expected
    assert {one.split for one in found} == {1, 2, 4}
    assert {one.tiles[0].shared_taps for one in found} == {way == SHARED}


def test_hopper_has_every_tile_and_split_too() -> None:
    names = [name for name, _ in doctor.configurations_of(ONLY, SM90)]
    assert len(names) == 1 + sum(len(tile.splits) for tile in SM90_TILES)


def test_the_cases_serve_every_configuration_with_tiles_in_turn() -> None:
    """At least two tiles of every configuration on one cluster: each accumulator is used again."""
    for name, tiling in configurations(ALIGNED):
        (tile,) = tiling.tiles
        tiles = []
        for case in CASES:
            problem = make_problem(case, {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")})
            for call in case.operation.computation.lower(problem, tiling.can_implement).calls:
                if isinstance(call, ConvCall) and tiling.can_implement(call.spec) is None:
                    assert tiling.choose(call.spec, call.grid, EIGHT.clusters).clusters == 1
                    tiles.append(call.spec.tiles(tile.tile_m, tile.tile_n, call.grid))
        assert min(tiles) >= 2, name
        assert max(tiles) >= 3, name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tiling"), configurations(ALIGNED))
def test_configurations_are_right(name: str, tiling: FixedTiling) -> None:
    case = Case("conv3d_raw", 3, 1, 1, 1, (160, tiling.tiles[0].tile_n))
    emulations = []

    @contextlib.contextmanager
    def emulating(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        with emulate(memory=tensors) as emulation:
            emulations.append(emulation)
            yield

    line = examine(case, ALIGNED, name, backend(EIGHT, tiling), CPU, emulating)
    assert line is not None
    assert not line.faults
    assert [launch.grid for launch in emulations[0].launches] == [(PAIR * tiling.split, 1, 1)]


def test_a_configuration_says_what_it_cannot_serve() -> None:
    tiling = FixedTiling((TILES[0],), Sm100Tiling(), 1)
    problem = make_problem(TINY, {**make_inputs(TINY, "cpu", integers=True), **make_outputs(TINY, "cpu")})
    assert "160 output channels are no multiple of 320" in (backend(EIGHT, tiling).can_implement(problem) or "")


# --- processes -----------------------------------------------------------------------------------------------------

# The process of one way: the doctor with stubs for kernels, of which the second is BROKEN.
PROCESS = """
import os, sys, time
import torch
from cudnn_fused import doctor
from tests.kernels.test_doctor import CPU, TINY, Stubborn, plainly
from cudnn_fused.backends import REFERENCE

def hang(*_): time.sleep(1000)
def die(*_): print("a last word", flush=True); os.abort()
def lose(*_): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def work(*_): pass

class Broken(Stubborn):
    def compile(self, problem):
        return self if {what} is not work else REFERENCE.compile(problem)

doctor.still_usable = lambda device: {what} is not lose
with torch.no_grad():
    configurations = [("first", REFERENCE), ("second", Broken({what})), ("third", REFERENCE)]
    doctor.send(doctor.examine_all(sys.argv[1], configurations, CPU, plainly, [TINY]))
"""


def process(way: str, what: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        textwrap.dedent(PROCESS.replace("{what}", what)),
        way,
    ]


def test_a_process_that_works_tells_everything() -> None:
    lines = examine_apart(ALIGNED, process(ALIGNED, "work"), PATIENCE)
    assert [line.what.split()[-1] for line in lines] == ["first", "second", "third"]
    assert not any(line.faults for line in lines)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("hang", "no answer, given up after"),
        ("die", "the process ended with status -6; a last word"),
        ("lose", "CUDA error: an illegal memory access"),
    ],
)
def test_one_way_that_breaks_leaves_the_other(
    what: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shared taps hang, take their process with them, or lose the context. Aligned ones are right all the same."""
    behaviour = {SHARED: what, ALIGNED: "work"}
    monkeypatch.setattr(doctor, "command", lambda way, device: process(way, behaviour[way]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    if what == "hang":
        patient, examine_gpu = 10.0, doctor.examine_gpu
        monkeypatch.setattr(doctor, "examine_gpu", lambda device: examine_gpu(device, patient))
    hardware_quirks.remember(MODEL, shared_taps=True)
    assert doctor.main([]) == 0
    report = capsys.readouterr().out.splitlines()
    assert (report[0], report[-1]) == (BEGIN, END)
    aligned = [text for text in report if text.startswith(ALIGNED)]
    assert len(aligned) == 3
    assert all(text.endswith("agrees") for text in aligned)
    shared = [text for text in report if text.startswith(SHARED)]
    assert shared[0].endswith("agrees")
    assert "second" in shared[1]
    assert fault in shared[1]
    assert f"Verdict for {MODEL}: {ALIGNED}." in report
    assert hardware_quirks.shared_taps(MODEL) is False


def test_a_process_that_says_nothing_is_ended() -> None:
    silent = [sys.executable, "-c", "import time; print('starting', flush=True); time.sleep(1000)"]
    (line,) = examine_apart(SHARED, silent, LITTLE_PATIENCE)
    assert line.faults == ("no answer, given up after 1 s",)


def test_other_output_does_not_count_as_news() -> None:
    chatty = "import time\nwhile True: print('still busy', flush=True); time.sleep(0.05)"
    (line,) = examine_apart(SHARED, [sys.executable, "-c", chatty], LITTLE_PATIENCE)
    assert "no answer" in line.faults[0]


def test_the_command_is_the_doctor_itself() -> None:
    _, *arguments = doctor.command(SHARED, torch.device("cuda", 1))
    assert arguments == ["-m", "cudnn_fused.doctor", "--examine", SHARED, "--device", "cuda:1"]


# --- concluding ----------------------------------------------------------------------------------------------------


def line(way: str, *faults: str) -> Line:
    return Line(way, "something", faults)


@pytest.mark.parametrize(
    ("lines", "expected", "status"),
    [
        ([line(SHARED), line(ALIGNED)], SHARED, 0),
        ([line(SHARED), line(ALIGNED, "x")], SHARED, 0),
        ([line(SHARED, "x"), line(ALIGNED)], ALIGNED, 0),
        ([line(SHARED), line(SHARED, "x"), line(ALIGNED), line(ALIGNED)], ALIGNED, 0),
        ([line(ALIGNED)], ALIGNED, 0),
        ([line(SHARED, "x"), line(ALIGNED, "x")], None, 1),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_verdict(lines: list[Line], expected: str | None, status: int, before: bool) -> None:
    hardware_quirks.remember(MODEL, shared_taps=before)
    assert right_way(lines) == expected
    found, said = conclude(SM100, MODEL, lines)
    assert found == status
    assert hardware_quirks.shared_taps(MODEL) is (expected == SHARED)
    assert any("report this whole block" in text for text in said) == any(one.faults for one in lines)


def test_nothing_is_remembered_of_other_targets() -> None:
    assert conclude(SM90, MODEL, [line(ONLY)])[0] == 0
    assert conclude(SM90, MODEL, [line(ONLY, "x")])[0] == 1
    assert not hardware_quirks.path().exists()


def test_a_line_survives_its_record() -> None:
    one = Line(SHARED, "something", ("x", "y"), 1.5)
    found = json.loads(json.dumps(asdict(one)))
    assert Line(found["way"], found["what"], tuple(found["faults"]), found["seconds"]) == one


@pytest.mark.parametrize(
    ("capability", "ways"), [((9, 0), [ONLY]), ((10, 0), [ALIGNED, SHARED]), ((10, 3), [ALIGNED, SHARED])]
)
def test_which_ways_a_gpu_is_examined_in(
    capability: tuple[int, int], ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default first."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(doctor, "examine_apart", lambda way, *_: [line(way)])
    status, report = doctor.examine_gpu(torch.device("cuda", 0))
    assert status == 0
    assert [text.split("  ")[0] for text in report if "something" in text] == ways


def test_without_a_gpu_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "nvidia-cutlass-dsl" in printed
    assert "compiled for sm_100a" in printed


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_compile_one", fail)
    status, (said,) = doctor.cross_compile()
    assert status == 1
    assert "failed: RuntimeError: no such luck" in said


# --- findings ------------------------------------------------------------------------------------------------------


def test_findings_are_kept_by_model() -> None:
    assert hardware_quirks.shared_taps(MODEL) is None
    assert hardware_quirks.remember(MODEL, shared_taps=False) is None
    assert hardware_quirks.remember("another", shared_taps=True) is None
    assert (hardware_quirks.shared_taps(MODEL), hardware_quirks.shared_taps("another")) == (False, True)
    assert [file.name for file in hardware_quirks.path().parent.iterdir()] == [hardware_quirks.FILE_NAME]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"Some GPU": 1}', '{"Some GPU": {"shared_taps": "no"}}', "\udcff"]
)
def test_a_broken_file_says_nothing(content: str) -> None:
    hardware_quirks.path().parent.mkdir(parents=True)
    hardware_quirks.path().write_bytes(content.encode(errors="surrogateescape"))
    assert hardware_quirks.shared_taps(MODEL) is None
    assert hardware_quirks.remember(MODEL, shared_taps=False) is None
    assert hardware_quirks.shared_taps(MODEL) is False


@pytest.mark.parametrize("place", ["file", ""])
def test_a_place_that_cannot_be_written_is_no_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / place) if place else "")
    status, said = conclude(SM100, MODEL, [line(SHARED), line(ALIGNED)])
    assert status == 0
    assert any("could not be kept" in text for text in said)
    assert hardware_quirks.shared_taps(MODEL) is None


@pytest.mark.parametrize(("asked", "found", "expected"), [
    (None, None, False),
    (None, True, True),
    (None, False, False),
    (True, False, True),
    (False, True, False),
])  # fmt: skip
def test_compilation_follows_the_finding(
    asked: bool | None, found: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found is not None:
        hardware_quirks.remember(MODEL, shared_taps=found)
    tiling = Sm100Tiling.loading(shared_taps=asked) if asked is not None else None
    device = DeviceSpec("sm_100a", PAIR, MODEL)
    chosen = backend(device, tiling).tiling_of(device)
    assert {tile.shared_taps for tile in chosen.tiles} == {expected}
