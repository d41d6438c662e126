"""Putting the fused encoder into a Diffusers VAE, and taking it out again."""

from __future__ import annotations

import weakref

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanEncoder3d

from cudnn_fused.wan.encoder import FusedWanEncoder
from cudnn_fused.wan.packing import PackedParameters
from cudnn_fused.wan.support import FittingModules, check_vae, encoder_arguments

CHUNK_FRAMES = 4  # Diffusers encodes one frame and then chunks of four


def fuse_encoder(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Make ``vae.encode`` run on fused operations. In place; a second call changes nothing.

    Weights, ``state_dict()`` and what ``encode`` takes and returns stay as they are. Afterwards ``encode`` is
    inference-only, takes BF16 video of 1 + 4k frames whose height and width are multiples of 16, and refuses anything
    else with TypeError or ValueError, where Diffusers drops frames that do not fill a chunk.

    Args:
        vae: a WAN 2.2 ``AutoencoderKLWan`` in BF16, on any device.

    Returns:
        ``vae``

    Raises:
        TypeError: ``vae`` is of another class, or not in BF16.
        ValueError: its encoder is not one that the operations fit. Nothing was changed, and the message says why.
    """
    if isinstance(getattr(vae, "encoder", None), FusedWanEncoder):
        return vae
    check_vae(vae)
    vae.encoder._packed = PackedParameters()
    vae.encoder._fitting = FittingModules(encoder_arguments(vae))
    vae.encoder.__class__ = FusedWanEncoder
    vae._encode = _Encode(vae)
    return vae


def unfuse_encoder(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Undo :func:`fuse_encoder`, in place. Weights become contiguous. Returns ``vae``.

    Raises ValueError if the encoder has hooks around its ``forward`` that were set up after fusing.
    """
    encoder = vae.encoder
    if isinstance(encoder, FusedWanEncoder):
        if "forward" in vars(encoder):
            raise ValueError("unfuse_encoder: remove the hooks (offloading?) around the encoder's forward first")
        for parameter in encoder.parameters():
            parameter.data = parameter.data.contiguous()
        for name in ("_packed", "_fitting", *FusedWanEncoder.TORCH_PARTS):
            vars(encoder).pop(name, None)
        encoder.__class__ = WanEncoder3d
    vars(vae).pop("_encode", None)
    return vae


class _Encode:
    """``AutoencoderKLWan._encode`` for videos that fit, which leaves no caches behind if it fails.

    It is an attribute of its VAE, which it must not keep alive; unlike a method it survives pickling and copying.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = weakref.ref(vae)

    def __reduce__(self) -> tuple[type[_Encode], tuple[AutoencoderKLWan | None]]:
        return _Encode, (self._vae(),)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        vae = self._vae()
        assert vae is not None  # its method calls this
        if not isinstance(vae.encoder, FusedWanEncoder):
            raise ValueError("vae.encoder was replaced after fusing; call fuse_encoder(vae) or unfuse_encoder(vae)")
        _check_video(vae, x)
        try:
            return AutoencoderKLWan._encode(vae, x)
        finally:
            vae.clear_cache()


def _check_video(vae: AutoencoderKLWan, x: torch.Tensor) -> None:
    patch = vae.config.patch_size or 1
    channels = vae.encoder.conv_in.in_channels // patch**2
    factor = vae.encoder.spatial_factor * patch
    if x.dim() != 5 or x.shape[0] == 0 or x.shape[1] != channels:
        raise ValueError(f"a video must be [N, {channels}, T, H, W], got {list(x.shape)}")
    frames, height, width = x.shape[2:]
    if frames % CHUNK_FRAMES != 1:
        raise ValueError(f"the WAN encoder takes 1 + {CHUNK_FRAMES}k frames (1, 5, 9, ...), got {frames}")
    if height == 0 or width == 0 or height % factor or width % factor:
        raise ValueError(f"height and width of a video must be positive multiples of {factor}, got {height}x{width}")
