"""Clips as people have them: their colours, which way up they are, their names, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from benchmark.e2e.clips import HD_WIDTH, decode, load_clips
from tests.benchmark import make_clips

COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 30, 90), (20, 180, 220), (255, 255, 255), (0, 0, 0)]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clips.gradients(tmp_path_factory.mktemp("clip") / "clip.mkv")


def test_clips_are_cropped_around_the_centre(gradients: Path) -> None:
    clips = load_clips(gradients, count=3, frames=5, height=36, width=32)
    assert clips.shape == (3, 3, 5, 36, 32)
    for start in range(3):
        expected = torch.arange(start, start + 5) * 30 / 127.5 - 1
        assert torch.allclose(clips[start, 2], expected[:, None, None].expand(5, 36, 32), atol=1e-2)
    columns, rows = torch.arange(16, 48) * 4 / 127.5 - 1, torch.arange(36) * 7 / 127.5 - 1
    assert torch.allclose(clips[0, 0], columns.expand(5, 36, 32), atol=1e-2)
    assert torch.allclose(clips[0, 1], rows[:, None].expand(5, 36, 32), atol=1e-2)


@pytest.mark.parametrize(("height", "width"), [(72, 64), (18, 64), (17, 31)])
def test_clips_are_resized_to_cover(gradients: Path, height: int, width: int) -> None:
    frame = load_clips(gradients, count=1, frames=1, height=height, width=width)[0, :, 0]
    assert frame.shape == (3, height, width)
    assert frame.min() >= -1
    assert frame.max() <= 1
    scale = max(height / 36, width / 64)
    middle = frame[:, height // 2, width // 2]
    assert middle[0] == pytest.approx(32 * 4 / 127.5 - 1, abs=4 / scale / 127.5 + 0.02)
    assert frame[0].diff(dim=1).mean() == pytest.approx(4 / scale / 127.5, rel=0.1)


def test_short_clips_are_refused(gradients: Path) -> None:
    assert load_clips(gradients, count=4, frames=5, height=16, width=16).shape[0] == 4
    with pytest.raises(ValueError, match="8 frames, but 5 x 5 frames take 9"):
        load_clips(gradients, count=5, frames=5, height=16, width=16)


# --- colours ---------------------------------------------------------------------------------------------------------


def assert_shows(path: Path, colors: list[make_clips.Color]) -> None:
    pictures = list(decode(path))
    assert len(pictures) == len(colors)
    for picture, color in zip(pictures, colors, strict=True):
        assert (picture.int() - torch.tensor(color)[:, None, None]).abs().max() <= 2, color


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", make_clips.LUMA_WEIGHTS)
def test_colors_follow_the_stated_matrix_and_range(tmp_path: Path, matrix: int, full_range: bool) -> None:
    pictures = [make_clips.yuv(color, matrix, full_range, 16, 32) for color in COLORS]
    assert_shows(make_clips.encode(tmp_path / "clip.mkv", pictures), COLORS)


@pytest.mark.parametrize(("width", "matrix"), [(64, 6), (HD_WIDTH, 1)])
def test_what_states_no_matrix_is_taken_as_players_do(tmp_path: Path, width: int, matrix: int) -> None:
    pictures = [make_clips.yuv(color, matrix, False, 16, width, stated=False) for color in COLORS]
    assert_shows(make_clips.encode(tmp_path / "clip.mkv", pictures), COLORS)


def test_rgb_stays_as_it_is(tmp_path: Path) -> None:
    assert_shows(make_clips.flat_clip(tmp_path / "clip.mkv", COLORS, width=HD_WIDTH), COLORS)


# --- orientation -----------------------------------------------------------------------------------------------------

QUARTERS = np.array([[(200, 0, 0), (0, 200, 0)], [(0, 0, 200), (200, 200, 200)]], np.uint8)  # all four differ


@pytest.mark.parametrize(
    ("matrix", "shown"),
    [
        ((1, 0, 0, 1), lambda quarters: quarters),
        ((0, 1, -1, 0), lambda quarters: np.rot90(quarters, -1)),  # clockwise, as phones write portraits
        ((-1, 0, 0, -1), lambda quarters: np.rot90(quarters, 2)),
        ((0, -1, 1, 0), np.rot90),
        ((-1, 0, 0, 1), np.fliplr),
        ((1, 0, 0, -1), np.flipud),
    ],
    ids=["as it is", "clockwise", "half a turn", "counterclockwise", "mirrored", "upside down"],
)
def test_clips_are_upright(tmp_path: Path, matrix: tuple[int, int, int, int], shown) -> None:
    stored = QUARTERS.repeat(16, axis=0).repeat(32, axis=1)
    frame = av.VideoFrame.from_ndarray(stored, format="rgb24").reformat(format="yuv444p")
    clip = make_clips.encode(tmp_path / "clip.mp4", [frame] * 3, codec="libx264")
    pictures = list(decode(make_clips.with_display_matrix(clip, *matrix)))
    assert len(pictures) == 3
    expected = shown(QUARTERS)
    for picture in pictures:
        height, width = picture.shape[1:]
        assert (height, width) == ((32, 64) if matrix[0] else (64, 32))
        for row in range(2):
            for column in range(2):
                centre = picture[:, height * (2 * row + 1) // 4, width * (2 * column + 1) // 4]
                assert (centre.int() - torch.from_numpy(expected[row, column].astype(np.int32))).abs().max() < 40


# --- what cannot be read ---------------------------------------------------------------------------------------------


def without_a_file(path: Path) -> None:
    """Nothing is there."""


def text(path: Path) -> None:
    path.write_text("no video" * 100)


def empty(path: Path) -> None:
    path.touch()


def folder(path: Path) -> None:
    path.mkdir()


def truncated(path: Path) -> None:
    make_clips.gradients(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])


def header_only(path: Path) -> None:
    make_clips.gradients(path)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\x1f\x43\xb6\x75")])  # up to the first cluster of Matroska


def audio(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_a_file, "No such file"),
        (text, "cannot be decoded|no video stream"),
        (empty, "cannot be decoded|no video stream"),
        (folder, "directory"),
        (truncated, "has [0-7] frames, but 1 x 8 frames take 8|is damaged|cannot be decoded"),
        (header_only, "has 0 frames, but 1 x 8 frames take 8|cannot be decoded"),
        (audio, "has no video stream"),
    ],
)
def test_what_is_no_whole_clip_is_told(tmp_path: Path, make, message: str) -> None:
    path = tmp_path / "clip.mkv"
    make(path)
    with pytest.raises((OSError, ValueError), match=message) as raised:
        load_clips(path, count=1, frames=8, height=16, width=16)
    assert "clip.mkv" in str(raised.value)
    assert "\n" not in str(raised.value)
