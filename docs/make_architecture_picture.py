"""Draws ``docs/architecture.svg``, the way of one call through the package.

python docs/make_architecture_picture.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("architecture.svg")

WIDTH, MARGIN, BAND = 960, 16, 96  # of the page, around it, of the column with the phases' names
BOX_HEIGHT, GAP = 70, 22
LINE = 18  # from one line of text to the next
PHASES = {
    "make": ("once for", "each shape", "#dbe9f6"),
    "run": ("every call,", "host", "#e3f1dd"),
    "device": ("every call,", "GPU", "#fbe8d3"),
}
"""Two lines of a name and the colour of each phase of a call."""


@dataclass(frozen=True)
class Stage:
    """One box: what happens, in which files of ``cudnn_fused``."""

    phase: str
    title: str
    what: str
    files: tuple[str, ...]


STAGES = (
    Stage(
        "run",
        "Function",
        "conv3d_rmsnorm_silu_pad(x, weight, bias, gamma): operands in the order of the operation's table",
        ("ops/conv3d_rmsnorm_silu_pad.py",),
    ),
    Stage(
        "run",
        "Plan",
        "find_executable looks the signatures up in the plan cache; a hit goes on at Program",
        ("plan.py", "plan_cache.py", "streams.py"),
    ),
    Stage(
        "make",
        "Problem and backend",
        "validate → Problem; select_backend → GpuBackend or the reference; can_implement → None or a reason",
        ("operands.py", "backends.py", "kernels/gpu.py"),
    ),
    Stage(
        "make",
        "Lowering",
        "Computation(source, steps, store) → ConvCall, RowsCall, PackCall and the bytes of workspace",
        ("kernels/lowering.py", "kernels/conv/spec.py"),
    ),
    Stage(
        "make",
        "Tile and split",
        "Tiling.choose: the legal tile and split of the reduction with the least estimated cycles",
        ("kernels/conv/select.py", "kernels/conv/tile_sm90.py", "kernels/conv/tile_sm100.py"),
    ),
    Stage(
        "make",
        "Compiled launcher",
        "compiled(arch, kernel, *key): from this process, from the disk, or from cute.compile",
        ("kernels/compiling.py", "kernels/disk_cache.py"),
    ),
    Stage(
        "run",
        "Program",
        "allocate outputs and workspace, then each Launch: stream, addresses by operand name, extents",
        ("kernels/gpu.py", "kernels/arguments.py"),
    ),
    Stage(
        "device",
        "Warp roles",
        "load activations, load weights → rings of stages → multiply → FP32 accumulators → rows in BF16",
        ("kernels/conv/sm90.py", "kernels/conv/sm100.py", "kernels/conv/schedule.py"),
    ),
    Stage(
        "device",
        "Epilogue steps",
        "RowFinisher: steps before the statistic → sums over the row → the statistic's step and those after",
        ("kernels/epilogue/rows.py", "kernels/epilogue/steps.py", "kernels/epilogue/arithmetic.py"),
    ),
    Stage(
        "device",
        "Store",
        "destinations of each row: output, cache, saved value; zeros or history in the padding pixels",
        ("kernels/epilogue/stores.py", "kernels/epilogue/device_stores.py"),
    ),
)


def text(x: int, y: int, content: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(content)}</text>'


def box(stage: Stage, top: int) -> list[str]:
    """A stage, with the name of its phase at its left."""
    first, second, colour = PHASES[stage.phase]
    left, inside = MARGIN + BAND, MARGIN + BAND + 14
    return [
        f'<rect x="{left}" y="{top}" width="{WIDTH - MARGIN - left}" height="{BOX_HEIGHT}" rx="6" fill="{colour}" '
        'stroke="#555"/>',
        text(MARGIN, top + 30, first, 'fill="#666"'),
        text(MARGIN, top + 30 + LINE, second, 'fill="#666"'),
        text(inside, top + 22, stage.title, 'font-weight="bold"'),
        text(inside, top + 22 + LINE, stage.what, ""),
        text(inside, top + 22 + 2 * LINE, "   ".join(stage.files), 'font-family="monospace" font-size="12"'),
    ]


def arrow(top: int) -> str:
    """From the bottom of a box at ``top`` to the next box."""
    x, begin = MARGIN + BAND + 40, top + BOX_HEIGHT
    return f'<path d="M{x} {begin}V{begin + GAP - 2}" stroke="#555" marker-end="url(#tip)"/>'


def render() -> str:
    """The picture."""
    tops = [MARGIN + index * (BOX_HEIGHT + GAP) for index in range(len(STAGES))]
    height = tops[-1] + BOX_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for stage, top in zip(STAGES, tops, strict=True):
        parts += box(stage, top)
    parts += map(arrow, tops[:-1])
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(render())
