"""The GPU architectures that kernels are written for, and which of them a device is."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass

import torch
from packaging.version import InvalidVersion, Version

OLDEST_DSL = Version("4.8.1")
DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_MODULE = "cutlass.cute"


@dataclass(frozen=True)
class Target:
    """A GPU architecture: ``archs`` maps the compute capabilities it serves to the name the compiler knows each by."""

    name: str
    archs: tuple[tuple[tuple[int, int], str], ...]

    def serves(self, capability: tuple[int, int]) -> bool:
        return any(capability == served for served, _ in self.archs)

    def arch(self, capability: tuple[int, int]) -> str:
        """The compiler's name for a device of ``capability``, such as ``sm_90a``."""
        return dict(self.archs)[capability]


SM90 = Target("SM90", (((9, 0), "sm_90a"),))
SM100 = Target("SM100", (((10, 0), "sm_100a"), ((10, 3), "sm_103a")))
TARGETS = (SM90, SM100)


def target_of(capability: tuple[int, int]) -> Target | None:
    """The target that serves a compute capability, if any."""
    return next((target for target in TARGETS if target.serves(capability)), None)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device. Raises RuntimeError if there is no such device."""
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available")
    return torch.cuda.get_device_capability(device)


def installed_dsl() -> str | None:
    """The version of the installed CuTe DSL, or None."""
    try:
        return importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def why_not_importable(module: str) -> str | None:
    """None if a module can be imported, or the error."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation fails in many ways
        return f"{type(error).__name__}: {error}"
    return None


def check_dsl() -> None:
    """Raise NotImplementedError unless the CuTe DSL is present, new enough and can be imported."""
    needed = f"GPU kernels need {DSL_PACKAGE} >= {OLDEST_DSL}"
    version = installed_dsl()
    if version is None:
        raise NotImplementedError(f"{needed}, which is not installed")
    if not _new_enough(version):
        raise NotImplementedError(f"{needed}, but {version} is installed")
    fault = why_not_importable(DSL_MODULE)
    if fault is not None:
        raise NotImplementedError(f"{needed}; {version} is installed but cannot be imported: {fault}")


def _new_enough(version: str) -> bool:
    """Whether a version is at least the oldest, as PEP 440 orders them: pre-releases come before their release."""
    try:
        return Version(version) >= OLDEST_DSL
    except InvalidVersion:
        return False
