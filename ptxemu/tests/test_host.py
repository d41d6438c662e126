"""The host side of launchers run for real: what reaches the driver, and how faults come back."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import cutlass
import pytest
import torch
from cuda.bindings import driver
from cutlass import BFloat16, Float16, Float32, Int32, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ptxemu import (
    DataType,
    EmulatorError,
    LaunchError,
    OutOfBounds,
    Swizzle,
    TensorMap,
    cross_compile,
    emulate,
)
from ptxemu.cutedsl.encoded_map import decode_tensor_map
from ptxemu.cutedsl.samples import Case, make_case
from ptxemu.errors import DescriptorError

STREAM = driver.CUstream(0)
ROWS = 300


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case("sm100_row_shift", ROWS)


@pytest.fixture(scope="module", params=["", "--enable-tvm-ffi"], ids=["plain", "tvm-ffi"])
def function(request: pytest.FixtureRequest, case: Case) -> Any:
    if request.param:
        pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    return cross_compile(case.launcher, *case.samples(), arch=case.arch, options=request.param)


def test_the_launch_is_that_of_the_host_code(case: Case, function: Any) -> None:
    output = case.output()
    with emulate(execute=False) as emulation:
        function(case.x, case.weight, output, ROWS, STREAM)
    (launch,) = emulation.launches
    assert (launch.grid, launch.block, launch.cluster) == ((2, 1, 1), (192, 1, 1), (2, 1, 1))
    assert launch.shared_bytes > 100_000
    maps, rest = launch.arguments[:3], launch.arguments[3:]
    assert [tensor_map.base for tensor_map in maps] == [t.data_ptr() for t in (case.x, case.weight, output)]
    assert maps[0] == TensorMap(
        case.x.data_ptr(), DataType.BFLOAT16, (128, ROWS), (256,), box=(64, 130), swizzle=Swizzle.B128
    )
    assert rest == (ROWS.to_bytes(4, "little"),)
    assert output.isnan().all()


def test_the_kernel_runs_and_is_counted(case: Case, function: Any) -> None:
    output = case.output()
    with emulate() as emulation:
        function(case.x, case.weight, output, ROWS, STREAM)
    assert torch.equal(output, case.expected)
    tiles, steps = 2, 2 * 3 * 4  # chunks, taps, K16 steps
    assert emulation.reports[0].counts.macs_issued == tiles * steps * 256 * 64 * 16


def test_a_fault_of_the_kernel_is_raised_by_the_call(case: Case, function: Any) -> None:
    def without_commit(ptx: str) -> str:
        return "\n".join(line for line in ptx.splitlines() if "tcgen05.commit" not in line)

    with pytest.raises(EmulatorError, match="no warp can go on"), emulate(edit_ptx=without_commit):
        function(case.x, case.weight, case.output(), ROWS, STREAM)


def test_calls_after_a_fault_are_sound(case: Case, function: Any) -> None:
    output = case.output()
    with pytest.raises(EmulatorError), emulate(edit_ptx=lambda ptx: ptx.replace("mbarrier.init", "mbarrier.unit")):
        function(case.x, case.weight, output, ROWS, STREAM)
    with emulate():
        function(case.x, case.weight, output, ROWS, STREAM)
    assert torch.equal(output, case.expected)


def test_only_the_arguments_may_be_accessed(case: Case, function: Any) -> None:
    """The kernel is told of more rows than its output has."""
    short = case.output()[: ROWS - 100]
    with pytest.raises(OutOfBounds), emulate():
        function(case.x, case.weight, short, ROWS, STREAM)
    assert short.isnan().any()


def test_further_memory_can_be_named(case: Case) -> None:
    function = cross_compile(case.launcher, *case.samples(), arch=case.arch)
    buffer = torch.full((ROWS + 100, 64), torch.nan, dtype=torch.bfloat16)
    with emulate(memory=[buffer]):
        function(case.x, case.weight, buffer[:ROWS], ROWS, STREAM)
    assert torch.equal(buffer[:ROWS], case.expected)
    assert buffer[ROWS:].isnan().all()


def test_compilation_inside_the_block(case: Case) -> None:
    """Code that compiles for itself needs nothing but the block."""
    output = case.output()
    with emulate(case.arch) as emulation:
        cute.compile(case.launcher, *case.samples())(case.x, case.weight, output, ROWS, STREAM)
    assert ".target sm_100a" in emulation.launches[0].ptx
    assert torch.equal(output, case.expected)


def test_sm103a(case: Case) -> None:
    function = cross_compile(case.launcher, *case.samples(), arch="sm_103a")
    output = case.output()
    with emulate(schedule="late", tensor_fences=True):
        function(case.x, case.weight, output, ROWS, STREAM)
    assert torch.equal(output, case.expected)


def test_a_function_without_ptx_is_refused(case: Case) -> None:
    function = cute.compile(case.launcher, *case.samples(), options="--gpu-arch sm_100a")
    with pytest.raises(LaunchError, match="has no PTX"), emulate():
        function(case.x, case.weight, case.output(), ROWS, STREAM)


# --- maps that CuTe's own host code encodes --------------------------------------------------------------------------


@cute.kernel
def _touch(atom: cute.CopyAtom, tensor: cute.Tensor):
    cpasync.prefetch_descriptor(atom)


class EncodedMap:
    """Launches a kernel with the TMA atom of a box."""

    def __init__(self, box: tuple[int, ...], swizzle: tuple[int, int, int] | None):
        self.box, self.swizzle = box, swizzle

    @cute.jit
    def __call__(self, x: cute.Tensor, stream):
        layout = cute.make_ordered_layout(self.box, order=tuple(range(len(self.box))))
        if cutlass.const_expr(self.swizzle is not None):
            layout = cute.make_composed_layout(cute.make_swizzle(*self.swizzle), 0, layout)
        atom, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, self.box)
        _touch(atom, tensor).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


TORCH_TYPES = {
    BFloat16: (torch.bfloat16, DataType.BFLOAT16),
    Float16: (torch.float16, DataType.FLOAT16),
    Float32: (torch.float32, DataType.FLOAT32),
    Uint8: (torch.uint8, DataType.UINT8),
    Int32: (torch.int32, DataType.UINT32),  # what CuTe encodes for it
}


@pytest.mark.parametrize(
    ("dtype", "extents", "strides", "box", "swizzle", "expected_swizzle"),
    [
        (BFloat16, (256, 512), (1, 256), (64, 128), (3, 4, 3), Swizzle.B128),
        (BFloat16, (256, 512), (1, 256), (32, 128), (2, 4, 3), Swizzle.B64),
        (BFloat16, (256, 512), (1, 256), (16, 128), (1, 4, 3), Swizzle.B32),
        (Float16, (256, 512), (1, 256), (64, 128), None, Swizzle.NONE),
        (Float32, (256, 512), (1, 256), (32, 128), (3, 4, 3), Swizzle.B128),
        (Uint8, (256, 512), (1, 256), (64, 128), None, Swizzle.NONE),
        (Int32, (256, 512), (1, 256), (32, 64), None, Swizzle.NONE),
        (BFloat16, (256,), (1,), (64,), None, Swizzle.NONE),
        (BFloat16, (250, 51, 31), (1, 264, 264 * 52), (64, 17, 5), None, Swizzle.NONE),
        (BFloat16, (250, 13, 11, 7), (1, 264, 264 * 14, 264 * 14 * 12), (64, 4, 3, 2), None, Swizzle.NONE),
        (BFloat16, (50, 6, 5, 7, 3), (1, 56, 56 * 6, 56 * 30, 56 * 210), (16, 4, 3, 2, 2), None, Swizzle.NONE),
    ],
    ids=str,
)
def test_maps_encoded_by_cute(
    dtype: Any,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: tuple[int, int, int] | None,
    expected_swizzle: Swizzle,
) -> None:
    torch_type, data_type = TORCH_TYPES[dtype]
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    x = torch.zeros(count, dtype=torch_type).as_strided(extents, strides)
    sample = make_fake_tensor(dtype, extents, stride=strides, assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=False)
    function = cross_compile(EncodedMap(box, swizzle), sample, stream, arch="sm_100a")
    with emulate(execute=False) as emulation:
        function(x, STREAM)
    (tensor_map,) = (value for value in emulation.launches[0].arguments if isinstance(value, TensorMap))
    bytes_per_element = x.element_size()
    assert tensor_map == TensorMap(
        x.data_ptr(),
        data_type,
        extents,
        tuple(stride * bytes_per_element for stride in strides[1:]),
        box=box,
        swizzle=expected_swizzle,
    )


@pytest.mark.parametrize("bit", [64, 67, 75, 79, 83, 13 * 32], ids=lambda bit: f"bit {bit}")
def test_an_unknown_form_of_map_is_refused(bit: int) -> None:
    """Bits that known maps leave constant: a map that uses them is not misread."""
    flags, stride, extents, boxes = 0x246512, 512 // 16, (255, 511), (63 << 24, 127)
    raw = bytearray(
        struct.pack("<15I", 0x1000, 0, flags, stride, 0, 0, 0, 0, *extents, 0, 0, 0, *boxes).ljust(128, b"\0")
    )
    decode_tensor_map(bytes(raw))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DescriptorError, match="known form"):
        decode_tensor_map(bytes(raw))


def test_the_example_in_the_readme_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    exec(compile(example, "README.md", "exec"), {})
