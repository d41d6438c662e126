"""Memory that an operation takes besides its operands."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from cudnn_fused.testing.cases import Case, Skip, make_inputs, make_outputs, make_plan
from tests.gpu.harness import call, inputs_of

pytestmark = pytest.mark.gpu

ALLOCATION_BYTES = 2 << 20  # how much a wrapper may take beyond its outputs: what the allocator rounds up

CASES = [
    Case("conv3d_raw", 1, 4, 480, 832, (160, 160)),
    Case("conv3d_rmsnorm_silu", 1, 4, 480, 832, (160, 160), skip=Skip.BIASED),
    Case("conv3d_rmsnorm_silu_pad", 1, 4, 480, 832, (160, 160), skip=Skip.BIASED, history=1),
    Case("conv3d_bias_residual_pad", 1, 4, 480, 832, (160, 160), skip=Skip.BIASED),
    Case("causal_conv3d_with_cache", 1, 4, 480, 832, (12, 160), history=1),
    Case("rmsnorm_silu_pad", 1, 4, 480, 832, (160,), skip=Skip.BIASED, history=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.variant)
def test_no_hidden_workspace(gpu: torch.device, case: Case) -> None:
    """A warm class takes nothing, from PyTorch or the driver; a function its outputs and scratch."""
    inputs = make_inputs(case, gpu, integers=False)
    outputs = make_outputs(case, gpu)
    plan: Any = make_plan(case, {**inputs, **outputs})
    plan.execute(**inputs, **outputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(gpu)
    allocated, free = torch.cuda.memory_allocated(gpu), torch.cuda.mem_get_info(gpu)[0]
    for _ in range(3):
        plan.execute(**inputs, **outputs)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(gpu) == allocated
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the driver's figure is about all processes
        assert torch.cuda.mem_get_info(gpu)[0] == free

    written = sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
    del outputs
    allocated = torch.cuda.memory_allocated(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    results = call(case, inputs_of(case, inputs))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(gpu) - allocated <= written + ALLOCATION_BYTES
    del results
