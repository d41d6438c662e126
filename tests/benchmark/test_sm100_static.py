"""The static comparison of SM100 convolutions: its arithmetic, and what it reads off the machine code."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest

from benchmark import sm100_static
from cudnn_fused.kernels.conv.select import Choice
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm100 import TILES, Sm100Tiling, tap_row_bytes
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from ptxemu.tools import sass

PLAIN, SQUARE = "conv3d_raw", (160, 160)


@pytest.fixture(scope="module")
def static() -> ModuleType:
    return sm100_static


@pytest.fixture
def disassembler() -> None:
    """Skips where nvdisasm is not installed, as peers() does where they are not."""
    try:
        sass.disassembler()
    except FileNotFoundError as error:
        if os.environ.get("CUDNN_FUSED_REQUIRE_PEERS"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("shared_taps", [True, False], ids=["shared", "aligned"])
@pytest.mark.usefixtures("disassembler")
def test_counts_are_those_of_the_cost_model(static: ModuleType, shared_taps: bool) -> None:
    """A tile in the emulator multiplies and loads what the model that chooses tiles takes it to."""
    spec = Conv3dSpec(160, Epilogue(160))
    wide, small = static.ours(PLAIN, SQUARE, shared_taps=shared_taps)
    for counts, tile in ((wide, TILES[1]), (small, TILES[2])):
        tile = replace(tile, shared_taps=shared_taps)
        assert counts.cycles["products"] == spec.window.tap_rows * 3 * sum(spec.chunk_steps) * tile.blocks * 80
        assert counts.global_to_shared == pytest.approx(2 * spec.window.tap_rows * tap_row_bytes(spec, tile), rel=0.05)
        pixels = 2 * spec.window.tap_rows * tile.a_loads(spec) * tile.a_rows(spec) * spec.gemm_channels * 2
        assert counts.global_to_shared - counts.weights == pytest.approx(pixels, rel=0.05)
        assert 0 < counts.registers <= 255
        assert counts.cycles["epilogue"] == max(counts.epilogue.values()) > 0


# Instructions that are translated one to one, by the beginnings of their names.
SAME = {"MUFU.EX2": "ex2.", "LDTM": "tcgen05.ld.", "STTM": "tcgen05.st.", "LDG": "ld.global."}


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("kernel", ["ours", "cuDNN"])
def test_the_machine_code_executes_what_the_ptx_does(
    static: ModuleType, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """With norm, residual and padding, of which loops, branches and divisions are part."""
    launches, count = [], static.counted

    def counted(name: str, emulation: object, *rest: int, **options: bool) -> object:
        launches.append(emulation.launches[-1])
        return count(name, emulation, *rest, **options)

    monkeypatch.setattr(static, "counted", counted)
    counts = next(static.ours(static.PADDED, SQUARE)) if kernel == "ours" else static.cudnn(static.PADDED, SQUARE)
    lines = launches[-1].ptx.splitlines()
    executed = static.epilogue_lines(lines, launches[-1].report.counts.lines)
    for opcode, instruction in SAME.items():
        in_ptx = sum(
            count for line, count in executed.items() if lines[line - 1].split()[:1][0].startswith(instruction)
        )
        assert total(counts.opcodes, opcode) == in_ptx, opcode
    assert total(counts.opcodes, "MUFU.EX2") == counts.rows * counts.channels / 32  # one for every output, in warps


def total(opcodes: Mapping[str, float], beginning: str) -> float:
    return sum(count for opcode, count in opcodes.items() if opcode.startswith(beginning))


def test_epilogue_cycles(static: ModuleType) -> None:
    """Of a pair: its eight schedulers share what is issued, its multiprocessors what the load-store units do."""
    opcodes = {"FFMA": 800, "IMAD.WIDE": 80, "F2FP.BF16.F32.PACK_AB": 400, "MUFU.EX2": 80, "LDG.E.128": 20, "BRA": 8}
    counts = static.TileCounts("some", 256, 160, 1, 1, 1, opcodes=opcodes)
    expected = {"issue": 173.5, "FMA": 100 + 20, "ALU": 100, "XU": 80, "LSU": 40}
    assert counts.epilogue == expected
    assert counts.cycles["epilogue"] == 173.5
    assert counts.per_output(static.Pipe.XU) == 80 * 32 / (256 * 160)
    assert counts.per_output(*static.Pipe) == 1388 * 32 / (256 * 160)
    special = static.TileCounts("some", 256, 160, 1, 1, 1, opcodes={"MUFU.EX2": 80, "FFMA": 80})
    assert special.cycles["epilogue"] == 80


def test_several_tiles_share_what_was_counted(static: ModuleType) -> None:
    one = static.shared_out(static.TileCounts("some", 256, 160, 8, 4, 2, weights=2, opcodes={"FFMA": 6}), 2)
    assert (one.products, one.global_to_shared, one.shared_to_tensor_core, one.opcodes) == (4, 2, 1, {"FFMA": 3})


def test_estimate(static: ModuleType) -> None:
    """Two waves of tiles that are bound by their products."""
    counts = static.TileCounts("some", 256, 160, 2 * 4096 * 10**6, 2 * 64 * 900, 0, weights=2 * 64 * 600)
    shape = (1, 1, 74, 254)  # 74 lines of 256 rows
    one = static.estimate(counts, 1, SQUARE, shape)
    assert (one.waves, one.last_wave, one.bound) == (1, 1.0, "products")
    assert one.milliseconds == pytest.approx(10**6 / static.CLOCK * 1e3)
    assert one.useful_share == pytest.approx(254 * 160 * 27 * 160 / counts.products)
    assert one.bytes_per_output == pytest.approx(2 * 64 * 900 / (254 * 160))
    assert one.bytes_with_multicast == pytest.approx(2 * 64 * 600 / (254 * 160))  # half of the weights less
    assert static.estimate(counts, 1, SQUARE, (1, 1, 75, 254)).waves == 2


def test_shapes_get_the_tile_that_the_backend_chooses(static: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that looks best here."""
    kernels = [static.TileCounts(str(index), 256, 160, 1, 1, 1, tile=tile) for index, tile in enumerate(TILES)]
    kernels.append(static.TileCounts(static.PEER, 256, 160, 1, 1, 1, flat=True))
    specs = []

    def choose(tiling: Sm100Tiling, spec: Conv3dSpec, *_: object) -> Choice:
        specs.append(spec)
        return Choice(TILES[2], 2, 1)

    monkeypatch.setattr(Sm100Tiling, "choose", choose)
    tiles = {operation: defaultdict(lambda: kernels) for operation in static.TITLES}
    rows = [(one.kernel, one.split) for _, _, one in static.chosen(tiles, shared_taps=False)]
    assert rows == [("2", 2), (static.PEER, 1)] * len(list(static.shapes()))
    assert [(spec.gemm_channels, spec.co) for spec in specs[:3]] == [(48, 160), (48, 160), (160, 160)]


def test_tiles_of_flat_kernels_run_over_frames(static: ModuleType) -> None:
    flat = static.TileCounts("flat", 256, 160, 1, 1, 1, flat=True)
    assert flat.tiles(2, 2, 8, 8, 320) == 2
    assert static.TileCounts("rows", 256, 160, 1, 1, 1).tiles(2, 2, 8, 8, 320) == 8
