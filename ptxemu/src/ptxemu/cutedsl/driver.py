"""The driver calls that the host code of a compiled CuTe-DSL launcher makes, answered without a device.

Every call ends in a method of `Driver`. What a launch needs (grid, block, cluster, shared bytes, raw parameters, tensor
maps) arrives as the host code made it, and the launch runs in the emulator before the call returns.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch

from ptxemu.cutedsl.encoded_map import decode_tensor_map
from ptxemu.errors import LaunchError
from ptxemu.isa.parser import parse
from ptxemu.launch import launch
from ptxemu.models.tensor_map import TensorMap

MAX_SHARED_BYTES = 232448  # 227 KB, what a CTA of SM90, SM100 and SM103 may ask for
TENSOR_MAP_BYTES = 128
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
    memory: tuple[torch.Tensor, ...] = ()  # that launches may access beyond their arguments
    launches: list[KernelLaunch] = field(default_factory=list)

    @property
    def reports(self) -> list[Any]:
        """The report of each launch, in order."""
        return [launch.report for launch in self.launches]


class Driver:
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
        """TVM-FFI wants an error of its own when a function fails; `running` raises the real one instead."""
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
        """Leaves the map's number in the 128 opaque bytes, to be found again among a launch's arguments."""
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
                memory=(*self.memory, *emulation.memory),
                **emulation.options,
            )


_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

# symbol -> (method of Driver, argument types). A null pointer arrives as None and is passed on as 0.
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

active: list[Driver] = []  # the driver of the call in progress; calls may nest


def _callback(method: str, argument_types: tuple[Any, ...]) -> Any:
    """A C function that calls `method` of the driver in use and answers with a cudaError_t."""

    def call(*arguments: Any) -> int:
        if not active:  # a destructor of an engine, at the end of the process
            return _Status.SUCCESS
        driver = active[-1]
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
def callbacks() -> dict[str, Any]:
    """The C functions by symbol. They live as long as the process, as do destructors that the engines registered."""
    return {symbol: _callback(method, types) for symbol, (method, types) in _DRIVER_CALLS.items()}


def _read(address: int, element: Any, count: int) -> tuple[int, ...]:
    return tuple((element * count).from_address(address)) if count else ()


@lru_cache(maxsize=64)
def _parameter_sizes(ptx: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.size for p in kernel.parameters) for name, kernel in parse(ptx).kernels.items()}
