"""What the SM100 convolutions cost, without a card: exact counts from the emulator, and an estimate of times from them.

    python -m benchmark.sm100_static [--peers] [--json FILE]

A kernel runs for one tile in the emulator, which counts products, bytes and how often every line of the PTX is issued;
with the machine code (``nvdisasm``, in the extra `peers`) that tells what the epilogue issues, pipe by pipe. A shape of
an encode is so many tiles. With ``--peers`` cuDNN's kernels, compiled by the same DSL, stand beside ours.

The times are a roofline: of a tile, the longest of its products, its loads and its epilogue; of a launch, so many waves
of tiles, or the traffic with device memory if that takes longer. No overlap is lost and no latency counted, so real
times are longer. The rates below are nominal.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cutlass import cute

from benchmark.conv.production import DEEPEST, STAGES
from cudnn_fused.kernels.compiling import LAUNCHERS, DeviceSpec
from cudnn_fused.kernels.conv.padded_grid import PaddedGrid
from cudnn_fused.kernels.conv.select import FixedTiling
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm100 import (
    PAIR,
    SPLIT_OVERHEAD,
    TILES,
    WARP,
    Sm100Tiling,
    TileConfig,
)
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.occupancy import expected_clusters
from cudnn_fused.kernels.sm100 import sm100
from cudnn_fused.selfcheck.cases import CHANNELS as WAN_CHANNELS
from cudnn_fused.selfcheck.cases import TAPS, Case, Skip, make_inputs, make_outputs, make_problem
from cudnn_fused.types import ELEMENT_BYTES
from cudnn_fused.weights import CAUSAL_CHANNELS, CAUSAL_PIXEL
from ptxemu import Emulation, emulate
from ptxemu.tools import cubin, sass
from ptxemu.tools.sass import Pipe

# NVIDIA states 2.25 PFLOP/s of dense BF16 and 8 TB/s for one B200 of an HGX B200 (data sheet, 2024). It has 148
# multiprocessors; a fifth-generation tensor core does 8192 BF16 operations a cycle, from which the clock follows.
MULTIPROCESSORS = 148
CLUSTERS = expected_clusters(MULTIPROCESSORS)
PRODUCTS_PER_CYCLE = 4096
CLOCK = 2.25e15 / (2 * PRODUCTS_PER_CYCLE * MULTIPROCESSORS)
MEMORY_BYTES_PER_SECOND = 8e12
# As on earlier architectures: what a multiprocessor reads from the L2 cache, and from its shared memory, in a cycle.
L2_BYTES_PER_CYCLE = 64
SHARED_BYTES_PER_CYCLE = 128
# A multiprocessor has four schedulers, each of which issues an instruction of a warp in a cycle, to pipes of its own.
# How long a pipe is taken then follows from the results per cycle that the CUDA programming guide gives for compute
# capability 9.0: 128 for FP32 and pairs of BF16; 64 for integers, logic and conversions to BF16; 16 for exponentials,
# reciprocals and conversions to integers. The load-store unit is shared, and moves 128 bytes a cycle.
SCHEDULERS = 4
PIPE_CYCLES = {Pipe.FMA: 1, Pipe.ALU: 2, Pipe.XU: 8}
INTEGER_PRODUCT, INTEGER_PRODUCT_CYCLES = "IMAD", 2  # on one of the two halves of the FMA pipe
LSU_CYCLES = {"128": 4, "64": 2}  # by the bits that a lane moves; 1 for fewer
MULTICAST = 2  # pairs that would share a load of weights
PEER = "cuDNN"
PEER_ROWS, PEER_CHANNELS = 256, 320  # a tile of cuDNN's covers at most so many channels

ROWS_PLANE = {256: (14, 16), 512: (20, 23)}  # planes that fill a tile of so many rows
PEER_PLANE = (16, 16)  # 256 pixels
RAW, PADDED, CAUSAL = "conv3d_raw", "conv3d_rmsnorm_silu_pad", "causal_conv3d_with_cache"
TITLES = {
    RAW: "Bare convolution",
    PADDED: "With norm, residual and padding",
    CAUSAL: "Causal convolution of 12 channels",
}
CHANNELS = {
    RAW: tuple(STAGES),
    PADDED: tuple(channels for channels in STAGES if channels[1] <= PEER_CHANNELS),
    CAUSAL: (CAUSAL_CHANNELS,),
}

Channels = tuple[int, int]
Extents = tuple[int, int, int, int]


@dataclass(frozen=True)
class TileCounts:
    """What one tile of a pair of CTAs takes; bytes and instructions of both together."""

    kernel: str
    rows: int
    channels: int
    products: int
    global_to_shared: int
    shared_to_tensor_core: int
    weights: int = 0  # of what goes from global to shared memory, as far as it is known
    registers: int = 0  # of a thread of the epilogue
    opcodes: Mapping[str, float] = field(default_factory=dict)  # issued by the warps of the epilogue
    flat: bool = False  # tiles run over all pixels; otherwise over the rows of a frame, halo rows included
    tile: TileConfig | None = None  # of ours

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
            "epilogue": max(self.epilogue.values(), default=0),
        }

    @property
    def epilogue(self) -> dict[str, float]:
        """How long the epilogue keeps the schedulers and each pipe busy."""
        busy = Counter[str]()
        for opcode, issued in self.opcodes.items():
            pipe = sass.pipe_of(opcode)
            busy["issue"] += issued / (PAIR * SCHEDULERS)
            if pipe is Pipe.LSU:
                busy[pipe.value] += issued * _lsu_cycles(opcode) / PAIR
            elif pipe in PIPE_CYCLES:
                integer = opcode.startswith(INTEGER_PRODUCT)
                cycles = INTEGER_PRODUCT_CYCLES if integer else PIPE_CYCLES[pipe]
                busy[pipe.value] += issued * cycles / (PAIR * SCHEDULERS)
        return dict(busy)

    def per_output(self, *pipes: Pipe) -> float:
        """Instructions of a thread for each result of the tile, on some pipes."""
        issued = sum(count for opcode, count in self.opcodes.items() if sass.pipe_of(opcode) in pipes)
        return issued * WARP / (self.rows * self.channels)


def _lsu_cycles(opcode: str) -> int:
    return max((LSU_CYCLES.get(part, 1) for part in opcode.split(".")), default=1)


# --- counting ------------------------------------------------------------------------------------------------------

_cubins: dict[str, bytes] = {}
"""The machine code of everything that was compiled inside :func:`compiling`, by its PTX."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Kernels are compiled anew with line information, which changes none of their instructions, and kept."""
    compile_kernel = cute.compile

    def compile_and_keep(*arguments: Any, options: str = "", **keywords: Any) -> Any:
        compiled = compile_kernel(*arguments, options=f"{options} --generate-line-info", **keywords)
        _cubins[compiled.__ptx__] = compiled.__cubin__
        return compiled

    LAUNCHERS.clear()
    with mock.patch.object(cute, "compile", compile_and_keep):
        yield
    LAUNCHERS.clear()


def counted(kernel: str, emulation: Emulation, rows: int, channels: int, *, flat: bool = False) -> TileCounts:
    """The last launch, as one tile."""
    launched = emulation.launches[-1]
    counts, lines = launched.report.counts, launched.ptx.splitlines()
    executed = epilogue_lines(lines, counts.lines)
    (resources,) = cubin.resources(_cubins[launched.ptx]).values()
    return TileCounts(
        kernel,
        rows,
        channels,
        counts.macs_issued,
        counts.bytes["global to shared"],
        counts.bytes["shared to tensor core"],
        registers=resources.registers,
        opcodes=sass.executed_opcodes(_cubins[launched.ptx], executed),
        flat=flat,
    )


def epilogue_lines(ptx: list[str], executed: Mapping[int, Counter[int]]) -> Counter[int]:
    """How often the warps that read accumulators executed each line."""
    total = Counter[int]()
    for counts in executed.values():
        if any(count and "tcgen05.ld." in ptx[line - 1] for line, count in counts.items()):
            total.update(counts)
    return total


def shared_out(several: TileCounts, tiles: int) -> TileCounts:
    """One of several equal tiles that were counted together."""
    names = ("products", "global_to_shared", "shared_to_tensor_core")
    opcodes = {opcode: issued / tiles for opcode, issued in several.opcodes.items()}
    return dataclasses.replace(several, opcodes=opcodes, **{name: getattr(several, name) / tiles for name in names})


# --- kernels -------------------------------------------------------------------------------------------------------


def case_of(operation: str, plane: tuple[int, int], channels: Channels) -> Case:
    """One frame, behind which no frame is known to be zero."""
    case = Case(operation, 1, 1, *plane, channels)
    if operation == PADDED:
        return dataclasses.replace(case, skip=Skip.PLAIN, history=2, caller_history=True)
    return dataclasses.replace(case, history=2) if operation == CAUSAL else case


def ours(operation: str, channels: Channels, *, shared_taps: bool = False) -> Iterator[TileCounts]:
    """Every tile that can serve a convolution."""
    for tile in (dataclasses.replace(tile, shared_taps=shared_taps) for tile in TILES):
        if channels[1] % tile.tile_n or (operation == PADDED and channels[1] != tile.tile_n):
            continue
        case = case_of(operation, ROWS_PLANE[tile.tile_m], (channels[0], tile.tile_n))
        if case.channels not in WAN_CHANNELS[case.variant]:
            case = dataclasses.replace(case, channels=channels)
        operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
        tensors = [operands.get(operand.name) for operand in case.operation.operands]
        tiling = FixedTiling((tile,), Sm100Tiling())
        backend, problem = sm100(DeviceSpec("sm_100a", PAIR), tiling), make_problem(case, operands)
        with compiling(), emulate(memory=[one for one in tensors if one is not None], races=False) as emulation:
            backend.compile(problem)(tensors, None, 0)
        one = counted(f"{tile.tile_m}x{tile.tile_n}", emulation, tile.tile_m, tile.tile_n)
        one = shared_out(one, case.channels[1] // tile.tile_n)
        yield dataclasses.replace(one, weights=weight_bytes(spec_of(operation, case.channels), tile), tile=tile)


def weight_bytes(spec: Conv3dSpec, tile: TileConfig) -> int:
    """Weights that both CTAs of a pair load for a tile."""
    return PAIR * spec.taps * tile.n_blocks * tile.b_rows * spec.gemm_channels * ELEMENT_BYTES


def cudnn(operation: str, channels: Channels) -> TileCounts:
    """cuDNN's kernel for the same operation, on a plane of one tile."""
    case = case_of(operation, PEER_PLANE, channels)
    operands = {**make_inputs(case, "cpu", integers=True), **make_outputs(case, "cpu")}
    with compiling():
        call = _cudnn_call(case, operands)
    with emulate(races=False) as emulation:
        call()
    width = min(channels[1], PEER_CHANNELS)
    return shared_out(counted(PEER, emulation, PEER_ROWS, width, flat=True), channels[1] // width)


def _cudnn_call(case: Case, operands: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    from ptxemu.cutedsl.peers import cudnn_causal_conv, cudnn_conv3d

    if case.variant == CAUSAL:
        n, _, t, h, w = operands["input"].shape
        packed = torch.zeros(n, t + 2, h + 2, w + 2, CAUSAL_PIXEL, dtype=torch.bfloat16)
        return cudnn_causal_conv(packed, operands["packed_weight"], operands["output"])
    given = {name: operands.get(name) for name in ("bias", "gamma", "residual", "residual_output")}
    if case.variant == RAW:
        return cudnn_conv3d("raw", operands["input"], operands["packed_weight"], operands["output"], **given)
    padded = (operands["input"], operands["packed_weight"], operands["padded_output"])
    return cudnn_conv3d("pad", *padded, **given, history_frames=case.history, cache=operands["cache_output"])


# --- shapes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """One kernel on one shape."""

    kernel: str
    split: int
    useful_share: float
    bytes_per_output: float  # that are read for shared memory
    bytes_with_multicast: float  # if MULTICAST pairs shared a load of weights
    waves: int
    last_wave: float  # share of the clusters that the last wave occupies
    milliseconds: float
    bound: str


def estimate(counts: TileCounts, split: int, channels: Channels, extents: Extents) -> Estimate:
    (ci, co), (n, t, h, w) = channels, extents
    outputs = n * t * h * w * co
    tiles = counts.tiles(n, t, h, w, co)
    clusters = CLUSTERS[PAIR * split]
    waves = math.ceil(tiles / clusters)
    bound, cycles = max(counts.cycles.items(), key=lambda item: item[1])
    seconds = waves * (cycles / split + (SPLIT_OVERHEAD if split > 1 else 0)) / CLOCK
    traffic = ELEMENT_BYTES * (n * (t + 2) * (h + 2) * (w + 2) * max(ci, CAUSAL_PIXEL) + outputs + TAPS * ci * co)
    if traffic / MEMORY_BYTES_PER_SECOND > seconds:
        bound, seconds = "device memory", traffic / MEMORY_BYTES_PER_SECOND
    saved = counts.weights * (MULTICAST - 1) / MULTICAST
    return Estimate(
        counts.kernel,
        split,
        outputs * TAPS * ci / (tiles * counts.products),
        tiles * counts.global_to_shared / outputs,
        tiles * (counts.global_to_shared - saved) / outputs,
        waves,
        (tiles - (waves - 1) * clusters) / clusters,
        seconds * 1e3,
        bound,
    )


def shapes() -> Iterator[tuple[str, Channels, Extents]]:
    for extents in STAGES[160, 160]:
        yield CAUSAL, CAUSAL_CHANNELS, extents
    for channels, stages in STAGES.items():
        for extents in stages:
            yield RAW, channels, extents
    yield RAW, (640, 640), DEEPEST


# --- printing ------------------------------------------------------------------------------------------------------

Tiles = dict[Channels, list[TileCounts]]


def print_table(title: str, heads: list[str], rows: Iterator[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def arrow(channels: Channels) -> str:
    return "->".join(map(str, channels))


def cycle_rows(tiles: Tiles) -> Iterator[list[str]]:
    for channels, kernels in tiles.items():
        for counts in kernels:
            cells = [f"{cycles:,.0f}" for cycles in counts.cycles.values()]
            share = counts.cycles["epilogue"] / counts.cycles["products"]
            yield [arrow(channels), counts.kernel, *cells, f"{share:.2f}"]


OTHERS = (Pipe.TENSOR_MEMORY, Pipe.UNIFORM, Pipe.ASYNC, Pipe.CONTROL)


def epilogue_rows(tiles: Tiles) -> Iterator[list[str]]:
    for channels, kernels in tiles.items():
        for counts in kernels:
            groups = [(Pipe.FMA,), (Pipe.ALU,), (Pipe.XU,), (Pipe.LSU,), OTHERS, tuple(Pipe)]
            per_output = [f"{counts.per_output(*pipes):.2f}" for pipes in groups]
            busy = [f"{counts.epilogue.get(name, 0):,.0f}" for name in ("issue", "FMA", "ALU", "XU", "LSU")]
            yield [arrow(channels), counts.kernel, str(counts.registers), *per_output, *busy]


def print_tiles(title: str, tiles: Tiles) -> None:
    heads = ["channels", "kernel", "products", "L2", "shared memory", "epilogue", "epilogue / products"]
    print_table(f"{title}: cycles of one tile", heads, cycle_rows(tiles))
    instructions = ["FMA", "ALU", "XU", "LSU", "others", "all"]
    cycles = ["issue", "FMA, cycles", "ALU, cycles", "XU, cycles", "LSU, cycles"]
    heads = ["channels", "kernel", "registers", *instructions, *cycles]
    print_table(
        f"{title}: instructions of the epilogue per output, and cycles of one tile", heads, epilogue_rows(tiles)
    )


def spec_of(operation: str, channels: Channels) -> Conv3dSpec:
    """What the backend makes of a convolution without post-operations."""
    bare = Epilogue(channels[1])
    if operation == CAUSAL:
        return Conv3dSpec(CAUSAL_PIXEL, bare, joins_w_taps=True)
    return Conv3dSpec(channels[0], bare)


def chosen(tiles: Mapping[str, Tiles], *, shared_taps: bool) -> Iterator[tuple[Channels, Extents, Estimate]]:
    """The tile and split that the backend chooses for each production shape, and cuDNN's kernel."""
    for operation, channels, extents in shapes():
        spec = spec_of(operation, channels)
        tiling = Sm100Tiling.loading(shared_taps=shared_taps)
        tile, split, _ = tiling.choose(spec, PaddedGrid.around(*extents), CLUSTERS)
        for counts in tiles[operation][channels]:
            if counts.tile == tile:
                yield channels, extents, estimate(counts, split, channels, extents)
            elif counts.kernel == PEER:
                yield channels, extents, estimate(counts, 1, channels, extents)


def shape_row(channels: Channels, extents: Extents, one: Estimate) -> list[str]:
    return [
        arrow(channels),
        ",".join(map(str, extents)),
        f"{one.kernel} in {one.split}" if one.split > 1 else one.kernel,
        f"{one.useful_share:.3f}",
        f"{one.bytes_per_output:.1f}",
        "" if one.kernel == PEER else f"{one.bytes_with_multicast:.1f}",
        str(one.waves),
        f"{one.last_wave:.2f}",
        f"{one.milliseconds:.4f}",
        one.bound,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="count cuDNN's kernels, too")
    parser.add_argument("--shared-taps", action="store_true", help="load the taps along W together, not one by one")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    tiles: dict[str, Tiles] = {}
    for operation, title in TITLES.items():
        tiles[operation] = {
            channels: [
                *ours(operation, channels, shared_taps=arguments.shared_taps),
                *([cudnn(operation, channels)] if arguments.peers else []),
            ]
            for channels in CHANNELS[operation]
        }
        print_tiles(title, tiles[operation])
    estimates = list(chosen(tiles, shared_taps=arguments.shared_taps))
    heads = ["channels", "N,T,H,W", "kernel", "useful products", "bytes read per output", "with multicast"]
    heads += ["waves", "last wave", "estimate, ms", "bound by"]
    print_table("Production shapes, without post-operations", heads, (shape_row(*row) for row in estimates))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(tiles, estimates), indent=1))
    return 0


def as_json(tiles: Mapping[str, Tiles], estimates: list[tuple[Channels, Extents, Estimate]]) -> dict[str, Any]:
    return {
        "tiles": {
            operation: {
                arrow(channels): [dataclasses.asdict(one) for one in kernels] for channels, kernels in table.items()
            }
            for operation, table in tiles.items()
        },
        "shapes": [
            {"channels": channels, "extents": extents, **dataclasses.asdict(one)}
            for channels, extents, one in estimates
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
