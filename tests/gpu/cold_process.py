"""What happens to the first call of a process. Run by ``test_compilation.py``, one scenario per process.

    python -m tests.gpu.cold_process SCENARIO

Prints one line of JSON: ``{"kernels": how many were compiled}``. The exit status is not 0 if anything went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmark.measure import counting_compilations
from cudnn_fused.testing.cases import Case, Operands, make_inputs, make_plan
from tests.gpu.harness import TYPICAL, Prepared, assert_equals_reference, call, prepare

THREADS = 4
GREEN_MULTIPROCESSORS = 16
CASE = TYPICAL["conv3d_rmsnorm_silu"]
GPU = torch.device("cuda", 0)


def one_call(case: Case = CASE) -> None:
    operands = make_inputs(case, GPU, integers=True)
    results = call(case, operands)
    torch.cuda.synchronize()
    assert_equals_reference(case, operands, results)


def in_threads(work: Callable[[int], None]) -> None:
    """Run ``work`` in several threads that start together."""
    barrier = threading.Barrier(THREADS)

    def wait_and_work(index: int) -> None:
        barrier.wait()
        with torch.no_grad():  # grad mode belongs to the thread
            work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(wait_and_work, range(THREADS)))


def threads_one_key() -> None:
    operands = make_inputs(CASE, GPU, integers=True)
    results: list[Operands] = []
    in_threads(lambda _: results.append(call(CASE, operands)))
    torch.cuda.synchronize()
    assert len(results) == THREADS
    for result in results:
        assert_equals_reference(CASE, operands, result)


def threads_many_classes() -> None:
    """Classes of different operations compiled at once."""
    cases = list(TYPICAL.values())[:THREADS]
    prepared = [prepare(case, GPU) for case in cases]

    def work(index: int) -> None:
        plan = make_plan(cases[index], prepared[index].operands)
        plan.execute(**prepared[index].operands)  # type: ignore[attr-defined]

    in_threads(work)
    torch.cuda.synchronize()
    for each in prepared:
        each.assert_right()


def cold_capture() -> None:
    """A cold function inside a capture works, or says what to do; then everything else works."""
    operands = make_inputs(CASE, GPU, integers=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            results = call(CASE, operands)
    except Exception as error:
        reasons = []
        link: BaseException | None = error
        while link is not None:
            reasons.append(str(link))
            link = link.__cause__ or link.__context__
        assert any("warm" in reason for reason in reasons), reasons
        torch.cuda.set_stream(torch.cuda.default_stream())  # PyTorch leaves that of a failed capture
    else:
        graph.replay()
        assert_equals_reference(CASE, operands, results)
    one_call()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        results = call(CASE, operands)
    again.replay()
    assert_equals_reference(CASE, operands, results)


def green_context() -> None:
    """All operations on a stream that has some of the multiprocessors only."""
    from cuda.bindings import driver

    def checked(result: tuple) -> tuple:
        status, *values = result
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return tuple(values)

    torch.zeros(1, device=GPU)  # creates the primary context
    (device,) = checked(driver.cuDeviceGet(GPU.index))
    (everything,) = checked(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, *_ = checked(driver.cuDevSmResourceSplitByCount(1, everything, 0, GREEN_MULTIPROCESSORS))
    (description,) = checked(driver.cuDevResourceGenerateDesc(groups, 1))
    default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    (context,) = checked(driver.cuGreenCtxCreate(description, device, default))
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    (stream,) = checked(driver.cuGreenCtxStreamCreate(context, flags, 0))
    done: list[Prepared] = []
    for case in TYPICAL.values():
        prepared = prepare(case.at(2, 3, 40, 60), GPU)
        plan = make_plan(prepared.case, prepared.operands)
        torch.cuda.synchronize()
        plan.execute(**prepared.operands, current_stream=stream)  # type: ignore[attr-defined]
        checked(driver.cuStreamSynchronize(stream))
        prepared.assert_right()
        done.append(prepared)


SCENARIOS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (one_call, threads_one_key, threads_many_classes, cold_capture, green_context)
}


def main(scenario: str) -> None:
    with torch.no_grad(), counting_compilations() as compilations:
        SCENARIOS[scenario]()
        torch.cuda.synchronize()
    print(json.dumps({"kernels": compilations.kernels}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    # Without tearing down: tensors last used on a stream of a green context outlive that context otherwise.
    os._exit(0)
