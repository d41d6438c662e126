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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch

from ptxemu.cutedsl.driver import Driver, Emulation, KernelLaunch, active, callbacks
from ptxemu.errors import LaunchError

__all__ = ["Emulation", "KernelLaunch", "cross_compile", "emulate", "targeting"]

CUDA_DEVICE_TYPE = 2  # DLPack's kDLCUDA


class _HostProgram:
    """The host code of one compiled function in an execution engine of its own, linked to the emulated driver."""

    def __init__(self, compiled: Any):
        from cutlass._mlir import execution_engine

        if not compiled.__ptx__:
            raise LaunchError("the function has no PTX; compile it by cross_compile() or inside emulate()")
        if compiled.ir_module is None:
            raise LaunchError("the function was loaded from an object file; its host code cannot be linked again")
        self.driver = Driver(compiled.__ptx__)
        self.engine = execution_engine.ExecutionEngine(compiled.ir_module, opt_level=2, shared_libs=[])
        for symbol, callback in callbacks().items():
            self.engine.raw_register_runtime(symbol, ctypes.cast(callback, ctypes.c_void_p))
        self._trampoline: Any = None

    @contextlib.contextmanager
    def running(self, emulation: Emulation, memory: Sequence[torch.Tensor]) -> Iterator[None]:
        """Connects the driver calls to `emulation`, and raises afterwards what they raised."""
        driver = self.driver
        driver.emulation, driver.memory, driver.tensor_maps, driver.error = emulation, tuple(memory), [], None
        active.append(driver)
        try:
            yield
        except Exception:
            if driver.error is None:
                raise
            raise driver.error from None  # the host code only says that a launch failed
        finally:
            active.pop()
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
    """Compilation without a device: for `arch` (if given), PTX and cubin kept, no engine linked to the real driver."""
    dsl = _dsl()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptxemu_"))
        kept = {"keep_ptx": True, "keep_cubin": True, "dump_dir": directory, "disable_file_caching": True}
        for name, value in kept.items():
            stack.enter_context(mock.patch.object(dsl.envar, name, value))
        if arch is not None:
            stack.enter_context(mock.patch.object(dsl.envar, "arch", arch))
        stack.enter_context(mock.patch.object(type(dsl), "_runtime_can_run_compiled", return_value=False))
        yield


def cross_compile(function: Any, *arguments: Any, arch: str, options: str = "", **keywords: Any) -> Any:
    """`cute.compile(function, *arguments)` for `arch` ("sm_90a", "sm_100a", "sm_103a") on any machine.

    The result is callable inside `emulate` and carries its PTX as `__ptx__` and its machine code as `__cubin__`.
    `arguments` are what `cute.compile` takes: fake tensors, CPU tensors, scalars and a stream.
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
    memory: Sequence[torch.Tensor] = (),
    **options: Any,
) -> Iterator[Emulation]:
    """Inside the block, calls of compiled CuTe-DSL functions run in the emulator instead of on a GPU.

    Args:
        arch: the architecture that `cute.compile` compiles for inside the block, e.g. "sm_100a". None leaves the
            choice to the caller's options.
        execute: False records the launches and does not run them.
        edit_ptx: applied to the PTX before it runs, for tests that break a kernel on purpose.
        memory: tensors that kernels may access beyond those among a call's arguments, for functions that are given
            addresses.
        options: for `launch`: the schedule, its seed, the checks.

    Yields the `Emulation` whose `launches` say what was launched and what the emulator counted. Arguments are CPU
    tensors (contained in tuples and dataclasses, too), scalars and streams; the emulated kernel may access nothing but
    these tensors and those of `memory`. A fault of the kernel is raised, as an `EmulatorError`, by the call that
    launched it.
    """
    from cutlass.cutlass_dsl import cuda_jit_executor

    emulation = Emulation(options, edit_ptx, execute, tuple(memory))
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

    def as_cuda(tensor: torch.Tensor) -> Any:
        return tvm_ffi.from_dlpack(_AsCuda(tensor))

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        program = _program(self)
        tensors = list(_tensors((arguments, keywords)))
        arguments = _replace_tensors(arguments, as_cuda)
        keywords = {name: _replace_tensors(value, as_cuda) for name, value in keywords.items()}
        with program.running(emulation, tensors):
            return program.tvm_ffi_function(self)(*arguments, **keywords)

    for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
        stack.enter_context(mock.patch.object(getattr(provider, name), "__call__", call))
