"""What a plan asks of its backend: capability, the workspace, and the seam through which another one comes in."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cudnn_fused import targets
from cudnn_fused.backends import REFERENCE, select_backend, using
from cudnn_fused.problem import Problem
from tests.cases import BY_NAME, OPERATION_NAMES, call, compiled_plan, make_operands, make_plan

Tensors = Sequence[torch.Tensor | None]


class Working:
    """The reference, with a workspace that it fills, on problems of at most four frames."""

    def __init__(self, workspace_bytes: int = 4096) -> None:
        self.workspace_bytes = workspace_bytes
        self.workspaces: list[torch.Tensor | None] = []

    def can_implement(self, problem: Problem) -> str | None:
        return None if problem.extents["T"] <= 4 else "it has more than four frames"

    def compile(self, problem: Problem) -> Any:
        return WorkingProgram(self, REFERENCE.compile(problem))


class WorkingProgram:
    def __init__(self, backend: Working, program: Any) -> None:
        self.backend, self.program = backend, program
        self.workspace_bytes = backend.workspace_bytes

    def __call__(self, operands: Tensors, workspace: torch.Tensor | None, stream: int) -> None:
        self.backend.workspaces.append(workspace)
        if workspace is not None:
            workspace.fill_(255)
        self.program(operands, None, stream)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("suffix", ["", "Sm90", "Sm100"])
def test_another_backend_serves_every_name(operation_name: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """...on any tensors, without a GPU or the DSL."""
    monkeypatch.setattr(targets, "installed_dsl", lambda: None)
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=tuple(operation.extensions))
    expected = call(operation, operands)
    backend = Working()
    with using(backend) as inside:
        assert inside is backend
        plan = make_plan(operation, operands, suffix)
        assert plan.check_support()
        result = call(operation, operands, f"_wrapper_{suffix.lower()}" if suffix else "")
        plan.compile()
    assert select_backend(operation, None, torch.device("cpu")) is REFERENCE
    plan.execute(**operands)  # a plan keeps what it was compiled for
    assert len(backend.workspaces) == 2
    for got, want in zip(result, expected, strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_support_is_what_can_be_compiled(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, T=5)
    with using(Working()):
        for method in ("check_support", "compile"):
            with pytest.raises(ValueError, match=f"^{operation_name}: it has more than four frames$"):
                getattr(make_plan(operation, operands), method)()
        with pytest.raises(ValueError, match=f"^{operation_name}: it has more than four frames$"):
            call(operation, operands)
    assert make_plan(operation, operands).check_support()


def test_other_threads_keep_their_backend() -> None:
    operation = BY_NAME["conv3d_raw"]
    found: list[object] = []
    with using(Working()):
        thread = threading.Thread(target=lambda: found.append(select_backend(operation, None, torch.device("cpu"))))
        thread.start()
        thread.join()
    assert found == [REFERENCE]


def test_a_backend_ends_with_its_context() -> None:
    with pytest.raises(KeyError), using(Working()):
        raise KeyError
    assert select_backend(BY_NAME["conv3d_raw"], None, torch.device("cpu")) is REFERENCE


# --- the workspace -------------------------------------------------------------------------------------------------


def test_a_plan_allocates_its_workspace_once() -> None:
    operation, backend = BY_NAME["conv3d_rmsnorm_silu"], Working()
    operands = make_operands(operation)
    with using(backend):
        plan = make_plan(operation, operands)
        assert plan.workspace_bytes == 4096
        with pytest.raises(RuntimeError, match="before compile"):
            plan.execute(**operands)
        plan.compile()
        plan.compile()
    for _ in range(3):
        plan.execute(**operands)
    assert len({id(workspace) for workspace in backend.workspaces}) == 1
    assert backend.workspaces[0] is not None
    assert backend.workspaces[0].nbytes == 4096
    twin = copy.deepcopy(plan)
    twin.execute(**operands)
    assert backend.workspaces[-1] is not backend.workspaces[0]


def test_the_caller_may_bring_the_workspace() -> None:
    operation, backend = BY_NAME["conv3d_rmsnorm_silu"], Working()
    operands = make_operands(operation)
    workspace = torch.zeros(4096 // 4 + 64, dtype=torch.float32)
    with using(backend):
        plan = make_plan(operation, operands)
        plan.compile(workspace)
        for bad, error, words in [
            (torch.zeros(4095, dtype=torch.uint8), ValueError, "must hold 4096 contiguous bytes, got 4095"),
            (torch.zeros(8192, dtype=torch.uint8)[::2], ValueError, "must hold 4096 contiguous bytes"),
            (torch.zeros(8192, dtype=torch.uint8)[8:], ValueError, "must be 16-byte aligned"),
            (torch.zeros(4096, dtype=torch.uint8, device="meta"), ValueError, "must be on cpu, but is on meta"),
            ([0] * 4096, TypeError, "workspace must be a torch.Tensor, got list"),
        ]:
            with pytest.raises(error, match=f"^conv3d_rmsnorm_silu: workspace .*{words.removeprefix('workspace ')}"):
                make_plan(operation, operands).compile(bad)  # type: ignore[arg-type]
    plan.execute(**operands)
    assert backend.workspaces == [workspace]


def test_operands_must_not_lie_in_the_workspace() -> None:
    operation, backend = BY_NAME["conv3d_raw"], Working()
    operands = make_operands(operation)
    workspace = torch.zeros(max(operands["input"].nbytes, 4096) + 4096, dtype=torch.uint8)
    with using(backend):
        plan = make_plan(operation, operands)
        plan.compile(workspace)
    inside = workspace[: operands["input"].nbytes].view(torch.bfloat16).view(operands["input"].shape)
    with pytest.raises(ValueError, match="workspace must not overlap input"):
        plan.execute(**{**operands, "input": inside})
    assert backend.workspaces == []


def test_functions_allocate_a_workspace_for_each_call() -> None:
    operation, backend = BY_NAME["conv3d_rmsnorm_silu"], Working()
    operands = make_operands(operation)
    with using(backend):
        results = [call(operation, operands) for _ in range(2)]
    first, second = backend.workspaces
    assert first is not second
    assert torch.equal(results[0][0], results[1][0])


def test_no_workspace_where_none_is_needed() -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu"]
    operands = make_operands(operation, Ci=320, Co=640, T=3, H=3, W=3)
    plan = compiled_plan(operation, operands)
    assert plan.workspace_bytes == 0  # the reference needs none
    backend = Working(0)
    with using(backend):
        call(operation, operands)
    assert backend.workspaces == [None]


def test_kernels_say_what_they_can_serve() -> None:
    """The real kernels, whose device code is not compiled for it."""
    sm90 = pytest.importorskip("cudnn_fused.kernels.sm90")
    from cudnn_fused.kernels.compiling import DeviceSpec

    operation = BY_NAME["conv3d_raw"]
    kernels = sm90.sm90(DeviceSpec("sm_90a", 132))
    with using(kernels):
        with pytest.raises(ValueError, match="104 output channels are no multiple of 160"):
            make_plan(operation, make_operands(operation, Ci=96, Co=104)).check_support()
        wide = BY_NAME["conv3d_rmsnorm_silu"]
        operands = make_operands(wide, Ci=320, Co=640, N=1, T=3, H=4, W=5)
        assert make_plan(wide, operands).check_support()
    extents = {"N": 600, "T": 3, "H": 1922, "W": 1922, "Ci": 160, "Co": 160, "P": 0}
    problem = Problem(operation, extents, frozenset({"input", "packed_weight", "output"}), {}, torch.device("cpu"))
    reason = kernels.can_implement(problem)
    assert reason is not None
    assert "600x3x1922x1922" in reason
    assert "split the batch" in reason
