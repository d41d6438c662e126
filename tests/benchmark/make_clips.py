"""Tiny clips, made with PyAV."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

Color = tuple[int, int, int]
LUMA_WEIGHTS = {1: (0.2126, 0.0722), 5: (0.299, 0.114), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}
"""Of red and blue, by the number of a matrix in ITU-T H.273."""


def encode(path: Path, pictures: Sequence[av.VideoFrame], codec: str = "ffv1") -> Path:
    """Frames of one size and format as a file whose name says its container. The stream states what the frames do."""
    with av.open(f"file:{path}", "w", format=path.suffix[1:].replace("mkv", "matroska")) as container:
        stream = container.add_stream(codec, rate=Fraction(25))
        first = pictures[0]
        stream.width, stream.height, stream.pix_fmt = first.width, first.height, first.format.name
        context = stream.codec_context
        context.colorspace, context.color_range = first.colorspace, first.color_range
        for picture in pictures:
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def flat_clip(path: Path, colors: Sequence[Color], height: int = 32, width: int = 48) -> Path:
    """Lossless frames of one colour each, in RGB."""
    pictures = [np.broadcast_to(np.uint8(color), (height, width, 3)) for color in colors]
    return encode(path, [rgb(picture) for picture in pictures])


def rgb(picture: np.ndarray) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24").reformat(format="bgr0")
    frame.colorspace = 0  # RGB
    return frame


def yuv(color: Color, matrix: int, full_range: bool, height: int, width: int, stated: bool = True) -> av.VideoFrame:
    """A frame of one colour in 4:4:4, by the definition of the matrix; ``stated`` says whether it names it."""
    red, blue = LUMA_WEIGHTS[matrix]
    r, g, b = (value / 255 for value in color)
    y = red * r + (1 - red - blue) * g + blue * b
    u, v = (b - y) / (2 - 2 * blue), (r - y) / (2 - 2 * red)
    levels = (255 * y, 128 + 255 * u, 128 + 255 * v) if full_range else (16 + 219 * y, 128 + 224 * u, 128 + 224 * v)
    planes = [np.full((height, width), np.clip(round(level), 0, 255), np.uint8) for level in levels]
    frame = av.VideoFrame.from_ndarray(np.stack(planes), format="yuv444p")
    frame.colorspace, frame.color_range = (matrix if stated else 2), (2 if full_range else 1)
    return frame


def gradients(path: Path) -> Path:
    """Eight lossless frames of 64x36: red grows to the right, green downwards, blue with time."""
    rows, columns = np.indices((36, 64))
    layers = [np.stack([columns * 4, rows * 7, np.full_like(rows, number * 30)], axis=-1) for number in range(8)]
    return encode(path, [rgb(layer.astype(np.uint8)) for layer in layers])


MP4_MATRIX = np.array([1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30], ">i4").tobytes()


def with_display_matrix(path: Path, a: int, b: int, c: int, d: int) -> Path:
    """Replace the display matrix of an MP4 file's track: pixel (x, y) is shown at (ax + cy, bx + dy)."""
    content = path.read_bytes()
    assert MP4_MATRIX in content[content.index(b"tkhd") :]
    matrix = np.array([a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30], ">i4").tobytes()
    head, tail = content[: content.index(b"tkhd")], content[content.index(b"tkhd") :]
    path.write_bytes(head + tail.replace(MP4_MATRIX, matrix, 1))
    return path
