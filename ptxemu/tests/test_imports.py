"""What importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
HEAVY = {"torch", "cutlass", "tvm_ffi", "cuda"}


def loaded(statement: str) -> set[str]:
    """The top-level modules in a new process after a statement."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {statement}; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return {name.partition(".")[0] for name in shown.split()}


def test_the_package_needs_numpy_only() -> None:
    assert loaded("import ptxemu; ptxemu.launch; from ptxemu.tools import cubin, sass") & HEAVY == set()


def test_the_host_side_is_loaded_on_first_use() -> None:
    assert loaded("from ptxemu import emulate") >= {"torch"}


def imported(file: Path) -> set[str]:
    """The top-level modules that a file imports by their full names."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def test_it_stands_alone() -> None:
    """The repository has other packages; none of them is imported."""
    used = set.union(*map(imported, [*SOURCE.rglob("*.py"), *Path(__file__).parent.glob("*.py")]))
    own = {"ptxemu", *(file.stem for file in Path(__file__).parent.glob("*.py"))}
    assert used - own - sys.stdlib_module_names <= HEAVY | {"numpy", "pytest"}
