"""The host side of a CuTe-DSL launcher, run for real with CPU tensors.

A compiled launcher is host code that builds tensor maps, fills a launch configuration and calls the driver. Here that
host code runs unchanged, and the driver calls it makes end in this module: grid, block, cluster, shared bytes, raw
parameters and tensor maps are those that a GPU would get. Each launch then runs in the emulator before the call
returns, so that a test reads as it would on a GPU:

    conv = cross_compile(Launcher(), x, weight, out, Int32(1), stream, arch="sm_100a")
    with emulate(schedule="late") as emulation:
        conv(x, weight, out, 1, stream)
    assert torch.equal(out, expected)
    print(emulation.launches[0].report)

Inside `emulate(arch="sm_100a")` every `cute.compile` cross-compiles for that architecture as well, so that code which
compiles for itself (a plan, another library's wrapper) needs no change. TVM-FFI functions work, too: they check their
arguments as always and are given the CPU tensors under the name of a CUDA device.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from .encoded_map import decode_tensor_map
from .errors import LaunchError
from .launch import launch
from .parser import parse
from .tensor_map import TensorMap

MAX_SHARED_BYTES = 232448  # 227 KB, what a CTA of SM90, SM100 and SM103 may ask for
TENSOR_MAP_BYTES = 128
CUDA_DEVICE_TYPE = 2  # DLPack's kDLCUDA
_MAP_MAGIC = b"emul.map"
_MAP_STAND_IN = struct.Struct("<8sQ")  # magic, number of the map


class _LaunchAttribute(IntEnum):
    """cudaLaunchAttributeID, those that change what a launch does."""

    COOPERATIVE = 2
    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _DeviceAttribute(IntEnum):
    """cudaDeviceAttr, those that host code asks for."""

    MULTIPROCESSOR_COUNT = 16
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class _Status(IntEnum):
    """cudaError_t, those that the emulated driver returns."""

    SUCCESS = 0
    LAUNCH_FAILURE = 719


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute: an id, padding to eight bytes, a 64-byte union."""

    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


@dataclass
class KernelLaunch:
    """One launch as the host code asked for it. `report` is what `launch` returned.

    `arguments` holds each parameter's raw bytes, or its tensor map.
    """

    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[bytes | TensorMap, ...]
    cooperative: bool = False
    dependent: bool = False  # launched with programmatic stream serialization
    report: Any = None


@dataclass
class Emulation:
    """What happened inside an `emulate` block: one `KernelLaunch` for each launch, in order."""

    options: dict[str, Any]
    edit_ptx: Callable[[str], str] | None = None
    execute: bool = True
    launches: list[KernelLaunch] = field(default_factory=list)

    @property
    def reports(self) -> list[Any]:
        """The report of each launch, in order."""
        return [launch.report for launch in self.launches]


class _Driver:
    """The driver calls of one compiled module. Errors are kept and raised when the host code has returned."""

    def __init__(self, ptx: str):
        self.ptx = ptx
        self.kernel_names: list[str] = []
        self.libraries: set[int] = set()
        self.memory: tuple[torch.Tensor, ...] = ()
        self.tensor_maps: list[TensorMap] = []
        self.emulation: Emulation | None = None
        self.error: BaseException | None = None

    # Kernel handles are indices into `kernel_names` plus one; null stays invalid.
    def _kernel_name(self, handle: int) -> str:
        return self.kernel_names[handle - 1]

    def library_load_data(self, library: int, *_: int) -> None:
        ctypes.c_uint64.from_address(library).value = 1

    def library_get_kernel(self, kernel: int, _library: int, name: bytes) -> None:
        self.kernel_names.append(name.decode())
        ctypes.c_uint64.from_address(kernel).value = len(self.kernel_names)

    def init_library_once(self, state: int, init: int, load_to_device: int, _set_error: int) -> None:
        if state in self.libraries:
            return
        self.libraries.add(state)
        ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(init)(state)
        ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)(load_to_device)(state, 0)

    def get_device(self, device: int) -> None:
        ctypes.c_int32.from_address(device).value = 0

    def device_get_attribute(self, value: int, attribute: int, _device: int) -> None:
        known = {
            _DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: MAX_SHARED_BYTES,
            _DeviceAttribute.MULTIPROCESSOR_COUNT: 1,
        }
        if attribute not in known:
            raise LaunchError(
                f"the host code asks for device attribute {attribute}, which the emulator has no value for"
            )
        ctypes.c_int32.from_address(value).value = known[attribute]

    def kernel_get_attribute(self, value: int, *_: int) -> None:
        ctypes.c_int32.from_address(value).value = 0  # static shared bytes: the PTX of the DSL declares none

    def max_active_blocks(self, value: int, *_: int) -> None:
        ctypes.c_int32.from_address(value).value = 1

    def assert_success(self, _status: int) -> None:
        """A failed call has left its error in `self.error`."""

    def raise_in_tvm_ffi(self, set_raised: int, _status: int) -> None:
        """TVM-FFI wants an error of its own when a function returns a failure; `running` raises the real one instead."""
        parts = (ctypes.c_char_p * 1)(b"a driver call failed")
        ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)(set_raised)(b"RuntimeError", parts, 1)

    def ignore(self, *_: int) -> None:
        """A call without effect on what is emulated."""

    def encode_tiled(self, out: int, data_type: int, rank: int, base: int, *rest: int) -> None:
        extents, strides, box, element_strides, *flags = rest
        tensor_map = TensorMap.from_tiled(
            data_type,
            rank,
            base,
            _read(extents, ctypes.c_uint64, rank),
            _read(strides, ctypes.c_uint64, rank - 1),
            _read(box, ctypes.c_uint32, rank),
            _read(element_strides, ctypes.c_uint32, rank),
            *flags,
        )
        self._store_map(out, tensor_map)

    def encode_im2col(self, out: int, data_type: int, rank: int, base: int, *rest: int) -> None:
        extents, strides, lower, upper, channels_per_pixel, pixels_per_column, element_strides, *flags = rest
        tensor_map = TensorMap.from_im2col(
            data_type,
            rank,
            base,
            _read(extents, ctypes.c_uint64, rank),
            _read(strides, ctypes.c_uint64, rank - 1),
            _read(lower, ctypes.c_int32, rank - 2),
            _read(upper, ctypes.c_int32, rank - 2),
            channels_per_pixel,
            pixels_per_column,
            _read(element_strides, ctypes.c_uint32, rank),
            *flags,
        )
        self._store_map(out, tensor_map)

    def _store_map(self, out: int, tensor_map: TensorMap) -> None:
        """Leaves the map's number where the host code wants the 128 opaque bytes, to be found again among a launch's arguments."""
        self.tensor_maps.append(tensor_map)
        stand_in = _MAP_STAND_IN.pack(_MAP_MAGIC, len(self.tensor_maps) - 1)
        ctypes.memmove(out, stand_in.ljust(TENSOR_MAP_BYTES, b"\0"), TENSOR_MAP_BYTES)

    def _argument(self, address: int, size: int) -> bytes | TensorMap:
        raw = ctypes.string_at(address, size)
        if size != TENSOR_MAP_BYTES:
            return raw
        if raw.startswith(_MAP_MAGIC):
            return self.tensor_maps[_MAP_STAND_IN.unpack_from(raw)[1]]
        return decode_tensor_map(raw)

    def launch_kernel(self, kernel: int, *rest: int) -> None:
        *dimensions, parameters, shared_bytes, _stream = rest
        self._launch(kernel, tuple(dimensions[:3]), tuple(dimensions[3:]), (1, 1, 1), shared_bytes, parameters, {})

    def launch_kernel_ex(self, config: int, kernel: int, parameters: int) -> None:
        config = _LaunchConfig.from_address(config)
        cluster, flags = (1, 1, 1), {}
        for attribute in config.attributes[: config.attribute_count]:
            if attribute.id == _LaunchAttribute.CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif attribute.id == _LaunchAttribute.COOPERATIVE:
                flags["cooperative"] = bool(attribute.value[0])
            elif attribute.id == _LaunchAttribute.PROGRAMMATIC_STREAM_SERIALIZATION:
                flags["dependent"] = bool(attribute.value[0])
        self._launch(kernel, tuple(config.grid), tuple(config.block), cluster, config.shared_bytes, parameters, flags)

    def _launch(
        self,
        kernel: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        cluster: tuple[int, ...],
        shared_bytes: int,
        parameters: int,
        flags: dict[str, bool],
    ) -> None:
        entry = self._kernel_name(kernel)
        sizes = _parameter_sizes(self.ptx)[entry]
        addresses = _read(parameters, ctypes.c_uint64, len(sizes))
        emulation = self.emulation
        ptx = emulation.edit_ptx(self.ptx) if emulation.edit_ptx else self.ptx
        request = KernelLaunch(
            ptx=ptx,
            entry=entry,
            grid=grid,
            block=block,
            cluster=cluster,
            shared_bytes=shared_bytes,
            arguments=tuple(map(self._argument, addresses, sizes)),
            **flags,
        )
        emulation.launches.append(request)
        if emulation.execute:
            request.report = launch(
                ptx,
                entry,
                grid,
                block,
                cluster,
                shared_bytes,
                request.arguments,
                memory=self.memory,
                **emulation.options,
            )


_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

# symbol -> (method of _Driver, argument types). A null pointer arrives as None and is passed on as 0.
_DRIVER_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "_cudaLaunchKernelEx": ("launch_kernel_ex", (_P, _P, _P)),
    "_cudaLaunchKernel": ("launch_kernel", (_P, _I, _I, _I, _I, _I, _I, _P, _L, _P)),
    "_cuTensorMapEncodeTiled": ("encode_tiled", (_P, _I, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I)),
    "_cuTensorMapEncodeIm2col": ("encode_im2col", (_P, _I, _I, _P, _P, _P, _P, _P, _I, _I, _P, _I, _I, _I, _I)),
    "_cudaLibraryLoadData": ("library_load_data", (_P, _P, _P, _P, _I, _P, _P, _I)),
    "_cudaLibraryGetKernel": ("library_get_kernel", (_P, _P, ctypes.c_char_p)),
    "_cuKernelGetAttribute": ("kernel_get_attribute", (_P, _I, _P, _I)),
    "_cudaDeviceGetAttribute": ("device_get_attribute", (_P, _I, _I)),
    "_cudaGetDevice": ("get_device", (_P,)),
    "_cudaSetDevice": ("ignore", (_I,)),
    "_cudaKernelSetAttributeForDevice": ("ignore", (_P, _I, _I, _I)),
    "_cudaFuncSetAttribute": ("ignore", (_P, _I, _I)),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": ("max_active_blocks", (_P, _P, _I, _L)),
    "cuda_dialect_assert_success": ("assert_success", (_I,)),
    "cuda_dialect_init_library_once": ("init_library_once", (_P, _P, _P, _P)),
    "cuda_dialect_unload_library_once": ("ignore", (_P,)),
    "CuteDSLRT_TVMFFISetRaisedCudaError": ("raise_in_tvm_ffi", (_P, _I)),
}

_active: list[_Driver] = []  # the driver of the call in progress; calls may nest


def _callback(method: str, argument_types: tuple[Any, ...]) -> Any:
    """A C function that calls `method` of the driver in use and answers with a cudaError_t."""

    def call(*arguments: Any) -> int:
        if not _active:  # a destructor of an engine, at the end of the process
            return _Status.SUCCESS
        driver = _active[-1]
        if driver.error is not None and method != "raise_in_tvm_ffi":
            return _Status.LAUNCH_FAILURE
        try:
            getattr(driver, method)(*(0 if argument is None else argument for argument in arguments))
        except BaseException as error:  # an exception cannot cross the C frames of the host code
            driver.error = error
            return _Status.LAUNCH_FAILURE
        return _Status.SUCCESS

    return ctypes.CFUNCTYPE(ctypes.c_int32, *argument_types)(call)


@lru_cache(maxsize=1)
def _callbacks() -> dict[str, Any]:
    """The C functions by symbol. They live as long as the process, as do destructors that the engines registered."""
    return {symbol: _callback(method, types) for symbol, (method, types) in _DRIVER_CALLS.items()}


def _read(address: int, element: Any, count: int) -> tuple[int, ...]:
    return tuple((element * count).from_address(address)) if count else ()


@lru_cache(maxsize=64)
def _parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.size for p in kernel.parameters) for name, kernel in parse(ptx).kernels.items()}


class _HostProgram:
    """The host code of one compiled function in an execution engine of its own, linked to the emulated driver."""

    def __init__(self, compiled: Any):
        from cutlass._mlir import execution_engine

        if not compiled.__ptx__:
            raise LaunchError(
                "the function was compiled without its PTX; compile it by cross_compile() or in emulate()"
            )
        if compiled.ir_module is None:
            raise LaunchError("the function was loaded from an object file; its host code cannot be linked again")
        self.driver = _Driver(compiled.__ptx__)
        self.engine = execution_engine.ExecutionEngine(compiled.ir_module, opt_level=2, shared_libs=[])
        for symbol, callback in _callbacks().items():
            self.engine.raw_register_runtime(symbol, ctypes.cast(callback, ctypes.c_void_p))
        self._trampoline: Any = None

    @contextlib.contextmanager
    def running(self, emulation: Emulation, memory: Sequence[torch.Tensor]) -> Iterator[None]:
        """Connects the driver calls to `emulation`, and raises afterwards what they raised."""
        driver = self.driver
        driver.emulation, driver.memory, driver.tensor_maps, driver.error = emulation, tuple(memory), [], None
        _active.append(driver)
        try:
            yield
        except Exception as error:
            if driver.error is None:
                raise
            raise driver.error from error
        finally:
            _active.pop()
        if driver.error is not None:
            raise driver.error

    def _packed(self, symbol: str) -> Callable[..., None]:
        address = self.engine.raw_lookup(symbol)
        if not address:
            raise LaunchError(f"the compiled host code has no {symbol}, or calls a function that the emulator lacks")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def load_kernels(self) -> None:
        """Runs the module's own initialisation, which names its kernels to the driver. Once; inside `running`."""
        if self.driver.kernel_names:
            return
        library, status, device = ctypes.c_void_p(), ctypes.c_int32(0), ctypes.c_int32(0)
        library_pointer = ctypes.pointer(library)
        self._packed("cuda_init")(_pointers(ctypes.pointer(library_pointer), ctypes.pointer(status)))
        load = self._packed("cuda_load_to_device")
        load(_pointers(ctypes.pointer(library_pointer), ctypes.pointer(device), ctypes.pointer(status)))

    def executor(self, compiled: Any) -> Callable[..., Any]:
        """The callable of a function without TVM-FFI."""
        from cutlass.base_dsl.jit_executor import JitExecutor
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitModule

        function = self.engine.lookup(compiled.function_name)
        function.restype = ctypes.c_int32
        return JitExecutor(CudaDialectJitModule(self.engine, function, compiled.execution_args, []), None, False)

    def tvm_ffi_function(self, compiled: Any) -> Any:
        """The `tvm_ffi.Function` of a function compiled with TVM-FFI.

        The engine only gives out packed wrappers (one array of pointers to the arguments), so a trampoline with
        TVM-FFI's own signature (handle, arguments, count, result) -> status stands in front of it.
        """
        import tvm_ffi

        packed = self._packed("__tvm_ffi_" + compiled.function_name)

        def call(handle: int, arguments: int, count: int, result: int) -> int:
            status = ctypes.c_int32(-1)
            slots = [
                ctypes.c_void_p(handle),
                ctypes.c_void_p(arguments),
                ctypes.c_int32(count),
                ctypes.c_void_p(result),
            ]
            packed(_pointers(*(ctypes.pointer(slot) for slot in slots), ctypes.pointer(status)))
            return status.value

        signature = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self._trampoline = signature(call)
        address = ctypes.cast(self._trampoline, ctypes.c_void_p).value
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self)


def _pointers(*pointers: Any) -> Any:
    return (ctypes.c_void_p * len(pointers))(*(ctypes.cast(pointer, ctypes.c_void_p) for pointer in pointers))


def _program(compiled: Any) -> _HostProgram:
    program = compiled.__dict__.get("_emulated_program")
    if program is None:
        program = compiled.__dict__["_emulated_program"] = _HostProgram(compiled)
    return program


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an argument: itself, or inside tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for member in fields(value):
            yield from _tensors(getattr(value, member.name))


def _replace_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replace_tensors(item, replace) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_replace_tensors(item, replace) for item in value)
    return value


class _AsCuda:
    """A CPU tensor that says in DLPack that it lies on CUDA device 0: TVM-FFI functions refuse any other."""

    _DEVICE_TYPE_OFFSET = 8  # of DLManagedTensor: the data pointer comes first

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE_TYPE, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = get_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + self._DEVICE_TYPE_OFFSET).value = CUDA_DEVICE_TYPE
        return capsule


def _dsl() -> Any:
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl()


@contextlib.contextmanager
def targeting(arch: str | None) -> Iterator[None]:
    """Compilation without a device: for `arch` (if given), PTX kept, no engine linked to the real driver."""
    dsl = _dsl()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="cudnn_fused_ptx_"))
        for name, value in {"keep_ptx": True, "dump_dir": directory, "disable_file_caching": True}.items():
            stack.enter_context(mock.patch.object(dsl.envar, name, value))
        if arch is not None:
            stack.enter_context(mock.patch.object(dsl.envar, "arch", arch))
        stack.enter_context(mock.patch.object(type(dsl), "_runtime_can_run_compiled", lambda *_: False))
        yield


def cross_compile(function: Any, *arguments: Any, arch: str, options: str = "", **keywords: Any) -> Any:
    """`cute.compile(function, *arguments)` for `arch` ("sm_90a", "sm_100a", "sm_103a") on any machine.

    The result is callable inside `emulate` and carries its PTX as `__ptx__`. `arguments` are what `cute.compile` takes:
    fake tensors, CPU tensors, scalars and a stream.
    """
    from cutlass import cute

    with targeting(arch):
        return cute.compile(function, *arguments, options=options, **keywords)


def _call_plain(compiled: Any, emulation: Emulation, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    program = _program(compiled)
    with program.running(emulation, list(_tensors((arguments, keywords)))):
        program.load_kernels()
        return program.executor(compiled)(*arguments, **keywords)


@contextlib.contextmanager
def emulate(
    arch: str | None = None,
    *,
    execute: bool = True,
    edit_ptx: Callable[[str], str] | None = None,
    **options: Any,
) -> Iterator[Emulation]:
    """Inside the block, calls of compiled CuTe-DSL functions run in the emulator instead of on a GPU.

    Args:
        arch: the architecture that `cute.compile` compiles for inside the block, e.g. "sm_100a". None leaves the
            choice to the caller's options.
        execute: False records the launches and does not run them.
        edit_ptx: applied to the PTX before it runs, for tests that break a kernel on purpose.
        options: for `launch`: the schedule, its seed, the checks.

    Yields the `Emulation` whose `launches` say what was launched and what the emulator counted. Arguments are CPU
    tensors (contained in tuples and dataclasses, too), scalars and streams; the emulated kernel may access nothing but
    these tensors. A fault of the kernel is raised by the call that launched it, as an `EmulatorError`.
    """
    from cutlass.cutlass_dsl import cuda_jit_executor

    emulation = Emulation(options, edit_ptx, execute)
    with contextlib.ExitStack() as stack:
        stack.enter_context(targeting(arch))
        stack.enter_context(
            mock.patch.object(
                cuda_jit_executor.CudaDialectJitCompiledFunction,
                "__call__",
                lambda self, *arguments, **keywords: _call_plain(self, emulation, arguments, keywords),
            )
        )
        _patch_tvm_ffi(stack, emulation)
        yield emulation


def _patch_tvm_ffi(stack: contextlib.ExitStack, emulation: Emulation) -> None:
    """Does for TVM-FFI functions what `emulate` does for plain ones, where TVM-FFI is installed."""
    try:
        import tvm_ffi
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:
        return

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        program = _program(self)
        tensors = list(_tensors((arguments, keywords)))
        arguments, keywords = (
            _replace_tensors(arguments, lambda tensor: tvm_ffi.from_dlpack(_AsCuda(tensor))),
            {
                name: _replace_tensors(value, lambda t: tvm_ffi.from_dlpack(_AsCuda(t)))
                for name, value in keywords.items()
            },
        )
        with program.running(emulation, tensors):
            return program.tvm_ffi_function(self)(*arguments, **keywords)

    for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
        stack.enter_context(mock.patch.object(getattr(provider, name), "__call__", call))
