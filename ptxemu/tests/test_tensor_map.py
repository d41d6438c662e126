"""Tensor maps against element-by-element loops over the tensor, and the driver's rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ptx_encodings import read_box
from ptxemu.errors import (
    DescriptorError,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    UnsupportedInstruction,
)
from ptxemu.models import numerics
from ptxemu.models.tensor_map import (
    CHUNK_BYTES,
    DataType,
    Fill,
    Im2colWindow,
    Swizzle,
    TensorMap,
    array_source,
    swizzle_address,
    swizzled_chunks,
    write_box,
)

MODELLED_SWIZZLES = [s for s in Swizzle if s is not Swizzle.B128_ATOM_32B_FLIP_8B]
ALIGNMENT = 64  # elements of two bytes: 128 bytes


def tensor(*shape: int) -> np.ndarray:
    """Distinct 16-bit elements (as far as 16 bits go) at a 128-byte aligned address."""
    count = int(np.prod(shape))
    raw = np.arange(count + ALIGNMENT, dtype=np.uint16)
    start = -(raw.ctypes.data // 2) % ALIGNMENT
    result = raw[start : start + count].reshape(shape)
    result[...] = (np.arange(1, count + 1) % 65521).reshape(shape)
    return result


def elements(dense: np.ndarray, *shape: int) -> np.ndarray:
    return dense.view(np.uint16).reshape(shape)


def box_by_loop(x: np.ndarray, coords: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """The box of a tensor whose axes are outermost first; map order is innermost first."""
    result = np.zeros(tuple(counts[::-1]), x.dtype)
    for index in itertools.product(*(range(n) for n in counts[::-1])):
        place = tuple(c + i * s for c, i, s in zip(coords[::-1], index, steps[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, x.shape, strict=True)):
            result[index] = x[place]
    return result


# --- Swizzling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", MODELLED_SWIZZLES)
def test_swizzling_twice_changes_nothing_and_permutes_each_line(swizzle: Swizzle) -> None:
    address = np.arange(0, 4096)
    swizzled = swizzle_address(address, swizzle)
    assert np.array_equal(swizzle_address(swizzled, swizzle), address)
    assert np.array_equal(swizzled // 128, address // 128)
    assert np.array_equal(swizzled % 16, address % 16)
    span = max(swizzle.span, 16)
    assert np.array_equal(swizzled // span, address // span)
    moved = swizzled != address
    assert moved.any() == (swizzle is not Swizzle.NONE)


def test_swizzle_patterns_by_their_written_definition() -> None:
    """The chunk of each 128-byte row that holds logical chunk 0, for the first eight rows."""
    rows = np.arange(8) * 128
    first = {s: ((swizzle_address(rows, s) - rows) // CHUNK_BYTES).tolist() for s in MODELLED_SWIZZLES}
    assert first[Swizzle.NONE] == [0] * 8
    assert first[Swizzle.B32] == [0, 1] * 4
    assert first[Swizzle.B64] == [0, 1, 2, 3] * 2
    assert first[Swizzle.B128] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert first[Swizzle.B128_ATOM_32B] == [0, 2, 4, 6] * 2
    assert first[Swizzle.B128_ATOM_64B] == [0, 4] * 4


def test_the_flip_is_refused() -> None:
    with pytest.raises(UnsupportedInstruction):
        swizzle_address(0, Swizzle.B128_ATOM_32B_FLIP_8B)


@pytest.mark.parametrize("swizzle", MODELLED_SWIZZLES)
@pytest.mark.parametrize("address", [1024, 1152, 2048 + 896])
def test_a_box_lands_where_the_absolute_address_says(swizzle: Swizzle, address: int) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 8192, dtype=np.uint8)
    before = shared.copy()
    dense = rng.integers(0, 256, 128 * 11, dtype=np.uint8)
    write_box(shared, address, dense, swizzle)
    for i in range(dense.size):
        assert shared[swizzle_address(address + i, swizzle)] == dense[i]
    outside = np.ones(shared.size, bool)
    outside[address : address + dense.size] = False
    assert np.array_equal(shared[outside], before[outside])
    assert np.array_equal(read_box(shared, address, dense.size, swizzle), dense)


def test_boxes_outside_shared_memory_and_misaligned_ones_are_reported() -> None:
    shared, dense = np.zeros(1024, np.uint8), np.zeros(256, np.uint8)
    with pytest.raises(OutOfBounds):
        write_box(shared, 896, dense, Swizzle.NONE)
    with pytest.raises(Misaligned):
        swizzled_chunks(1024 + 64, 128, Swizzle.NONE)


# --- Tiled maps ------------------------------------------------------------------------------------------------------

TILED_CASES = [
    ((24,), (16,), [(0,), (8,), (-5,), (20,), (24,), (-16,)]),
    ((10, 40), (16, 4), [(0, 0), (24, 6), (30, 8), (-3, -2), (40, 0), (0, 10), (39, 9)]),
    ((3, 5, 16), (8, 2, 2), [(0, 0, 0), (8, 4, 2), (-4, -1, -1), (12, 3, 1)]),
    ((2, 3, 4, 16), (8, 2, 3, 1), [(8, 2, 1, 1), (0, -1, 2, 0)]),
    ((2, 2, 3, 4, 8), (8, 3, 2, 2, 2), [(0, 2, 1, 1, 1), (-1, -1, -1, -1, -1), (3, 0, 0, 0, 0)]),
]


@pytest.mark.parametrize(("shape", "box", "places"), TILED_CASES)
def test_tiled_loads_and_stores(shape: tuple[int, ...], box: tuple[int, ...], places: list[tuple[int, ...]]) -> None:
    x = tensor(*shape)
    original = x.copy()
    m = TensorMap.over(x, DataType.BFLOAT16, box)
    assert m.box_bytes == 2 * int(np.prod(box))
    for coords in places:
        wanted = box_by_loop(original, coords, box, (1,) * len(box))
        dense = m.load(coords)
        assert np.array_equal(elements(dense, *box[::-1]), wanted)
        assert m.bytes_in_bounds(coords) == 2 * np.count_nonzero(wanted)
        if wanted.any():
            assert np.array_equal(m.rows_in_bounds(coords), wanted.any(axis=-1).ravel())
        x[...] = 0
        m.store(coords, dense)
        restored = box_by_loop(x, coords, box, (1,) * len(box))
        assert np.array_equal(restored, wanted)
        assert np.count_nonzero(x) == np.count_nonzero(wanted)
        x[...] = original


@pytest.mark.parametrize("steps", [(1, 2), (1, 3), (1, 8)])
@pytest.mark.parametrize("coords", [(0, 0), (8, 1), (0, -3), (-8, 5), (0, -7), (0, 19)])
def test_element_strides_skip_rows(steps: tuple[int, int], coords: tuple[int, int]) -> None:
    x = tensor(20, 24)
    m = TensorMap.over(x, DataType.UINT16, (16, 10), element_strides=steps)
    count = -(-10 // steps[1])
    assert m.box_bytes == 2 * 16 * count
    wanted = box_by_loop(x, coords, (16, count), steps)
    assert np.array_equal(m.rows_in_bounds(coords), wanted.any(axis=1))
    assert np.array_equal(elements(m.load(coords), count, 16), wanted)
    assert m.bytes_in_bounds(coords) == 2 * np.count_nonzero(wanted)


def test_overlapping_rows() -> None:
    """Rows of 64 elements that start 16 elements apart, as the C16 convolution reads them."""
    x = tensor(100 * 16)
    base = x.ctypes.data
    m = TensorMap(base, DataType.BFLOAT16, (64, 97), (32,), (64, 8), swizzle=Swizzle.B128, source=array_source(x))
    dense = elements(m.load((0, 90)), 8, 64)
    for row in range(7):
        assert np.array_equal(dense[row], x[(90 + row) * 16 : (90 + row) * 16 + 64])
    assert not dense[7].any()


def test_strides_may_exceed_the_rows() -> None:
    padded = tensor(6, 5, 32)
    x = padded[1:, 1:4, :24]
    m = TensorMap.over(x, DataType.BFLOAT16, (8, 2, 3))
    assert np.array_equal(elements(m.load((8, 1, 1)), 3, 2, 8), x[1:4, 1:3, 8:16])


def test_nan_fill() -> None:
    x = tensor(4, 16)
    m = TensorMap.over(x, DataType.BFLOAT16, (16, 4), fill=Fill.NAN)
    dense = m.load((8, 2)).view(np.uint16).reshape(4, 16)
    assert np.array_equal(dense[:2, :8], x[2:, 8:])
    rest = np.concatenate((dense[:2, 8:].ravel(), dense[2:].ravel()))
    assert np.isnan(numerics.widen(rest, "bf16")).all()
    single = TensorMap.over(np.zeros((1, 4), np.float32), DataType.FLOAT32, (8, 1), fill=Fill.NAN)
    assert np.isnan(single.load((2, 0)).view(np.float32)).tolist() == [False] * 2 + [True] * 6


def test_reductions() -> None:
    x = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])
    box = np.float32([10, -10, 20, 0] * 2)
    for op, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        y = x.copy()
        TensorMap.over(y, DataType.FLOAT32, (4, 2)).reduce((2, 1), box.view(np.uint8), op)
        wanted = x.copy()
        wanted[1, 2:] = function(x[1, 2:], box[:2])
        assert np.array_equal(y, wanted)
    bits = np.uint16([[0x3F80] * 8])  # bf16 ones
    TensorMap.over(bits, DataType.BFLOAT16, (8, 1)).reduce((0, 0), np.uint16([0x3C00] * 8).view(np.uint8), "add")
    assert bits.tolist() == [[0x3F81] * 8]  # one and 2**-7, exactly one ulp
    words = np.uint32([[0b1100] * 4])
    TensorMap.over(words, DataType.UINT32, (4, 1)).reduce((0, 0), np.uint32([0b1010] * 4).view(np.uint8), "xor")
    assert words.tolist() == [[0b0110] * 4]
    with pytest.raises(UnsupportedInstruction):
        TensorMap.over(x, DataType.FLOAT32, (4, 2)).reduce((0, 0), box.view(np.uint8), "and")


def test_parameters_of_the_driver_call() -> None:
    x = tensor(30, 64)
    m = TensorMap.from_tiled(9, 2, x.ctypes.data, [64, 30], [128], [32, 4], [1, 1], 0, 3, 2, 0, source=array_source(x))
    assert m == TensorMap.over(x, DataType.BFLOAT16, (32, 4), swizzle=Swizzle.B128)
    assert np.array_equal(elements(m.load((32, 7)), 4, 32), x[7:11, 32:])
    # Without interleaving the first element stride is ignored.
    again = TensorMap.from_tiled(9, 2, x.ctypes.data, [64, 30], [128], [32, 4], [5, 1], swizzle=3)
    assert again == m


def test_accesses_outside_the_array_are_reported() -> None:
    x = tensor(8, 16)
    lying = TensorMap(x.ctypes.data, DataType.BFLOAT16, (16, 9), (32,), (16, 4), source=array_source(x))
    assert lying.load((0, 4)).any()
    with pytest.raises(OutOfBounds):
        lying.load((0, 5))
    with pytest.raises(DescriptorError, match="no source"):
        TensorMap(x.ctypes.data, DataType.BFLOAT16, (16, 8), (32,), (16, 4)).load((0, 0))


def test_wrong_numbers_of_coordinates_and_bytes() -> None:
    m = TensorMap.over(tensor(8, 16), DataType.BFLOAT16, (16, 4))
    for call in (
        lambda: m.load((0,)),
        lambda: m.load((0, 0), (1,)),
        lambda: m.store((0, 0), np.zeros(5, np.uint8)),
    ):
        with pytest.raises(DescriptorError):
            call()


# --- im2col ----------------------------------------------------------------------------------------------------------


def im2col_by_loop(
    x: np.ndarray, window: Im2colWindow, coords: Sequence[int], offsets: Sequence[int], steps: Sequence[int]
) -> np.ndarray:
    """Walk the base pixels one by one: x is [N, ..., W, C], everything else W first."""
    extents = x.shape[::-1]
    spatial = len(window.lower)
    result = np.zeros((window.pixels_per_column, window.channels_per_pixel), x.dtype)
    base, image = list(coords[1:-1]), coords[-1]
    for row in result:
        pixel = [b + o for b, o in zip(base, offsets, strict=True)]
        if 0 <= image < extents[-1] and all(0 <= p < n for p, n in zip(pixel, extents[1:-1], strict=True)):
            for i in range(window.channels_per_pixel):
                if 0 <= coords[0] + i < extents[0]:
                    row[i] = x[(image, *pixel[::-1], coords[0] + i)]
        for d in range(spatial):
            base[d] += steps[d + 1]
            if base[d] <= extents[d + 1] - 1 + window.upper[d]:
                break
            base[d] = window.lower[d]
        else:
            image += 1
    return result


def im2col_map(x: np.ndarray, window: Im2colWindow, steps: tuple[int, ...] = ()) -> TensorMap:
    return TensorMap(
        x.ctypes.data,
        DataType.BFLOAT16,
        x.shape[::-1],
        x.strides[-2::-1],
        element_strides=steps,
        window=window,
        source=array_source(x),
    )


# Shape (N, ..., W, C), lower and upper corners and steps W first.
IM2COL_CASES = [
    ((2, 9, 16), (-1,), (-1,), (1, 1, 1)),
    ((2, 5, 7, 16), (-1, -1), (-1, -1), (1, 1, 1, 1)),
    ((2, 5, 8, 16), (0, -2), (-2, 1), (1, 2, 1, 1)),
    ((2, 4, 5, 6, 16), (-1, -1, -2), (-1, -1, -2), (1, 1, 1, 1, 1)),
    ((2, 4, 5, 6, 16), (0, 0, 0), (-2, -2, -2), (1, 1, 1, 1, 1)),
    ((3, 5, 7, 9, 16), (-1, -1, -1), (-1, -1, -1), (1, 2, 2, 1, 1)),
]


@pytest.mark.parametrize(("shape", "lower", "upper", "steps"), IM2COL_CASES)
def test_im2col_loads(shape: tuple[int, ...], lower: Any, upper: Any, steps: tuple[int, ...]) -> None:
    x = tensor(*shape)
    spatial = len(lower)
    window = Im2colWindow(lower, upper, 8, 37)
    m = im2col_map(x, window, steps)
    assert m.box_bytes == 37 * 8 * 2
    starts = [tuple(lower), tuple(low + step for low, step in zip(lower, steps[1:], strict=False))]
    for start, image, channel in itertools.product(starts, (0, shape[0] - 1), (0, 8, 12)):
        for offsets in itertools.product(range(3), repeat=spatial):
            coords = (channel, *start, image)
            wanted = im2col_by_loop(x, window, coords, offsets, steps)
            assert np.array_equal(elements(m.load(coords, offsets), 37, 8), wanted)
            assert m.bytes_in_bounds(coords, offsets) == 2 * np.count_nonzero(wanted)
            assert np.array_equal(m.rows_in_bounds(coords, offsets), wanted.any(axis=1))


def test_a_convolution_through_im2col() -> None:
    """A 3x3x3 convolution with zero padding as 27 im2col loads, against a direct sum."""
    rng = np.random.default_rng(3)
    x = tensor(1, 3, 4, 5, 8)
    x[...] = numerics.cvt(rng.integers(-4, 5, x.shape).astype(np.float32), "bf16", "f32", "rn")
    weight = rng.integers(-4, 5, (3, 3, 3, 8)).astype(np.float64)
    m = im2col_map(x, Im2colWindow((-1, -1, -1), (-1, -1, -1), 8, 60))
    total = np.zeros(60)
    for t, r, s in itertools.product(range(3), repeat=3):
        tap = numerics.widen(elements(m.load((0, -1, -1, -1, 0), (s, r, t)), 60, 8), "bf16")
        total += tap @ weight[t, r, s]
    padded = np.pad(numerics.widen(x, "bf16")[0], ((1, 1), (1, 1), (1, 1), (0, 0)))
    direct = np.zeros((3, 4, 5))
    for t, r, s in itertools.product(range(3), repeat=3):
        direct += padded[t : t + 3, r : r + 4, s : s + 5] @ weight[t, r, s]
    assert np.array_equal(total.reshape(3, 4, 5), direct)


def test_im2col_stores_walk_like_loads_and_drop_what_is_outside() -> None:
    x = tensor(2, 3, 4, 5, 16)
    original = x.copy()
    m = im2col_map(x, Im2colWindow((0, 0, 0), (0, 0, 0), 8, 50))
    coords = (8, 2, 1, 0, 1)
    dense = m.load(coords, (0, 0, 0))
    x[...] = 0
    m.store(coords, dense)
    wanted = np.zeros_like(x)
    flat = wanted.reshape(-1, 16)
    first = ((1 * 3 + 0) * 4 + 1) * 5 + 2
    flat[first : first + 50, 8:] = original.reshape(-1, 16)[first : first + 50, 8:]
    assert np.array_equal(x, wanted)


def test_im2col_misuse() -> None:
    m = im2col_map(tensor(2, 5, 7, 16), Im2colWindow((-1, -1), (-1, -1), 8, 16), (1, 2, 1, 1))
    for call in (
        lambda: m.load((0, -1, -1, 0), (0,)),
        lambda: m.load((0, -1, 0), (0, 0)),
        lambda: m.load((0, 0, -1, 0), (0, 0)),  # off the grid of steps of two
        lambda: m.load((0, 7, -1, 0), (0, 0)),
        lambda: m.load((0, -1, -1, 0), (256, 0)),
        lambda: m.load((0, -1, -1, 0), (-1, 0)),
        lambda: m.store((0, -1, -1, 0), np.zeros(m.box_bytes, np.uint8)),
    ):
        with pytest.raises(EmulatorError):
            call()


def test_parameters_of_the_driver_call_for_im2col() -> None:
    x = tensor(2, 4, 5, 6, 16)
    args = ([16, 6, 5, 4, 2], x.strides[-2::-1], [-1, -1, 0], [0, -1, 1], 8, 33, [1] * 5, 0, 1, 0, 0)
    m = TensorMap.from_im2col(9, 5, x.ctypes.data, *args, source=array_source(x))
    assert m.window == Im2colWindow((-1, -1, 0), (0, -1, 1), 8, 33)
    assert m.swizzle is Swizzle.B32
    assert m.load((0, -1, -1, 0, 0), (1, 1, 0)).any()


# --- The driver's rules ----------------------------------------------------------------------------------------------

VALID = {"base": 4096, "data_type": DataType.BFLOAT16, "extents": (64, 30), "strides": (128,), "box": (64, 8)}


@pytest.mark.parametrize(
    "change",
    [
        {"base": 4104},
        {"strides": (136,)},
        {"strides": (2**40,)},
        {"strides": (128, 256)},
        {"box": (64, 257)},
        {"box": (64, 0)},
        {"box": (64,)},
        {"box": (4, 8)},  # 8 bytes
        {"swizzle": Swizzle.B64},  # 128 bytes a row
        {"box": (128, 8), "swizzle": Swizzle.B128},
        {"extents": (0, 30)},
        {"extents": (64, 2**32 + 1)},
        {"element_strides": (1, 9)},
        {"element_strides": (1, 0)},
        {"element_strides": (2, 1)},
        {"extents": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6},
        {"data_type": DataType.UINT16, "fill": Fill.NAN},
        {"data_type": DataType.TFLOAT32},
        {"data_type": DataType.PACKED_16U4_ALIGN8B},
        {"swizzle": Swizzle.B128_ATOM_32B_FLIP_8B},
        {"window": Im2colWindow((0,), (0,), 8, 8), "box": ()},
    ],
)
def test_maps_that_the_driver_refuses(change: dict[str, Any]) -> None:
    TensorMap(**VALID)
    with pytest.raises(EmulatorError):
        TensorMap(**(VALID | change))


IM2COL_VALID = {
    "base": 4096,
    "data_type": DataType.BFLOAT16,
    "extents": (64, 7, 5, 4, 2),
    "strides": (128, 896, 4480, 17920),
}


@pytest.mark.parametrize(
    "window",
    [
        Im2colWindow((-17, 0, 0), (0, 0, 0), 64, 128),
        Im2colWindow((0, 0, 0), (16, 0, 0), 64, 128),
        Im2colWindow((0, 0), (0, 0, 0), 64, 128),
        Im2colWindow((0, 0, 0), (0, 0, 0), 257, 128),
        Im2colWindow((0, 0, 0), (0, 0, 0), 4, 128),
        Im2colWindow((0, 0, 0), (0, 0, 0), 64, 1025),
        Im2colWindow((0, 0, 2), (0, 0, -2), 64, 128),
    ],
)
def test_im2col_windows_that_are_refused(window: Im2colWindow) -> None:
    TensorMap(**IM2COL_VALID, window=Im2colWindow((-16, -1, -1), (15, 0, 0), 64, 128))
    with pytest.raises(DescriptorError):
        TensorMap(**IM2COL_VALID, window=window)


def test_im2col_maps_do_not_step_over_images() -> None:
    window = Im2colWindow((0, 0, 0), (0, 0, 0), 64, 128)
    TensorMap(**IM2COL_VALID, window=window, element_strides=(1, 2, 2, 2, 1))
    with pytest.raises(UnsupportedInstruction):
        TensorMap(**IM2COL_VALID, window=window, element_strides=(1, 1, 1, 1, 2))


@pytest.mark.parametrize("change", [{"interleave": 1}, {"data_type": 99}, {"swizzle": 7}, {"rank": 3}])
def test_encode_parameters_that_are_refused(change: dict[str, int]) -> None:
    arguments = {"data_type": 9, "rank": 2, "address": 4096, "extents": [64, 30], "strides": [128], "box": [64, 8]}
    arguments |= {"element_strides": [1, 1]}
    TensorMap.from_tiled(**arguments)
    with pytest.raises(EmulatorError):
        TensorMap.from_tiled(**(arguments | change))
