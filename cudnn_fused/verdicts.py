"""What ``python -m cudnn_fused.doctor`` found out about models of GPUs, remembered for later processes.

One small JSON file in the user's cache directory: model -> {"shared_taps": bool}. A file that is missing, unreadable
or not what it should be says nothing, and one that cannot be written is not: no operation depends on it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

DIRECTORY_VARIABLE = "CUDNN_FUSED_CACHE_DIR"
FILE_NAME = "verdicts.json"
SHARED_TAPS = "shared_taps"


def path() -> Path:
    """Where verdicts are kept."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen) / FILE_NAME
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cudnn_fused" / FILE_NAME


def shared_taps(model: str) -> bool | None:
    """Whether a model reads three taps from one tile of pixels as it should; None if nobody has looked."""
    entry = _read().get(model)
    found = entry.get(SHARED_TAPS) if isinstance(entry, dict) else None
    return found if isinstance(found, bool) else None


def remember(model: str, *, shared_taps: bool) -> str | None:
    """Keep a verdict. Returns why that was impossible, or None."""
    try:
        file = path()
        verdicts = {**_read(), model: {SHARED_TAPS: shared_taps}}
        file.parent.mkdir(parents=True, exist_ok=True)
        # Readers see the old file or the new one, never half of one.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, suffix=".tmp") as new:
            json.dump(verdicts, new, indent=1)
        os.replace(new.name, file)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return str(error)
    return None


def _read() -> dict[str, object]:
    try:
        verdicts = json.loads(path().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}
