"""Tensor memory: layouts against index formulas and against the fragments of mma, and the allocator's rules."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_encodings import join_address
from ptxemu.errors import OutOfBounds, TensorMemoryMisuse, UninitializedRead, UnsupportedInstruction
from ptxemu.models import matrix
from ptxemu.models.tensor_memory import (
    COLUMNS,
    LANES,
    Access,
    TensorMemory,
    a_placement,
    access,
    accumulator_placement,
    register_count,
    split_address,
)

NUMBERED = (np.arange(LANES)[:, None] << 16 | np.arange(COLUMNS)).astype(np.uint32)  # every cell holds its own address
WIDTH_IN_COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}


def legal_counts() -> list[tuple[str, int]]:
    limits = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}
    return [(shape, 1 << p) for shape, limit in limits.items() for p in range(8) if 1 << p <= limit]


def load(cells: Access, address: int, warp: int) -> np.ndarray:
    return cells.to_registers(NUMBERED[cells.region(address, warp)])


def test_addresses() -> None:
    assert split_address(join_address(97, 300)) == (97, 300)
    assert join_address(32, 5) == 0x200005


def test_register_counts() -> None:
    assert [register_count(s, 8) for s in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")] == [8, 8, 16, 32, 8]
    for shape, num in (("16x256b", 64), ("16x128b", 128), ("32x32b", 3), ("32x32b", 256), ("32x32b", 0), ("4x256b", 1)):
        with pytest.raises(UnsupportedInstruction):
            register_count(shape, num)


def cell_of(shape: str, t: int, i: int) -> tuple[int, int]:
    """Lane and column of register i of thread t, as the figures of the ISA show them."""
    if shape == "32x32b":
        return t, i
    quad, q = divmod(t, 4)
    if shape == "16x64b":  # threads 4n and 4n + 2 hold row n, columns 0 and 1; 4n + 1 and 4n + 3 row n + 8
        return quad + 8 * (q & 1), 2 * i + (q >> 1)
    if shape == "16x128b":  # register pairs: rows n and n + 8, one column a thread
        return quad + 8 * (i & 1), 4 * (i >> 1) + q
    return quad + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * q + (i & 1)


@pytest.mark.parametrize(("shape", "num"), [c for c in legal_counts() if c[0] != "16x32bx2"])
def test_every_shape_and_count(shape: str, num: int) -> None:
    cells = access(shape, num)
    lane, column = 64 + (16 if shape.startswith("16") else 0), COLUMNS - WIDTH_IN_COLUMNS[shape] * num
    registers = load(cells, join_address(lane, column), 6)
    assert registers.shape == (register_count(shape, num), 32)
    assert cells.column_span == WIDTH_IN_COLUMNS[shape] * num
    for t in range(32):
        for i in range(cells.registers):
            r, c = cell_of(shape, t, i)
            assert registers[i, t] == join_address(lane + r, column + c)
    assert np.unique(registers).size == cells.lane_span * cells.column_span, "each cell goes to one register"


def test_16x256b_is_the_accumulator_fragment_of_mma() -> None:
    registers = load(access("16x256b", 4), join_address(16, 40), 0)
    assert np.array_equal(matrix.accumulator_from_fragment(registers), NUMBERED[16:32, 40:72])


def test_16x128b_is_the_register_a_fragment() -> None:
    """A pair of 16-bit elements is one cell: K = 16 takes eight columns."""
    registers = load(access("16x128b", 2), join_address(32, 8), 1)
    assert np.array_equal(matrix.a_from_fragment(registers).view(np.uint32), NUMBERED[32:48, 8:16])


def test_16x32bx2_splits_the_warp_over_two_column_ranges() -> None:
    for num, split in ((1, 8), (4, 32), (16, 0)):
        registers = load(access("16x32bx2", num, half_split=split), join_address(112, 20), 3)
        for t in range(32):
            for i in range(num):
                assert registers[i, t] == join_address(112 + t % 16, 20 + i + split * (t // 16))


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 4), ("16x64b", 2), ("16x128b", 2), ("16x256b", 1), ("16x32bx2", 4)]
)
def test_packing_takes_the_lower_halves_of_two_columns(shape: str, num: int) -> None:
    cells = access(shape, num, packed=True, half_split=16 if shape == "16x32bx2" else 0)
    plain = access(shape, num)
    registers = load(cells, join_address(0, 0), 0)
    assert cells.registers == plain.registers
    for t in range(32):
        for i in range(cells.registers):
            column = 2 * int(plain.columns[i, t]) + (16 if shape == "16x32bx2" and t >= 16 else 0)
            assert registers[i, t] == (column + 1) << 16 | column  # the columns are the cells' lower halves


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
def test_a_store_is_read_back_by_the_same_load(shape: str, packed: bool) -> None:
    cells = access(shape, 4, packed=packed, half_split=8 if shape == "16x32bx2" else 0)
    registers = np.random.default_rng(0).integers(0, 1 << 32, (cells.registers, 32), dtype=np.uint32)
    tensor = TensorMemory()
    region = cells.region(join_address(32, 64), 1)
    tensor.data[region] = cells.to_cells(registers)
    tensor.written[region] = True
    assert np.array_equal(cells.to_registers(tensor.data[region]), registers)
    assert tensor.written.sum() == 32 * cells.registers * (2 if packed else 1)
    if packed:
        assert (tensor.data <= 0xFFFF).all()


def test_a_warp_reaches_its_own_lanes_only() -> None:
    wide, narrow = access("32x32b", 1), access("16x256b", 1)
    for warp in range(8):
        for lane in range(0, 128, 16):
            own = lane // 32 == warp % 4
            if own and lane % 32 == 0:
                wide.region(join_address(lane, 0), warp)
            else:
                with pytest.raises(TensorMemoryMisuse):
                    wide.region(join_address(lane, 0), warp)
            if own:
                narrow.region(join_address(lane, 0), warp)
            else:
                with pytest.raises(TensorMemoryMisuse):
                    narrow.region(join_address(lane, 0), warp)
    with pytest.raises(TensorMemoryMisuse):
        narrow.region(join_address(8, 0), 0)
    with pytest.raises(OutOfBounds):
        wide.region(join_address(0, COLUMNS), 0)


def test_relative_lanes_count_from_the_quarter_of_the_warp() -> None:
    cells = access("32x32b", 2)
    for lane in (0, 32, 64, 96):
        registers = cells.to_registers(NUMBERED[cells.region(join_address(lane, 5), 3, relative=True)])
        assert registers[1].tolist() == [join_address(96 + t, 6) for t in range(32)]
    with pytest.raises(TensorMemoryMisuse):
        cells.region(join_address(16, 5), 3, relative=True)


def test_half_split_belongs_to_one_shape() -> None:
    with pytest.raises(UnsupportedInstruction):
        access("32x32b", 4, half_split=8)


# --- Accumulators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "group"), [(128, 160, 1), (256, 160, 2), (64, 40, 1), (64, 256, 1), (128, 64, 2), (128, 256, 2)]
)
def test_accumulator_placement(m: int, n: int, group: int) -> None:
    placement = accumulator_placement(m, n, group)
    found = placement.read(NUMBERED, join_address(0, 32))
    assert found.shape == (m // group, n)
    for r in range(m // group):
        for c in range(0, n, 7):
            lane, column = r, c
            if (m, group) == (64, 1):
                lane = r // 16 * 32 + r % 16
            elif (m, group) == (128, 2):
                lane, column = r + 64 * (c >= n // 2), c % (n // 2)
            assert found[r, c] == join_address(lane, 32 + column)
    assert placement.column_span == (n // 2 if (m, group) == (128, 2) else n)
    written = np.zeros_like(NUMBERED)
    placement.write(written, join_address(0, 32), found.view(np.float32))
    assert np.array_equal(placement.read(written, join_address(0, 32)), found)
    assert np.count_nonzero(written) == found.size


def test_an_accumulator_of_64_rows_may_start_in_the_upper_half_of_each_quarter() -> None:
    found = accumulator_placement(64, 8, 1).read(NUMBERED, join_address(16, 0))
    assert found[:, 0].tolist() == [join_address(r // 16 * 32 + 16 + r % 16, 0) for r in range(64)]


def test_accumulators_are_seen_by_the_warps_that_own_their_rows() -> None:
    """Row 16 w + r of an M = 64 accumulator, loaded by warp w with the 16-lane shape: the fragment of wgmma."""
    d = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    data = np.zeros((LANES, COLUMNS), np.uint32)
    accumulator_placement(64, 16, 1).write(data, 0, d)
    cells = access("16x256b", 2)
    parts = [cells.to_registers(data[cells.region(join_address(32 * w, 0), w)]).view(np.float32) for w in range(4)]
    assert np.array_equal(matrix.accumulator_from_fragment(np.concatenate(parts, axis=1)), d)


def test_a_in_tensor_memory() -> None:
    bits = a_placement(256, 2).read(NUMBERED, join_address(0, 8)).view(np.uint16)
    assert bits.shape == (128, 16)
    assert bits[5, ::2].tolist() == list(range(8, 16))
    assert bits[5, 1::2].tolist() == [5] * 8
    with pytest.raises(UnsupportedInstruction):
        a_placement(64, 1)


def test_matrices_past_the_end() -> None:
    with pytest.raises(OutOfBounds):
        list(accumulator_placement(128, 160, 1).regions(join_address(0, 400)))
    with pytest.raises(OutOfBounds):
        list(accumulator_placement(128, 8, 1).regions(join_address(16, 0)))
    with pytest.raises(UnsupportedInstruction):
        accumulator_placement(256, 8, 1)


# --- Allocation ------------------------------------------------------------------------------------------------------


def test_allocation_and_leaks() -> None:
    tensor = TensorMemory()
    first, second = tensor.allocate(256), tensor.allocate(128)
    assert (first, second) == (0, 256)
    assert tensor.allocate(128) == 384
    assert tensor.allocate(32) is None, "the caller has to wait"
    tensor.free(second, 128)
    assert tensor.allocate(128) == 256, "a gap of exactly this size"
    tensor.free(second, 128)
    assert tensor.allocate(32) == 256
    assert tensor.allocations == {0: 256, 384: 128, 256: 32}
    tensor.require_allocated(10, 246, "a test")
    for column, count in ((10, 247), (288, 1), (255, 2)):
        with pytest.raises(OutOfBounds):
            tensor.require_allocated(column, count, "a test")


@pytest.mark.parametrize("columns", [0, 16, 48, 1024, -32])
def test_sizes_that_tcgen05_alloc_refuses(columns: int) -> None:
    with pytest.raises(TensorMemoryMisuse):
        TensorMemory().allocate(columns)


def test_misuse_of_the_allocator() -> None:
    tensor = TensorMemory()
    start = tensor.allocate(64)
    assert start is not None
    with pytest.raises(TensorMemoryMisuse, match="grow"):
        tensor.allocate(128)
    with pytest.raises(TensorMemoryMisuse):
        tensor.free(start, 32)
    with pytest.raises(TensorMemoryMisuse):
        tensor.free(start + 32, 64)
    tensor.relinquish_permit()
    with pytest.raises(TensorMemoryMisuse, match="permit"):
        tensor.allocate(32)
    tensor.free(start, 64)
    with pytest.raises(TensorMemoryMisuse):
        tensor.free(start, 64)


def test_reads_of_cells_that_nothing_wrote() -> None:
    tensor = TensorMemory()
    tensor.allocate(64)
    tensor.written[:, :8] = True
    for cells in (access("32x32b", 8), access("16x256b", 1)):
        tensor.require_written(cells.region(join_address(32, 0), 1), "a load")
    for cells in (access("32x32b", 16), access("16x256b", 2), access("32x32b", 8, packed=True)):
        with pytest.raises(UninitializedRead, match="lane 32, column 8"):
            tensor.require_written(cells.region(join_address(32, 0), 1), "a load")
    tensor.free(0, 64)
    tensor.allocate(64)
    assert not tensor.written.any(), "a new allocation starts unwritten"
