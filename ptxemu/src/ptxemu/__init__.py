"""A CPU emulator of sm_90a and sm_100a PTX.

    from ptxemu import TensorMap, launch

    report = launch(ptx, "my_kernel", grid=(2, 1, 1), block=(192, 1, 1), cluster=(2, 1, 1), shared_bytes=100_000,
                    args=[tensor_map, out, 4, 1.5])
    print(report.counts)

Tensors are NumPy arrays or CPU torch tensors and are changed in place. A fault of the kernel raises an
`EmulatorError` that names the kernel, the CTA, the warp, the PTX line and, where the PTX carries it, the source line.

`emulate` runs compiled CuTe-DSL functions with CPU tensors. It and what belongs to it need the extra `cutedsl`
and are loaded on first use; everything else needs NumPy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptxemu.errors import (
    BarrierMisuse,
    Deadlock,
    DescriptorError,
    DivergenceError,
    EmulatorError,
    KernelTrap,
    LaunchError,
    Location,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    RaceError,
    TensorMemoryMisuse,
    UninitializedRead,
    UnsupportedInstruction,
)
from ptxemu.launch import Report, launch, unsupported_instructions
from ptxemu.machine.async_queue import Order, Schedule
from ptxemu.models.tensor_map import DataType, Fill, Im2colWindow, Swizzle, TensorMap

if TYPE_CHECKING:
    from ptxemu.cutedsl.host import Emulation, KernelLaunch, cross_compile, emulate, targeting

__all__ = [
    "BarrierMisuse",
    "DataType",
    "Deadlock",
    "DescriptorError",
    "DivergenceError",
    "Emulation",
    "EmulatorError",
    "Fill",
    "Im2colWindow",
    "KernelLaunch",
    "KernelTrap",
    "LaunchError",
    "Location",
    "Misaligned",
    "Order",
    "OutOfBounds",
    "PtxSyntaxError",
    "RaceError",
    "Report",
    "Schedule",
    "Swizzle",
    "TensorMap",
    "TensorMemoryMisuse",
    "UninitializedRead",
    "UnsupportedInstruction",
    "cross_compile",
    "emulate",
    "launch",
    "targeting",
    "unsupported_instructions",
]


_HOST_NAMES = {"Emulation", "KernelLaunch", "cross_compile", "emulate", "targeting"}


def __getattr__(name: str) -> Any:
    """Loads the host side, which imports torch and the DSL, when one of its names is first asked for."""
    if name not in _HOST_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ptxemu.cutedsl import host

    return getattr(host, name)
