"""Print the results that ``benchmark.conv.postops --json`` wrote as a Markdown table.

    python -m benchmark.conv.results_table results.json

Figures that miss their goal are bold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIGURES = {
    "ours_ms": ("ms", ".3f"),
    "conv_ratio": ("times faster than `F.conv3d`", ".2f"),
    "compile_ratio": ("than `torch.compile`", ".2f"),
    "over_raw": ("over bare", ".2f"),
    "cublas_share": ("of cuBLAS", ".2f"),
    "copy_share": ("of a copy", ".2f"),
}
"""Titles and formats of the columns, by figure."""


def table(results: Mapping[str, Any]) -> str:
    titles = ["operation", "N,T,H,W", "channels", "with", *(title for title, _ in FIGURES.values())]
    lines = [titles, ["---"] * len(titles)] + [cells(row) for row in results["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Mapping[str, Any]) -> list[str]:
    place = ",".join(map(str, row["extents"]))
    settings = [f"{row['leading_zero_frames']} zero frames"] if row["leading_zero_frames"] else []
    settings += [f"history {row['history']}"] if row["history"] else []
    settings += {"none": [], "plain": ["residual"], "bias": ["residual, its bias"]}[row["residual"]]
    missed = {goal["figure"] for goal in row["goals"] if not goal["met"]}
    figures = [figure(row["figures"].get(name), spec, name in missed) for name, (_, spec) in FIGURES.items()]
    return [f"`{row['variant']}`", place, "->".join(map(str, row["channels"])), ", ".join(settings), *figures]


def figure(value: float | None, spec: str, missed: bool) -> str:
    if value is None:
        return ""
    return f"**{value:{spec}}**" if missed else f"{value:{spec}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    print(table(json.loads(parser.parse_args().results.read_text())))


if __name__ == "__main__":
    main()
