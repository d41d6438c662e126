"""Chunks, batches, grids, and tensors too large for 32-bit offsets."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_fused import causal_conv3d_with_cache, reference
from cudnn_fused.kernels.epilogue.steps import RmsNorm, Silu
from cudnn_fused.testing.cases import Case, Operands, Skip, Values, make_inputs, make_outputs, make_plan, sample_of
from tests.cases import assert_same_bits
from tests.gpu.harness import TYPICAL, call

GIB = 1 << 30


# --- chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[9], [1, 4, 4], [1, 1, 1, 2, 4], [3, 1, 5]], ids=str)
def test_causal_chunks(device: torch.device, chunks: list[int]) -> None:
    """However a clip is cut, the outputs are the same, and the cache is the last raw frames."""
    whole = Case("causal_conv3d_with_cache", 2, 9, 7, 5, (12, 160))
    operands = make_inputs(whole, device, integers=True)
    clip, packed = operands["input"], operands["packed_weight"]
    expected = call(whole, operands)["output"]
    outputs, history, seen = [], None, 0
    for frames in chunks:
        chunk = clip[:, :, seen : seen + frames]  # a strided view
        output, history = causal_conv3d_with_cache(chunk, packed, previous=history)
        seen += frames
        outputs.append(output)
        assert_same_bits(history, clip[:, :, max(seen - 2, 0) : seen].permute(0, 2, 3, 4, 1))
    assert_same_bits(torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("name", ["rmsnorm_silu_pad", "conv3d_rmsnorm_silu_pad"])
def test_padded_chunks(device: torch.device, name: str) -> None:
    """Chunks with ``previous``: leading planes and cache are the last activated frames, whatever the chunk lengths."""
    channels = (160,) if name == "rmsnorm_silu_pad" else (160, 160)
    history, activated = None, []
    for index, frames in enumerate([1, 1, 2, 4]):
        case = Case(name, 2, frames, 4, 3, channels, history=0 if history is None else history.shape[1])
        operands = make_inputs(case, device, integers=True, seed=index)
        if history is not None:
            operands["previous"] = history
        results = call(case, operands)
        inside = results["padded_output"][:, :, 1:-1, 1:-1]
        activated.append(inside[:, 2:])
        together = torch.cat(activated, dim=1)
        assert_same_bits(results["cache_output"], together[:, -2:])
        before = min(2, together.shape[1] - frames)
        assert_same_bits(inside[:, 2 - before :], together[:, together.shape[1] - frames - before :])
        assert not inside[:, : 2 - before].any()
        history = results["cache_output"]


# --- batches and grids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [Case("conv3d_raw", 3, 2, 5, 7, (320, 640)), *(case.at(3, 2, 5, 7) for case in TYPICAL.values())],
    ids=lambda case: f"{case.variant}-{case.channels[-1]}",
)
def test_samples_do_not_meet(device: torch.device, case: Case) -> None:
    """Each sample of a batch is what it is alone."""
    operands = make_inputs(case, device, integers=True)
    batch = call(case, operands)
    for index in range(case.n):
        one, alone = sample_of(case, operands, index)
        for name, tensor in call(one, alone).items():
            assert_same_bits(batch[name][index : index + 1], tensor)


@pytest.mark.gpu
def test_many_frames_of_a_norm(gpu: torch.device) -> None:
    """66000 frames of one pixel: more than a grid axis may have blocks."""
    case = Case("rmsnorm_silu_pad", 1, 66000, 1, 1, (160,))
    operands = make_inputs(case, gpu, integers=True)
    activated = Silu().reference(RmsNorm().reference(operands["input"], operands), operands)
    results = call(case, operands)
    inside = results["padded_output"][:, 2:, 1:-1, 1:-1]
    one = case.at(1, 1, 1, 1)
    for frame in (0, 1, 65534, 65535, 65536, 65999):
        alone = call(one, {**operands, "input": operands["input"][:, frame : frame + 1]})
        assert_same_bits(inside[:, frame : frame + 1], alone["padded_output"][:, 2:, 1:-1, 1:-1])
    assert (inside.float() - activated.float()).abs().max() <= 2**-8 * activated.abs().max()
    border = results["padded_output"].clone()
    border[:, 2:, 1:-1, 1:-1] = 0
    assert not border.any()


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [66000])
def test_many_samples_of_a_convolution(gpu: torch.device, samples: int) -> None:
    """With one output pixel, a sample is one row of a matrix product."""
    case = Case("conv3d_raw", samples, 1, 1, 1, (160, 160))
    operands = make_inputs(case, gpu, integers=True)
    rows = operands["input"].float().view(samples, -1)
    columns = operands["packed_weight"][..., :160].float().reshape(160, -1)
    with reference.full_precision(gpu):
        expected = (rows.double() @ columns.T.double()).to(torch.bfloat16)
    assert_same_bits(call(case, operands)["output"].view(samples, 160), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("extents", [(1, 1, 1, 70000), (1, 1, 70000, 1)], ids=str)
@pytest.mark.parametrize("name", ["conv3d_raw", "conv3d_rmsnorm_silu_pad", "causal_conv3d_with_cache"])
def test_long_planes(gpu: torch.device, name: str, extents: tuple[int, int, int, int]) -> None:
    """A plane of 1x70000 pixels equals its two halves, which overlap by what a window needs."""
    case = Case(name, *extents, (12, 160) if name == "causal_conv3d_with_cache" else (160, 160))
    operands = make_inputs(case, gpu, integers=True)
    axis = 3 if extents[3] > 1 else 2
    from_end, length = 1000, 1200
    whole = call(case, operands)
    output = whole.get("output", whole.get("padded_output"))
    # The last ``length`` pixels alone: all but those at its own left end are the same.
    input_axis = axis + (1 if name == "causal_conv3d_with_cache" else 0)
    inputs = operands["input"]
    part = inputs.narrow(input_axis, inputs.shape[input_axis] - length - case.halo, length + case.halo).contiguous()
    small = tuple(length if index == axis else extent for index, extent in enumerate(extents))
    tail = call(case.at(*small), {**operands, "input": part})
    alone = tail.get("output", tail.get("padded_output"))
    assert output is not None
    assert alone is not None
    ends = [tensor.narrow(axis, tensor.shape[axis] - from_end, from_end) for tensor in (output, alone)]
    assert_same_bits(*ends)


# --- offsets past 32 bits ------------------------------------------------------------------------------------------


def large(case: Case, gpu: torch.device) -> Operands:
    """Inputs, if there is memory for them, all else and a second copy of an output."""
    needed = 2 * case.bytes + 2 * GIB
    free = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free")
    return make_inputs(case, gpu, integers=True)


LARGE = [
    Case("conv3d_raw", 32, 4, 320, 240, (160, 160)),
    Case("conv3d_rmsnorm_silu_pad", 32, 4, 320, 240, (160, 160), skip=Skip.PLAIN, history=1),
    Case("conv3d_bias_residual_pad", 32, 4, 320, 240, (160, 160), skip=Skip.PLAIN),
    Case("rmsnorm_silu_pad", 32, 4, 320, 240, (160,), skip=Skip.PLAIN, history=2),
    Case("causal_conv3d_with_cache", 36, 4, 240, 416, (12, 160), history=1),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.variant)
def test_offsets_past_32_bits(gpu: torch.device, case: Case) -> None:
    """The first and the last samples of a batch with a tensor of over 2^31 elements are what they are alone."""
    sizes = {
        operand.name: math.prod(operand.shape.evaluate(case.extents))
        for operand in case.operation.operands
        if operand.name in case.present
    }
    assert max(sizes.values()) > 2**31
    assert sizes.get("padded_input", 0) < 2**31  # the causal scratch stays below while the output passes it
    inputs = large(case, gpu)
    operands = {**inputs, **make_outputs(case, gpu)}
    make_plan(case, operands).execute(**operands)  # type: ignore[attr-defined]
    for index in (0, 1, case.n // 2, case.n - 1):
        one, alone = sample_of(case, inputs, index)
        for name, tensor in call(one, alone).items():
            assert_same_bits(operands[name][index : index + 1], tensor)


@pytest.mark.gpu
@pytest.mark.slow
def test_strides_past_32_bits(gpu: torch.device) -> None:
    """A causal chunk that is a view into a very long clip."""
    frames, height, width = 4, 8, 8
    stride = (1 << 31) // 11 + 64  # from one frame of a channel to the next: channel 11 begins past 2^31 elements
    if torch.cuda.mem_get_info(gpu)[0] < 14 * stride * 2:
        pytest.skip("needs more GPU memory")
    storage = torch.empty(12 * stride + frames * height * width, dtype=torch.bfloat16, device=gpu)
    clip = storage.as_strided((1, 12, frames, height, width), (0, stride, height * width, width, 1))
    case = Case("causal_conv3d_with_cache", 1, frames, height, width, (12, 160))
    operands = make_inputs(case, gpu, integers=True)
    clip.copy_(operands["input"])
    for name, tensor in call(case, operands).items():
        assert_same_bits(call(case, {**operands, "input": clip})[name], tensor)


def test_values_reproduce(device: torch.device) -> None:
    """The same seed gives the same operands, another one others."""
    first, again, other = (Values(device, integers=True, seed=seed).between((4, 5), 9) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
