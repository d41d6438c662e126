"""Streams, CUDA Graphs, threads, devices, and kernels that share the GPU with others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda.bindings import driver

import cudnn_fused
from cudnn_fused.testing.cases import Case, Operands, make_inputs, make_outputs, make_plan, run_reference
from tests.cases import assert_same_bits
from tests.gpu.harness import ALL_OPERATIONS, TYPICAL, Prepared, assert_equals_reference, call, inputs_of, prepare

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 100_000_000  # some 50 ms


@contextmanager
def forbidding_waits() -> Iterator[None]:
    """PyTorch calls that make the host wait for the GPU raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def allocating_nothing(device: torch.device) -> Iterator[None]:
    """Fail if PyTorch's allocator hands out anything."""

    def allocations() -> int:
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    before = allocations()
    yield
    assert allocations() == before


def new_values(prepared: Prepared, seed: int) -> None:
    """Other integers in the same inputs, and the outputs as they were."""
    for name, tensor in make_inputs(prepared.case, prepared.operands["input"].device, integers=True, seed=seed).items():
        prepared.operands[name].copy_(tensor)
    prepared.refill()


# --- graphs --------------------------------------------------------------------------------------------------------


@ALL_OPERATIONS
def test_a_warm_class_in_a_graph(gpu: torch.device, case: Case) -> None:
    """Captured on a side stream without waiting or allocating; replays follow their inputs."""
    prepared = prepare(case, gpu)
    plan: Any = make_plan(case, prepared.operands)
    plan.execute(**prepared.operands)
    prepared.assert_right()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), forbidding_waits(), allocating_nothing(gpu):
        plan.execute(**prepared.operands)
    for seed in (1, 2, 3):
        new_values(prepared, seed)
        graph.replay()
        prepared.assert_right()
    prepared.assert_guards()


@ALL_OPERATIONS
def test_a_warm_function_in_a_graph(gpu: torch.device, case: Case) -> None:
    operands = inputs_of(case, make_inputs(case, gpu, integers=True))
    call(case, operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(case, operands)
    for seed in (1, 2):
        for name, tensor in make_inputs(case, gpu, integers=True, seed=seed).items():
            operands[name].copy_(tensor)
        graph.replay()
        assert_equals_reference(case, operands, results)


@ALL_OPERATIONS
def test_warm_execution_neither_waits_nor_allocates(gpu: torch.device, case: Case) -> None:
    prepared = prepare(case, gpu)
    plan: Any = make_plan(case, prepared.operands)
    plan.execute(**prepared.operands)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with forbidding_waits(), allocating_nothing(gpu):
        for _ in range(10):
            plan.execute(**prepared.operands)
            plan.execute(**prepared.operands, current_stream=side)
    torch.cuda.synchronize()
    prepared.assert_right()


# --- streams -------------------------------------------------------------------------------------------------------

HANDLES: dict[str, Callable[[torch.cuda.Stream], Any]] = {
    "int": lambda stream: stream.cuda_stream,
    "torch": lambda stream: stream,
    "driver": lambda stream: driver.CUstream(stream.cuda_stream),
}


@ALL_OPERATIONS
@pytest.mark.parametrize("handle", [None, *HANDLES])
def test_work_is_ordered_by_its_stream(gpu: torch.device, case: Case, handle: str | None) -> None:
    """Behind a slow stream that changes the input: the current one, or a given one while another is current."""
    operands = make_inputs(case, gpu, integers=True)
    later = make_inputs(case, gpu, integers=True, seed=1)["input"]
    call(case, operands)  # compiles
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
        operands["input"].copy_(later)
        if handle is None:
            results = call(case, operands)
    if handle is not None:
        with torch.cuda.stream(other):
            results = call(case, operands, current_stream=HANDLES[handle](side))
            assert torch.cuda.current_stream() == other
    side.synchronize()
    assert_equals_reference(case, operands, results)


@ALL_OPERATIONS
@pytest.mark.parametrize("function", [False, True], ids=["class", "function"])
def test_freed_inputs_are_kept_until_done(gpu: torch.device, case: Case, function: bool) -> None:
    """Operands that are dropped while their stream still sleeps, and whose memory is asked for again."""
    inputs = make_inputs(case, gpu, integers=True)
    outputs = make_outputs(case, gpu)
    expected = {**inputs, **{name: tensor.clone() for name, tensor in outputs.items()}}
    run_reference(case, expected)
    plan: Any = make_plan(case, {**inputs, **outputs})
    call(case, inputs)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN_CYCLES)
    if function:
        results = call(case, inputs, current_stream=side.cuda_stream)
    else:
        plan.execute(**inputs, **outputs, current_stream=side.cuda_stream)
        results = outputs
    shapes = [tensor.shape for tensor in inputs.values()]
    wanted = {name: tensor.clone() for name, tensor in expected.items() if name in results}
    del inputs, expected
    poison = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=gpu) for shape in shapes for _ in range(4)]
    side.synchronize()
    for name in case.operation.returns:
        if name in results:
            assert_same_bits(results[name], wanted[name])
    del poison


# --- threads and devices -------------------------------------------------------------------------------------------


@ALL_OPERATIONS
def test_a_thread_whose_first_cuda_act_is_execute(gpu: torch.device, case: Case) -> None:
    prepared = prepare(case, gpu)
    plan: Any = make_plan(case, prepared.operands)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():  # grad mode belongs to the thread
                plan.execute(**prepared.operands)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    torch.cuda.synchronize()
    prepared.assert_right()


@ALL_OPERATIONS
def test_the_current_device_is_kept(gpu: torch.device, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is made with the tensors' device current, and afterwards everything is as before."""
    prepared = prepare(case, gpu)
    plan: Any = make_plan(case, prepared.operands)
    entered: list[int] = []
    original = torch.cuda.device.__enter__

    def recording(self: torch.cuda.device) -> Any:
        entered.append(self.idx)
        return original(self)

    before = torch.cuda.current_device(), torch.cuda.current_stream()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.device, "__enter__", recording)
        plan.execute(**prepared.operands)
    assert gpu.index in entered
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
    call(case, prepared.operands)
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
    prepared.assert_right()


@ALL_OPERATIONS
def test_another_device_than_the_current_one(gpu: torch.device, case: Case) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs; test_the_current_device_is_kept covers the guard with one")
    other = torch.device("cuda", 1 - gpu.index if gpu.index < 2 else 0)
    prepared = prepare(case, other)
    plan: Any = make_plan(case, prepared.operands)  # made while the other device is current
    plan.execute(**prepared.operands)
    assert torch.cuda.current_device() == gpu.index
    prepared.assert_right()
    results = call(case, prepared.operands)
    assert torch.cuda.current_device() == gpu.index
    assert_equals_reference(case, prepared.operands, results)


# --- races ---------------------------------------------------------------------------------------------------------


class Chain:
    """Packing, convolution, norm, fused convolution and bare convolution of one chunk, each reading the last."""

    def __init__(self, gpu: torch.device, extents: tuple[int, int, int, int]) -> None:
        causal = Case("causal_conv3d_with_cache", *extents, (12, 160))
        norm = Case("rmsnorm_silu_pad", *extents, (160,))
        fused = Case("conv3d_rmsnorm_silu_pad", *extents, (160, 160))
        raw = Case("conv3d_raw", *extents, (160, 160))
        self.operands: list[Operands] = []
        source: torch.Tensor | None = None
        for case in (causal, norm, fused, raw):
            operands = {**make_inputs(case, gpu, integers=True), **make_outputs(case, gpu)}
            if source is not None:
                operands["input"] = source
            source = operands.get("padded_output", operands.get("output"))
            self.operands.append(operands)
        self.plans: list[Any] = [
            make_plan(case, operands) for case, operands in zip((causal, norm, fused, raw), self.operands, strict=True)
        ]

    @property
    def input(self) -> torch.Tensor:
        return self.operands[0]["input"]

    @property
    def output(self) -> torch.Tensor:
        return self.operands[-1]["output"]

    def execute(self) -> None:
        for plan, operands in zip(self.plans, self.operands, strict=True):
            plan.execute(**operands)


ROUNDS = 200


@pytest.mark.parametrize("extents", [(1, 1, 1, 1), (1, 2, 9, 17)], ids=str)
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
def test_no_races(gpu: torch.device, extents: tuple[int, int, int, int], graphed: bool) -> None:
    """Rounds in a row, each overwriting the last one's tensors, equal rounds with a pause between."""
    chain = Chain(gpu, extents)
    sources = torch.randint(-2, 3, (ROUNDS, *chain.input.shape), device=gpu).to(torch.bfloat16)
    execute: Callable[[], object] = chain.execute
    chain.execute()
    torch.cuda.synchronize()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain.execute()
        execute = graph.replay

    def rounds(pause: bool) -> torch.Tensor:
        results = torch.empty((ROUNDS, *chain.output.shape), dtype=torch.bfloat16, device=gpu)
        for index in range(ROUNDS):
            chain.input.copy_(sources[index])
            execute()
            chain.input.zero_()
            results[index].copy_(chain.output)
            if pause:
                torch.cuda.synchronize()
        return results

    paused = rounds(pause=True)
    assert not torch.equal(paused[0], paused[1])
    assert_same_bits(rounds(pause=False), paused)


@ALL_OPERATIONS
def test_the_smallest_grid(gpu: torch.device, case: Case) -> None:
    """One output pixel, over and over."""
    prepared = prepare(case.at(1, 1, 1, 1), gpu)
    plan: Any = make_plan(prepared.case, prepared.operands)
    for _ in range(ROUNDS):
        plan.execute(**prepared.operands)
    prepared.assert_right()
    prepared.assert_guards()


# --- sharing the GPU -----------------------------------------------------------------------------------------------


@ALL_OPERATIONS
def test_beside_another_kernel(gpu: torch.device, case: Case) -> None:
    """Persistent kernels must not count on having all multiprocessors."""
    prepared = prepare(case.at(2, 3, 40, 60), gpu)
    plan: Any = make_plan(prepared.case, prepared.operands)
    plan.execute(**prepared.operands)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=gpu) for _ in range(2))
    product = torch.empty_like(left)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    prepared.refill()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(5):
            torch.mm(left, right, out=product)
    for _ in range(20):
        plan.execute(**prepared.operands)
    torch.cuda.synchronize()
    prepared.assert_right()


def test_names_of_one_target_on_its_gpu(gpu: torch.device) -> None:
    """The names for this GPU's architecture run, and the others say which one they need."""
    capability = torch.cuda.get_device_capability(gpu)
    mine, theirs = ("Sm90", "Sm100") if capability[0] == 9 else ("Sm100", "Sm90")
    prepared = prepare(TYPICAL["conv3d_raw"], gpu)
    samples = {f"sample_{name}": tensor for name, tensor in prepared.operands.items()}
    plan = getattr(cudnn_fused, f"Conv3dRaw{mine}")(**samples)
    plan.check_support()
    plan.compile()
    plan.execute(**prepared.operands)
    prepared.assert_right()
    with pytest.raises(NotImplementedError, match="compute capability"):
        getattr(cudnn_fused, f"Conv3dRaw{theirs}")(**samples).check_support()
