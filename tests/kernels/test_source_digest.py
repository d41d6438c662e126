"""Which changes of the package's sources invalidate compiled kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import cudnn_fused
from cudnn_fused.kernels import disk_cache
from cudnn_fused.kernels.source_digest import source_digest

ROOT = Path(cudnn_fused.__file__).parent
KERNEL_SOURCES = (
    "kernels/__init__.py",
    "kernels/conv/sm90.py",
    "kernels/epilogue/rows.py",
    "operands.py",  # imported by kernels
    "weights.py",
    "user_cache.py",
)
OTHER_SOURCES = (
    "__init__.py",
    "doctor.py",
    "selfcheck/cases.py",
    "testing/cases.py",
    "testing/eager.py",
    "wan/encoder.py",
    "ops/conv3d_raw.py",
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package."""
    return Path(shutil.copytree(ROOT, tmp_path / ROOT.name, ignore=shutil.ignore_patterns("__pycache__")))


def digest_after_a_comment(package: Path, name: str) -> str:
    with (package / name).open("a", encoding="utf-8") as file:
        file.write("# a comment\n")
    return source_digest(package)


@pytest.mark.parametrize("name", KERNEL_SOURCES)
def test_what_kernels_are_made_from(package: Path, name: str) -> None:
    assert digest_after_a_comment(package, name) != disk_cache.SOURCES


@pytest.mark.parametrize("name", OTHER_SOURCES)
def test_other_modules(package: Path, name: str) -> None:
    assert digest_after_a_comment(package, name) == disk_cache.SOURCES


def test_a_new_name_of_a_file_counts(package: Path) -> None:
    epilogue = package / "kernels" / "epilogue"
    (epilogue / "rows.py").rename(epilogue / "other_rows.py")
    assert source_digest(package) != disk_cache.SOURCES


def test_new_files(package: Path) -> None:
    (package / "notes.md").write_text("text")
    (package / "another.py").write_text("")
    assert source_digest(package) == disk_cache.SOURCES
    (package / "kernels" / "another.py").write_text("from cudnn_fused import another\n")
    with_kernel = source_digest(package)
    assert with_kernel != disk_cache.SOURCES
    assert digest_after_a_comment(package, "another.py") != with_kernel


def test_an_import_inside_a_function_counts(package: Path) -> None:
    (package / "helper.py").write_text("")
    (package / "kernels" / "another.py").write_text("def f():\n    from cudnn_fused.helper import g\n")
    before = source_digest(package)
    assert digest_after_a_comment(package, "helper.py") != before
