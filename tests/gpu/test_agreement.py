"""Every operation, channel pair and option against the reference, on shapes at the edges of tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from cudnn_fused import reference
from cudnn_fused.backends import REFERENCE, select_backend
from cudnn_fused.kernels.lowering import convolve
from cudnn_fused.ops import OPERATIONS
from cudnn_fused.testing.cases import BY_NAME, CHANNELS, Case, Skip, make_inputs, make_outputs, make_plan, run_reference
from cudnn_fused.weights import unpack_conv3d_weight
from cudnn_fused.window import DENSE_3X3X3
from tests.cases import assert_same_bits
from tests.gpu.harness import execute_with_unread_frames, pairwise, prepare, run

ZEROS = HISTORY = (0, 1, 2)
CPU_EXTENTS = ((2, 2, 3, 4),)
# One pixel, rows just short of and past a tile of 128, several planes, more tiles than a GPU has multiprocessors, and
# few tiles with a long reduction.
GPU_EXTENTS = ((1, 1, 1, 1), (2, 3, 1, 127), (1, 2, 2, 129), (3, 2, 13, 29), (2, 4, 96, 130), (1, 1, 30, 52))
ACCURATE_PIXELS = 40  # with fewer, the largest of PyTorch's own errors is a matter of luck


def combinations(all_channels: bool) -> Iterator[Case]:
    """Cases with extents of 1, every pair of settings of an operation in at least one of them."""
    for name, operation in BY_NAME.items():
        settings: dict[str, tuple[object, ...]] = {"channels": CHANNELS[operation.name][: None if all_channels else 1]}
        operands = {operand.name: operand for operand in operation.operands}
        if "residual" in operands:
            settings["skip"] = tuple(Skip) if operands["residual"].optional else (Skip.PLAIN, Skip.BIASED)
        if "previous" in operands:
            settings["history"] = HISTORY
        options = {option.name for option in operation.options}
        if "leading_zero_frames" in options:
            settings["leading_zero_frames"] = ZEROS
        if "history_frames" in options:
            settings["caller_history"] = (False, True)
        if "input_bias" in operands:
            settings["input_bias"] = settings["save_input"] = (False, True)
        for setting in pairwise(**settings):
            yield Case(name, 1, 1, 1, 1, **setting)  # type: ignore[arg-type]


def describe(case: Case) -> str:
    settings = [case.skip.value, f"history{case.history}", f"zeros{case.leading_zero_frames}"]
    flags = [name for name in ("caller_history", "input_bias", "save_input") if getattr(case, name)]
    return "-".join([case.variant, "x".join(map(str, case.channels)), *settings, *flags])


def on_devices(marker: str) -> pytest.MarkDecorator:
    """All combinations on a GPU, and those of the first channels, which do not take long, on the CPU."""
    on_cpu = [pytest.param("cpu", case, id=f"cpu-{describe(case)}") for case in combinations(False)]
    on_gpu = [
        pytest.param("cuda", case, id=f"cuda-{describe(case)}", marks=pytest.mark.gpu) for case in combinations(True)
    ]
    return pytest.mark.parametrize(("device", marker), on_cpu + on_gpu, indirect=["device"])


def extents_on(device: torch.device) -> tuple[tuple[int, int, int, int], ...]:
    return GPU_EXTENTS if device.type == "cuda" else CPU_EXTENTS


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_kernels_run_here(gpu: torch.device, operation: object) -> None:
    """Otherwise the tests below would compare the reference with itself."""
    assert select_backend(operation, None, gpu) is not REFERENCE  # type: ignore[arg-type]


@on_devices("case")
def test_equals_the_reference(device: torch.device, case: Case) -> None:
    """Bit for bit on integers, twice; as accurate as PyTorch on random numbers, and the same bits again."""
    for extents in extents_on(device):
        sized = case.at(*extents)
        integers = prepare(sized, device)
        plan = make_plan(sized, integers.operands)
        for _ in range(2):
            integers.refill()
            execute_with_unread_frames(plan, integers)
            integers.assert_right()
            integers.assert_guards()
        random = prepare(sized, device, integers=False)
        execute_with_unread_frames(plan, random)
        first = random.outputs()
        if sized.n * sized.t * sized.h * sized.w >= ACCURATE_PIXELS:
            random.assert_accurate()
        random.refill()
        execute_with_unread_frames(plan, random)
        for name, tensor in random.outputs().items():
            assert_same_bits(tensor, first[name])
        random.assert_guards()


@pytest.mark.parametrize(
    ("name", "channels"),
    [(name, channels) for name, operation in BY_NAME.items() for channels in CHANNELS[operation.name]],
)
def test_integers_are_exact(device: torch.device, name: str, channels: tuple[int, ...]) -> None:
    """What the comparison bit for bit stands on: FP32 sums of the integer operands do not round.

    On every shape that is compared, since cuDNN chooses its algorithm by the shape.
    """
    skip = Skip.BIASED if "residual" in {operand.name for operand in BY_NAME[name].operands} else Skip.NONE
    for _, _, height, width in GPU_EXTENTS if device.type == "cuda" else ((1, 1, 1, 2),):
        check_exactness(Case(name, 1, 1, height, width, channels, skip=skip), device)


def check_exactness(case: Case, device: torch.device) -> None:
    operands = {**make_inputs(case, device, integers=True), **make_outputs(case, device)}
    run_reference(case, operands)
    if case.flops and case.variant != "causal_conv3d_with_cache":
        weight = unpack_conv3d_weight(operands["packed_weight"], case.channels[0]).double()
        exact = F.conv3d(operands["input"].double().permute(0, 4, 1, 2, 3), weight).permute(0, 2, 3, 4, 1)
        assert exact.abs().max() < 2**24
        with reference.full_precision(device):
            rounded = convolve(operands["input"], weight.to(torch.bfloat16), DENSE_3X3X3)
        assert_same_bits(rounded, exact.float().to(torch.bfloat16))
    if "residual_output" in operands:
        value = operands["residual_output"].double()
        assert (value == value.round()).all()
        assert value.square().sum(-1).max() < 2**24


@pytest.mark.parametrize("extents", [(1, 1, 1, 1), (1, 2, 3, 5)])
def test_frames_said_to_be_zero_count_as_zero(device: torch.device, extents: tuple[int, int, int, int]) -> None:
    """The same result with and without the option."""
    for zeros in (1, 2):
        told = run(Case("conv3d_raw", *extents, (160, 160), leading_zero_frames=zeros), device)
        untold = prepare(Case("conv3d_raw", *extents, (160, 160)), device)
        untold.operands["input"].copy_(told.operands["input"])
        make_plan(untold.case, untold.operands).execute(**untold.operands)  # type: ignore[attr-defined]
        assert_same_bits(told.operands["output"], untold.operands["output"])
