"""What code written for the API that the ``Sm100`` names mirror relies on: the other names keep it, too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import cudnn_fused
from cudnn_fused import targets
from cudnn_fused.operands import Option
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.plan import PLANS
from tests.cases import BY_NAME, OPERATION_NAMES, call, compiled_plan, inputs_only, make_operands, make_plan
from tests.test_targets import pretend_gpu

BOTH = [TypeError, ValueError]


# --- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_a_plan_can_be_called(operation_name: str) -> None:
    """Calling compiles when that has not been done, then executes."""
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, optional=False)
    expected = compiled_plan(operation, operands).execute(**operands)
    plan = make_plan(operation, operands)
    for _ in range(2):
        result = plan(**operands)
        assert torch.equal(result[0], expected[0])
    positional = [operands[operand.name] for operand in operation.operands if operand.name in operands]
    assert torch.equal(make_plan(operation, operands)(*positional, current_stream=0)[0], expected[0])


def test_calling_a_plan_that_is_not_supported_says_why() -> None:
    operation = BY_NAME["conv3d_raw"]
    operands = make_operands(operation)
    operands["output"] = operands["output"][:1]
    with pytest.raises(ValueError, match="output shape mismatch"):
        make_plan(operation, operands)(**operands)


class Holder(torch.nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.plan = plan


@pytest.mark.parametrize("compiled", [False, True])
def test_plans_can_be_copied(compiled: bool) -> None:
    operation = BY_NAME["conv3d_raw"]
    operands = make_operands(operation)
    plan = (compiled_plan if compiled else make_plan)(operation, operands)
    for twin in (copy.deepcopy(plan), copy.deepcopy(Holder(plan)).plan):
        assert type(twin) is type(plan)
        assert twin is not plan
        if compiled:
            assert torch.equal(twin.execute(**operands), plan.execute(**operands))
        else:
            with pytest.raises(RuntimeError, match="before compile"):
                twin.execute(**operands)
            assert torch.equal(twin(**operands), call(operation, operands))
    shallow = copy.copy(plan)
    assert torch.equal(shallow(**operands), call(operation, operands))


def test_plans_can_be_pickled() -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu_pad"]
    operands = make_operands(operation)
    plan = pickle.loads(pickle.dumps(compiled_plan(operation, operands)))
    with pytest.raises(RuntimeError, match="before compile"):
        plan.execute(**operands)
    assert torch.equal(plan(**operands)[0], compiled_plan(operation, operands).execute(**operands)[0])


# --- options -------------------------------------------------------------------------------------------------------

OPTIONS = [(operation.name, option) for operation in OPERATIONS for option in operation.options]
WHOLE = [np.int64(1), torch.tensor(1), np.array(1), torch.tensor(1, dtype=torch.int8)]
NOT_WHOLE = [True, 1.0, None, "1", np.float32(1), torch.tensor(1.0), torch.tensor(True), np.True_]


@pytest.mark.parametrize(("operation_name", "declared"), OPTIONS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("warm", [False, True])
def test_whole_number_options(operation_name: str, declared: Option, warm: bool) -> None:
    operation, option = BY_NAME[operation_name], declared.name
    allowed = f"{option} must be one of {', '.join(map(str, declared.choices))}"
    extents = {declared.symbol: 1} if declared.symbol not in ("", "P") else {}
    operands = make_operands(operation, history=0 if option == "history_frames" else 2, **extents)
    if option == "history_frames":
        cache = operands["cache_output"].shape
        operands["cache_output"] = torch.full((cache[0], 2, *cache[2:]), torch.nan, dtype=torch.bfloat16)
    if warm:
        call(operation, operands, **{option: 1})
    for value in WHOLE:
        call(operation, operands, **{option: value})
        assert make_plan(operation, operands, **{option: value}).check_support()
    assert len(PLANS) == 1
    for value in NOT_WHOLE:
        for error in BOTH:
            with pytest.raises(error, match=allowed):
                call(operation, operands, **{option: value})
            with pytest.raises(error, match=allowed):
                make_plan(operation, operands, **{option: value}).check_support()


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("bad", ["dtype", "missing", "list"])
def test_type_faults_can_be_caught_as_both(operation_name: str, bad: str) -> None:
    operation = BY_NAME[operation_name]
    good = make_operands(operation)
    value: Any = {"dtype": good["packed_weight" if "packed_weight" in good else "gamma"].float(), "missing": None}.get(
        bad, [1.0]
    )
    operands = {**good, "packed_weight" if "packed_weight" in good else "gamma": value}
    plan = compiled_plan(operation, good)
    for error in BOTH:
        for suffix in ("", "Sm100"):
            kept = {name: each for name, each in operands.items() if suffix == "" or name not in operation.extensions}
            with pytest.raises(error, match=r"(packed_weight|gamma) must"):
                make_plan(operation, kept, suffix).check_support()
        with pytest.raises(error, match=r"(packed_weight|gamma) must"):
            call(operation, operands)
        if bad != "missing":
            with pytest.raises(error, match=r"(packed_weight|gamma) must"):
                plan.execute(**operands)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_no_cuda_can_be_caught_as_both(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    operation = BY_NAME["conv3d_raw"]
    operands = make_operands(operation)
    with pytest.raises(error, match="SM100 needs a CUDA device, and none is available"):
        make_plan(operation, operands, "Sm100").check_support()


def test_words_of_the_mirrored_api() -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu"]
    operands = make_operands(operation)
    plan = compiled_plan(operation, operands)
    with pytest.raises(ValueError, match="output shape mismatch"):
        plan.execute(**{**operands, "output": operands["output"][:1]})
    with pytest.raises(ValueError, match="output shape mismatch"):
        make_plan(operation, {**operands, "output": operands["output"][:1]}).check_support()
    with pytest.raises(ValueError, match="residual presence"):
        plan.execute(**{**operands, "residual": None})
    start = operands["packed_weight"].view(-1)[: operands["output"].numel()].view(operands["output"].shape)
    with pytest.raises(ValueError, match="output must not overlap packed_weight"):
        plan.execute(**{**operands, "output": start})
    operation = BY_NAME["rmsnorm_silu_pad"]
    operands = make_operands(operation)
    operands["previous"] = torch.cat([operands["previous"]] * 2, 1)
    with pytest.raises(ValueError, match="previous must contain one or two frames"):
        call(operation, operands)


# --- gates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("suffix", ["Sm90", "Sm100"])
def test_the_dsl_gate_speaks_first(operation_name: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """...before operands are checked, and before a device is looked for."""
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=tuple(operation.extensions))
    operands = {name: tensor.float() for name, tensor in operands.items()}
    monkeypatch.setattr(targets, "installed_dsl", lambda: None)
    for run in (
        make_plan(operation, operands, suffix).check_support,
        lambda: call(operation, operands, f"_wrapper_{suffix.lower()}"),
    ):
        with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl >= 4\.8\.1, which is not installed"):
            run()
    with pytest.raises(TypeError, match="must have dtype"):
        call(operation, operands)


def test_a_dsl_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "DSL_MODULE", "no_such_dsl")
    operation = BY_NAME["conv3d_raw"]
    operands = make_operands(operation)
    for run in (make_plan(operation, operands, "Sm100").check_support, make_plan(operation, operands, "Sm100").compile):
        with pytest.raises(NotImplementedError, match=r"cannot be imported: ModuleNotFoundError.*no_such_dsl"):
            run()


@pytest.mark.parametrize(
    ("capability", "names"),
    [((9, 0), "the Sm90 names, and those without a suffix, serve it"), ((8, 9), "without a suffix run the reference")],
)
def test_the_wrong_gpu_is_told_which_names_serve_it(
    capability: tuple[int, int], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudnn_fused.backends import select_backend
    from cudnn_fused.targets import SM100

    pretend_gpu(monkeypatch, capability)
    with pytest.raises(NotImplementedError, match=names):
        select_backend(BY_NAME["conv3d_raw"], SM100, torch.device("cuda", 0))


# --- what users do to classes and tensors --------------------------------------------------------------------------


def test_a_derived_class_does_not_replace_the_one_that_functions_call() -> None:
    class Mine(cudnn_fused.Conv3dRaw):
        def execute(self, *arguments: Any, **named: Any) -> Any:
            raise AssertionError("the function must not come here")

    operation = BY_NAME["conv3d_raw"]
    operands = inputs_only(operation, make_operands(operation))
    torch._dynamo.reset()
    compiled = torch.compile(cudnn_fused.conv3d_raw, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**operands), cudnn_fused.conv3d_raw(**operands))
    assert issubclass(Mine, cudnn_fused.Conv3dRaw)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_vmap_is_refused(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = inputs_only(operation, make_operands(operation, optional=False))
    others = {name: tensor for name, tensor in operands.items() if name != "input"}
    for warm in (False, True):
        if warm:
            call(operation, operands)
        with pytest.raises(TypeError, match=r"input has no memory of its own: .* torch\.vmap"):
            torch.vmap(lambda each: call(operation, {"input": each, **others})[0])(torch.stack([operands["input"]] * 2))
