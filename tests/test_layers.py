"""What the modules of the product may import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cudnn_fused

ROOT = Path(cudnn_fused.__file__).parent
PRODUCT = sorted(file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0] != "testing")
NOT_FOR_IT = ("cudnn_fused.testing", "ptxemu", "tests", "benchmark")


def imported(file: Path) -> set[str]:
    """The full names of the modules that a file imports, anywhere in it, and of what it takes from them."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("file", PRODUCT, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_product_imports_no_tests(file: Path) -> None:
    used = imported(file)
    assert [name for name in used for barred in NOT_FOR_IT if name == barred or name.startswith(f"{barred}.")] == []
