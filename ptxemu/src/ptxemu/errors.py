"""What the emulator reports. An error names kernel, CTA, warp, PTX line and, if known, source line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """Where an instruction stands: kernel, CTA (linear index in the grid), warp in the CTA, PTX line, source line."""

    kernel: str = ""
    cta: int | None = None
    warp: int | None = None
    ptx_line: int | None = None
    ptx_text: str = ""
    source: str = ""

    def __str__(self) -> str:
        parts = []
        if self.kernel:
            parts.append(f"kernel {shorten(self.kernel)}")
        if self.cta is not None:
            parts.append(f"CTA {self.cta}")
        if self.warp is not None:
            parts.append(f"warp {self.warp}")
        if self.ptx_line is not None:
            parts.append(f"PTX line {self.ptx_line}")
        if self.ptx_text:
            parts.append(f"`{shorten(self.ptx_text)}`")
        if self.source:
            parts.append(f"from {self.source}")
        return ", ".join(parts)


def shorten(text: str, limit: int = 100) -> str:
    """`text` with its middle left out if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


class EmulatorError(Exception):
    """A fault of the kernel (or of the launch) that the emulator found. `location` says where, `reason` says what."""

    def __init__(self, reason: str, location: Location | None = None):
        super().__init__(reason)
        self.reason = reason
        self.location = location

    def __str__(self) -> str:
        return f"{self.reason}\n  at {self.location}" if self.location else self.reason


class PtxSyntaxError(EmulatorError):
    """Text that is not PTX as this parser knows it."""


class LaunchError(EmulatorError):
    """Arguments, grid, block or cluster that do not fit the kernel."""


class UnsupportedInstruction(EmulatorError):
    """An opcode or a modifier that the emulator does not model."""


class OutOfBounds(EmulatorError):
    """An access outside every registered tensor, outside shared memory or outside allocated tensor memory."""


class Misaligned(EmulatorError):
    """An address that its instruction requires to be aligned, and is not."""


class UninitializedRead(EmulatorError):
    """A read of shared, local or tensor memory that nothing wrote."""


class BarrierMisuse(EmulatorError):
    """An mbarrier, named barrier or cluster barrier used against its rules."""


class TensorMemoryMisuse(EmulatorError):
    """Tensor memory allocated, freed or addressed against its rules, or not freed at the end."""


class DescriptorError(EmulatorError):
    """A shared-memory, instruction or tensor-map descriptor that is malformed or contradicts its operation."""


class RaceError(EmulatorError):
    """Two accesses of which one writes, with nothing that orders them (or no proxy fence between them)."""


class DivergenceError(EmulatorError):
    """A warp-wide instruction that not all of its lanes reach."""


class Deadlock(EmulatorError):
    """No warp can go on. The reason lists every warp with its line and what it waits for."""


class KernelTrap(EmulatorError):
    """The kernel executed `trap`."""
