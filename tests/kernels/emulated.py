"""Running a case on kernels in the emulator.

`python -m tests.kernels.emulated NAME` runs one of :data:`PROBES` and says whether it agrees with the reference: so the
mutation tests run a changed copy of the package.
"""

from __future__ import annotations

import sys

import torch

from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import Kernels, Machine
from cudnn_fused.kernels.sm100 import Sm100Kernels
from cudnn_fused.kernels.tiling_sm100 import TileConfig
from cudnn_fused.testing.agreement import against_reference
from cudnn_fused.testing.cases import Case, Skip, make_problem
from cudnn_fused.testing.ptx import Emulation, EmulatorError, emulate
from tests.gpu.harness import Prepared, prepare

CPU = torch.device("cpu")
MULTIPROCESSORS = 2  # one pair of CTAs, which takes all tiles in turn
EARLY, LATE, NEWEST, RANDOM = SCHEDULES = ("early", "late", "newest", "random")

# Few cases that between them use every part of the convolution and of its epilogue.
PROBES = {
    "raw": Case("conv3d_raw", 1, 1, 3, 5, (160, 160)),
    "padded": Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, (160, 160), skip=Skip.BIASED, history=2),
    "history": Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, (160, 160), history=1),
    "zeros": Case("conv3d_raw", 1, 2, 1, 3, (160, 160), leading_zero_frames=1),
    "corner": Case("conv3d_bias_residual_pad", 1, 1, 3, 5, (160, 160), skip=Skip.PLAIN),
    "causal": Case("causal_conv3d_with_cache", 1, 1, 3, 5, (12, 160), history=1),
    "tiles": Case("conv3d_raw", 1, 3, 2, 129, (160, 160)),
    "split": Case("conv3d_raw", 1, 1, 3, 5, (160, 160)),
    "split-tiles": Case("conv3d_raw", 1, 1, 3, 5, (320, 320)),
}
ON_MANY = ("split", "split-tiles")  # run by the smallest tile on more pairs than there are tiles


class OneTile(Sm100Kernels):
    """The backend with one of the tiles that can serve an operation, the first or, with ``turn``, another one."""

    def __init__(self, machine: Machine, *, shared_taps: bool, turn: int = 0) -> None:
        super().__init__(machine, shared_taps=shared_taps)
        self.turn = turn

    def tiles(self, spec: Conv3dSpec, machine: Machine) -> tuple[TileConfig, ...]:
        legal = super().tiles(spec, machine)
        return (legal[self.turn % len(legal)],)


def sm100(*, shared_taps: bool = True, turn: int = 0, multiprocessors: int = MULTIPROCESSORS) -> OneTile:
    return OneTile(Machine("sm_100a", multiprocessors), shared_taps=shared_taps, turn=turn)


def kernels_for(probe: str) -> OneTile:
    return sm100(turn=-1, multiprocessors=8) if probe in ON_MANY else sm100()


def run(
    kernels: Kernels,
    case: Case,
    *,
    integers: bool = True,
    schedule: str = EARLY,
    schedule_seed: int = 0,
) -> tuple[Prepared, Emulation]:
    """Execute a case. Frames of the input that are said to be zero hold NaN meanwhile: they must not be read."""
    prepared = prepare(case, CPU, integers=integers)
    tensors = [prepared.operands.get(operand.name) for operand in case.operation.operands]
    problem = make_problem(case, prepared.operands)
    zeros = prepared.operands["input"][:, : case.leading_zero_frames]
    memory = [tensor for tensor in tensors if tensor is not None]
    size = kernels.workspace_bytes(problem)
    workspace = torch.empty(size, dtype=torch.uint8) if size else None
    memory += [workspace] if workspace is not None else []
    with emulate(memory=memory, schedule=schedule, seed=schedule_seed, tensor_fences=True) as emulation:
        program = kernels.compile(problem)
        zeros.fill_(torch.nan)
        program(tensors, workspace, 0)
        zeros.zero_()
    return prepared, emulation


def check(kernels: Kernels, case: Case, **options: object) -> Emulation:
    """Execute a case on integers; its results must be those of the reference bit for bit, and nothing else written."""
    prepared, emulation = run(kernels, case, **options)  # type: ignore[arg-type]
    prepared.assert_right()
    prepared.assert_guards()
    return emulation


def main(name: str) -> int:
    case = PROBES[name]
    try:
        prepared, _ = run(kernels_for(name), case)
    except EmulatorError as error:
        print(f"fault: {error}")
        return 1
    faults = against_reference(case, prepared.operands, {n: t.clone() for n, t in prepared.initial.items()})
    faults += [f"{name}: written beside it" for name in prepared.guards.broken()]
    print("\n".join(faults) or "agrees")
    return bool(faults)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1]))
