"""What a user of PyTorch can do for a VAE without fused kernels. Which is the fastest differs by model and size."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmark.e2e.task import Task
from benchmark.measure import Call

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Baseline:
    """Diffusers with the weights of its convolutions, and its input, in one memory format or the other."""

    name: str
    compiled: bool = False
    channels_last_weights: bool = False
    channels_last_input: bool = False

    def build(self, task: Task, model: Any, inputs: torch.Tensor) -> Call:
        """A call that runs ``task`` on a copy of ``model``."""
        own = copy.deepcopy(model)
        if self.channels_last_weights:
            for module in task.part(own).modules():
                if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                    module.weight.data = channels_last(module.weight.data)
        if self.channels_last_input:
            inputs = channels_last(inputs)
        if self.compiled:
            task.part(own).compile(dynamic=False)
        return partial(task.run, own, inputs)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


BASELINES = (
    Baseline("eager"),
    Baseline("eager, channels-last weights", channels_last_weights=True),
    Baseline("compile", compiled=True),
    Baseline("compile, channels-last weights", compiled=True, channels_last_weights=True),
    Baseline(
        "compile, channels-last weights and input", compiled=True, channels_last_weights=True, channels_last_input=True
    ),
)
