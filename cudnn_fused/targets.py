"""The GPU architectures that kernels are written for, and which of them a device is."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

import torch

OLDEST_DSL = (4, 8, 1)
DSL_PACKAGE = "nvidia-cutlass-dsl"


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


def check_dsl() -> None:
    """Raise NotImplementedError unless the CuTe DSL is present and new enough."""
    needed = ".".join(map(str, OLDEST_DSL))
    version = installed_dsl()
    if version is None:
        raise NotImplementedError(f"GPU kernels need {DSL_PACKAGE} >= {needed}, which is not installed")
    digits = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if digits is None or tuple(int(part or 0) for part in digits.groups()) < OLDEST_DSL:
        raise NotImplementedError(f"GPU kernels need {DSL_PACKAGE} >= {needed}, but {version} is installed")
