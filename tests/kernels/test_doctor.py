"""``python -m cudnn_fused.doctor`` and the verdicts it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cudnn_fused import doctor, user_cache, verdicts
from cudnn_fused.backends import REFERENCE
from cudnn_fused.doctor import ALIGNED, CASES, ONLY, SHARED, Line, conclude, examine, right_way
from cudnn_fused.kernels import sm100 as backend
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import Machine
from cudnn_fused.kernels.padded_grid import PaddedGrid
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import RowFinish
from cudnn_fused.kernels.sm100 import Sm100Kernels
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.targets import SM90, SM100
from cudnn_fused.testing.cases import Case
from cudnn_fused.testing.ptx import emulate
from tests.kernels.emulated import sm100

CPU = torch.device("cpu")
MODEL = "Some GPU"
TINY = Case("conv3d_raw", 1, 1, 1, 1, (160, 160))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))


@contextlib.contextmanager
def plainly(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    yield


class Stubborn:
    """A backend, and its only program, that does ``what`` in place of its work."""

    workspace_bytes = 0

    def __init__(self, what: Callable[..., None]) -> None:
        self.what = what

    def can_implement(self, problem: object) -> str | None:
        return None

    def compile(self, problem: object) -> Stubborn:
        return self

    def __call__(self, operands: object, workspace: object, stream: int) -> None:
        self.what(operands, workspace, stream)


def fail(*_: object) -> None:
    raise RuntimeError("no such luck\nand more")


# --- examining -----------------------------------------------------------------------------------------------------


def test_every_operation_is_examined() -> None:
    assert {case.variant for case in CASES} == {operation.name for operation in OPERATIONS}


@pytest.mark.parametrize("way", [SHARED, ALIGNED])
def test_right_kernels_agree(way: str) -> None:
    line = examine(TINY, way, sm100(shared_taps=way == SHARED), CPU, lambda tensors: emulate(memory=tensors))
    assert not line.faults
    assert str(line).endswith("agrees")


def test_results_that_are_missing_are_faults() -> None:
    line = examine(TINY, ONLY, Stubborn(lambda *_: None), CPU, plainly)
    assert line.faults == ("output: 160 of 160 elements differ from the reference",)


def test_errors_are_faults() -> None:
    assert examine(TINY, ONLY, Stubborn(fail), CPU, plainly).faults == ("RuntimeError: no such luck",)


def test_the_reference_agrees_with_itself() -> None:
    for case in CASES:
        assert not examine(case.at(1, 1, 1, 1), ONLY, REFERENCE, CPU, plainly).faults


# --- concluding ----------------------------------------------------------------------------------------------------


def line(way: str, *faults: str) -> Line:
    return Line(TINY, way, faults, 0.0)


@pytest.mark.parametrize(
    ("lines", "expected", "status"),
    [
        ([line(SHARED), line(ALIGNED)], True, 0),
        ([line(SHARED), line(ALIGNED, "x")], True, 0),
        ([line(SHARED, "x"), line(ALIGNED)], False, 0),
        ([line(SHARED), line(SHARED, "x"), line(ALIGNED), line(ALIGNED)], False, 0),
        ([line(SHARED, "x"), line(ALIGNED, "x")], None, 1),
    ],
)
def test_verdict(lines: list[Line], expected: bool | None, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert right_way(lines) is expected
    assert conclude(SM100, MODEL, lines) == status
    assert verdicts.shared_taps(MODEL) is expected
    assert ("report" in capsys.readouterr().out) == any(one.faults for one in lines)


def test_nothing_is_remembered_of_other_targets() -> None:
    assert conclude(SM90, MODEL, [line(ONLY)]) == 0
    assert conclude(SM90, MODEL, [line(ONLY, "x")]) == 1
    assert not verdicts.path().exists()


def test_a_gpu_is_examined_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def examine_all(ways: dict[str, Any], *_: object) -> list[Line]:
        seen.update(ways)
        return [line(SHARED, "x"), line(ALIGNED)]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: MODEL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    monkeypatch.setattr(doctor, "examine_all", examine_all)
    assert doctor.examine_gpu(torch.device("cuda", 0)) == 0
    assert {way: kernels.shared_taps for way, kernels in seen.items()} == {SHARED: True, ALIGNED: False}
    assert verdicts.shared_taps(MODEL) is False


def test_without_a_gpu_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "nvidia-cutlass-dsl" in printed
    assert "compiled for sm_100a" in printed


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_compile_one", fail)
    assert doctor.cross_compile() == 1
    assert "failed: RuntimeError: no such luck" in capsys.readouterr().out


# --- verdicts ------------------------------------------------------------------------------------------------------


def test_verdicts_are_kept_by_model() -> None:
    assert verdicts.shared_taps(MODEL) is None
    assert verdicts.remember(MODEL, shared_taps=False) is None
    assert verdicts.remember("another", shared_taps=True) is None
    assert (verdicts.shared_taps(MODEL), verdicts.shared_taps("another")) == (False, True)
    assert [file.name for file in verdicts.path().parent.iterdir()] == [verdicts.FILE_NAME]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"Some GPU": 1}', '{"Some GPU": {"shared_taps": "no"}}', "\udcff"]
)
def test_a_broken_file_says_nothing(content: str) -> None:
    verdicts.path().parent.mkdir(parents=True)
    verdicts.path().write_bytes(content.encode(errors="surrogateescape"))
    assert verdicts.shared_taps(MODEL) is None
    assert verdicts.remember(MODEL, shared_taps=False) is None
    assert verdicts.shared_taps(MODEL) is False


@pytest.mark.parametrize("place", ["file", ""])
def test_a_place_that_cannot_be_written_is_no_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / place) if place else "")
    assert conclude(SM100, MODEL, [line(SHARED), line(ALIGNED)]) == 0
    assert "could not be kept" in capsys.readouterr().out
    assert verdicts.shared_taps(MODEL) is None


@pytest.mark.parametrize(("asked", "verdict", "expected"), [
    (None, None, True),
    (None, True, True),
    (None, False, False),
    (True, False, True),
    (False, True, False),
])  # fmt: skip
def test_compilation_follows_the_verdict(
    asked: bool | None, verdict: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if verdict is not None:
        verdicts.remember(MODEL, shared_taps=verdict)
    built = []
    monkeypatch.setattr(backend, "compiled", lambda arch, build, spec, tile, **_: built.append(tile))
    machine = Machine("sm_100a", 2, MODEL)
    spec = Conv3dSpec(160, RowFinish(PostOps(160)))
    Sm100Kernels(machine, shared_taps=asked).convolution(spec, PaddedGrid(1, 3, 3, 3), machine)
    assert {tile.shared_taps for tile in built} == {expected}
