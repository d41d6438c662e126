"""What importing the package loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
    """The full names of the modules that a file imports, and of what it takes from them."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.name}: imports are absolute here"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    """Takes away what imports nothing that is left, until nothing is."""
    left = {name: used & graph.keys() - {name} for name, used in graph.items()}
    while left:
        free = [name for name, used in left.items() if not used & left.keys()]
        assert free, f"import one another: {sorted(left)}"
        for name in free:
            del left[name]


# The package's __init__ gathers the public names of modules that in turn are inside the package.
MODULES = {name: imported(file) for file in SOURCE.rglob("*.py") if (name := module_name(file)) != "ptxemu"}


def test_no_module_imports_one_that_imports_it() -> None:
    """Imports for type checkers alone and those inside functions count, too."""
    assert_no_circle(MODULES)


def test_no_folder_imports_one_that_imports_it() -> None:
    folders: dict[str, set[str]] = {}
    for name, used in MODULES.items():
        inside = {other for other in used if other in MODULES}
        folders.setdefault(name.split(".")[1], set()).update(other.split(".")[1] for other in inside)
    assert len(folders) > 5
    assert_no_circle(folders)


def test_a_circle_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"\['a', 'b'\]"):
        assert_no_circle({"a": {"b"}, "b": {"a", "c"}, "c": set()})


def test_it_stands_alone() -> None:
    """The repository has other packages; none of them is imported."""
    files = [*SOURCE.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    used = {name.partition(".")[0] for file in files for name in imported(file)}
    own = {"ptxemu", *(file.stem for file in Path(__file__).parent.glob("*.py"))}
    assert used - own - sys.stdlib_module_names <= HEAVY | {"numpy", "pytest"}
