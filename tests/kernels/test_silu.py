"""SiLU of the kernels, on every BF16 number."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.experimental import primitives as prims

from cudnn_fused.kernels.device import GLOBAL
from cudnn_fused.kernels.epilogue import arithmetic
from ptxemu import emulate

THREADS = 128
NUMBERS = 1 << 16


@cute.kernel
def silu_kernel(output: Int64):
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    pair = (2 * index) | ((2 * index + 1) << 16)
    (result,) = arithmetic.map_wide(arithmetic.silu, [pair])
    prims.store_ext(result, cutlass.inttoptr(output + Int64(index) * 4, GLOBAL, Int32))


@cute.jit
def launch_silu(output: Int64, stream):
    """Store SiLU of the BF16 number with bits ``i`` at element ``i``."""
    silu_kernel(output).launch(grid=(NUMBERS // 2 // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream)


def silu_of_all(device: str) -> torch.Tensor:
    output = torch.zeros(NUMBERS, dtype=torch.bfloat16, device=device)
    stream = make_fake_stream(use_tvm_ffi_env_stream=False)
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    if device == "cpu":
        with emulate(memory=[output]):
            cute.compile(launch_silu, Int64(0), stream, options=options)(output.data_ptr(), driver.CUstream(0))
        return output
    cute.compile(launch_silu, Int64(0), stream, options=options)(output.data_ptr(), driver.CUstream(0))
    torch.cuda.synchronize()
    return output.cpu()


def expected() -> torch.Tensor:
    x = torch.arange(NUMBERS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return (x / (1 + torch.exp(-x))).to(torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_silu_of_every_number(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.testing.assert_close(silu_of_all(device), expected(), rtol=0, atol=0, equal_nan=True)
