"""The WAN encode whose fused operations run on the kernels of a GPU, in the emulator.

One by one the kernels are tested elsewhere. Here they hand each other what an encode hands on: padded inputs in which
the kernel before wrote the borders, caches, frames that are known to be zero, sums that the next block adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm

from cudnn_fused.backends import Program, ReferenceBackend, using
from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.kernels.sm90 import sm90
from cudnn_fused.kernels.sm100 import sm100
from cudnn_fused.problem import Problem
from cudnn_fused.testing.agreement import differing
from cudnn_fused.wan import fuse_encoder
from ptxemu import emulate
from tests.wan.conftest import eager_moments, moments, random_video, randomize, relative_l2
from tests.wan.test_encoder import SAME_ROUNDING

ONE_BLOCK = {"num_res_blocks": 1}
TWO_STAGES = {**ONE_BLOCK, "dim_mult": [1, 1], "temperal_downsample": [True], "scale_factor_spatial": 4}
MULTIPROCESSORS = 4  # two pairs of CTAs: reductions are split
FRAMES, CHUNKS = 5, 2  # a first chunk of one frame, and one of four behind one frame of history
HEIGHT, WIDTH = 16, 32  # the smallest that is not square
CONVOLUTIONS = {"causal_conv3d_with_cache", "conv3d_rmsnorm_silu_pad", "conv3d_bias_residual_pad"}
NORMS = {"rmsnorm_silu_pad", "conv3d_rmsnorm_silu_pad"}
# One operation on the same random operands differs from the reference where sums in another order fall to the other
# side of a tie: in so few elements, and by at most a unit in the last place of the largest value.
DIFFERING_SHARE = 1e-3
LARGEST_DIFFERENCE = 2.0**-7  # of it


@dataclass(frozen=True)
class Call:
    """An operation that ran in the emulator."""

    problem: Problem
    products: int  # multiply-accumulates of the tensor cores
    faults: list[str]  # against the reference on the same operands

    @property
    def name(self) -> str:
        return self.problem.operation.name


@dataclass(frozen=True)
class EmulatedProgram:
    run: Callable[[Sequence[torch.Tensor | None], torch.Tensor | None, int], None]
    workspace_bytes: int

    def __call__(self, operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None, stream: int) -> None:
        self.run(operands, workspace, stream)


class EmulatedBackend:
    """Kernels in the emulator, and after every call of them the reference on the same operands."""

    def __init__(self, kernels: GpuBackend) -> None:
        self.kernels = kernels
        self.calls: list[Call] = []

    def can_implement(self, problem: Problem) -> str | None:
        return self.kernels.can_implement(problem)

    def compile(self, problem: Problem) -> Program:
        with emulate():
            program = self.kernels.compile(problem)
        launch_reference = ReferenceBackend().compile(problem)
        operation = problem.operation
        names = [operand.name for operand in operation.operands]

        def run(operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None, stream: int) -> None:
            results = {name: tensor for name, tensor in zip(names, operands, strict=True) if name in operation.returns}
            results = {name: tensor.fill_(torch.nan) for name, tensor in results.items() if tensor is not None}
            expected = {name: tensor.clone() for name, tensor in results.items()}
            memory = [tensor for tensor in (*operands, workspace) if tensor is not None]
            with emulate(memory=memory, schedule="random", seed=len(self.calls), tensor_fences=True) as emulation:
                program(operands, workspace, stream)
            launch_reference([expected.get(*named) for named in zip(names, operands, strict=True)], None, stream)
            products = sum(launched.report.counts.macs_issued for launched in emulation.launches)
            faults = [f"{name}: {fault}" for name in results for fault in disagreements(results[name], expected[name])]
            self.calls.append(Call(problem, products, faults))

        return EmulatedProgram(run, program.workspace_bytes)


def disagreements(result: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """What speaks against a result for random operands. Zeros have to be zeros."""
    faults, wrong = [], differing(result, expected)
    if wrong > DIFFERING_SHARE * expected.numel():
        faults.append(f"{wrong} of {expected.numel()} elements differ")
    error, largest = (x.float().abs().max().item() for x in (result.float() - expected.float(), expected))
    if not error <= LARGEST_DIFFERENCE * largest:  # true for NaN
        faults.append(f"off by {error:.3g} where the largest is {largest:.3g}")
    if bool((result[expected == 0] != 0).any()):
        faults.append("not zero where the reference is")
    return faults


def count(vae: AutoencoderKLWan, kind: type[torch.nn.Module]) -> int:
    """Modules of a kind in the encoder that work on three dimensions."""
    modules = [module for module in vae.encoder.modules() if isinstance(module, kind)]
    if kind is WanCausalConv3d:
        return sum(module.kernel_size == (3, 3, 3) for module in modules) - 1  # conv_out stays in PyTorch
    return sum(module.gamma.dim() == 4 for module in modules)  # the one in the attention has three


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "arch", "architecture"),
    [
        (sm100, "sm_100a", ONE_BLOCK),  # all channels of production
        (sm90, "sm_90a", TWO_STAGES),  # the emulator is slower here, and GPUs run the others
    ],
    ids=["SM100", "SM90"],
)
def test_encode_on_emulated_kernels(
    run_model: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Callable[..., GpuBackend],
    arch: str,
    architecture: dict[str, Any],
) -> None:
    monkeypatch.setattr(run_model, "PRODUCTION", {**run_model.PRODUCTION, **architecture})
    vae, video = randomize(run_model.load_vae(None, seed=2)), random_video(FRAMES, HEIGHT, WIDTH)
    convolutions, norms = count(vae, WanCausalConv3d), count(vae, WanRMS_norm)
    eager = eager_moments(vae, video)
    fuse_encoder(vae)
    on_reference = moments(vae, video)

    backend = EmulatedBackend(kernels(DeviceSpec(arch, MULTIPROCESSORS), all_tiles=False))
    with using(backend):
        emulated = moments(vae, video)

    calls = Counter(call.name for call in backend.calls)
    assert set(calls) == CONVOLUTIONS | NORMS
    assert sum(calls[name] for name in CONVOLUTIONS) == convolutions * CHUNKS
    assert sum(calls[name] for name in NORMS) == norms * CHUNKS
    assert all((call.products > 0) == (call.name in CONVOLUTIONS) for call in backend.calls)
    assert {call.problem.extents["P"] for call in backend.calls if call.name in NORMS} == {0, 1}
    assert {call.problem.options.get("absent_zero_frames", 2) for call in backend.calls} == {2, 1}

    faults = [
        f"call {i}, {call.name} {call.problem.channels}: {call.faults}"
        for i, call in enumerate(backend.calls)
        if call.faults
    ]
    assert not faults
    assert emulated.shape == eager.shape
    assert relative_l2(emulated, on_reference) < SAME_ROUNDING
    assert relative_l2(emulated, eager) < SAME_ROUNDING
