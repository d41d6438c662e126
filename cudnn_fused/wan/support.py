"""Which VAEs the fused encoder fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanEncoder3d
from torch import nn

from cudnn_fused.cudnn_names import CHANNELS
from cudnn_fused.operands import Operation
from cudnn_fused.ops.causal_conv3d_with_cache import CAUSAL_CONV3D_WITH_CACHE
from cudnn_fused.ops.conv3d_raw import CONV3D_RAW

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKED = "has hooks or a forward of its own, which the fused encoder would not run"
_OFFLOADING = ("_hf_hook", "_diffusers_hook")  # what Accelerate and Diffusers leave on a module whose weights they move
_PLAIN = (bool, int, float, str, tuple, list, type(None))


def check_vae(vae: object) -> None:
    """Raise unless the fused encoder computes what ``vae.encoder`` does.

    The encoder is compared, module by module, with one that Diffusers builds from the same configuration with residual
    stages and without dropout.

    Raises:
        TypeError: another class, or not BF16.
        ValueError: another architecture, unsupported channels, or hooks that would no longer run.
    """
    if type(vae) is not AutoencoderKLWan:
        raise TypeError(f"fuse_encoder takes a diffusers.AutoencoderKLWan, got {type(vae).__qualname__}")
    if not vae.config.is_residual:
        raise ValueError("fuse_encoder fits WAN 2.2 VAEs, with is_residual=True; this one has is_residual=False")
    expected = _expected_encoder(vae.config)
    for name, module, like in _paired_modules(vae.encoder, expected):
        _check_module(name, module, like)
    _check_channels("encoder.conv_in", vae.encoder.conv_in, CAUSAL_CONV3D_WITH_CACHE)
    for name, module in vae.encoder.named_modules(prefix="encoder"):
        if name.endswith((".conv1", ".conv2")):
            _check_channels(name, module, CONV3D_RAW)


class _Member(NamedTuple):
    """A module where it was found."""

    name: str
    siblings: dict[str, nn.Module | None]  # the parent's modules, by the last part of the name
    module: nn.Module
    kind: type[nn.Module]
    contents: tuple[tuple[str, ...], ...]  # the names of its modules, parameters and buffers
    settings: dict[str, Any]

    def change(self) -> str | None:
        """What has become of the module, as the rest of a sentence about it; None if nothing has."""
        module, state = self.module, vars(self.module)
        if self.siblings.get(self.name.rpartition(".")[2]) is not module:
            return "was replaced"
        if any(marker in state for marker in _OFFLOADING):
            return (
                "was given to an offloading hook, which the fused encoder does not run: offload the VAE as a whole "
                "(pipe.enable_model_cpu_offload()), or call unfuse_encoder(vae) first"
            )
        if _is_hooked(module):
            return _HOOKED
        if type(module) is not self.kind or _contents(module) != self.contents:
            return "was parametrized, or got or lost a parameter or a module"
        if not self.settings.items() <= state.items():
            name = next(name for name, value in self.settings.items() if (name, value) not in state.items())
            return f"had {name}={self.settings[name]!r}, which is now {state.get(name)!r}"
        return None


class Structure:
    """The modules below an encoder as they were when it was fused. Parameters are no part of it."""

    def __init__(self, encoder: nn.Module) -> None:
        self._members = [
            _Member(f"{parent}.{name}", module._modules, child, type(child), _contents(child), _plain_settings(child))
            for parent, module in encoder.named_modules(prefix="encoder")
            for name, child in module.named_children()
        ]

    def check(self) -> None:
        """Raise RuntimeError if the modules may compute something else now: the fused encoder would not."""
        for member in self._members:
            change = member.change()
            if change is not None:
                raise RuntimeError(
                    f"the fused encoder no longer computes what its modules do: {member.name} {change}. "
                    "Undo this, or call unfuse_encoder(vae), and fuse_encoder(vae) again if it still fits"
                )


def _is_hooked(module: nn.Module) -> bool:
    state = vars(module)
    return "forward" in state or any(state[hooks] for hooks in _HOOKS)


def _contents(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    return (
        tuple(module._modules),
        tuple(n for n, p in module._parameters.items() if p is not None),
        tuple(module._buffers),
    )


def _plain_settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "training"}


def _expected_encoder(config: Any) -> WanEncoder3d:
    with torch.device("meta"):
        return WanEncoder3d(
            in_channels=config.in_channels,
            dim=config.base_dim,
            z_dim=config.z_dim * 2,
            dim_mult=config.dim_mult,
            num_res_blocks=config.num_res_blocks,
            attn_scales=config.attn_scales,
            temperal_downsample=config.temperal_downsample,
            is_residual=True,
        )


def _paired_modules(encoder: nn.Module, expected: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    found = dict(encoder.named_modules(prefix="encoder"))
    wanted = dict(expected.named_modules(prefix="encoder"))
    for name in {**wanted, **found}:
        if name not in found or name not in wanted:
            raise ValueError(f"fuse_encoder: {name} is {'missing' if name in wanted else 'not part of a WAN encoder'}")
        yield name, found[name], wanted[name]


def _check_module(name: str, module: nn.Module, like: nn.Module) -> None:
    """Raise unless ``module`` has the class, the settings and the kinds of parameters of ``like``."""
    if type(module) is not type(like):
        raise ValueError(f"fuse_encoder: {name} must be a {type(like).__qualname__}, got {type(module).__qualname__}")
    if _is_hooked(module):
        raise ValueError(f"fuse_encoder: {name} {_HOOKED}")
    for setting, value in _plain_settings(like).items():
        actual = getattr(module, setting, None)
        if type(actual) is not type(value) or actual != value:
            got = "a parameter" if isinstance(actual, nn.Parameter) else repr(actual)
            raise ValueError(f"fuse_encoder: {name}.{setting} must be {value!r}, got {got}")
    parameters = dict(module.named_parameters(recurse=False))
    for parameter, value in like.named_parameters(recurse=False):
        _check_parameter(f"{name}.{parameter}", parameters.pop(parameter, None), value)
    for extra in [*parameters, *dict(module.named_buffers(recurse=False))]:
        raise ValueError(f"fuse_encoder: {name}.{extra} is not part of a WAN encoder")


def _check_parameter(name: str, parameter: nn.Parameter | None, like: nn.Parameter) -> None:
    if parameter is None or parameter.shape != like.shape:
        got = "none" if parameter is None else list(parameter.shape)
        raise ValueError(f"fuse_encoder: {name} must have shape {list(like.shape)}, got {got}")
    if type(parameter) is not nn.Parameter or parameter.dtype is not torch.bfloat16:
        raise TypeError(
            f"fuse_encoder: {name} must be a plain torch.bfloat16 parameter, "
            f"got {type(parameter).__qualname__} of {parameter.dtype}"
        )


def _check_channels(name: str, conv: nn.Conv3d, operation: Operation) -> None:
    channels = (conv.in_channels, conv.out_channels)
    if channels not in CHANNELS[operation.name]:
        supported = ", ".join(f"{inputs}->{outputs}" for inputs, outputs in CHANNELS[operation.name])
        raise ValueError(
            f"fuse_encoder: {name} has channels {channels[0]}->{channels[1]}; {operation.name} supports {supported}"
        )
