"""BF16 convolutions on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


def cpu_convolves_bf16() -> bool:
    """Whether PyTorch has a BF16 convolution for this CPU; where it has none, a loop serves, 300 times slower."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Fp32Convolutions(TorchFunctionMode):
    """Within it, BF16 ``conv2d`` and ``conv3d`` of CPU tensors run in FP32 and are rounded to BF16 once.

    This is what PyTorch's own BF16 convolution does on a CPU that has one (FP32 accumulation, the bias included), at
    the speed of an FP32 convolution.
    """

    _CONVOLUTIONS = (F.conv2d, F.conv3d)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._CONVOLUTIONS or args[0].dtype is not torch.bfloat16 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        wide = [_widened(argument) for argument in args]
        return func(*wide, **{name: _widened(argument) for name, argument in kwargs.items()}).bfloat16()


def _widened(argument: Any) -> Any:
    return argument.float() if isinstance(argument, torch.Tensor) else argument
