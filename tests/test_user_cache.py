"""The user's cache directory, and how files in it are written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudnn_fused import user_cache


def names(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir()]


@pytest.mark.skipif("sys.platform == 'win32'")
def test_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(user_cache.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache.directory() == Path("/home/someone/.cache/cudnn_fused")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache.directory() == Path("/elsewhere/cudnn_fused")
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, "/here")
    assert user_cache.directory() == Path("/here")
    monkeypatch.setenv(user_cache.DIRECTORY_VARIABLE, "")
    assert user_cache.directory() is None


def test_nobody_has_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in (user_cache.DIRECTORY_VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache.directory() is None


def test_files_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "made" / "on demand" / "file"
    user_cache.write(file, b"old and longer")
    user_cache.write(file, b"new")
    assert file.read_bytes() == b"new"
    assert names(file.parent) == ["file"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "occupied" / "by a directory").mkdir(parents=True)
    with pytest.raises(OSError, match="occupied"):
        user_cache.write(tmp_path / "occupied", b"content")
    assert names(tmp_path) == ["occupied"]


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif("sys.platform == 'win32'")
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, umask: int) -> None:
    file = tmp_path / "made" / "file"
    user_cache.write(file, b"content")
    user_cache.write(file, b"replaced")
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o777 & ~umask


def test_writers_at_the_same_time_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, replace, written = tmp_path / "file", os.replace, []

    def another_comes_between(new: str, old: Path) -> None:
        if not written:
            written.append(new)
            user_cache.write(file, b"of another")
        replace(new, old)

    monkeypatch.setattr(os, "replace", another_comes_between)
    user_cache.write(file, b"content")
    assert file.read_bytes() == b"content"
    assert names(tmp_path) == ["file"]
