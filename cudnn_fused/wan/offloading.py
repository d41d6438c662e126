"""Offloading hooks of Accelerate and Diffusers on modules whose ``forward`` the fused encoder replaces.

Such hooks stand around a module's ``forward``: they bring its parameters to the GPU before and take them away after.
Here they are called around the use of the parameters instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

_WRAPPERS = ("accelerate.hooks", "diffusers.hooks.hooks")  # the modules whose functions stand around a `forward`
_OFFLOADS = {
    "AlignDevicesHook",
    "CpuOffload",
    "GroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LazyPrefetchGroupOffloadingHook",
}


def hooks(module: nn.Module) -> list[Any]:
    """The hooks of Accelerate and Diffusers around a module, the outermost first."""
    found: list[Any] = []
    registry = getattr(module, "_diffusers_hook", None)
    if registry is not None:
        found += [registry.hooks[name] for name in reversed(registry._hook_order)]
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        found += getattr(hook, "hooks", [hook])
    return found


def only_offloads(module: nn.Module) -> bool:
    """Whether nothing but offloading stands around the ``forward`` of a module's class."""
    forward = vars(module).get("forward")
    while isinstance(forward, partial) and forward.func.__module__ in _WRAPPERS:
        forward = getattr(forward, "__wrapped__", None)
    is_its_own = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return is_its_own and all(type(hook).__name__ in _OFFLOADS for hook in hooks(module))


class Onloading:
    """Brings parameters to where they are used.

    ``hosts`` are, for each module that is touched by offloading, the modules with hooks that it lies in, itself
    included, the outermost first.
    """

    def __init__(self, hosts: Mapping[nn.Module, tuple[nn.Module, ...]]) -> None:
        self._hosts = hosts
        self._active: set[nn.Module] = set()

    def concerns(self, module: nn.Module) -> bool:
        """Whether the parameters of a module may be away."""
        return module in self._hosts

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Within it, the parameters that are offloaded with ``module``, or with what it lies in, are there."""
        entered: list[nn.Module] = []
        try:
            for host in self._hosts.get(module, ()):
                if host not in self._active:
                    self._active.add(host)
                    entered.append(host)
                    for hook in hooks(host):
                        hook.pre_forward(host)
            yield
        finally:
            for host in reversed(entered):
                self._active.remove(host)
                for hook in reversed(hooks(host)):
                    hook.post_forward(host, None)


def hosts_of(root: nn.Module) -> dict[nn.Module, tuple[nn.Module, ...]]:
    """The argument of :class:`Onloading` for the modules in ``root``, whose own hooks run by themselves."""
    hosts: dict[nn.Module, tuple[nn.Module, ...]] = {}

    def visit(module: nn.Module, around: tuple[nn.Module, ...]) -> None:
        for child in module.children():
            path = (*around, child) if hooks(child) else around
            if path:
                hosts[child] = path
            visit(child, path)

    visit(root, ())
    return hosts
