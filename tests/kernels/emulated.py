"""Running a case on kernels in the emulator.

`python -m tests.kernels.emulated NAME` runs one of :data:`PROBES` and says whether it agrees with the reference: so the
mutation tests run a changed copy of the package.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.select import FixedTiling, Tiling
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm90 import TILES as SM90_TILES
from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling, TileConfig
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.kernels.sm90 import sm90 as sm90_backend
from cudnn_fused.kernels.sm100 import sm100 as sm100_backend
from cudnn_fused.testing.agreement import against_reference
from cudnn_fused.testing.cases import Case, Skip, make_problem
from ptxemu import Emulation, EmulatorError, emulate
from tests.gpu.harness import Prepared, prepare

CPU = torch.device("cpu")
MULTIPROCESSORS = 2  # one pair of CTAs, which takes all tiles in turn
EARLY, LATE, NEWEST, RANDOM = SCHEDULES = ("early", "late", "newest", "random")
TALL, TALL_128, WIDE = SM90_TILES


@dataclass(frozen=True)
class OneTile(Sm100Tiling):
    """One of the tiles that can serve a convolution, the first or, with ``turn``, another one."""

    turn: int = 0

    def preferred(self, spec: Conv3dSpec, legal: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
        return (legal[self.turn % len(legal)],)


def sm100(*, shared_taps: bool = True, turn: int = 0, multiprocessors: int = MULTIPROCESSORS) -> GpuBackend:
    return sm100_backend(
        DeviceSpec("sm_100a", multiprocessors), OneTile(Sm100Tiling.loading(shared_taps=shared_taps).tiles, turn)
    )


def sm90(multiprocessors: int = MULTIPROCESSORS, tiling: Tiling | None = None) -> GpuBackend:
    return sm90_backend(DeviceSpec("sm_90a", multiprocessors), tiling or Sm90Tiling())


def fixed(base: Tiling, tile: object, split: int, clusters: int = 1) -> FixedTiling:
    """That tile and split, whatever would be chosen."""
    return FixedTiling((tile,), base, split, clusters)


@dataclass(frozen=True)
class Probe:
    """A case on kernels that shows a fault."""

    case: Case
    kernels: GpuBackend
    schedule: str = EARLY


def tall(split: int) -> GpuBackend:
    """Hopper kernels of the first tile, on one cluster of ``split`` CTAs."""
    return sm90(split, fixed(Sm90Tiling(), TALL, split))


SQUARE = (160, 160)
SMALLEST = {"turn": -1, "multiprocessors": 8}  # the smallest tile on more pairs of CTAs than there are tiles
# Few cases that between them use every part of the convolutions and of their epilogue.
PROBES = {
    "raw": Probe(Case("conv3d_raw", 1, 1, 3, 5, SQUARE), sm100()),
    "padded": Probe(Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, SQUARE, skip=Skip.BIASED, history=2), sm100()),
    "history": Probe(Case("conv3d_rmsnorm_silu_pad", 1, 1, 3, 5, SQUARE, history=1), sm100()),
    "zeros": Probe(Case("conv3d_raw", 1, 2, 1, 3, SQUARE, leading_zero_frames=1), sm100()),
    "corner": Probe(Case("conv3d_bias_residual_pad", 1, 1, 3, 5, SQUARE, skip=Skip.PLAIN), sm100()),
    "causal": Probe(Case("causal_conv3d_with_cache", 1, 1, 3, 5, (12, 160), history=1), sm100()),
    "tiles": Probe(Case("conv3d_raw", 1, 3, 2, 129, SQUARE), sm100()),
    "split": Probe(Case("conv3d_raw", 1, 1, 3, 5, SQUARE), sm100(**SMALLEST)),
    "split-tiles": Probe(Case("conv3d_raw", 1, 1, 3, 5, (320, 320)), sm100(**SMALLEST)),
    "sm90-raw": Probe(Case("conv3d_raw", 1, 1, 3, 5, SQUARE), tall(1), LATE),
    "sm90-full": Probe(Case("conv3d_raw", 1, 1, 2, 120, SQUARE), tall(1), LATE),
    "sm90-tiles": Probe(Case("conv3d_raw", 1, 2, 2, 129, SQUARE), tall(1), LATE),
    "sm90-split": Probe(Case("conv3d_raw", 1, 2, 3, 29, SQUARE), tall(4), LATE),
}


def run(
    kernels: GpuBackend,
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
    with emulate():
        program = kernels.compile(problem)
    workspace = torch.full((program.workspace_bytes,), 0xFF, dtype=torch.uint8)  # NaN
    memory = [tensor for tensor in (*tensors, workspace) if tensor is not None]
    with emulate(memory=memory, schedule=schedule, seed=schedule_seed, tensor_fences=True) as emulation:
        zeros.fill_(torch.nan)
        program(tensors, workspace, 0)
        zeros.zero_()
    return prepared, emulation


def check(kernels: GpuBackend, case: Case, **options: object) -> Emulation:
    """Execute a case on integers; its results must be those of the reference bit for bit, and nothing else written."""
    prepared, emulation = run(kernels, case, **options)  # type: ignore[arg-type]
    prepared.assert_right()
    prepared.assert_guards()
    return emulation


def main(name: str) -> int:
    probe = PROBES[name]
    try:
        prepared, _ = run(probe.kernels, probe.case, schedule=probe.schedule)
    except EmulatorError as error:
        print(f"fault: {error}")
        return 1
    faults = against_reference(probe.case, prepared.operands, {n: t.clone() for n, t in prepared.initial.items()})
    faults += [f"{name}: written beside it" for name in prepared.guards.broken()]
    print("\n".join(faults) or "agrees")
    return bool(faults)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1]))
