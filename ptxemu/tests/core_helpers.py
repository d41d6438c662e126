"""Small handwritten PTX kernels for the tests of the emulator's core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxemu import Report, launch

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGISTERS = """
    .reg .pred %p<40>;
    .reg .b16 %rs<40>;
    .reg .b32 %r<400>;
    .reg .b64 %rd<100>;
"""
DYNAMIC_SHARED = 1024  # offset of `smem` in the window: the first KiB belongs to the system


def kernel(body: str, parameters: Sequence[str] = (".u64 out",), target: str = "sm_100a", extra: str = "") -> str:
    """PTX text of a kernel `k`; registers %p, %rs, %r and %rd are declared."""
    declared = ",\n".join(f"    .param {parameter}" for parameter in parameters)
    return (
        f"{HEADER.format(target=target)}{extra}.visible .entry k(\n{declared}\n)\n{{{REGISTERS}{body}\n    ret;\n}}\n"
    )


# %r1 = thread, %rd1 = out + 4 * thread
PER_THREAD = """
    ld.param.b64 %rd0, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd0, %rd2;
"""

# Lane 0 of warp 0 continues at ONE, all others at REST.
ELECT = """
    mov.u32 %r1, %tid.x;
    setp.ne.b32 %p1, %r1, 0;
"""


def run(
    ptx: str,
    args: Sequence[Any],
    *,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 4096,
    **options: Any,
) -> Report:
    """Launches `k` in one dimension."""
    return launch(ptx, "k", (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), shared, args, **options)


def per_thread(
    body: str, *, block: int = 32, target: str = "sm_100a", extra_args: Sequence[Any] = (), **options: Any
) -> np.ndarray:
    """Runs a body that leaves a result in %r0; the results by thread. Extra arguments are u32 parameters a0, a1..."""
    out = np.full(block, 0xABABABAB, np.uint32)
    parameters = [".u64 out", *(f".u32 a{number}" for number in range(len(extra_args)))]
    text = kernel(PER_THREAD + body + "\n    st.global.b32 [%rd1], %r0;", parameters, target)
    run(text, [out, *extra_args], block=block, **options)
    return out


def bf16_bits(values: Any) -> np.ndarray:
    """The BF16 bits of values that BF16 holds exactly."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
