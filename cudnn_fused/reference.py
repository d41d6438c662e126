"""Running the reference: what every operation computes, in plain PyTorch, on CPU and CUDA tensors.

The arithmetic stands with what it is the arithmetic of, one line per rounding point: convolutions in
:mod:`.kernels.lowering`, the steps behind them in :mod:`.kernels.epilogue.steps`, stores in
:mod:`.kernels.epilogue.stores`. It is the oracle of every test and what runs where no kernel serves the device. The sum
of squares of a norm runs in FP32 over the contiguous channel axis, in the order of PyTorch's reduction on that device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cudnn_fused.operands import Operation, bind_extents
from cudnn_fused.problem import Problem

MKLDNN_CONV: Any = torch.backends.mkldnn.conv  # type: ignore[attr-defined]  # of the object in the module's place


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """FP32 convolutions in FP32, whatever autocast, TF32 or the reduced-precision switches of PyTorch say."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False))
        elif MKLDNN_CONV.fp32_precision not in ("none", "ieee"):
            stack.callback(setattr, MKLDNN_CONV, "fp32_precision", MKLDNN_CONV.fp32_precision)
            MKLDNN_CONV.fp32_precision = "ieee"
        yield


def run(operation: Operation, operands: Mapping[str, torch.Tensor], **options: int) -> None:
    """Fill the outputs among ``operands``, of which nothing is checked, on whatever device they are."""
    values = {option.name: options.get(option.name, option.default) for option in operation.options}
    device = operands[operation.operands[0].name].device
    problem = Problem(operation, bind_extents(operation, operands, values), frozenset(operands), values, device)
    with full_precision(device):
        operation.computation.reference(problem, operands)
