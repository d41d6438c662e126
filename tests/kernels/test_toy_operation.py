"""What it takes to add an operation: this file. A window, channels and a norm that no shipped operation has.

A convolution with a 1x3x3 window of 48 channels, a bias, and a norm that takes the mean of the row away, into a
contiguous output. It runs on the reference and, in the emulator, on the kernels of both architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from cudnn_fused import reference
from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling
from cudnn_fused.kernels.conv.tile_sm90 import TileConfig as Sm90Tile
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling
from cudnn_fused.kernels.conv.tile_sm100 import TileConfig as Sm100Tile
from cudnn_fused.kernels.epilogue.steps import Bias, Step, to_bf16
from cudnn_fused.kernels.epilogue.stores import Contiguous
from cudnn_fused.kernels.gpu import GpuBackend
from cudnn_fused.kernels.lowering import Computation, Convolution
from cudnn_fused.kernels.sm90 import sm90
from cudnn_fused.kernels.sm100 import sm100
from cudnn_fused.operands import ChannelRule, Operand, Operation, Role, Sample, Shape, validate
from cudnn_fused.problem import Problem
from cudnn_fused.weights import unpack_conv3d_weight
from cudnn_fused.window import Window
from ptxemu import emulate
from tests.cases import assert_same_bits, small_integers

CHANNELS = 48
FRAME = Window(1, 3, 3)


@dataclass(frozen=True)
class MeanFree(Step):
    """``B(x - mean(x))`` over the row, for channels that are a multiple of 16 and values whose sums are exact."""

    sums: ClassVar[int] = 1

    def reference(self, value: torch.Tensor, operands: Any) -> torch.Tensor:
        wide = value.float()
        return to_bf16(wide - wide.sum(dim=-1, keepdim=True) * (1 / value.shape[-1]))

    def statistic(self, fragment: list[Any], math: Any) -> list[Any]:
        low, high = zip(*map(math.unpack, fragment), strict=True)
        return [sum(low[1:], low[0]) + sum(high[1:], high[0])]

    def prepared(self, sums: list[Any], channels: int, math: Any) -> Any:
        return sums[0] * (1 / channels)

    def apply(self, fragment: list[Any], span: Any, mean: Any) -> list[Any]:
        return span.math.map_wide(lambda x: x - mean, fragment)


OUTPUT = Shape(FRAME.shape_rule())
OPERATION = Operation(
    name="toy",
    summary="A 1x3x3 convolution, its bias, and no mean.",
    computation=Computation(Convolution(FRAME), (Bias(), MeanFree()), Contiguous()),
    operands=(
        Operand("input", Shape("N, T, H, W, Ci")),
        Operand("packed_weight", Shape("Co, 1, 3, 3, ceil64(Ci)")),
        Operand("bias", Shape("Co")),
        Operand("output", OUTPUT, Role.OUTPUT),
    ),
    returns=("output",),
    channel_symbols=("Ci", "Co"),
    channels=ChannelRule(multiple=16),
    minimum=1,
)
KERNELS = {
    "sm90": sm90(DeviceSpec("sm_90a", 2), Sm90Tiling((Sm90Tile(2, 1, CHANNELS, a_stages=2, b_stages=8),))),
    # A granule of 32 channels: the block is 64 wide and has a tail.
    "sm100": sm100(DeviceSpec("sm_100a", 2), Sm100Tiling((Sm100Tile(1, 1, 64, a_stages=4, b_stages=9),))),
}


def make_operands(n: int, t: int, h: int, w: int) -> dict[str, torch.Tensor]:
    packed = F.pad(small_integers((CHANNELS, 1, 3, 3, CHANNELS), -1, 2), (0, 64 - CHANNELS))
    return {
        "input": small_integers((n, t, h + 2, w + 2, CHANNELS)),
        "packed_weight": packed,
        "bias": small_integers((CHANNELS,)),
        "output": torch.full((n, t, h, w, CHANNELS), torch.nan, dtype=torch.bfloat16),
    }


def problem_of(operands: dict[str, torch.Tensor]) -> Problem:
    return validate(OPERATION, [Sample.of(operands[operand.name]) for operand in OPERATION.operands], {})


def expected(operands: dict[str, torch.Tensor]) -> torch.Tensor:
    result = {**operands, "output": operands["output"].clone()}
    reference.run(OPERATION, result)
    return result["output"]


def test_the_reference_is_pytorchs_convolution_without_its_mean() -> None:
    operands = make_operands(2, 3, 4, 5)
    weight = operands["packed_weight"][..., :CHANNELS].permute(0, 4, 1, 2, 3).float()
    sums = F.conv3d(operands["input"].permute(0, 4, 1, 2, 3).float(), weight, operands["bias"].float())
    rows = sums.permute(0, 2, 3, 4, 1).to(torch.bfloat16).float()
    assert_same_bits(expected(operands), (rows - rows.mean(dim=-1, keepdim=True)).to(torch.bfloat16))


@pytest.mark.parametrize("extents", [(1, 1, 1, 1), (2, 2, 3, 29), (1, 2, 3, 100)], ids=str)
@pytest.mark.parametrize("arch", KERNELS)
def test_kernels_equal_the_reference(arch: str, extents: tuple[int, int, int, int]) -> None:
    operands, kernels = make_operands(*extents), KERNELS[arch]
    run(kernels, operands)
    assert_same_bits(operands["output"], expected(operands))


def run(kernels: GpuBackend, operands: dict[str, torch.Tensor]) -> None:
    tensors = [operands[operand.name] for operand in OPERATION.operands]
    with emulate():
        program = kernels.compile(problem_of(operands))
    assert program.workspace_bytes == 0
    with emulate(memory=tensors, schedule="late", tensor_fences=True):
        program(tensors, None, 0)


@pytest.mark.parametrize("arch", KERNELS)
def test_what_no_tile_serves_is_said(arch: str) -> None:
    operands = make_operands(1, 1, 1, 1)
    operands["packed_weight"] = small_integers((80, 1, 3, 3, 64))
    operands["bias"], operands["output"] = small_integers((80,)), torch.zeros(1, 1, 1, 1, 80, dtype=torch.bfloat16)
    reason = KERNELS[arch].can_implement(problem_of(operands))
    assert reason is not None
    assert "80 output channels are no multiple of" in reason


def test_weights_unpack_with_any_window() -> None:
    packed = make_operands(1, 1, 1, 1)["packed_weight"]
    assert unpack_conv3d_weight(packed, CHANNELS).shape == (CHANNELS, CHANNELS, 1, 3, 3)
