"""The plan cache: its bound, its order, what is in a key, and many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cudnn_fused
from cudnn_fused import plan
from cudnn_fused.backends import ReferenceBackend, using
from cudnn_fused.plan import PLAN_CAPACITY, PLANS
from cudnn_fused.plan_cache import PlanCache
from cudnn_fused.problem import Problem
from cudnn_fused.types import BF16
from tests.cases import BY_NAME, OPERATION_NAMES, call, compiled_plan, make_operands


@pytest.fixture
def compiled() -> Iterator[list[Problem]]:
    """Every problem that is compiled, in order; nothing is computed."""
    recorder = Recorder()
    with using(recorder):
        yield recorder.problems


class Recorder:
    """A backend that notes what it compiles, and computes nothing."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def can_implement(self, problem: Problem) -> str | None:
        return None

    def compile(self, problem: Problem) -> Any:
        self.problems.append(problem)
        return Nothing()


class Nothing:
    workspace_bytes = 0

    def __call__(self, operands: object, workspace: object, stream: int) -> None:
        pass


def norm(width: int, **operands: Any) -> Any:
    operands = {"input": torch.zeros(1, 1, 1, width, 160, dtype=BF16), **operands}
    return cudnn_fused.rmsnorm_silu_pad(gamma=torch.ones(160, dtype=BF16), **operands)


def test_one_plan_per_shape(compiled: list[Problem]) -> None:
    for _ in range(3):
        for width in (1, 2, 3):
            norm(width)
    assert [problem.extents["W"] for problem in compiled] == [1, 2, 3]


def test_all_operations_share_one_bounded_cache(compiled: list[Problem]) -> None:
    assert PLAN_CAPACITY == PLANS.capacity == 128
    for name in OPERATION_NAMES:
        call(BY_NAME[name], make_operands(BY_NAME[name]))
    assert len(PLANS) == len(OPERATION_NAMES)
    for width in range(1, 200):
        norm(width)
        assert len(PLANS) <= PLAN_CAPACITY


def test_first_in_first_out(compiled: list[Problem]) -> None:
    """A hot shape is dropped in its turn all the same, and made again."""
    builds = PLANS.builds
    norm(1)
    for width in range(2, PLAN_CAPACITY + 1):
        norm(width)
        norm(1)
    assert len(compiled) == PLAN_CAPACITY
    norm(PLAN_CAPACITY + 1)
    norm(2)
    assert len(compiled) == PLAN_CAPACITY + 1
    norm(1)
    assert len(compiled) == PLAN_CAPACITY + 2
    assert compiled[-1].extents["W"] == 1
    assert PLANS.builds == builds + len(compiled)


def test_more_live_shapes_than_plans_give_right_answers() -> None:
    inputs = [torch.randn(1, 1, 1, width, 160).to(BF16) for width in range(1, PLAN_CAPACITY + 2)]
    expected = [norm(0, input=value).padded_output for value in inputs]
    for value, want in zip(inputs, expected, strict=True):
        assert torch.equal(norm(0, input=value).padded_output, want)


def test_options_interleaved_at_one_shape(compiled: list[Problem]) -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu_pad"]
    full = make_operands(operation, history=1)
    variants: list[tuple[dict[str, Any], dict[str, int]]] = [
        (full, {}),
        (full, {"leading_zero_frames": 1}),
        (full, {"leading_zero_frames": 2}),
        ({key: value for key, value in full.items() if key != "residual_bias"}, {}),
    ]
    bare = {key: value for key, value in full.items() if not key.startswith("residual") and key != "previous"}
    variants += [(bare, {"history_frames": history}) for history in (0, 1, 2)]
    for _ in range(3):
        for operands, options in variants:
            call(operation, operands, **options)
    assert len(compiled) == len(PLANS) == len(variants)
    assert [problem.extents["P"] for problem in compiled] == [1, 1, 1, 1, 0, 1, 2]


def test_what_changes_a_key() -> None:
    """Shape, strides that matter, dtype, device with its index, and presence do; values and addresses do not."""
    tensor = torch.zeros(2, 3, 8, dtype=BF16)
    same = [torch.ones(2, 3, 8, dtype=BF16), torch.nn.Parameter(tensor), torch.zeros(4, 3, 8, dtype=BF16)[2:]]
    assert {plan.signature(value) for value in same} == {plan.signature(tensor)}
    different = [None, tensor.float(), tensor[:1], tensor.to("meta"), torch.zeros(2, 3, 16, dtype=BF16)[..., ::2], "x"]
    assert len({plan.signature(value) for value in [tensor, *different]}) == len(different) + 1
    assert torch.device("cuda", 0) != torch.device("cuda", 1)
    assert tensor.device in plan.signature(tensor)  # type: ignore[operator]


def test_save_input_is_in_the_key(compiled: list[Problem]) -> None:
    norm(1)
    norm(1, save_input=True)
    norm(1)
    assert len(compiled) == 2


def test_neutral_and_target_names_do_not_share_plans() -> None:
    operation = BY_NAME["conv3d_raw"]
    operands = make_operands(operation)
    call(operation, operands)
    with pytest.raises(RuntimeError):
        call(operation, operands, "_wrapper_sm90")


def test_backends_do_not_share_plans(compiled: list[Problem]) -> None:
    norm(1)
    with using(Recorder()) as other:
        norm(1)
    norm(1)
    assert len(compiled) == len(other.problems) == 1


def test_a_failed_build_leaves_nothing() -> None:
    class Failing(Recorder):
        def compile(self, problem: Problem) -> Any:
            raise RuntimeError("no luck")

    with using(Failing()), pytest.raises(RuntimeError, match="no luck"):
        norm(1)
    assert len(PLANS) == 0
    norm(1)
    assert len(PLANS) == 1


def test_a_call_that_cannot_run_compiles_nothing(compiled: list[Problem]) -> None:
    with torch.enable_grad(), pytest.raises(RuntimeError, match="requires grad"):
        norm(1, input=torch.zeros(1, 1, 1, 1, 160, dtype=BF16, requires_grad=True))
    assert compiled == []


def test_many_threads_build_one_plan() -> None:
    threads = 4
    barrier, built = threading.Barrier(threads), []

    class Slow(ReferenceBackend):
        def compile(self, problem: Problem) -> Any:
            built.append(problem)
            threading.Event().wait(0.05)
            return super().compile(problem)

    backend = Slow()
    value = torch.randn(1, 1, 2, 3, 160).to(BF16)

    def run(_: int) -> torch.Tensor:
        barrier.wait()
        with using(backend):
            return norm(0, input=value).padded_output

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(run, range(threads)))
    assert len(built) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_many_threads_compile_one_class(compiled: list[Problem]) -> None:
    operation = BY_NAME["rmsnorm_silu_pad"]
    one = compiled_plan(operation, make_operands(operation))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: one.compile(), range(8)))
    assert len(compiled) == 1


def test_a_thread_that_waits_for_a_failed_build_tries_itself() -> None:
    cache: PlanCache[int] = PlanCache(2)
    started, attempts = threading.Event(), []

    def build() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            started.set()
            threading.Event().wait(0.05)
            raise RuntimeError("first")
        return 7

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_build, "key", build)
        started.wait()
        second = pool.submit(cache.get_or_build, "key", build)
        assert isinstance(first.exception(), RuntimeError)
        assert second.result() == 7
    assert cache._building == {}


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="capacity"):
        PlanCache(0)
