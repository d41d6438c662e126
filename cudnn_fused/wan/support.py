"""Which VAEs the fused encoder fits."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanEncoder3d
from torch import nn

from cudnn_fused.cudnn_names import CHANNELS
from cudnn_fused.operands import Operation
from cudnn_fused.ops.causal_conv3d_with_cache import CAUSAL_CONV3D_WITH_CACHE
from cudnn_fused.ops.conv3d_raw import CONV3D_RAW
from cudnn_fused.wan import offloading

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
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
    with _explained("fuse_encoder: {}"):
        _check_class("encoder", vae.encoder, WanEncoder3d)
        _check_hooks("encoder", vae.encoder, offloads=False)
        _check_modules(vae.encoder, encoder_arguments(vae), offloads=False)
        _check_channels("encoder.conv_in", vae.encoder.conv_in, CAUSAL_CONV3D_WITH_CACHE)
        for name, module in vae.encoder.named_modules(prefix="encoder"):
            if name.endswith((".conv1", ".conv2")):
                _check_channels(name, module, CONV3D_RAW)


def encoder_arguments(vae: AutoencoderKLWan) -> dict[str, Any]:
    """What Diffusers constructs the encoder of a VAE with, but for dropout."""
    config = vae.config
    return {
        "in_channels": config.in_channels,
        "dim": config.base_dim,
        "z_dim": config.z_dim * 2,
        "dim_mult": config.dim_mult,
        "num_res_blocks": config.num_res_blocks,
        "attn_scales": config.attn_scales,
        "temperal_downsample": config.temperal_downsample,
        "is_residual": True,
    }


class FittingModules:
    """Whether the submodules of a fused encoder are still such as the encoder computes.

    A module that is as it was when it was last compared costs a look at its attributes; whenever one is not, all are
    compared again with what Diffusers builds. Parameters are not looked at: the operations check what they read.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._children: dict[str, nn.Module | None] = {}  # of the encoder itself; none before a comparison
        self._seen: list[_Seen] = []
        self._hosts: dict[nn.Module, tuple[nn.Module, ...]] = {}

    def __reduce__(self) -> tuple[type[FittingModules], tuple[Mapping[str, Any]]]:
        return FittingModules, (self._arguments,)  # a copy has its own modules

    def check(self, encoder: nn.Module) -> offloading.Onloading:
        """Raise ValueError or TypeError, naming the module, unless all still fit. Returns how to reach their weights.

        Hooks that offload are welcome. Those of the encoder itself are not looked at: they run, whatever they do.
        """
        if not _are_the_same(encoder._modules, self._children) or not all(seen.is_unchanged() for seen in self._seen):
            self._children = {}
            with _explained("{}; the fused WAN encoder fits no more. unfuse_encoder(vae) restores that of Diffusers"):
                _check_modules(encoder, self._arguments, offloads=True)
            self._hosts = offloading.hosts_of(encoder)
            self._seen = [_Seen(module) for module in encoder.modules() if module is not encoder]
            self._children = dict(encoder._modules)
        return offloading.Onloading(self._hosts)


class _Seen:
    """A submodule as it was, without its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._kind = module, type(module)
        self._children, self._attributes = module._modules, vars(module)
        self._had_children, self._had_attributes = dict(self._children), dict(self._attributes)
        self._hooks = [getattr(module, hooks) for hooks in _HOOKS]

    def is_unchanged(self) -> bool:
        return (
            type(self._module) is self._kind
            and not any(self._hooks)
            and _are_the_same(self._children, self._had_children)
            and _are_the_same(self._attributes, self._had_attributes)
        )


def _are_the_same(values: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values.values(), others.values()))


@contextmanager
def _explained(explanation: str) -> Iterator[None]:
    """Put the messages of errors into a sentence."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(explanation.format(error)) from None


def _check_modules(encoder: nn.Module, arguments: Mapping[str, Any], offloads: bool) -> None:
    """Raise unless ``encoder`` consists of the modules that the arguments make; ``offloads``: hooks may offload."""
    with torch.device("meta"):
        expected = WanEncoder3d(**arguments)
    for name, module, like in _paired_modules(encoder, expected):
        if module is not encoder:
            _check_class(name, module, type(like))
            _check_hooks(name, module, offloads)
        _check_settings(name, module, like)


def _paired_modules(encoder: nn.Module, expected: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    found = dict(encoder.named_modules(prefix="encoder"))
    wanted = dict(expected.named_modules(prefix="encoder"))
    for name in {**wanted, **found}:
        if name not in found or name not in wanted:
            raise ValueError(f"{name} is {'missing' if name in wanted else 'not part of a WAN encoder'}")
        yield name, found[name], wanted[name]


def _check_class(name: str, module: nn.Module, expected: type[nn.Module]) -> None:
    if type(module) is not expected:
        raise ValueError(f"{name} must be a {expected.__qualname__}, got {type(module).__qualname__}")


def _check_hooks(name: str, module: nn.Module, offloads: bool) -> None:
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise ValueError(f"{name} has hooks, which the fused encoder would not run")
    if "forward" in vars(module) and not offloads:
        raise ValueError(
            f"{name} has hooks or another forward, which the fused encoder would not run (offloading is set up after "
            "fusing)"
        )
    if not offloading.only_offloads(module):
        raise ValueError(f"{name} has another forward, or hooks that do more than offload, which would not run")


def _check_settings(name: str, module: nn.Module, like: nn.Module) -> None:
    """Raise unless ``module`` has the settings and the kinds of parameters of ``like``."""
    for setting, value in vars(like).items():
        if isinstance(value, _PLAIN) and setting != "training":
            actual = getattr(module, setting, None)
            if type(actual) is not type(value) or actual != value:
                got = "a parameter" if isinstance(actual, nn.Parameter) else repr(actual)
                raise ValueError(f"{name}.{setting} must be {value!r}, got {got}")
    parameters = dict(module.named_parameters(recurse=False))
    for parameter, value in like.named_parameters(recurse=False):
        _check_parameter(f"{name}.{parameter}", parameters.pop(parameter, None), value)
    for extra in [*parameters, *dict(module.named_buffers(recurse=False))]:
        raise ValueError(f"{name}.{extra} is not part of a WAN encoder")


def _check_parameter(name: str, parameter: nn.Parameter | None, like: nn.Parameter) -> None:
    if parameter is None or parameter.shape != like.shape:
        got = "none" if parameter is None else list(parameter.shape)
        raise ValueError(f"{name} must have shape {list(like.shape)}, got {got}")
    if type(parameter) is not nn.Parameter or parameter.dtype is not torch.bfloat16:
        raise TypeError(
            f"{name} must be a plain torch.bfloat16 parameter, got {type(parameter).__qualname__} of {parameter.dtype}"
        )


def _check_channels(name: str, conv: nn.Conv3d, operation: Operation) -> None:
    channels = (conv.in_channels, conv.out_channels)
    if channels not in CHANNELS[operation.name]:
        supported = ", ".join(f"{inputs}->{outputs}" for inputs, outputs in CHANNELS[operation.name])
        raise ValueError(f"{name} has channels {channels[0]}->{channels[1]}; {operation.name} supports {supported}")
