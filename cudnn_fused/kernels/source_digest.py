"""A digest of the sources that kernels are made from.

These are the files of this directory and those of the package that they import, directly or through another; what is
imported for type checkers alone does not count. A change elsewhere (the checks of operands, a test helper, an encoder,
the command line) leaves compiled kernels valid.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parent.name


def source_digest(package: Path) -> str:
    """The digest for the package in a directory."""
    digest = hashlib.sha256()
    for source in kernel_sources(package):
        content = source.read_bytes()
        digest.update(f"{source.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def kernel_sources(package: Path) -> list[Path]:
    """The files that kernels depend on, in an order that is the same everywhere."""
    found: set[Path] = set()
    waiting = list((package / KERNELS).rglob("*.py"))
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting.extend(_imported(source, package))
    return sorted(found)


def _imported(source: Path, package: Path) -> Iterator[Path]:
    """The modules of the package that a file imports, and the subpackages that they are in."""
    for node in _executed(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root == package.name:
                yield from _files(package, parts)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, less what stands under ``if TYPE_CHECKING``."""
    yield node
    skipped = node.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" else []
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _executed(child)


def _files(package: Path, parts: list[str]) -> Iterator[Path]:
    """The files behind a dotted name. Its last parts may name something inside a module."""
    # The package's own __init__.py only gathers the public names: through it everything would belong to the kernels.
    place = package
    for part in parts:
        place = place / part
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
