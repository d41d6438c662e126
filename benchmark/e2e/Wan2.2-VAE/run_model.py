"""Runs ``python -m benchmark.e2e.wan22_encode`` from wherever it is called."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = str(Path(__file__).resolve().parents[3])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-m", "benchmark.e2e.wan22_encode", *sys.argv[1:]])
