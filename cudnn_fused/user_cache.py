"""The directory in which the package keeps what later processes can use: nothing that an operation depends on."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from pathlib import Path

DIRECTORY_VARIABLE = "CUDNN_FUSED_CACHE_DIR"
FILE_MODE = 0o666  # less what the umask takes away: whether others may use the files is for the user to say


def directory() -> Path | None:
    """The directory; None if the environment variable is set to an empty string or the user has no home directory."""
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

    Raises OSError if that is impossible; nothing is left behind then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    name = file.parent / f"{uuid.uuid4().hex}.tmp"  # a module for temporary files would make it the user's alone
    binary = getattr(os, "O_BINARY", 0)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, FILE_MODE)
    try:
        with os.fdopen(handle, "wb") as new:
            new.write(content)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
