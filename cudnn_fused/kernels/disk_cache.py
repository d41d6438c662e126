"""Compiled launchers on disk, for later processes and for those that start at the same time.

An entry is the object file that the compiler exports, which holds the host code of a launcher and the machine code of
its kernel, with a checksum behind it: ELF ignores what follows its sections. The file's name is a digest of all that
shapes the code. Nothing depends on an entry: one that is missing, broken or impossible to write means compiling.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import CuTeDSL

import cudnn_fused
from cudnn_fused import user_cache
from cudnn_fused.kernels.compile_cache import COMPILER_LOCK
from cudnn_fused.kernels.source_digest import source_digest

try:
    import fcntl
except ImportError:  # not POSIX: processes that start together each compile
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # of an entry
SUBDIRECTORY = "launchers"
CAPACITY = 1000  # entries, of at most about 100 KB each
FUNCTION = "launcher"  # what an object file calls its function
CHECKSUM_BYTES = hashlib.sha256().digest_size
PATIENCE = 60.0  # seconds for another process to compile the same launcher, which takes it two to five
POLL = 0.05  # seconds

PACKAGE = cudnn_fused.__name__
COMPILER = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi")
COMPILER_VARIABLES = "CUTE_DSL_"
# The compiler's own settings with which a launcher must really be compiled: for its artifacts, or on request.
COMPILER_MUST_RUN = ("disable_file_caching", "no_cache", "keep_tokens")
# Lines of /proc/cpuinfo that say which instructions host code may use, on x86-64 and on AArch64.
PROCESSOR_LINES = {"vendor_id", "cpu family", "model", "flags"} | {"CPU implementer", "CPU part", "Features"}

logger = logging.getLogger(__name__)


def get_or_compile(build: Callable[..., Any], identity: Sequence[Any], compile_it: Callable[[], Any]) -> Any:
    """The launcher that ``compile_it()`` would return, from the disk if it is there.

    ``identity`` is what, with ``build``, tells it from all other launchers of these sources in this environment:
    numbers, strings, enumerations, classes, and tuples and dataclasses of them.
    """
    directory = _directory(build)
    if directory is None:
        return compile_it()
    file = directory / f"{_digest((build, *identity))}.o"
    launcher = _load(file)
    if launcher is None:
        with _turn(file.with_suffix(".lock")):
            launcher = _load(file)  # another process may have had its turn before
            if launcher is None:
                launcher = compile_it()
                _store(file, launcher)
    return launcher


def _directory(build: Callable[..., Any]) -> Path | None:
    """Where entries are, or None if this one has to be compiled."""
    directory = user_cache.directory()
    settings = CuTeDSL._get_dsl().envar
    must_run = any(getattr(settings, name, None) for name in COMPILER_MUST_RUN)
    foreign = build.__module__.partition(".")[0] != PACKAGE  # its sources are not in the digest
    return None if directory is None or must_run or foreign else directory / SUBDIRECTORY


# --- keys ----------------------------------------------------------------------------------------------------------


def _digest(identity: Sequence[Any]) -> str:
    return hashlib.sha256(f"{_environment()}\n{_spelled(tuple(identity))}".encode()).hexdigest()


def _spelled(value: Any) -> str:
    """A value in characters that are the same in every process, and different for different values."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{_spelled(type(value))}.{value.name}"
    if isinstance(value, tuple):
        return f"({','.join(map(_spelled, value))})"
    if dataclasses.is_dataclass(value):
        members = (f"{field.name}={_spelled(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{_spelled(type(value))}({','.join(members)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise TypeError(f"{value!r} cannot be part of the name of a compiled launcher")


SOURCES = source_digest(
    Path(cudnn_fused.__file__).parent
)  # now, because that is what this process runs even if the files change


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """The processor, as far as host code depends on it: the compiler uses every instruction that it finds."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    return " ".join(f"{name.strip()}:{value.strip()}" for name, _, value in lines if name.strip() in PROCESSOR_LINES)


@functools.cache
def _environment() -> str:
    """Everything beside a launcher's identity that its code depends on."""
    return "\n".join(
        [
            f"format {FORMAT}",
            f"sources {SOURCES}",
            *(f"{package} {_version(package)}" for package in COMPILER),
            f"CUDA {cutlass.CUDA_VERSION}",
            f"python {sys.implementation.cache_tag}",
            f"{platform.system()} {platform.machine()} {_processor()}",
            *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(COMPILER_VARIABLES)),
        ]
    )


# --- entries -------------------------------------------------------------------------------------------------------


def _checksum(file: Path, code: bytes) -> bytes:
    """Of an object file under a name: an entry is not valid under another."""
    return hashlib.sha256(file.name.encode() + code).digest()


def _load(file: Path) -> Any:
    """The launcher in a file; None if there is none, or none that works."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if _checksum(file, content[:-CHECKSUM_BYTES]) != content[-CHECKSUM_BYTES:]:
        logger.info("%s is broken", file)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # it is in use
    try:
        return cute.runtime.load_module(str(file), enable_tvm_ffi=True)[FUNCTION]
    except Exception as error:  # the loader's errors are of several types
        logger.info("%s cannot be loaded: %s", file, error)
        return None


def _store(file: Path, launcher: Any) -> None:
    """Keep a launcher, if that is possible."""
    if not os.access(file.parent, os.W_OK):
        return
    try:
        with tempfile.TemporaryDirectory(prefix=f"{PACKAGE}_") as scratch:
            exported = Path(scratch) / file.name
            with COMPILER_LOCK:
                launcher.export_to_c(str(exported), function_name=FUNCTION)
            code = exported.read_bytes()
        user_cache.write(file, code + _checksum(file, code))
        _discard_oldest(file.parent)
    except Exception as error:  # the exporter's errors are of several types, and none is the caller's concern
        logger.info("%s cannot be written: %s", file, error)


def _discard_oldest(directory: Path) -> None:
    """Leave the CAPACITY entries that were used last."""
    with contextlib.suppress(OSError):  # another process may be at it
        entries = sorted(directory.glob("*.o"), key=lambda entry: entry.stat().st_mtime)
        for entry in entries[:-CAPACITY]:
            entry.unlink()


# --- turns ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Enter when no other process is inside. If locking fails or takes too long, enter anyway."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there may be no place for it, or no locks on this file system
            lock.parent.mkdir(parents=True, exist_ok=True)
            if fcntl is not None:
                handle = os.open(lock, os.O_RDWR | os.O_CREAT, user_cache.FILE_MODE)
                stack.callback(os.close, handle)
                if _locked(handle):
                    stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)  # a fork may have copied the handle
                    stack.callback(_remove, lock)
        yield


def _locked(handle: int) -> bool:
    """Lock a file, waiting for those who hold it. False if PATIENCE ends first."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)


def _remove(lock: Path) -> None:
    # Processes that already wait still get this lock, later ones create a new file: both find the entry.
    with contextlib.suppress(OSError):
        lock.unlink()
