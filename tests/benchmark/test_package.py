"""Benchmarks are a package like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["benchmark", "tests"])
def test_nobody_edits_the_path_of_imports(folder: str) -> None:
    ways = ("sys." + "path", "spec_from_" + "file_location")
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert not [str(path) for path in files if any(way in path.read_text() for way in ways)]
