"""WAN VAEs with random weights, and how they encode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytest.importorskip("diffusers", reason="needs the wan extra: pip install 'cudnn-fused[wan]'")

from diffusers import AutoencoderKLWan

from benchmark.e2e import wan22_encode
from cudnn_fused.wan import fuse_encoder
from cudnn_fused.wan.fp32_convolutions import Fp32Convolutions

SMALL = {"dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [False, True], "scale_factor_spatial": 8}
"""What makes the production architecture small: 160 and 320 channels, a 2-D and a 3-D downsampling."""


@pytest.fixture(scope="session")
def run_model() -> ModuleType:
    """The end-to-end program of the WAN 2.2 encoder."""
    return wan22_encode


def randomize(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Biases and gammas of a size that a lost one would be seen by."""
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
    return vae


@pytest.fixture(scope="session")
def production_vae(run_model: ModuleType) -> AutoencoderKLWan:
    """The production encoder: all channels. Not to be changed."""
    return randomize(run_model.load_vae(None, seed=1))


@pytest.fixture(scope="session")
def _small_vae(run_model: ModuleType) -> AutoencoderKLWan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_model, "PRODUCTION", {**run_model.PRODUCTION, **SMALL})
        return randomize(run_model.load_vae(None, seed=0))


@pytest.fixture
def small_vae(_small_vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """A VAE of 160 and 320 channels that reduces 8 times, for a test to change."""
    return copy.deepcopy(_small_vae)


@pytest.fixture
def fused_vae(small_vae: AutoencoderKLWan) -> AutoencoderKLWan:
    return fuse_encoder(small_vae)


def random_video(frames: int, height: int, width: int, samples: int = 1) -> torch.Tensor:
    return (torch.rand(samples, 3, frames, height, width) * 2 - 1).bfloat16()


def moments(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    return vae.encode(video).latent_dist.parameters


def eager_moments(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """What Diffusers computes in BF16."""
    with Fp32Convolutions():
        return moments(vae, video)


def relative_l2(result: torch.Tensor, other: torch.Tensor) -> float:
    return ((result.double() - other.double()).norm() / other.double().norm()).item()


def unused_decoder(vae: AutoencoderKLWan) -> torch.nn.Module:
    """A decoder as the configuration says, without which a checkpoint would not be whole."""
    return AutoencoderKLWan.from_config(vae.config).decoder.to(torch.bfloat16)


Mutate = Callable[[AutoencoderKLWan], object]
