"""What ``python -m cudnn_fused.doctor`` found out about models of GPUs, remembered for later processes.

One small JSON file in the user's cache directory: model -> {"shared_taps": bool}. No operation depends on it: a file
that is missing or broken counts as empty, and failure to write it is reported, not raised.
"""

from __future__ import annotations

import json
from pathlib import Path

from cudnn_fused import user_cache

FILE_NAME = "hardware_quirks.json"
SHARED_TAPS = "shared_taps"


def path() -> Path | None:
    """Where findings are kept, if anywhere."""
    directory = user_cache.directory()
    return directory / FILE_NAME if directory else None


def shared_taps(model: str) -> bool | None:
    """Whether a model reads three taps from one tile of pixels as it should; None if the doctor has not found out."""
    entry = _read().get(model)
    found = entry.get(SHARED_TAPS) if isinstance(entry, dict) else None
    return found if isinstance(found, bool) else None


def remember(model: str, *, shared_taps: bool) -> str | None:
    """Keep a finding. Returns why that was impossible, or None."""
    file = path()
    if file is None:
        return "there is no cache directory"
    findings = {**_read(), model: {SHARED_TAPS: shared_taps}}
    try:
        user_cache.write(file, json.dumps(findings, indent=1).encode())
    except OSError as error:
        return str(error)
    return None


def _read() -> dict[str, object]:
    file = path()
    try:
        findings = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return findings if isinstance(findings, dict) else {}
