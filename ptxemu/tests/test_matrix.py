"""Tensor-core operands: descriptors read back what tensor maps wrote, fragments follow the ISA's index formulas."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ptx_encodings import a_to_fragment, encode_tcgen05, encode_wgmma, gather_operand, to_bits
from ptxemu.errors import DescriptorError, EmulatorError, OutOfBounds, UnsupportedInstruction
from ptxemu.models import matrix, numerics
from ptxemu.models.matrix import InstructionDescriptor, Major, SharedDescriptor
from ptxemu.models.tensor_map import DataType, Swizzle, TensorMap, write_box

SHARED_BYTES = 128 * 1024
TILE = 8192  # a multiple of every swizzle period
SWIZZLED = (Swizzle.B32, Swizzle.B64, Swizzle.B128)
ALL = (Swizzle.NONE, *SWIZZLED)


def random_elements(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(1, 1 << 16, shape, dtype=np.uint16)


def load(
    shared: np.ndarray, address: int, x: np.ndarray, column: int, row: int, width: int, height: int, swizzle: Swizzle
) -> None:
    """A box of `height` rows of `width` elements of a 2-D matrix, as a bulk copy puts it into shared memory."""
    m = TensorMap.over(x, DataType.BFLOAT16, (width, height), swizzle=swizzle)
    write_box(shared, address, m.load((column, row)), swizzle)


# --- Descriptor bits -------------------------------------------------------------------------------------------------


def test_shared_descriptor_bits() -> None:
    d = SharedDescriptor(0x12340, 16, 1024, 5, Swizzle.B128)
    assert encode_tcgen05(d) == 0x1234 | 1 << 16 | 64 << 32 | 1 << 46 | 5 << 49 | 2 << 61
    assert encode_wgmma(d) == 0x1234 | 1 << 16 | 64 << 32 | 5 << 49 | 1 << 62
    for swizzle in ALL:
        d = replace(d, swizzle=swizzle)
        assert SharedDescriptor.from_tcgen05(encode_tcgen05(d)) == d
        assert SharedDescriptor.from_wgmma(encode_wgmma(d)) == d


def test_a_descriptor_keeps_18_bits_of_the_address() -> None:
    """Bits 24 and up hold the CTA's rank: one descriptor serves both CTAs of a pair."""
    d = SharedDescriptor(0x1004020, 16, 1024, 0, Swizzle.B128)
    assert SharedDescriptor.from_tcgen05(encode_tcgen05(d)).start == 0x4020


@pytest.mark.parametrize("bit", [14, 30, 47, 52, 53, 60])
def test_reserved_bits_of_tcgen05_descriptors(bit: int) -> None:
    value = encode_tcgen05(SharedDescriptor(TILE, 16, 1024, 0, Swizzle.B128))
    with pytest.raises(EmulatorError):
        SharedDescriptor.from_tcgen05(value ^ 1 << bit)


def test_fixed_bits_and_swizzle_codes_of_tcgen05_descriptors() -> None:
    value = encode_tcgen05(SharedDescriptor(TILE, 16, 1024, 0, Swizzle.NONE))
    with pytest.raises(DescriptorError, match="0b001"):
        SharedDescriptor.from_tcgen05(value ^ 1 << 46)
    for code in (3, 5, 7):
        with pytest.raises(DescriptorError, match="swizzle"):
            SharedDescriptor.from_tcgen05(value | code << 61)


@pytest.mark.parametrize("bit", [14, 30, 46, 52, 61])
def test_reserved_bits_of_wgmma_descriptors(bit: int) -> None:
    value = encode_wgmma(SharedDescriptor(TILE, 16, 1024, 0, Swizzle.B128))
    with pytest.raises(DescriptorError):
        SharedDescriptor.from_wgmma(value | 1 << bit)


def test_instruction_descriptor() -> None:
    d = InstructionDescriptor.from_bits(0x08400490)
    assert d == InstructionDescriptor("f32", "bf16", "bf16", False, False, Major.K, Major.K, 128, 256)
    assert to_bits(d) == 0x08400490
    flags = InstructionDescriptor("f32", "f16", "bf16", True, False, Major.MN, Major.K, 256, 160)
    assert InstructionDescriptor.from_bits(to_bits(flags)) == flags
    assert to_bits(flags) == 1 << 4 | 1 << 10 | 1 << 13 | 1 << 15 | 20 << 17 | 16 << 24
    for bits in (1 << 0, 1 << 2, 1 << 3, 1 << 6, 1 << 23, 1 << 29, 1 << 31, 2 << 4, 2 << 7, 7 << 10):
        with pytest.raises(EmulatorError):
            InstructionDescriptor.from_bits(to_bits(d) & ~(bits if bits in (2 << 4,) else 0) | bits)
    with pytest.raises(DescriptorError):
        InstructionDescriptor("f16", "bf16", "bf16", False, False, Major.K, Major.K, 128, 256).check(1)


def test_mma_shapes() -> None:
    legal = {
        (m, n, group)
        for group, rows, step in ((1, (64, 128), 8), (2, (128, 256), 16))
        for m in rows
        for n in range(step, 257, step)
    }
    for group in (1, 2):
        for m in (16, 32, 64, 128, 192, 256):
            for n in range(0, 281, 4):
                if (m, n, group) in legal:
                    matrix.check_mma_shape(m, n, group)
                else:
                    with pytest.raises(DescriptorError):
                        matrix.check_mma_shape(m, n, group)
    matrix.check_wgmma_shape(160)
    for n in (0, 4, 12, 264):
        with pytest.raises(DescriptorError):
            matrix.check_wgmma_shape(n)


# --- What a tensor map wrote, a descriptor reads ---------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", SWIZZLED)
@pytest.mark.parametrize("rows", [8, 64, 160, 256])
def test_k_major_swizzled(swizzle: Swizzle, rows: int) -> None:
    width = swizzle.span // 2
    x = random_elements(rows, width)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    load(shared, TILE, x, 0, 0, width, rows, swizzle)
    for k in range(0, width, 16):
        d = SharedDescriptor(TILE + 2 * k, 16, 8 * swizzle.span, 0, swizzle)
        assert np.array_equal(gather_operand(shared, d, Major.K, rows), x[:, k : k + 16])


def test_k_major_unswizzled() -> None:
    """Panels of eight columns: rows 16 bytes apart, groups of eight rows 128 bytes, panels `leading` apart."""
    rows, x = 72, random_elements(72, 32)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    for panel in range(4):
        load(shared, TILE + panel * rows * 16, x, 8 * panel, 0, 8, rows, Swizzle.NONE)
    for step in range(2):
        d = SharedDescriptor(TILE + step * 2 * rows * 16, rows * 16, 128, 0, Swizzle.NONE)
        assert np.array_equal(gather_operand(shared, d, Major.K, rows), x[:, 16 * step : 16 * step + 16])


@pytest.mark.parametrize("swizzle", SWIZZLED)
@pytest.mark.parametrize("spans", [1, 2, 3])
def test_mn_major_swizzled(swizzle: Swizzle, spans: int) -> None:
    """Boxes of one span along M or N by all of K, one after the other."""
    width, depth = swizzle.span // 2, 48
    x = random_elements(depth, spans * width)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    box_bytes = depth * swizzle.span
    for span in range(spans):
        load(shared, TILE + span * box_bytes, x, span * width, 0, width, depth, swizzle)
    for k in range(0, depth, 16):
        d = SharedDescriptor(TILE + k * swizzle.span, box_bytes, 8 * swizzle.span, 0, swizzle)
        assert np.array_equal(gather_operand(shared, d, Major.MN, spans * width), x[k : k + 16].T)


def test_mn_major_unswizzled() -> None:
    """Boxes of eight elements along M or N by all of K: `stride` to the next box, `leading` to the next eight k."""
    rows, depth = 40, 32
    x = random_elements(depth, rows)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    for chunk in range(rows // 8):
        load(shared, TILE + chunk * depth * 16, x, 8 * chunk, 0, 8, depth, Swizzle.NONE)
    for k in (0, 16):
        d = SharedDescriptor(TILE + k * 16, 128, depth * 16, 0, Swizzle.NONE)
        assert np.array_equal(gather_operand(shared, d, Major.MN, rows), x[k : k + 16].T)


@pytest.mark.parametrize("stride", [1024, 1152, 1280, 2304])
@pytest.mark.parametrize("shift", range(10))
def test_row_shifted_starts_need_base_offset_zero(stride: int, shift: int) -> None:
    """The cases that were measured on an H200: a start any number of rows into a tile that lies on its boundary."""
    x = random_elements(256, 64)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    load(shared, TILE, x, 0, 0, 64, 256, Swizzle.B128)
    rows = shift + np.arange(64) // 8 * (stride // 128) + np.arange(64) % 8
    for k in range(0, 64, 16):
        d = SharedDescriptor(TILE + shift * 128 + 2 * k, 16, stride, 0, Swizzle.B128)
        wanted = x[rows, k : k + 16]
        assert np.array_equal(gather_operand(shared, d, Major.K, 64), wanted)
        for base_offset in range(1, 8):
            other = replace(d, base_offset=base_offset)
            assert not np.array_equal(gather_operand(shared, other, Major.K, 64), wanted)


@pytest.mark.parametrize("swizzle", SWIZZLED)
def test_base_offset_moves_the_pattern_to_where_the_tile_starts(swizzle: Swizzle) -> None:
    """By the ISA's wording: a pattern that starts 128 * n bytes off its boundary, with base offset n."""
    x = random_elements(64, swizzle.span // 2)
    for n in range(1, 8):
        shared = np.zeros(SHARED_BYTES, np.uint8)
        scratch = np.zeros(SHARED_BYTES, np.uint8)
        load(scratch, TILE, x, 0, 0, swizzle.span // 2, 64, swizzle)
        shared[TILE + 128 * n :] = scratch[TILE : SHARED_BYTES - 128 * n]
        d = SharedDescriptor(TILE + 128 * n, 16, 8 * swizzle.span, n, swizzle)
        assert np.array_equal(gather_operand(shared, d, Major.K, 64), x[:, :16])


def test_the_two_classic_mistakes_read_something_else() -> None:
    x = random_elements(64, 64)
    shared = np.zeros(SHARED_BYTES, np.uint8)
    load(shared, TILE, x, 0, 0, 64, 64, Swizzle.B128)
    right = SharedDescriptor(TILE, 16, 1024, 0, Swizzle.B128)
    assert np.array_equal(gather_operand(shared, right, Major.K, 64), x[:, :16])
    for wrong in (
        replace(right, swizzle=Swizzle.B64, stride=512),
        replace(right, stride=1152),
        replace(right, start=TILE + 16),
    ):
        assert not np.array_equal(gather_operand(shared, wrong, Major.K, 64), x[:, :16])


def test_operands_outside_shared_memory() -> None:
    shared = np.zeros(SHARED_BYTES, np.uint8)
    last = SharedDescriptor(SHARED_BYTES - 8192, 16, 1024, 0, Swizzle.B128)
    gather_operand(shared, last, Major.K, 64)
    with pytest.raises(OutOfBounds):
        gather_operand(shared, replace(last, start=last.start + 128), Major.K, 64)
    with pytest.raises(OutOfBounds):
        gather_operand(shared, last, Major.K, 72)


@pytest.mark.parametrize(
    ("descriptor", "major"),
    [
        (SharedDescriptor(TILE, 16, 0, 0, Swizzle.B128), Major.K),
        (SharedDescriptor(TILE, 16, 512, 0, Swizzle.B128), Major.K),
        (SharedDescriptor(TILE, 0, 128, 0, Swizzle.NONE), Major.K),
        (SharedDescriptor(TILE, 0, 1024, 0, Swizzle.B128), Major.MN),
        (SharedDescriptor(TILE, 4096, 0, 0, Swizzle.B128), Major.MN),
    ],
)
def test_offsets_that_lay_parts_over_each_other(descriptor: SharedDescriptor, major: Major) -> None:
    with pytest.raises(DescriptorError, match="over each other"):
        matrix.operand_layout(descriptor, major, 128)


def test_modes_that_are_not_modelled_or_mean_nothing() -> None:
    with pytest.raises(UnsupportedInstruction):
        matrix.operand_layout(SharedDescriptor(TILE, 16, 1024, 0, Swizzle.B128_ATOM_32B), Major.MN, 64)
    with pytest.raises(DescriptorError):
        matrix.operand_layout(SharedDescriptor(TILE, 128, 256, 3, Swizzle.NONE), Major.K, 64)
    with pytest.raises(DescriptorError):
        matrix.operand_layout(SharedDescriptor(TILE, 2048, 1024, 0, Swizzle.B128), Major.MN, 60)


@pytest.mark.parametrize("swizzle", SWIZZLED)
def test_a_step_along_k_stays_in_its_row(swizzle: Swizzle) -> None:
    for start in range(0, 2 * swizzle.span, 16):
        d = SharedDescriptor(TILE + start, 16, 8 * swizzle.span, 0, swizzle)
        if start % swizzle.span + 32 <= swizzle.span:
            matrix.operand_layout(d, Major.K, 64)
        else:
            with pytest.raises(DescriptorError, match="leave their row"):
                matrix.operand_layout(d, Major.K, 64)


def test_layouts_are_shared_between_stages() -> None:
    first = SharedDescriptor(TILE, 16, 1024, 0, Swizzle.B128)
    assert matrix.operand_layout(first, Major.K, 128) is matrix.operand_layout(
        replace(first, start=3 * TILE), Major.K, 128
    )
    chunks = matrix.operand_chunks(first, Major.K, 128, shared_bytes=SHARED_BYTES)
    assert chunks.min() == TILE // 16
    assert not matrix.operand_layout(first, Major.K, 128).chunks.flags.writeable


# --- The product -----------------------------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> np.ndarray:
    return numerics.cvt(np.asarray(values, np.float32), "bf16", "f32", "rn")


def test_products_of_integers_are_exact() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (64, 320)), rng.integers(-8, 9, (48, 320))
    c = rng.integers(-100, 100, (64, 48)).astype(np.float32)
    left, right = (matrix.operand_values(bf16(v), "bf16") for v in (a, b))
    assert np.array_equal(matrix.multiply_accumulate(None, left, right), a @ b.T)
    assert np.array_equal(matrix.multiply_accumulate(c, left, right), a @ b.T + c)
    negated = matrix.operand_values(bf16(a), "bf16", negate=True)
    assert np.array_equal(matrix.multiply_accumulate(c, negated, right), c - a @ b.T)


def test_each_step_is_rounded_once() -> None:
    """Against rational sums: the accumulator and sixteen products, rounded to float32 after every sixteen."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((4, 64)), rng.standard_normal((4, 64))
    left, right = (matrix.operand_values(bf16(v), "bf16") for v in (a, b))
    c = rng.standard_normal((4, 4)).astype(np.float32)
    result = matrix.multiply_accumulate(c, left, right)
    for m in range(4):
        for n in range(4):
            total = Fraction(float(c[m, n]))
            for k in range(0, 64, 16):
                total += sum(
                    Fraction(x) * Fraction(y) for x, y in zip(left[m, k : k + 16], right[n, k : k + 16], strict=True)
                )
                total = Fraction(float(np.float32(float(total))))
            assert float(total) == result[m, n]


def test_infinities_and_nan_pass_through() -> None:
    a = np.full((8, 16), 1.0)
    a[0, 3], a[1, 0], a[1, 1] = np.inf, np.inf, -np.inf
    result = matrix.multiply_accumulate(None, matrix.operand_values(bf16(a), "bf16"), np.ones((8, 16)))
    assert np.isinf(result[0]).all()
    assert np.isnan(result[1]).all()
    assert (result[2:] == 16).all()


# --- Fragments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 24, 160, 256])
def test_wgmma_accumulator_fragment(n: int) -> None:
    d = np.arange(64 * n, dtype=np.float32).reshape(64, n)
    fragment = matrix.accumulator_to_fragment(d)
    assert fragment.shape == (n // 2, 128)
    for t in range(128):
        for i in range(n // 2):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (t % 4) + i % 2
            assert fragment[i, t] == d[row, column]
    assert np.array_equal(matrix.accumulator_from_fragment(fragment), d)


@pytest.mark.parametrize("warps", [1, 4])
def test_register_a_fragment(warps: int) -> None:
    """ISA: elements a0..a7 of a thread, in pairs; rows g and g + 8, columns 2q and 2q + 8."""
    a = random_elements(16 * warps, 16)
    fragment = a_to_fragment(a)
    assert fragment.shape == (4, 32 * warps)
    for t in range(32 * warps):
        for element in range(8):
            row = 16 * (t // 32) + t % 32 // 4 + (8 if element in (2, 3, 6, 7) else 0)
            column = 2 * (t % 4) + element % 2 + (8 if element >= 4 else 0)
            assert int(fragment[element // 2, t]) >> 16 * (element % 2) & 0xFFFF == a[row, column]
    assert np.array_equal(matrix.a_from_fragment(fragment), a)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix_and_stmatrix_fragments(count: int, transpose: bool) -> None:
    matrices = random_elements(count, 8, 8)
    fragment = matrix.matrices_to_fragment(matrices, transpose)
    assert fragment.shape == (count, 32)
    for t in range(32):
        for j in range(count):
            for e in range(2):
                row, column = t // 4, 2 * (t % 4) + e
                wanted = matrices[j, column, row] if transpose else matrices[j, row, column]
                assert int(fragment[j, t]) >> 16 * e & 0xFFFF == wanted
    assert np.array_equal(matrix.fragment_to_matrices(fragment, transpose), matrices)


def test_ldmatrix_x4_gives_the_a_fragment_of_mma() -> None:
    """The usual arrangement: matrices in the order (rows 0-7, k 0-7), (rows 8-15, k 0-7), then k 8-15."""
    a = random_elements(16, 16)
    matrices = np.stack([a[r : r + 8, k : k + 8] for k in (0, 8) for r in (0, 8)])
    assert np.array_equal(matrix.matrices_to_fragment(matrices), a_to_fragment(a))


def test_stmatrix_writes_an_accumulator_that_was_packed_to_halves() -> None:
    """The epilogue of an sm_90 kernel: two f32 columns of D become one register, four registers one stmatrix.x4."""
    d = np.random.default_rng(5).standard_normal((16, 16)).astype(np.float32)
    f = matrix.accumulator_to_fragment(d)
    packed = np.stack([numerics.cvt_pack(f[2 * i + 1], f[2 * i], "bf16x2") for i in range(4)])
    tiles = matrix.fragment_to_matrices(packed)
    halves = bf16(d)
    for i, (r, c) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        assert np.array_equal(tiles[i], halves[r : r + 8, c : c + 8])
