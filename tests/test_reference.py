"""The reference arithmetic against an independent formulation in NumPy, and the properties the contract promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import cudnn_fused
from cudnn_fused.operands import BF16
from cudnn_fused.testing.cases import CHANNELS
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight
from tests.cases import (
    BY_NAME,
    OPERATION_NAMES,
    WRITTEN,
    assert_same_bits,
    call,
    compiled_plan,
    make_operands,
    small_integers,
)

Array = np.ndarray


# --- the contract once more, in NumPy ------------------------------------------------------------------------------


def to_bf16(value: Array) -> Array:
    """FP32 values rounded to BF16, to nearest even, kept as FP32. NaN stays NaN."""
    word = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return np.where(np.isnan(value), np.float32(np.nan), rounded)


def array(tensor: torch.Tensor) -> Array:
    return tensor.float().numpy()


def convolution(input: Array, weight: Array) -> Array:
    """Valid convolution in FP64: NTHWC with OITRS."""
    t, h, w = (extent - 2 for extent in input.shape[1:4])
    total = np.zeros((input.shape[0], t, h, w, weight.shape[0]))
    for dt in range(3):
        for r in range(3):
            for s in range(3):
                tap = input[:, dt : dt + t, r : r + h, s : s + w].astype(np.float64)
                total += tap @ weight[:, :, dt, r, s].T.astype(np.float64)
    return to_bf16(total.astype(np.float32))


def post_operations(
    value: Array,
    gamma: Array,
    bias: Array | None,
    residual: Array | None,
    residual_bias: Array | None,
) -> tuple[Array, Array]:
    """``(activated, value)``; the sum of squares, the exponential and the last division are in FP64."""
    if bias is not None:
        value = to_bf16(value + bias)
    if residual is not None:
        value = to_bf16(value + (residual if residual_bias is None else to_bf16(residual + residual_bias)))
    squares = np.square(value.astype(np.float64)).sum(-1, keepdims=True)
    denominator = np.maximum(np.sqrt(squares.astype(np.float32)), np.float32(1e-12))
    normalized = to_bf16(value / denominator)
    scaled = to_bf16(normalized * np.float32(math.sqrt(value.shape[-1])))
    affine = to_bf16(scaled * gamma).astype(np.float64)
    return to_bf16((affine / (1 + np.exp(-affine))).astype(np.float32)), value


def framed(activated: Array, previous: Array | None) -> Array:
    """The activated frames in their padding."""
    n, t, h, w, c = activated.shape
    padded = np.zeros((n, t + 2, h + 2, w + 2, c), np.float32)
    padded[:, 2:, 1:-1, 1:-1] = activated
    if previous is not None:
        padded[:, 2 - previous.shape[1] : 2, 1:-1, 1:-1] = previous
    return padded


def newest(current: Array, previous: Array | None) -> Array:
    """The last two frames there are."""
    return (current if previous is None else np.concatenate([previous, current], 1))[:, -2:]


def assert_matches(actual: torch.Tensor | None, expected: Array | None, *, exact: bool = True) -> None:
    """Equal; or, after an exponential and on random data, equal but for 1 BF16 ulp in fewer than 1 of 10^4 elements."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    reference = torch.from_numpy(np.ascontiguousarray(expected, np.float32)).to(BF16)
    assert actual.shape == reference.shape
    if exact:
        assert torch.equal(actual, reference)
        return
    apart = (actual.view(torch.int16).int() - reference.view(torch.int16).int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-4


def random_like(tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(tensor.shape) * scale).to(BF16)


# --- operations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", CHANNELS["conv3d_raw"])
def test_convolution_is_exact_on_integers(channels: tuple[int, int]) -> None:
    inputs, outputs = channels
    input, weight = small_integers((2, 4, 4, 5, inputs)), small_integers((outputs, inputs, 3, 3, 3))
    output = cudnn_fused.conv3d_raw(input, pack_conv3d_weight(weight))
    assert_matches(output, convolution(array(input), array(weight)))


def test_convolution_rounds_once() -> None:
    """On random data the result is within half a BF16 ulp of FP64, plus the FP32 error of the sum."""
    input, weight = torch.randn(1, 3, 6, 7, 160).to(BF16), (torch.randn(160, 160, 3, 3, 3) / 65).to(BF16)
    truth = torch.nn.functional.conv3d(input.double().permute(0, 4, 1, 2, 3), weight.double()).permute(0, 2, 3, 4, 1)
    error = (cudnn_fused.conv3d_raw(input, pack_conv3d_weight(weight)).double() - truth).abs()
    ulp = torch.exp2(torch.floor(torch.log2(truth.abs())) - 7)
    assert (error <= ulp / 2 + 1e-5).all()


@pytest.mark.parametrize("channels", CHANNELS["conv3d_rmsnorm_silu"])
@pytest.mark.parametrize("residual", ["none", "residual", "residual and bias"])
def test_convolution_with_norm(channels: tuple[int, int], residual: str) -> None:
    without = {"none": ("residual", "residual_bias", "residual_output"), "residual": ("residual_bias",)}
    operation = BY_NAME["conv3d_rmsnorm_silu"]
    extents = dict(zip(operation.channel_symbols, channels, strict=True))
    operands = make_operands(operation, without=without.get(residual, ()), T=3, H=4, W=5, **extents)
    weight = small_integers((channels[1], channels[0], 3, 3, 3))
    operands["packed_weight"] = pack_conv3d_weight(weight)
    operands["gamma"] = random_like(operands["gamma"])
    given = {name: array(tensor) for name, tensor in operands.items()}
    activated, value = post_operations(
        convolution(given["input"], array(weight)),
        given["gamma"],
        given["bias"],
        given.get("residual"),
        given.get("residual_bias"),
    )
    result = call(operation, operands)
    assert_matches(result.output, activated, exact=False)
    assert_matches(result.residual_output, value if residual != "none" else None)


@pytest.mark.parametrize("channels", [160, 320, 640])
@pytest.mark.parametrize("history", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_standalone_norm(channels: int, history: int, frames: int) -> None:
    operation = BY_NAME["rmsnorm_silu_pad"]
    operands = make_operands(operation, history=history, T=frames, C=channels)
    operands["input"] = small_integers(tuple(operands["input"].shape), -9, 10)  # squares that sum exactly
    operands["gamma"] = random_like(operands["gamma"], 3.0)
    given = {name: array(tensor) for name, tensor in operands.items()}
    activated, value = post_operations(
        *(given.get(name) for name in ("input", "gamma", "input_bias", "residual", "residual_bias"))
    )
    result = compiled_plan(operation, operands).execute(**operands)
    assert_matches(result[0], framed(activated, given.get("previous")), exact=False)
    assert_matches(result[1], newest(activated, given.get("previous")), exact=False)
    assert_matches(result[2], value)


@pytest.mark.parametrize("channels", CHANNELS["conv3d_bias_residual_pad"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_bias_residual_pad(channels: tuple[int, int], with_bias: bool) -> None:
    operation = BY_NAME["conv3d_bias_residual_pad"]
    extents = dict(zip(operation.channel_symbols, channels, strict=True))
    operands = make_operands(operation, optional=with_bias, N=1, T=3, H=4, W=5, **extents)
    weight = small_integers((channels[1], channels[0], 3, 3, 3))
    operands["packed_weight"] = pack_conv3d_weight(weight)
    given = {name: array(tensor) for name, tensor in operands.items()}
    _, value = post_operations(
        convolution(given["input"], array(weight)),
        np.ones(channels[1], np.float32),
        given["bias"],
        given["residual"],
        given.get("residual_bias"),
    )
    expected = np.zeros((*value.shape[:2], value.shape[2] + 1, value.shape[3] + 1, value.shape[4]), np.float32)
    expected[:, :, :-1, :-1] = value
    assert_matches(compiled_plan(operation, operands).execute(**operands), expected)


@pytest.mark.parametrize("history", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_causal_convolution(history: int, frames: int) -> None:
    operation = BY_NAME["causal_conv3d_with_cache"]
    operands = make_operands(operation, history=history, T=frames)
    weight = small_integers((160, 12, 3, 3, 3))
    operands["packed_weight"] = pack_causal_conv3d_weight(weight)
    chunk = array(operands["input"]).transpose(0, 2, 3, 4, 1)
    previous = array(operands["previous"]) if history else None
    output, cache = compiled_plan(operation, operands).execute(**operands)
    assert_matches(output, convolution(framed(chunk, previous), array(weight)))
    assert_matches(cache, newest(chunk, previous))


def test_the_causal_input_may_have_any_strides() -> None:
    operation = BY_NAME["causal_conv3d_with_cache"]
    operands = make_operands(operation, N=2, T=4)
    expected = call(operation, operands)
    chunk = operands["input"]
    views = [
        torch.cat([chunk, chunk], 2)[:, :, :4],
        chunk.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3),
        torch.zeros((*chunk.shape[:4], 2 * chunk.shape[4] + 1), dtype=BF16)[..., 1::2],
    ]
    views[2].copy_(chunk)
    for view in views:
        assert not view.is_contiguous()
        for got, want in zip(call(operation, {**operands, "input": view}), expected, strict=True):
            assert_same_bits(got, want)


# --- padding and history -------------------------------------------------------------------------------------------

SENTINEL = -77.0


@pytest.mark.parametrize("history", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_history_interiors_survive_and_all_else_is_written(history: int, frames: int) -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu_pad"]
    operands = make_operands(operation, optional=False, T=frames + 2)
    operands["cache_output"] = torch.full((2, min(2, frames + history), 3, 4, 160), SENTINEL, dtype=BF16)
    padded, cache = operands["padded_output"], operands["cache_output"]
    interior = padded[:, 2 - history : 2, 1:-1, 1:-1]
    interior.fill_(SENTINEL)
    compiled_plan(operation, operands, history_frames=history).execute(**operands)
    assert (interior == SENTINEL).all()
    outside = padded.clone()
    outside[:, 2 - history : 2, 1:-1, 1:-1] = 0
    outside[:, 2:, 1:-1, 1:-1] = 0
    assert (outside == 0).all()
    current = padded[:, 2:, 1:-1, 1:-1]
    assert not torch.isnan(current).any()
    written = min(2, frames)
    assert_same_bits(cache[:, -written:], current[:, -written:])
    assert (cache[:, : cache.shape[1] - written] == SENTINEL).all()


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("fill_first", [False, True])
def test_previous_is_what_a_caller_would_copy(history: int, frames: int, fill_first: bool) -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu_pad"]
    operands = make_operands(operation, history=history, T=frames + 2)
    ours = call(operation, operands)
    previous = operands.pop("previous")
    samples = {**operands, "cache_output": torch.empty_like(ours.cache_output)}
    plan = compiled_plan(operation, samples, history_frames=history)

    def copy_history() -> None:
        samples["padded_output"][:, 2 - history : 2, 1:-1, 1:-1].copy_(previous)
        older = max(samples["cache_output"].shape[1] - frames, 0)
        if older:
            samples["cache_output"][:, :older].copy_(previous[:, -older:])

    for step in (copy_history, lambda: plan.execute(**samples))[:: 1 if fill_first else -1]:
        step()
    assert_same_bits(ours.padded_output, samples["padded_output"])
    assert_same_bits(ours.cache_output, samples["cache_output"])


CHUNKINGS = [[9], [1, 4, 4], [1, 1, 1, 2, 4], [3, 6]]


def test_causal_chunks_join() -> None:
    video = torch.randn(2, 12, 9, 7, 5).to(BF16)
    packed = pack_causal_conv3d_weight((torch.randn(160, 12, 3, 3, 3) / 18).to(BF16))
    whole = cudnn_fused.causal_conv3d_with_cache(video, packed).output
    for chunking in CHUNKINGS:
        outputs, cache, seen = [], None, 0
        for frames in chunking:
            chunk = video[:, :, seen : seen + frames]
            output, cache = cudnn_fused.causal_conv3d_with_cache(chunk, packed, previous=cache)
            outputs.append(output)
            seen += frames
            assert_same_bits(cache, video[:, :, max(seen - 2, 0) : seen].permute(0, 2, 3, 4, 1))
        assert_same_bits(torch.cat(outputs, 1), whole)


def test_norm_and_convolution_chunks_join() -> None:
    """A norm that feeds a convolution with norm, chunk by chunk, with both caches."""
    video = torch.randn(1, 9, 4, 5, 160).to(BF16)
    gamma, bias = torch.randn(160).to(BF16), torch.randn(160).to(BF16)
    packed = pack_conv3d_weight((torch.randn(160, 160, 3, 3, 3) / 65).to(BF16))

    def run(chunking: Sequence[int]) -> torch.Tensor:
        outputs, seen, caches = [], 0, [None, None]
        for frames in chunking:
            padded, caches[0], _ = cudnn_fused.rmsnorm_silu_pad(
                video[:, seen : seen + frames], gamma, previous=caches[0]
            )
            result = cudnn_fused.conv3d_rmsnorm_silu_pad(padded, packed, bias, gamma, previous=caches[1])
            caches[1] = result.cache_output
            outputs.append(result.padded_output[:, 2:])
            seen += frames
        return torch.cat(outputs, 1)

    whole = run([9])
    for chunking in CHUNKINGS[1:]:
        assert_same_bits(run(chunking), whole)


@pytest.mark.parametrize("operation_name", [name for name in OPERATION_NAMES if name.startswith("conv3d")])
@pytest.mark.parametrize("zeros", [1, 2])
@pytest.mark.parametrize("frames", [3, 5])
def test_leading_zero_frames(operation_name: str, zeros: int, frames: int) -> None:
    """They count as zeros, and are not read."""
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, T=frames)
    operands["input"][:, :zeros] = 0
    expected = call(operation, operands)
    operands["input"][:, :zeros] = torch.nan
    result = call(operation, operands, leading_zero_frames=zeros)
    if isinstance(result, torch.Tensor):
        result, expected = (result,), (expected,)
    for got, want in zip(result, expected, strict=True):
        assert torch.equal(got, want)


# --- rounding points and special values ----------------------------------------------------------------------------


def one_pixel_convolution(conv: float) -> tuple[torch.Tensor, torch.Tensor]:
    """An input and a packed weight whose convolution is ``conv`` before it is rounded, in every channel."""
    input = torch.zeros(1, 3, 3, 3, 160, dtype=BF16)
    weight = torch.zeros(160, 160, 3, 3, 3, dtype=BF16)
    input[0, 1, 1, 1, 0], input[0, 1, 1, 1, 1] = 256, 1
    weight[:, 0, 1, 1, 1], weight[:, 1, 1, 1, 1] = 1, conv - 256
    return input, pack_conv3d_weight(weight)


@pytest.mark.parametrize(("conv", "bias", "residual"), [(257, 1, 0), (256, 1, 1)])
def test_no_rounding_point_is_lost(conv: float, bias: float, residual: float) -> None:
    """BF16 has a spacing of 2 at 256, and ties go to even: each step alone stays at 256, exact sums would reach 258."""
    input, packed = one_pixel_convolution(conv)
    values = [torch.full((160,), float(value), dtype=BF16) for value in (bias, residual)]
    skip = values[1].expand(1, 1, 1, 1, 160).contiguous()
    assert (cudnn_fused.conv3d_raw(input, packed) == 256).all()
    padded = cudnn_fused.conv3d_bias_residual_pad(input, packed, values[0], skip).padded_output
    assert (padded[:, :, 0, 0] == 256).all()
    gamma = torch.ones(160, dtype=BF16)
    assert (cudnn_fused.conv3d_rmsnorm_silu(input, packed, values[0], gamma, skip).residual_output == 256).all()
    assert (cudnn_fused.conv3d_rmsnorm_silu_pad(input, packed, values[0], gamma, 0, skip)[2] == 256).all()
    raw = cudnn_fused.conv3d_raw(input, packed)
    assert (cudnn_fused.rmsnorm_silu_pad(raw, gamma, values[0], residual=skip).residual_output == 256).all()


def test_the_residual_bias_has_its_own_rounding() -> None:
    input, packed = one_pixel_convolution(256)
    ones = torch.ones(160, dtype=BF16)
    skip = torch.full((1, 1, 1, 1, 160), 256.0, dtype=BF16)
    padded = cudnn_fused.conv3d_bias_residual_pad(input, packed, ones, skip, ones).padded_output
    assert (padded[:, :, 0, 0] == 512).all()


def norm_of(value: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(value.numel(), dtype=BF16)
    return cudnn_fused.rmsnorm_silu_pad(value.view(1, 1, 1, 1, -1), ones).padded_output[0, 2, 1, 1]


def test_special_values_propagate() -> None:
    ones = torch.ones(160, dtype=BF16)
    poisoned = ones.clone()
    poisoned[7] = torch.nan
    assert torch.isnan(norm_of(poisoned)).all()
    for infinity in (torch.inf, -torch.inf):
        infinite = ones.clone()
        infinite[7] = infinity
        result = norm_of(infinite)
        assert torch.isnan(result[7])
        assert (torch.cat([result[:7], result[8:]]) == 0).all()
    assert (norm_of(torch.zeros(160, dtype=BF16)) == 0).all()


def test_rows_below_the_smallest_norm() -> None:
    """The denominator is 1e-12 at least, and no epsilon is added to a larger one."""
    tiny = torch.zeros(160, dtype=BF16)
    tiny[0] = 1e-14
    expected, _ = post_operations(array(tiny), np.ones(160, np.float32), None, None, None)
    assert_matches(norm_of(tiny), expected)
    assert norm_of(tiny)[0] != norm_of(tiny * 1e3)[0]


def test_every_bf16_value_through_the_norm() -> None:
    """All finite values, each alone in its row beside a fixed partner, against NumPy."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    every = every[torch.isfinite(every)]
    rows = torch.zeros(every.numel(), 160, dtype=BF16)
    rows[:, 0], rows[:, 1] = every, 1
    gamma = torch.randn(160).to(BF16)
    value = rows.view(1, 1, 1, -1, 160)
    result = cudnn_fused.rmsnorm_silu_pad(value, gamma).padded_output[:, 2:, 1:-1, 1:-1]
    with np.errstate(over="ignore"):
        wide = array(value)
        finite = np.isfinite(np.square(wide).sum(-1, dtype=np.float32))[0, 0, 0]
        expected, _ = post_operations(wide, array(gamma), None, None, None)
    assert finite.sum() > 48000
    assert_matches(result[:, :, :, finite], expected[:, :, :, finite], exact=False)


# --- independence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", [(1, 1), (1, 127), (2, 129), (13, 29)])
def test_planes_and_batches(plane: tuple[int, int]) -> None:
    """Each sample equals its own run, whatever the plane."""
    height, width = plane
    input, weight = torch.randn(3, 3, height + 2, width + 2, 160).to(BF16), torch.randn(160, 160, 3, 3, 3).to(BF16)
    packed = pack_conv3d_weight(weight)
    batch = cudnn_fused.conv3d_raw(input, packed)
    assert batch.shape == (3, 1, height, width, 160)
    for n in range(3):
        assert_same_bits(cudnn_fused.conv3d_raw(input[n : n + 1], packed), batch[n : n + 1])


def test_batch_of_an_uneven_shape() -> None:
    input, packed = torch.randn(3, 4, 7, 9, 320).to(BF16), pack_conv3d_weight(torch.randn(640, 320, 3, 3, 3).to(BF16))
    batch = cudnn_fused.conv3d_raw(input, packed)
    for n in range(3):
        assert_same_bits(cudnn_fused.conv3d_raw(input[n : n + 1], packed), batch[n : n + 1])


@pytest.mark.parametrize(("operation_name", "name"), WRITTEN)
def test_what_memory_held_before_does_not_matter(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, having=name)
    plan = compiled_plan(operation, operands)
    plan.execute(**operands)
    results = {each: operands[each].clone() for each in operation.returns}
    for garbage in (torch.nan, torch.inf, 3e38):
        operands[name].fill_(garbage)
        plan.execute(**operands)
        for other, expected in results.items():
            assert_same_bits(operands[other], expected)
            assert torch.isfinite(operands[other]).all()


def autocast(run: Callable[[], object]) -> object:
    with torch.autocast("cpu", dtype=BF16):
        return run()


def default_dtype(run: Callable[[], object]) -> object:
    torch.set_default_dtype(torch.float64)
    try:
        return run()
    finally:
        torch.set_default_dtype(torch.float32)


def reduced_precision(run: Callable[[], object]) -> object:
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        return run()
    finally:
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
        torch.backends.mkldnn.conv.fp32_precision = "none"


def deterministic(run: Callable[[], object]) -> object:
    """PyTorch then fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("setting", [autocast, default_dtype, reduced_precision, deterministic])
def test_settings_of_pytorch_change_no_bit(operation_name: str, setting: Callable[..., object]) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    operands["input"] = random_like(operands["input"])
    expected, result = call(operation, operands), setting(lambda: call(operation, operands))
    if isinstance(result, torch.Tensor):
        expected, result = (expected,), (result,)
    for got, want in zip(result, expected, strict=True):  # type: ignore[call-overload]
        assert_same_bits(got, want)
