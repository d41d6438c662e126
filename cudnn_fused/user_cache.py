"""The directory in which the package keeps what later processes can use: nothing that an operation depends on."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path

DIRECTORY_VARIABLE = "CUDNN_FUSED_CACHE_DIR"


def directory() -> Path | None:
    """Where things are kept; None if the variable is there and empty, or if the user has no home."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        else:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(base) / "cudnn_fused"


def write(file: Path, content: bytes) -> None:
    """Write a file and the directories around it. Readers see the old content or the new, never half of one.

    Who may read is the umask's decision, as for any file of the user: a cache can be filled once for many.

    Raises OSError if that is impossible; nothing is left behind then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{secrets.token_hex(8)}.tmp")
    try:
        with open(new, "xb") as handle:
            handle.write(content)
        os.replace(new, file)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
