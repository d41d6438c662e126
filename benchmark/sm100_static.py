"""What the SM100 convolutions cost, without a card: exact counts from the emulator, and an estimate of times from them.

    python benchmark/sm100_static.py [--peers] [--json FILE]

A kernel runs for one tile in the emulator, which counts products, bytes and instructions; a production shape is so many
tiles. With ``--peers`` (the extras `peers` and `test`) cuDNN's kernels, compiled by the same DSL, stand beside ours.
The times are a roofline: of a tile, the longest of its products, its loads and its epilogue; of a launch, so many waves
of tiles, or the traffic with device memory if that takes longer. No overlap is lost and no latency counted, so real
times are longer. The rates below are nominal.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "conv" / "cutedsl")]

from production import DEEPEST, STAGES  # noqa: E402

from cudnn_fused.kernels.launching import Machine  # noqa: E402
from cudnn_fused.kernels.sm100 import Sm100Kernels  # noqa: E402
from cudnn_fused.kernels.tiling_sm100 import SPLIT_OVERHEAD, TILES, TileConfig, resident_clusters  # noqa: E402
from cudnn_fused.testing.cases import Case, Skip, make_inputs, make_outputs, make_problem  # noqa: E402
from cudnn_fused.testing.ptx import Emulation, emulate  # noqa: E402

# NVIDIA states 2.25 PFLOP/s of dense BF16 and 8 TB/s for one B200 of an HGX B200 (data sheet, 2024). It has 148
# multiprocessors; a fifth-generation tensor core does 8192 BF16 operations a cycle, from which the clock follows.
MULTIPROCESSORS = 148
PRODUCTS_PER_CYCLE = 4096
CLOCK = 2.25e15 / (2 * PRODUCTS_PER_CYCLE * MULTIPROCESSORS)
MEMORY_BYTES_PER_SECOND = 8e12
# As on earlier architectures: what a multiprocessor reads from the L2 cache, and from its shared memory, in a cycle.
L2_BYTES_PER_CYCLE = 64
SHARED_BYTES_PER_CYCLE = 128
SCHEDULERS = 4  # of a multiprocessor: each issues an instruction of a warp in a cycle
SPECIAL_CYCLES = 8  # a scheduler's unit for exponentials and reciprocals takes four lanes a cycle
ELEMENT_BYTES = 2
TAPS = 27
PAIR = 2
PEER_ROWS, PEER_CHANNELS = 256, 320  # a tile of cuDNN's covers at most so many channels

UNCOUNTED = {"tensor", "async copy", "sync", "control"}  # classes of instructions that are not the epilogue's
ROWS_PLANE = {256: (14, 16), 512: (20, 23)}  # planes that fill a tile of so many rows
PAIRS_OF_CHANNELS = tuple(STAGES)


@dataclass(frozen=True)
class TileCounts:
    """What one tile of a pair of CTAs takes; bytes and instructions of both together."""

    kernel: str
    rows: int
    channels: int
    products: int
    global_to_shared: int
    shared_to_tensor_core: int
    instructions: int  # but those of UNCOUNTED
    special: int
    flat: bool = False  # tiles run over all pixels; otherwise over the rows of a frame, junk included
    splits: tuple[int, ...] = (1,)  # pairs that may share a tile

    def tiles(self, n: int, t: int, h: int, w: int, co: int) -> int:
        if self.flat:
            return math.ceil(n * t * h * w / self.rows) * math.ceil(co / self.channels)
        return n * t * math.ceil(h * (w + 2) / self.rows) * math.ceil(co / self.channels)

    @property
    def cycles(self) -> dict[str, float]:
        """How long each resource is busy with the tile."""
        return {
            "products": self.products / (PAIR * PRODUCTS_PER_CYCLE),
            "L2 to shared memory": self.global_to_shared / (PAIR * L2_BYTES_PER_CYCLE),
            "shared memory to tensor core": self.shared_to_tensor_core / (PAIR * SHARED_BYTES_PER_CYCLE),
            "epilogue": max(self.instructions, self.special * SPECIAL_CYCLES) / (PAIR * SCHEDULERS),
        }


def counted(kernel: str, emulation: Emulation, rows: int, channels: int, *, flat: bool = False) -> TileCounts:
    counts = emulation.launches[-1].report.counts
    instructions = sum(count for name, count in counts.instructions.items() if name not in UNCOUNTED)
    return TileCounts(
        kernel,
        rows,
        channels,
        counts.macs_issued,
        counts.bytes["global to shared"],
        counts.bytes["shared to tensor core"],
        instructions,
        counts.instructions["special function"],
        flat,
    )


# --- kernels -------------------------------------------------------------------------------------------------------


class OneTile(Sm100Kernels):
    """The backend with one tile."""

    def __init__(self, tile: TileConfig) -> None:
        super().__init__(Machine("sm_100a", PAIR), shared_taps=True)
        self.tile = tile

    def tiles(self, spec: object, machine: Machine) -> tuple[TileConfig, ...]:
        return (self.tile,)


def padded_case(case: Case) -> Case:
    """The same convolution with a norm, a residual and padding."""
    return dataclasses.replace(case, variant="conv3d_rmsnorm_silu_pad", skip=Skip.PLAIN, history=2, caller_history=True)


def ours(channels: tuple[int, int], *, padded: bool = False) -> Iterator[TileCounts]:
    """Every tile that can serve a convolution."""
    for tile in TILES:
        co = channels[1]
        if co % tile.tile_n or (padded and co != tile.tile_n):
            continue
        plane = ROWS_PLANE[tile.tile_m]
        case = Case("conv3d_raw", 1, 1, *plane, (channels[0], tile.tile_n))
        case = padded_case(case) if padded else case
        if case.channels not in case.operation.channels:
            case = dataclasses.replace(case, channels=channels)
        operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
        tensors = [operands.get(operand.name) for operand in case.operation.operands]
        problem = make_problem(case, operands)
        with emulate(memory=[tensor for tensor in tensors if tensor is not None], races=False) as emulation:
            OneTile(tile).compile(problem)(tensors, 0)
        one = counted(f"{tile.tile_m}x{tile.tile_n}", emulation, tile.tile_m, tile.tile_n)
        yield dataclasses.replace(scaled(one, case.channels[1] // tile.tile_n), splits=tile.splits)


def scaled(several: TileCounts, tiles: int) -> TileCounts:
    """One of several equal tiles that were counted together."""
    fields = ("products", "global_to_shared", "shared_to_tensor_core", "instructions", "special")
    return dataclasses.replace(several, **{name: getattr(several, name) // tiles for name in fields})


def cudnn(channels: tuple[int, int], *, padded: bool = False) -> TileCounts:
    """cuDNN's kernel for the same operation, on a plane of one tile."""
    from tests.ptx.peers import cudnn_conv3d

    co = channels[1]
    case = Case("conv3d_raw", 1, 1, 16, 16, channels)
    case = padded_case(case) if padded else case
    operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
    given = {name: operands.get(name) for name in ("bias", "gamma", "residual", "residual_output")}
    cache = operands.get("cache_output")
    output = operands["padded_output" if padded else "output"]
    history = {"history_frames": case.history, "cache": cache} if padded else {}
    call = cudnn_conv3d(
        "pad" if padded else "raw", operands["input"], operands["packed_weight"], output, **given, **history
    )
    with emulate(races=False) as emulation:
        call()
    width = min(co, PEER_CHANNELS)
    return scaled(counted("cuDNN", emulation, PEER_ROWS, width, flat=True), co // width)


# --- shapes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """One kernel on one shape."""

    kernel: str
    split: int
    useful_share: float
    bytes_per_output: float  # from global to shared memory
    waves: int
    last_wave: float  # share of the clusters that the last wave occupies
    milliseconds: float
    bound: str


def estimate(counts: TileCounts, split: int, channels: tuple[int, int], extents: tuple[int, int, int, int]) -> Estimate:
    (ci, co), (n, t, h, w) = channels, extents
    outputs = n * t * h * w * co
    tiles = counts.tiles(n, t, h, w, co)
    clusters = resident_clusters(split, MULTIPROCESSORS)
    waves = math.ceil(tiles / clusters)
    bound, cycles = max(counts.cycles.items(), key=lambda item: item[1])
    seconds = waves * (cycles / split + (SPLIT_OVERHEAD if split > 1 else 0)) / CLOCK
    traffic = ELEMENT_BYTES * (n * (t + 2) * (h + 2) * (w + 2) * ci + outputs + TAPS * ci * co)
    if traffic / MEMORY_BYTES_PER_SECOND > seconds:
        bound, seconds = "device memory", traffic / MEMORY_BYTES_PER_SECOND
    return Estimate(
        counts.kernel,
        split,
        outputs * TAPS * ci / (tiles * counts.products),
        tiles * counts.global_to_shared / outputs,
        waves,
        (tiles - (waves - 1) * clusters) / clusters,
        seconds * 1e3,
        bound,
    )


def shapes() -> Iterator[tuple[tuple[int, int], tuple[int, int, int, int]]]:
    for channels, stages in STAGES.items():
        for extents in stages:
            yield channels, extents
    yield (640, 640), DEEPEST


def print_tiles(title: str, all_counts: dict[tuple[int, int], list[TileCounts]]) -> None:
    print(f"\n{title}\n")
    print("| channels | kernel | products of a tile, cycles | L2, cycles | shared memory, cycles | epilogue, cycles |")
    print("| --- | --- | --- | --- | --- | --- |")
    for channels, kernels in all_counts.items():
        for counts in kernels:
            cells = " | ".join(f"{cycles:,.0f}" for cycles in counts.cycles.values())
            print(f"| {channels[0]}->{channels[1]} | {counts.kernel} | {cells} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="count cuDNN's kernels, too")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    raw: dict[tuple[int, int], list[TileCounts]] = {}
    padded: dict[tuple[int, int], list[TileCounts]] = {}
    for channels in PAIRS_OF_CHANNELS:
        raw[channels] = [*ours(channels), *([cudnn(channels)] if arguments.peers else [])]
        if channels[1] <= PEER_CHANNELS:
            both = [*ours(channels, padded=True), *([cudnn(channels, padded=True)] if arguments.peers else [])]
            padded[channels] = both
    print_tiles("Bare convolution, one tile", raw)
    print_tiles("With norm, residual and padding, one tile", padded)
    print("\nBare convolution, production shapes\n")
    print("| channels | N,T,H,W | kernel | useful products | bytes to shared memory per output | waves | last wave |"
          " estimate, ms | bound by |")  # fmt: skip
    print("| --- " * 9 + "|")
    rows = []
    for channels, extents in shapes():
        candidates = [estimate(counts, split, channels, extents) for counts in raw[channels] for split in counts.splits]
        own = min((one for one in candidates if one.kernel != "cuDNN"), key=lambda one: one.milliseconds)
        for one in [own, *(peer for peer in candidates if peer.kernel == "cuDNN")]:
            rows.append({"channels": channels, "extents": extents, **dataclasses.asdict(one)})
            print(
                f"| {channels[0]}->{channels[1]} | {','.join(map(str, extents))} | "
                f"{one.kernel}{f' in {one.split}' if one.split > 1 else ''} | "
                f"{one.useful_share:.3f} | {one.bytes_per_output:.1f} | {one.waves} | {one.last_wave:.2f} | "
                f"{one.milliseconds:.4f} | {one.bound} |"
            )
    if arguments.json:
        tiles = {
            name: {"->".join(map(str, key)): [dataclasses.asdict(c) for c in counts] for key, counts in table.items()}
            for name, table in (("raw", raw), ("padded", padded))
        }
        arguments.json.write_text(json.dumps({"tiles": tiles, "shapes": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
