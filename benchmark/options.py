"""What the command lines of several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """The type of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def check_writable(path: Path) -> None:
    """Raise OSError unless ``path`` can be written, so that nobody waits for figures that are then lost."""
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()
