"""The most memory that an encode needs beside what lives, counted tensor by tensor as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_fused.backends import using
from cudnn_fused.problem import Problem
from cudnn_fused.wan import encoder, fuse_encoder
from tests.wan.conftest import random_video


class Accountant(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside and are alive, after every operation of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(arg.untyped_storage()) for arg in args if isinstance(arg, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and (ref := StorageWeakRef(tensor.untyped_storage())) not in given:
                self._sizes[ref] = tensor.untyped_storage().nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


class UncomputedConvolutions(TorchFunctionMode):
    """Convolutions that only allocate their results, channels last as cuDNN does for such weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.conv2d, F.conv3d):
            return func(*args, **(kwargs or {}))
        meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
        shape = func(*meta, **(kwargs or {})).shape
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return torch.empty(shape, dtype=args[0].dtype, memory_format=last)


class NoKernels:
    """A backend, and its only program, that does nothing."""

    workspace_bytes = 0

    def can_implement(self, problem: Problem) -> str | None:
        return None

    def compile(self, problem: Problem) -> NoKernels:
        return self

    def __call__(self, *arguments: object) -> None:
        pass


def peak(vae: AutoencoderKLWan, video: torch.Tensor) -> int:
    with UncomputedConvolutions(), Accountant() as accountant:
        vae.encode(video)
    return accountant.peak


@pytest.mark.parametrize("frames", [1, 9])
def test_no_more_than_eager_channels_last(
    small_vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    video = random_video(frames, 128, 128)
    for module in small_vae.encoder.modules():
        if isinstance(module, torch.nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)
    eager = peak(small_vae, video)
    monkeypatch.setattr(encoder, "Fp32Convolutions", UncomputedConvolutions)
    vae = fuse_encoder(small_vae)
    with using(NoKernels()):
        vae.encode(random_video(1, 16, 16))  # lays the weights out
        fused = peak(vae, video)
    print(f"{frames} frames: eager {eager / 2**20:.2f} MiB, fused {fused / 2**20:.2f} MiB")
    assert fused <= eager
