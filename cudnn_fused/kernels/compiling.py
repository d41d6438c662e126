"""Compiled launchers, each made once in a process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream

from cudnn_fused.kernels import disk_cache
from cudnn_fused.kernels.compile_cache import COMPILER_LOCK, CompileCache
from cudnn_fused.kernels.occupancy import expected_clusters

LAUNCHERS: CompileCache[Any] = CompileCache()
"""The launchers of this process, by everything that :func:`compiled` takes."""


@dataclass(frozen=True)
class DeviceSpec:
    """Where kernels run: what they are compiled for, and how many multiprocessors share the work.

    ``model`` is the name of the device; it is empty where there is none, that is in the emulator. ``clusters`` is how
    many clusters run at a time, by their size.
    """

    arch: str
    multiprocessors: int
    model: str = ""
    clusters: Mapping[int, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.clusters:
            object.__setattr__(self, "clusters", expected_clusters(self.multiprocessors))


def _compile(arch: str, kernel: type, key: tuple[Any, ...]) -> Any:
    options = f"--enable-tvm-ffi --gpu-arch {arch}"

    def compile_it() -> Any:
        built = kernel(*key)
        stream = make_fake_stream(use_tvm_ffi_env_stream=False)
        with COMPILER_LOCK:
            return cute.compile(built, stream, *built.signature.placeholders(Int64), options=options)

    return disk_cache.get_or_compile(kernel, (key, options), compile_it)


def compiled(arch: str, kernel: type, *key: Any) -> Any:
    """The launcher of ``kernel(*key)``, loaded or compiled by whichever thread needs it first.

    It takes the stream, then the values of the kernel's ``signature``.
    """
    request = (arch, kernel, key)
    return LAUNCHERS.get(request, functools.partial(_compile, *request))
