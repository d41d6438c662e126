"""Launchers on disk: what is kept, under which name, and that no entry and no place can do harm.

The kernel is the smallest one, really compiled and loaded; it is not launched. Threads play processes: they go to the
disk without what threads of a process share. `python -m tests.kernels.test_disk_cache` is a process.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cudnn_fused import user_cache
from cudnn_fused.kernels import compiling, disk_cache
from cudnn_fused.kernels.conv.sm90 import Conv3dSm90
from cudnn_fused.kernels.conv.sm100 import Conv3dSm100
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling
from cudnn_fused.kernels.cross_compile import targeting
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.steps import Bias
from cudnn_fused.kernels.epilogue.stores import Padded
from cudnn_fused.kernels.norm import RowsKernel
from cudnn_fused.kernels.pack import PackC12
from cudnn_fused.window import Window

ARCH = "sm_90a"
PARAMETERS = "Expects 15 parameters"  # what a launcher says when it is called without them
PACKING = (2, "input", "previous", "padded_input", "cache_output")
IDENTITY = ("some", "identity")
PROCESSES = 3
PATIENCE = 240  # seconds for processes that import the compiler
NOBODY = 65534  # a user who owns nothing
ROOT = Path(__file__).parents[2]


def pack() -> Any:
    """The launcher of a small kernel, past the cache of the process."""
    return compiling._compile(ARCH, PackC12, PACKING)


def assert_is_launcher(launcher: Any) -> None:
    with pytest.raises(TypeError, match=PARAMETERS):
        launcher(1)


@functools.cache
def object_code() -> bytes:
    """What the compiler exports for the kernel of :func:`pack`, compiled without the cache."""
    with targeting(ARCH), tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "object.o"
        pack().export_to_c(str(file), function_name=disk_cache.FUNCTION)
        return file.read_bytes()


class Compiler:
    """Stands in for the compiler. Counts what it does; what it returns can be exported."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes, self.count, self.exports = takes, 0, 0

    def __call__(self) -> Compiler:
        self.count += 1
        time.sleep(self.takes)
        return self

    def export_to_c(self, path: str, function_name: str) -> None:
        self.exports += 1
        Path(path).write_bytes(object_code())


def get(compiler: Callable[[], Any], identity: Sequence[Any] = IDENTITY) -> Any:
    return disk_cache.get_or_compile(PackC12, identity, compiler)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries are."""
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / disk_cache.SUBDIRECTORY


@contextlib.contextmanager
def recording_compilations() -> Iterator[list[str]]:
    """The options of every real compilation inside the context."""
    done: list[str] = []
    compile_it = compiling.cute.compile

    def recorded(*arguments: Any, options: str) -> Any:
        done.append(options)
        return compile_it(*arguments, options=options)

    with mock.patch.object(compiling.cute, "compile", recorded):
        yield done


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    with recording_compilations() as done:
        yield done


def entries(cache: Path) -> list[Path]:
    """All files there; nothing but entries may be left."""
    files = sorted(cache.iterdir()) if cache.exists() else []
    assert {file.suffix for file in files} <= {".o"}
    return files


# --- keeping -------------------------------------------------------------------------------------------------------


def test_a_launcher_is_compiled_once(cache: Path, compilations: list[str]) -> None:
    first, second = pack(), pack()
    assert compilations == [f"--enable-tvm-ffi --gpu-arch {ARCH}"]
    assert second is not first
    assert_is_launcher(second)
    assert len(entries(cache)) == 1


def test_an_entry_holds_the_machine_code(cache: Path) -> None:
    pack()
    with targeting(ARCH):
        machine_code = pack().__cubin__
    (entry,) = entries(cache)
    assert machine_code in entry.read_bytes()


@pytest.mark.slow
def test_processes_compile_once(cache: Path) -> None:
    """Several that start on an empty cache, on a broken one, and on a full one."""

    def compiled() -> int:
        command = [sys.executable, "-m", "tests.kernels.test_disk_cache"]
        processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes)
        return sum(map(int, outputs))

    assert compiled() == 1
    (entry,) = entries(cache)
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2])
    assert compiled() == 1
    assert compiled() == 0
    assert entries(cache) == [entry]


def test_who_comes_during_a_compilation_waits(cache: Path) -> None:
    compiler, barrier = Compiler(takes=0.3), threading.Barrier(PROCESSES)

    def start(_: int) -> Any:
        barrier.wait()
        return get(compiler)

    with ThreadPoolExecutor(PROCESSES) as pool:
        launchers = list(pool.map(start, range(PROCESSES)))
    assert compiler.count == 1
    for launcher in launchers:
        if launcher is not compiler:
            assert_is_launcher(launcher)
    assert len(entries(cache)) == 1


def test_different_launchers_do_not_wait_for_each_other() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def compiler(_: int = 0) -> Compiler:
        meeting.wait()
        return Compiler()

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda name: get(compiler, (name,)), "ab"))) == 2


def test_patience_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who holds the lock and does nothing keeps nobody from compiling."""
    monkeypatch.setattr(disk_cache, "PATIENCE", 0.2)
    inside, done = threading.Event(), threading.Event()

    def stuck() -> Compiler:
        inside.set()
        done.wait(timeout=10)
        return Compiler()

    compiler = Compiler()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(get, stuck)
        inside.wait()
        try:
            assert get(compiler) is compiler
        finally:
            done.set()
        other.result()
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("lockless", ["no module", "no locks"])
def test_without_locks_entries_are_kept(lockless: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("No locks available")

    if lockless == "no module":
        monkeypatch.setattr(disk_cache, "fcntl", None)
    else:
        monkeypatch.setattr(disk_cache.fcntl, "flock", no_locks)
    compiler = Compiler()
    get(compiler)
    assert_is_launcher(get(compiler))
    assert compiler.count == 1
    assert len([file for file in cache.iterdir() if file.suffix == ".o"]) == 1


def test_the_oldest_are_discarded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "CAPACITY", 2)
    compiler, names = Compiler(), {}
    for age, name in enumerate("ab"):
        get(compiler, (name,))
        (names[name],) = set(entries(cache)) - set(names.values())
        os.utime(names[name], (age, age))
    get(compiler, "a")  # so that "b" is what nobody has used for longest
    get(compiler, "c")
    assert compiler.count == 3
    assert len(entries(cache)) == 2
    assert names["b"] not in entries(cache)


# --- not keeping ---------------------------------------------------------------------------------------------------


def test_the_variable_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    compiler = Compiler()
    assert get(compiler) is get(compiler) is compiler
    assert compiler.count == 2
    assert not list(tmp_path.rglob("*"))


def test_cross_compiling_compiles(cache: Path, compilations: list[str]) -> None:
    pack()
    with targeting(ARCH):
        launcher = pack()
    assert len(compilations) == 2
    assert launcher.__ptx__
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    ("setting", "value"), [("keep_tokens", frozenset({"sass"})), ("no_cache", True), ("disable_file_caching", True)]
)
def test_the_compiler_can_be_told_to_run(
    setting: str, value: object, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache.CuTeDSL._get_dsl().envar, setting, value)
    compiler = Compiler()
    assert get(compiler) is get(compiler) is compiler
    assert not entries(cache)


def test_kernels_of_others_are_not_kept(cache: Path) -> None:
    class Foreign:
        pass

    compiler = Compiler()
    assert disk_cache.get_or_compile(Foreign, IDENTITY, compiler) is compiler
    assert not entries(cache)


def test_failed_compilations_leave_nothing(cache: Path) -> None:
    def fail() -> None:
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        get(fail)
    assert not entries(cache)


def test_failed_exports_leave_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such function")

    compiler = Compiler()
    monkeypatch.setattr(compiler, "export_to_c", fail)
    assert get(compiler) is compiler
    assert not entries(cache)


def test_a_place_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    compiler = Compiler()
    assert get(compiler) is get(compiler) is compiler
    assert compiler.count == 2
    assert compiler.exports == 0


def test_a_place_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are loaded, and what is not there is compiled."""
    compiler = Compiler()
    get(compiler)
    before = entries(cache)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    for name in ("open", "utime", "unlink", "replace"):  # permissions mean nothing to root
        monkeypatch.setattr(disk_cache.os, name, refuse)
    monkeypatch.setattr(disk_cache.os, "access", lambda *_: False)
    assert_is_launcher(get(compiler))
    assert get(compiler, ("another",)) is get(compiler, ("another",)) is compiler
    assert (compiler.count, compiler.exports) == (3, 1)
    monkeypatch.undo()
    assert entries(cache) == before


@pytest.mark.skipif("not hasattr(os, 'geteuid') or os.geteuid() != 0", reason="only root can be another user")
def test_another_user_loads_what_root_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is filled as root, in an image for instance, serves users who may not write there."""
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o755)  # others are to read it
        monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, shared)
        before = os.umask(0o022)
        try:
            get(Compiler())
        finally:
            os.umask(before)
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.setuid(NOBODY)
                compiler = Compiler()
                get(compiler)
                status = compiler.count + 10 * os.access(shared, os.W_OK)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- broken entries ------------------------------------------------------------------------------------------------


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"broken",
        lambda content: content[: disk_cache.CHECKSUM_BYTES],
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        flipped,
    ],
    ids=["empty", "short", "as long as a checksum", "a byte less", "half", "a bit"],
)
def test_broken_entries_are_replaced(damage: Callable[[bytes], bytes], cache: Path) -> None:
    compiler = Compiler()
    get(compiler)
    (entry,) = entries(cache)
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    assert get(compiler) is compiler
    assert entry.read_bytes() == content
    assert_is_launcher(get(compiler))
    assert compiler.count == 2


def test_an_entry_is_not_valid_under_another_name(cache: Path) -> None:
    compiler = Compiler()
    get(compiler, ("one",))
    (one,) = entries(cache)
    get(compiler, ("two",))
    (two,) = set(entries(cache)) - {one}
    two.write_bytes(one.read_bytes())
    assert get(compiler, ("two",)) is compiler


@pytest.mark.parametrize("code", [b"no object file", b""], ids=["garbage", "nothing"])
def test_entries_that_do_not_load_are_replaced(code: bytes, cache: Path) -> None:
    compiler = Compiler()
    get(compiler)
    (entry,) = entries(cache)
    entry.write_bytes(code + disk_cache._checksum(entry, code))
    assert get(compiler) is compiler
    assert_is_launcher(get(compiler))


# --- names ---------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    ONE = 1


def test_whatever_differs_has_another_name() -> None:
    def identities(epilogue: Epilogue, **options: Any) -> list[tuple[Any, ...]]:
        spec = Conv3dSpec(160, epilogue, **options)
        sharing = [(shared_taps, Sm100Tiling.loading(shared_taps=shared_taps)) for shared_taps in (True, False)]
        return [(Conv3dSm90, (spec, tile)) for tile in Sm90Tiling().candidates(spec)] + [
            (Conv3dSm100, (spec, tile)) for _, tiling in sharing for tile in tiling.candidates(spec)
        ]

    all_of_them = [
        *identities(Epilogue(160, (), Padded())),
        *identities(Epilogue(160, (Bias(),), Padded())),
        *identities(Epilogue(160, (Bias("input_bias"),), Padded())),
        *identities(Epilogue(160, (), Padded(history=1))),
        *identities(Epilogue(160, (), Padded()), leading_zero_frames=1),
        *identities(Epilogue(160, (), Padded()), leading_zero_frames=1, absent_frames=1),
        *identities(Epilogue(160, (), Padded()), window=Window(1, 3, 3)),
        *identities(Epilogue(320, (), Padded())),
        *[(PackC12, (history, *PACKING[1:])) for history in (0, 1, 2)],
        *[(PackC12, spelling) for spelling in ("", "1", 1, 1.0, True, None, Kind.ONE, (1, 2), ("1,2",), ((1,), 2))],
    ]
    names = {disk_cache._digest(identity) for identity in all_of_them}
    assert len(names) == len(set(map(repr, all_of_them))) > 30


def test_kernels_and_types_are_told_apart_by_name() -> None:
    @dataclass(frozen=True)
    class Config:
        stages: int

    other = dataclass(frozen=True)(type("OtherConfig", (Config,), {}))
    identities = [(PackC12, Config(2)), (PackC12, other(2)), (RowsKernel, Config(2))]
    assert len({disk_cache._digest(identity) for identity in identities}) == len(identities)
    compiler = Compiler()
    for build in (PackC12, RowsKernel):
        assert disk_cache.get_or_compile(build, IDENTITY, compiler) is compiler


def test_an_identity_has_no_objects() -> None:
    with pytest.raises(TypeError, match="cannot be part of the name"):
        disk_cache._digest((PackC12, object()))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(disk_cache, "FORMAT", disk_cache.FORMAT + 1),
        lambda patch: patch.setattr(disk_cache, "SOURCES", "other sources"),
        lambda patch: patch.setattr(disk_cache.importlib.metadata, "version", lambda package: "99.0"),
        lambda patch: patch.setattr(disk_cache.cutlass, "CUDA_VERSION", "99.0"),
        lambda patch: patch.setattr(sys.implementation, "cache_tag", "cpython-999"),
        lambda patch: patch.setattr(disk_cache.platform, "machine", lambda: "another"),
        lambda patch: patch.setattr(disk_cache, "_processor", lambda: "another"),
        lambda patch: patch.setenv("CUTE_DSL_LINEINFO", "1"),
    ],
    ids=["format", "sources", "packages", "CUDA", "Python", "machine", "processor", "variables"],
)
def test_another_environment_has_other_names(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = disk_cache._environment.__wrapped__()
    change(monkeypatch)
    assert disk_cache._environment.__wrapped__() != before


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        (("cpu MHz : 2445", "cpu MHz : 800"), False),
        (("avx avx2", "avx avx2 avx512f"), True),
        (("family : 6", "family : 7"), True),
    ],
)
def test_the_processor_is_its_instructions(
    change: tuple[str, str], matters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "vendor_id : V\ncpu family : 6\nmodel : 1\ncpu MHz : 2445\nflags : fpu avx avx2\n\n"
    names = []
    for text in (lines, lines.replace(*change)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text + "processor : 1\n")
        names.append(disk_cache._processor())
    assert (names[0] != names[1]) is matters


def test_no_processor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert isinstance(disk_cache._processor(), str)


def main() -> None:
    """Get one launcher. Prints how many were compiled."""
    with recording_compilations() as done:
        launcher = pack()
    if not done:  # where there is no GPU, only those that were loaded can be called
        assert_is_launcher(launcher)
    print(len(done))


if __name__ == "__main__":
    main()
