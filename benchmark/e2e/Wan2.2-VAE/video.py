"""Video files as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

WHITE = 255


def load_clips(path: Path, count: int, frames: int, height: int, width: int) -> torch.Tensor:
    """The beginning of a video as ``count`` clips of consecutive frames, each starting one frame after the last.

    Frames are resized, keeping their proportions, until they cover ``height`` x ``width``, and cropped around the
    centre.

    Args:
        path: any file that PyAV reads.

    Returns:
        FP32 ``[count, 3, frames, height, width]`` in [-1, 1].

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a video, or it has fewer than ``frames + count - 1`` frames.
    """
    needed = frames + count - 1
    decoded = tqdm(islice(_decode(path), needed), desc="decoding", unit="frame", total=needed, leave=False)
    pictures = [_fit(picture, height, width) for picture in decoded]
    if len(pictures) < needed:
        raise ValueError(f"{path} has {len(pictures)} frames, but {count} x {frames} frames take {needed}")
    video = torch.stack(pictures, dim=1) / (WHITE / 2) - 1
    return torch.stack([video[:, start : start + frames] for start in range(count)])


def _decode(path: Path) -> Iterator[torch.Tensor]:
    """RGB pictures, uint8 ``[3, H, W]``."""
    import av  # here, so that random video needs no PyAV

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream")
        for frame in container.decode(video=0):
            yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)


def _fit(picture: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """``picture`` resized to cover ``height`` x ``width`` and cropped around its centre: FP32, 0 to 255."""
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    covering = F.interpolate(picture[None].float(), size=size, mode="bicubic", antialias=True)[0].clamp(0, WHITE)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return covering[:, top : top + height, left : left + width]
