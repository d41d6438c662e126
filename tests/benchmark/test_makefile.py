"""What ``make encode`` hands to the program."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("name", ["clip.mkv", "it's.mkv", "12:30.mkv", "two words.mkv", 'a "b" `c`.mkv'])
def test_any_name_of_a_clip(tmp_path: Path, name: str) -> None:
    """With an environment that is ready, and whose Python prints its arguments."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / "ready-torch").touch()
    (tmp_path / "ready-wan").touch()
    os.utime(tmp_path / "ready-torch", (0, 0))
    command = ["make", "--silent", "encode", f"VENV={tmp_path}", f"VIDEO={name}", "ARGS=--frames 9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["-m", "benchmark.e2e.wan22_encode", "--video", name, "--frames", "9"]
