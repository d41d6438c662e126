"""Video files as tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    import av

WHITE = 255
UNSTATED_MATRIX = 2  # AVCOL_SPC_UNSPECIFIED, for which PyAV has no name
HD_HEIGHT, HD_WIDTH = 720, 1280  # from here on, players take a clip that does not say its matrix for BT.709
DISPLAY_MATRIX = struct.Struct("=9i")


def load_clips(
    path: Path, count: int, frames: int, height: int, width: int, on_frame: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """The beginning of a video as ``count`` clips of consecutive frames, each starting one frame after the last.

    Frames are turned upright, resized, keeping their proportions, until they cover ``height`` x ``width``, and cropped
    around the centre.

    Args:
        path: any file that PyAV reads.
        on_frame: called after each frame that was decoded.

    Returns:
        FP32 ``[count, 3, frames, height, width]`` in [-1, 1].

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a video, it is damaged, or it has fewer than ``frames + count - 1`` frames.
    """
    needed = frames + count - 1
    pictures = []
    for picture in islice(decode(path), needed):
        pictures.append(_fit(picture, height, width))
        on_frame()
    if len(pictures) < needed:
        raise ValueError(f"{path} has {len(pictures)} frames, but {count} x {frames} frames take {needed}")
    video = torch.stack(pictures, dim=1) / (WHITE / 2) - 1
    return torch.stack([video[:, start : start + frames] for start in range(count)])


def decode(path: Path) -> Iterator[torch.Tensor]:
    """The pictures of a local file, upright, in full-range RGB: uint8 ``[3, H, W]``.

    Raises: as :func:`load_clips` does.
    """
    import av  # here, so that random video needs no PyAV

    path.open("rb").close()  # PyAV's words for a file that cannot be opened do not all name it
    try:
        # With the protocol in front, no part of a name is taken for one.
        with av.open(f"file:{path}") as container:
            if not container.streams.video:
                raise ValueError(f"{path} has no video stream")
            for number, frame in enumerate(container.decode(video=0)):
                if frame.is_corrupt:
                    raise ValueError(f"{path} is damaged in frame {number}")
                yield _upright(torch.from_numpy(_rgb(frame)).permute(2, 0, 1), frame)
    except av.FFmpegError as error:
        raise ValueError(f"{path} cannot be decoded: {error.strerror}") from error


def _rgb(frame: av.VideoFrame) -> object:
    """The picture by the matrix and the range that the frame states, an array ``[H, W, 3]``."""
    from av.video.reformatter import Colorspace

    high_definition = frame.height >= HD_HEIGHT or frame.width >= HD_WIDTH
    matrix = Colorspace.ITU709 if frame.colorspace == UNSTATED_MATRIX and high_definition else None
    return frame.to_ndarray(format="rgb24", src_colorspace=matrix)


def _upright(picture: torch.Tensor, frame: av.VideoFrame) -> torch.Tensor:
    """``picture`` turned and mirrored as the frame's display matrix says, in steps of 90 degrees.

    The matrix, row by row (a, b, u), (c, d, v), ..., maps a pixel (x, y) to (ax + cy, bx + dy).
    """
    stored = frame.side_data.get("DISPLAYMATRIX")
    if stored is None:
        return picture
    a, b, _, c, d, *_ = DISPLAY_MATRIX.unpack(bytes(stored))
    if abs(a) >= abs(b):
        across, down = a, d
    else:
        picture, across, down = picture.transpose(1, 2), c, b
    mirrored = [axis for axis, sign in ((2, across), (1, down)) if sign < 0]
    return picture.flip(mirrored)


def _fit(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """``picture`` resized to cover ``height`` x ``width`` and cropped around its centre: FP32, 0 to 255."""
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    covering = F.interpolate(picture[None].float(), size=size, mode="bicubic", antialias=True)[0].clamp(0, WHITE)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return covering[:, top : top + height, left : left + width]
