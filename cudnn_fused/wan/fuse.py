"""Putting the fused encoder into a Diffusers VAE, and taking it out again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanEncoder3d

from cudnn_fused.wan.encoder import FusedWanEncoder
from cudnn_fused.wan.packing import LAYOUT, PackedParameters
from cudnn_fused.wan.support import Structure, check_vae

CHUNK_FRAMES = 4  # Diffusers encodes one frame and then chunks of four


def fuse_encoder(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Make ``vae.encode`` run on fused operations. In place; a second call changes nothing.

    The memory of the convolutions' weights is put into the order that the operations read, ``torch.channels_last_3d``,
    so that there are no copies of them. Values, ``state_dict()`` and what ``encode`` takes and returns stay the same.
    Afterwards ``encode`` is inference-only, takes BF16 video of 1 + 4k frames whose height and width are multiples of
    16, and refuses anything else with TypeError or ValueError, where Diffusers drops frames that do not fill a chunk.

    Every encode reads the parameters as they are then, however they were written. It raises RuntimeError if modules of
    the encoder were changed: replaced, given hooks or another ``forward``, parametrized, or offloaded one by one.

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
    encoder = vae.encoder
    encoder._packed = PackedParameters()
    encoder._structure = Structure(encoder)
    encoder._laid_out = _lay_out(encoder)
    encoder.__class__ = FusedWanEncoder
    for name, function in _REPLACED.items():
        setattr(vae, name, _WeakMethod(function, vae))
    return vae


def unfuse_encoder(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Undo :func:`fuse_encoder`, in place. Returns ``vae``."""
    encoder = vae.encoder
    if isinstance(encoder, FusedWanEncoder):
        for name in encoder._laid_out:
            weight = encoder.get_parameter(name)
            weight.data = weight.data.contiguous()
        for name in ("_packed", "_structure", "_laid_out", *FusedWanEncoder.TORCH_PARTS):
            vars(encoder).pop(name, None)
        encoder.__class__ = WanEncoder3d
        for name in _REPLACED:
            vars(vae).pop(name, None)
    return vae


class _WeakMethod:
    """A function bound to an object that does not live longer for it: one that holds it is freed at once.

    Unlike a method of a local class it survives pickling, and a copy of the object gets one of its own.
    """

    def __init__(self, function: Callable[..., Any], owner: object) -> None:
        self._function = function
        self._owner = weakref.ref(owner)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(self._owner(), *arguments, **options)

    def __reduce__(self) -> tuple[type[_WeakMethod], tuple[Callable[..., Any], object]]:
        return _WeakMethod, (self._function, self._owner())


def _lay_out(encoder: WanEncoder3d) -> list[str]:
    """Order the memory of all 3-D convolution weights as the operations read it. Returns those that were not so."""
    changed = []
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == len("OITRS") and not parameter.is_contiguous(memory_format=LAYOUT):
            parameter.data = parameter.data.contiguous(memory_format=LAYOUT)
            changed.append(name)
    return changed


def _encode(vae: AutoencoderKLWan, x: torch.Tensor) -> torch.Tensor:
    """``AutoencoderKLWan._encode`` for videos that fit, which leaves no caches behind if it fails."""
    _check_video(vae, x)
    try:
        with vae.encoder._one_encode():
            return AutoencoderKLWan._encode(vae, x)
    finally:
        vae.clear_cache()


def _refuse_group_offload(vae: AutoencoderKLWan, *_: object, **__: object) -> NoReturn:
    raise ValueError(
        "group offloading moves weights when the modules that hold them are called, and the fused encoder does not "
        "call them: offload the VAE as a whole (pipe.enable_model_cpu_offload()), or call unfuse_encoder(vae) first"
    )


_REPLACED = {"_encode": _encode, "enable_group_offload": _refuse_group_offload}
"""What stands in a fused VAE before the methods of its class."""


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
