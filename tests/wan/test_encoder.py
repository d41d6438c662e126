"""The fused encoder: agreement with Diffusers, caches, weights, refusals."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanEncoder3d, WanRMS_norm
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

import cudnn_fused
from benchmark.agreement import judge
from benchmark.e2e import runner
from cudnn_fused.wan import FusedWanEncoder, fuse_encoder, unfuse_encoder
from cudnn_fused.wan.fp32_convolutions import Fp32Convolutions
from tests.wan.conftest import SMALL, Mutate, eager_moments, moments, random_video, relative_l2, unused_decoder

SAME_ROUNDING = 0.02
"""Relative L2 below which two BF16 encodes differ by rounding alone; a lost bias or frame of history is over 0.1."""


# --- agreement with Diffusers ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_production_encoder_is_as_close_to_fp32_as_diffusers(
    production_vae: AutoencoderKLWan, run_model: ModuleType
) -> None:
    video = random_video(9, 48, 48)  # 3x3 latents: an odd extent at every depth
    eager = eager_moments(production_vae, video)
    fp32 = runner.in_fp32(run_model.task_for(video), copy.deepcopy(production_vae).float(), video)
    fused = moments(fuse_encoder(copy.deepcopy(production_vae)), video)
    assert judge(fused, eager, fp32).holds
    assert relative_l2(fused, eager) < SAME_ROUNDING


@pytest.mark.slow
def test_a_frame_of_240x432(production_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 240, 432)
    fused = moments(fuse_encoder(copy.deepcopy(production_vae)), video)
    assert fused.shape == (1, 96, 1, 15, 27)
    assert relative_l2(fused, eager_moments(production_vae, video)) < SAME_ROUNDING


@pytest.mark.parametrize("frames", [1, 5, 13])
def test_small_encoder_agrees(small_vae: AutoencoderKLWan, frames: int) -> None:
    video = random_video(frames, 24, 40)
    eager = eager_moments(small_vae, video)
    fused = moments(fuse_encoder(small_vae), video)
    assert fused.shape == eager.shape
    assert relative_l2(fused, eager) < SAME_ROUNDING


def test_a_lost_bias_would_be_seen(small_vae: AutoencoderKLWan) -> None:
    """The check of the tolerance above: Diffusers without one bias is further away than any fused result may be."""
    video = random_video(5, 24, 40)
    eager = eager_moments(small_vae, video)
    small_vae.encoder.down_blocks[1].resnets[0].conv_shortcut.bias.zero_()
    assert relative_l2(eager_moments(small_vae, video), eager) > 2 * SAME_ROUNDING


def test_samples_are_independent(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(5, 16, 16, samples=3)
    together = moments(fused_vae, video)
    for sample, result in zip(video.split(1), together.split(1), strict=True):
        assert relative_l2(result, moments(fused_vae, sample)) < SAME_ROUNDING


def test_slicing_encodes_one_by_one(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(5, 16, 16, samples=2)
    expected = torch.cat([moments(fused_vae, sample) for sample in video.split(1)])
    fused_vae.enable_slicing()
    assert torch.equal(moments(fused_vae, video), expected)


def test_tiling_is_that_of_diffusers(small_vae: AutoencoderKLWan) -> None:
    video = random_video(5, 48, 64)
    small_vae.enable_tiling(16, 16, 12, 12)
    eager = eager_moments(small_vae, video)
    fused = moments(fuse_encoder(small_vae), video)
    assert fused.shape == eager.shape
    assert relative_l2(fused, eager) < SAME_ROUNDING
    small_vae.use_tiling = False
    assert not torch.equal(moments(small_vae, video), fused)


def test_tiles_that_do_not_fit_are_refused(fused_vae: AutoencoderKLWan) -> None:
    fused_vae.enable_tiling(18, 18, 12, 12)
    with pytest.raises(ValueError, match="multiples of 4"):
        fused_vae.encode(random_video(1, 64, 64))


def test_encode_returns_what_diffusers_returns(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 16, 16)
    output = fused_vae.encode(video)
    assert type(output) is AutoencoderKLOutput
    (distribution,) = fused_vae.encode(video, return_dict=False)
    assert type(distribution) is DiagonalGaussianDistribution
    assert torch.equal(distribution.parameters, output.latent_dist.parameters)
    assert distribution.parameters.is_contiguous()


def test_autocast_changes_nothing(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 16, 16)
    outside = moments(fused_vae, video)
    with torch.autocast("cpu", dtype=torch.float16):
        encoded = fused_vae.encoder(torch.rand(1, 12, 1, 8, 8).bfloat16(), [None] * 32, [0])
        assert encoded.dtype is torch.bfloat16
    assert torch.equal(moments(fused_vae, video), outside)


def test_parts_in_pytorch_compile_without_graph_breaks(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(9, 16, 16)
    before = moments(fused_vae, video)
    torch._dynamo.reset()  # the limit of variants of a function counts those of other tests
    fused_vae.encoder.compile_torch_parts(backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(moments(fused_vae, video), before)


@pytest.mark.slow
def test_parts_in_pytorch_compile_without_options(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(5, 16, 16)
    before = moments(fused_vae, video)
    torch._dynamo.reset()
    fused_vae.encoder.compile_torch_parts()
    assert relative_l2(moments(fused_vae, video), before) < SAME_ROUNDING


def test_known_zero_frames_are_skipped(fused_vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []
    for name in ("conv3d_rmsnorm_silu_pad", "conv3d_bias_residual_pad"):
        operation = getattr(cudnn_fused, name)

        def record(*arguments: object, operation=operation, absent_zero_frames: int, **options: object) -> object:
            skipped.append(absent_zero_frames)
            return operation(*arguments, absent_zero_frames=absent_zero_frames, **options)

        monkeypatch.setattr(cudnn_fused, name, record)
    fused_vae.encode(random_video(9, 16, 16))
    chunk = len(skipped) // 3
    assert chunk > 0
    assert skipped == [2] * chunk + [1] * chunk + [0] * chunk  # no history, then one frame, then two


def test_fp32_convolutions_are_pytorch_bf16_convolutions() -> None:
    inputs, weight, bias = torch.randn(1, 32, 4, 7, 9), torch.randn(24, 32, 3, 3, 3) / 30, torch.randn(24)
    operands = [tensor.bfloat16() for tensor in (inputs, weight, bias)]
    expected = torch.nn.functional.conv3d(*operands)
    with Fp32Convolutions():
        result = torch.nn.functional.conv3d(*operands)
        assert torch.nn.functional.conv3d(inputs, weight).dtype is torch.float32
    assert result.dtype is torch.bfloat16
    ulps = (result.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert ulps.max() <= 1  # where the orders of the sums fall on two sides of a tie
    assert (ulps == 0).float().mean() > 0.99


# --- state between chunks and encodes --------------------------------------------------------------------------------


def test_no_state_after_an_exception(fused_vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = random_video(9, 16, 16), random_video(9, 16, 16)
    expected = moments(fused_vae, second)
    calls = Counter[str]()
    attend = FusedWanEncoder._attend

    def fail_in_the_second_chunk(attention: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
        calls["attend"] += 1
        if calls["attend"] == 2:
            raise KeyboardInterrupt
        return attend(attention, value)

    monkeypatch.setattr(FusedWanEncoder, "_attend", staticmethod(fail_in_the_second_chunk))
    with pytest.raises(KeyboardInterrupt):
        fused_vae.encode(first)
    assert fused_vae._enc_feat_map == [None] * len(fused_vae._enc_feat_map)
    assert torch.equal(moments(fused_vae, second), expected)


def test_encodes_of_two_vaes_interleave(fused_vae: AutoencoderKLWan) -> None:
    other_vae = copy.deepcopy(fused_vae)
    other_vae.encoder.conv_in.weight.mul_(1.5)
    video, other_video = random_video(9, 16, 16), random_video(5, 24, 16)
    expected, other_expected = moments(fused_vae, video), moments(other_vae, other_video)
    in_between: list[torch.Tensor] = []
    hook = fused_vae.encoder.register_forward_hook(lambda *_: in_between.append(moments(other_vae, other_video)))
    interleaved = moments(fused_vae, video)
    hook.remove()
    assert torch.equal(interleaved, expected)
    assert len(in_between) == 3
    assert all(torch.equal(result, other_expected) for result in in_between)


def test_chunks_are_needed(fused_vae: AutoencoderKLWan) -> None:
    with pytest.raises(ValueError, match="feat_cache"):
        fused_vae.encoder(torch.zeros(1, 12, 1, 8, 8, dtype=torch.bfloat16))


# --- weights ---------------------------------------------------------------------------------------------------------


def halve_in_place(vae: AutoencoderKLWan) -> None:
    vae.encoder.down_blocks[0].resnets[0].conv1.weight.mul_(0.5)


def change_gamma_in_place(vae: AutoencoderKLWan) -> None:
    vae.encoder.norm_out.gamma.mul_(-1)


def replace_the_input_weight(vae: AutoencoderKLWan) -> None:
    conv = vae.encoder.conv_in
    conv.weight = torch.nn.Parameter(conv.weight * 2, requires_grad=False)


def give_other_data(vae: AutoencoderKLWan) -> None:
    conv = vae.encoder.mid_block.resnets[1].conv2
    conv.weight.data = conv.weight.data * 3


def load_other_weights(vae: AutoencoderKLWan) -> None:
    vae.load_state_dict({name: tensor * 0.75 for name, tensor in vae.state_dict().items()})


def assign_other_weights(vae: AutoencoderKLWan) -> None:
    vae.load_state_dict({name: tensor * 0.75 for name, tensor in vae.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        halve_in_place,
        change_gamma_in_place,
        replace_the_input_weight,
        give_other_data,
        load_other_weights,
        assign_other_weights,
    ],
)
def test_changed_weights_are_used(small_vae: AutoencoderKLWan, change: Mutate) -> None:
    video = random_video(5, 16, 16)
    fused = fuse_encoder(copy.deepcopy(small_vae))
    before = moments(fused, video)
    change(fused)
    change(small_vae)
    after = moments(fused, video)
    assert not torch.equal(after, before)
    assert torch.equal(after, moments(fuse_encoder(small_vae), video))


def test_checkpoints_stay_those_of_diffusers(fused_vae: AutoencoderKLWan, tmp_path: Path) -> None:
    names = list(fused_vae.state_dict())
    fused_vae.decoder = unused_decoder(fused_vae)
    fused_vae.save_pretrained(tmp_path)
    loaded = AutoencoderKLWan.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    unfuse_encoder(fused_vae)
    assert list(fused_vae.state_dict())[: len(names)] == names
    assert type(loaded.encoder) is WanEncoder3d
    assert loaded.config["_class_name"] == "AutoencoderKLWan"
    for name, tensor in fused_vae.encoder.state_dict().items():
        assert torch.equal(loaded.encoder.state_dict()[name], tensor), name


# --- fusing and undoing it -------------------------------------------------------------------------------------------


def test_fusing_twice_is_fusing_once(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 16, 16)
    before, encoder, encode = moments(fused_vae, video), fused_vae.encoder, fused_vae._encode
    assert fuse_encoder(fused_vae) is fused_vae
    assert fused_vae.encoder is encoder
    assert fused_vae._encode is encode
    assert torch.equal(moments(fused_vae, video), before)


def test_unfusing_restores_diffusers(small_vae: AutoencoderKLWan) -> None:
    video = random_video(5, 16, 16)
    attributes, encoder_attributes = set(vars(small_vae)), set(vars(small_vae.encoder))
    eager = eager_moments(small_vae, video)
    fuse_encoder(small_vae)
    moments(small_vae, video)
    small_vae.encoder.compile_torch_parts()
    assert isinstance(small_vae.encoder, FusedWanEncoder)
    assert unfuse_encoder(unfuse_encoder(small_vae)) is small_vae
    assert type(small_vae.encoder) is WanEncoder3d
    assert set(vars(small_vae)) >= attributes
    assert "_encode" not in vars(small_vae)
    assert set(vars(small_vae.encoder)) == encoder_attributes
    assert torch.equal(eager_moments(small_vae, video), eager)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))])
def test_copies_are_fused_and_independent(fused_vae: AutoencoderKLWan, duplicate: Mutate) -> None:
    video = random_video(1, 16, 16)
    expected = moments(fused_vae, video)
    duplicated = duplicate(fused_vae)
    fused_vae.encoder.conv_in.weight.zero_()
    assert torch.equal(moments(duplicated, video), expected)
    with pytest.raises(ValueError, match="frames"):
        duplicated.encode(random_video(2, 16, 16))


# --- videos that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("video", "error", "message"),
    [
        (torch.zeros(1, 3, 6, 32, 32), ValueError, "6"),
        (torch.zeros(1, 3, 0, 32, 32), ValueError, "frames"),
        (torch.zeros(1, 3, 5, 250, 432), ValueError, "16.*250x432"),
        (torch.zeros(1, 3, 5, 32, 40), ValueError, "16.*32x40"),
        (torch.zeros(1, 3, 5, 0, 32), ValueError, "0x32"),
        (torch.zeros(1, 4, 5, 32, 32), ValueError, r"\[N, 3, T, H, W\]"),
        (torch.zeros(0, 3, 5, 32, 32), ValueError, r"\[N, 3, T, H, W\]"),
        (torch.zeros(3, 5, 32, 32), ValueError, r"\[N, 3, T, H, W\]"),
        (torch.zeros(1, 3, 5, 32, 32, device="meta"), ValueError, "meta"),
    ],
    ids=str,
)
def test_videos_that_do_not_fit(
    production_vae: AutoencoderKLWan,
    monkeypatch: pytest.MonkeyPatch,
    video: torch.Tensor,
    error: type[Exception],
    message: str,
) -> None:
    vae = copy.copy(production_vae)  # its own attributes and the same weights
    vae._modules = {**production_vae._modules, "encoder": copy.copy(production_vae.encoder)}
    fuse_encoder(vae)
    for name in ("causal_conv3d_with_cache", "rmsnorm_silu_pad"):
        monkeypatch.delattr(cudnn_fused, name)  # nothing may run
    with pytest.raises(error, match=message):
        vae.encode(video.bfloat16())


def test_videos_of_another_dtype(fused_vae: AutoencoderKLWan) -> None:
    with pytest.raises(TypeError, match="float32"):
        fused_vae.encode(torch.zeros(1, 3, 1, 16, 16))


def test_gradients_are_refused(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 16, 16)
    expected = moments(fused_vae, video)
    with torch.enable_grad():
        assert torch.equal(moments(fused_vae, video), expected)
        with pytest.raises(RuntimeError, match="inference-only"):
            fused_vae.encode(video.clone().requires_grad_())
        fused_vae.encoder.norm_out.gamma.requires_grad_()
        with pytest.raises(RuntimeError, match="inference-only"):
            fused_vae.encode(video)
    assert torch.equal(moments(fused_vae, video), expected)


# --- VAEs that do not fit --------------------------------------------------------------------------------------------


def first_block(vae: AutoencoderKLWan) -> torch.nn.Module:
    return vae.encoder.down_blocks[0].resnets[0]


class OtherConv(WanCausalConv3d):
    """A subclass whose forward could do anything."""


def in_fp32(vae: AutoencoderKLWan) -> None:
    vae.float()


def with_a_weight_in_fp16(vae: AutoencoderKLWan) -> None:
    first_block(vae).norm2.half()


def with_norm_bias(vae: AutoencoderKLWan) -> None:
    first_block(vae).norm1 = WanRMS_norm(160, images=False, bias=True).bfloat16()


def with_other_padding(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv2._padding = (1, 1, 1, 1, 1, 1)


def with_padding_mode(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.padding_mode = "replicate"


def with_another_activation(vae: AutoencoderKLWan) -> None:
    first_block(vae).nonlinearity = torch.nn.GELU()


def with_dropout(vae: AutoencoderKLWan) -> None:
    first_block(vae).dropout.p = 0.1


def with_a_subclass(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.__class__ = OtherConv


def with_weight_norm(vae: AutoencoderKLWan) -> None:
    torch.nn.utils.parametrizations.weight_norm(first_block(vae).conv1)


def with_a_hook(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.register_forward_hook(lambda *_: None)


def with_another_forward(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.forward = lambda x: x


def without_a_bias(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.bias = None


def with_an_extra_module(vae: AutoencoderKLWan) -> None:
    first_block(vae).adapter = torch.nn.Linear(1, 1)


def without_attention(vae: AutoencoderKLWan) -> None:
    vae.encoder.mid_block.attentions[0] = None


def with_a_buffer(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (in_fp32, TypeError, "float32"),
        (with_a_weight_in_fp16, TypeError, "norm2.gamma.*float16"),
        (with_norm_bias, ValueError, "norm1.bias must be 0.0, got a parameter"),
        (with_other_padding, ValueError, "conv2._padding"),
        (with_padding_mode, ValueError, "conv1.padding_mode must be 'zeros', got 'replicate'"),
        (with_another_activation, ValueError, "nonlinearity must be a SiLU, got GELU"),
        (with_dropout, ValueError, r"dropout.p must be 0.0, got 0.1"),
        (with_a_subclass, ValueError, "conv1 must be a WanCausalConv3d, got OtherConv"),
        (with_weight_norm, ValueError, "conv1"),
        (with_a_hook, ValueError, "conv1 has hooks"),
        (with_another_forward, ValueError, "conv1 has hooks"),
        (without_a_bias, ValueError, "conv1.bias must have shape .160., got none"),
        (with_an_extra_module, ValueError, "adapter is not part"),
        (without_attention, ValueError, "attentions.0 is missing"),
        (with_a_buffer, ValueError, "conv1.scale is not part"),
    ],
)
def test_encoders_that_do_not_fit(
    small_vae: AutoencoderKLWan, change: Mutate, error: type[Exception], message: str
) -> None:
    change(small_vae)
    attributes = dict(vars(small_vae))
    with pytest.raises(error, match=message):
        fuse_encoder(small_vae)
    assert type(small_vae.encoder) is WanEncoder3d
    assert vars(small_vae) == attributes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"is_residual": False}, "is_residual"),
        ({"base_dim": 96}, "12->96.*12->160"),
        ({"in_channels": 3, "patch_size": None}, "3->160.*12->160"),
        ({"dim_mult": [1, 4, 4]}, "160->640.*160->160, 160->320"),
        ({"dropout": 0.1}, "dropout"),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit(run_model: ModuleType, settings: dict[str, object], message: str) -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan(**{**run_model.PRODUCTION, **SMALL, **settings}).bfloat16()
    with pytest.raises(ValueError, match=message):
        fuse_encoder(vae)
    assert type(vae.encoder) is WanEncoder3d


class OtherVae(AutoencoderKLWan):
    """A subclass whose encode could do anything."""


@pytest.mark.parametrize("kind", [torch.nn.Linear, OtherVae, AutoencoderKLQwenImage])
def test_other_models_are_refused(kind: type[torch.nn.Module]) -> None:
    with torch.device("meta"):
        model = kind(2, 2) if kind is torch.nn.Linear else kind()
    with pytest.raises(TypeError, match=kind.__name__):
        fuse_encoder(model)
