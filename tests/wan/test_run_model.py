"""The end-to-end program: what it accepts, what it reports, and that it notices a wrong result."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from cudnn_fused.wan import FusedWanEncoder
from tests.wan.conftest import SMALL, unused_decoder

TINY = ["--device", "cpu", "--frames", "5", "--height", "32", "--width", "48"]


@pytest.fixture
def small_run_model(run_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with the small architecture in place of the production one."""
    monkeypatch.setattr(run_model, "PRODUCTION", {**run_model.PRODUCTION, **SMALL})
    return run_model


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight lossless frames of 64x36: red grows to the right, green downwards, blue with time."""
    path = tmp_path_factory.mktemp("clip") / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = 64, 36, "bgr0"
        for number in range(8):
            rows, columns = np.indices((36, 64))
            picture = np.stack([columns * 4, rows * 7, np.full_like(rows, number * 30)], axis=-1).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


# --- the whole program -----------------------------------------------------------------------------------------------


def test_random_weights_agree_and_are_reported(
    small_run_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_run_model.main([*TINY, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    fused = report["fused"]["fused"]
    assert report["video"] == [1, 3, 5, 32, 48]
    assert fused["holds"]
    assert fused["ratio"] == pytest.approx(fused["to_fp32"]["relative_l2"] / report["eager_to_fp32"]["relative_l2"])
    for difference in (fused["to_fp32"], fused["to_eager"], report["eager_to_fp32"]):
        assert 0 < difference["mean_abs"] < difference["max_abs"] < 0.1
        assert 0 < difference["relative_l2"] < 0.05
    printed = capsys.readouterr().out
    assert "1 x 5 frames of 32x48" in printed
    assert f"{fused['ratio']:.3f} times as far from FP32" in printed


def test_a_checkpoint_gives_the_same_agreement(small_run_model: ModuleType, tmp_path: Path) -> None:
    small_run_model.main([*TINY, "--seed", "3", "--json", str(tmp_path / "random.json")])
    vae = small_run_model.load_vae(None, seed=3)
    vae.decoder = unused_decoder(vae)
    vae.save_pretrained(tmp_path / "root" / "vae")
    for model in (tmp_path / "root", tmp_path / "root" / "vae"):
        arguments = [*TINY, "--seed", "3", "--model", str(model), "--json", str(tmp_path / "loaded.json")]
        assert small_run_model.main(arguments) == 0
        assert json.loads((tmp_path / "loaded.json").read_text()) == json.loads((tmp_path / "random.json").read_text())


def flip_the_sign(moments: torch.Tensor) -> None:
    largest = moments.abs().argmax()
    moments.view(-1)[largest] *= -1


def flip_the_top_exponent_bit(moments: torch.Tensor) -> None:
    moments.view(torch.int16).view(-1)[17] ^= 1 << 14


def lose_a_value(moments: torch.Tensor) -> None:
    moments.view(-1)[-1] = math.nan


@pytest.mark.parametrize("corrupt", [flip_the_sign, flip_the_top_exponent_bit, lose_a_value])
def test_one_corrupted_value_fails(
    small_run_model: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    corrupt,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = FusedWanEncoder._project

    def project_and_corrupt(conv: torch.nn.Module, padded: torch.Tensor) -> torch.Tensor:
        moments = project(conv, padded)
        corrupt(moments)
        return moments

    monkeypatch.setattr(FusedWanEncoder, "_project", staticmethod(project_and_corrupt))
    monkeypatch.setattr(small_run_model, "load_vae", without_quantization(small_run_model.load_vae))
    assert small_run_model.main([*TINY, "--frames", "1", "--check-only"]) == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


def without_quantization(load_vae):
    """The last convolution of ``encode`` mixes the channels; without it one value stays one value."""

    def load(*arguments: object) -> AutoencoderKLWan:
        vae = load_vae(*arguments)
        vae.quant_conv = torch.nn.Identity()
        return vae

    return load


def test_a_clip_is_encoded(small_run_model: ModuleType, clip: Path) -> None:
    assert small_run_model.main([*TINY, "--batch-size", "2", "--video", str(clip)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frames", "6"], "1 [+] 4k frames"),
        (["--height", "250", "--width", "432"], "16"),
        (["--model", "nowhere"], "nowhere"),
        (["--video", "nowhere.mp4"], "nowhere.mp4"),
        (["--video", __file__], "test_run_model"),
    ],
)
def test_what_cannot_run_is_told_at_once(
    run_model: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    production_vae: AutoencoderKLWan,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_vae = run_model.load_vae
    monkeypatch.setattr(run_model, "load_vae", lambda model, seed: load_vae(model, seed) if model else production_vae)
    assert run_model.main([*TINY, *arguments]) == 2
    assert re.search(f"error: .*{message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [["--frames", "0"], ["--device", "tpu"], ["--device", "cpu", "--profile-path", "x"], ["--repeats", "many"]],
)
def test_wrong_options_are_usage_errors(run_model: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_model.parse(arguments)
    assert stopped.value.code == 2


def test_defaults_depend_on_the_device(run_model: ModuleType) -> None:
    on_gpu, on_cpu = run_model.parse(["--device", "cuda:1"]), run_model.parse(["--device", "cpu", "--width", "64"])
    assert (on_gpu.batch_size, on_gpu.frames, on_gpu.height, on_gpu.width) == (32, 17, 480, 832)
    assert (on_cpu.batch_size, on_cpu.frames, on_cpu.width) == (1, 5, 64)


# --- clips -----------------------------------------------------------------------------------------------------------


def test_clips_are_cropped_around_the_centre(run_model: ModuleType, clip: Path) -> None:
    clips = run_model.load_clips(clip, count=3, frames=5, height=36, width=32)
    assert clips.shape == (3, 3, 5, 36, 32)
    for start in range(3):
        expected = torch.arange(start, start + 5) * 30 / 127.5 - 1
        assert torch.allclose(clips[start, 2], expected[:, None, None].expand(5, 36, 32), atol=1e-2)
    columns, rows = torch.arange(16, 48) * 4 / 127.5 - 1, torch.arange(36) * 7 / 127.5 - 1
    assert torch.allclose(clips[0, 0], columns.expand(5, 36, 32), atol=1e-2)
    assert torch.allclose(clips[0, 1], rows[:, None].expand(5, 36, 32), atol=1e-2)


@pytest.mark.parametrize(("height", "width"), [(72, 64), (18, 64), (17, 31)])
def test_clips_are_resized_to_cover(run_model: ModuleType, clip: Path, height: int, width: int) -> None:
    frame = run_model.load_clips(clip, count=1, frames=1, height=height, width=width)[0, :, 0]
    assert frame.shape == (3, height, width)
    assert frame.min() >= -1
    assert frame.max() <= 1
    scale = max(height / 36, width / 64)
    middle = frame[:, height // 2, width // 2]
    assert middle[0] == pytest.approx(32 * 4 / 127.5 - 1, abs=4 / scale / 127.5 + 0.02)
    assert frame[0].diff(dim=1).mean() == pytest.approx(4 / scale / 127.5, rel=0.1)


def test_short_clips_are_refused(run_model: ModuleType, clip: Path) -> None:
    assert run_model.load_clips(clip, count=4, frames=5, height=16, width=16).shape[0] == 4
    with pytest.raises(ValueError, match="8 frames, but 5 x 5 frames take 9"):
        run_model.load_clips(clip, count=5, frames=5, height=16, width=16)


# --- the rule of agreement -------------------------------------------------------------------------------------------


def results(fused_error: float, eager_error: float = 0.01) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fused, eager and FP32 results whose errors have these sizes, in different directions."""
    fp32 = torch.ones(1000)
    direction = torch.tensor([1.0, -1.0]).repeat(500)
    return fp32 + fused_error * direction, fp32 + eager_error * direction.roll(1), fp32


@pytest.mark.parametrize(("fused_error", "holds"), [(0.0, True), (0.01, True), (0.0109, True), (0.0111, False)])
def test_the_limit_is_a_tenth_more_than_eager(run_model: ModuleType, fused_error: float, holds: bool) -> None:
    assert run_model.judge(*results(fused_error), atol=1.0).holds is holds


def test_tolerance_is_elementwise(run_model: ModuleType) -> None:
    fused, eager, fp32 = results(0.01)
    assert run_model.judge(fused, eager, fp32, atol=0.0199, rtol=0.001).holds
    assert not run_model.judge(fused, eager, fp32, atol=0.0199, rtol=0.0).holds


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("position", range(3))
def test_what_is_not_finite_never_agrees(run_model: ModuleType, value: float, position: int) -> None:
    tensors = [tensor.clone() for tensor in results(0.01)]
    tensors[position][7] = value
    assert not run_model.judge(*tensors, atol=1.0).holds
    for tensor in tensors:
        tensor[7] = value
    assert not run_model.judge(*tensors, atol=1.0).holds


# --- timing ----------------------------------------------------------------------------------------------------------


class FakeEvent:
    """A CUDA event on a clock that the runs advance."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


@pytest.fixture
def timing(run_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import timing

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timing


def test_order_alternates_and_warmup_is_not_timed(timing: ModuleType) -> None:
    calls: list[str] = []

    def run(name: str, milliseconds: float) -> None:
        calls.append(name)
        FakeEvent.now += 100 if len(calls) <= 4 else milliseconds

    runs = {"a": lambda: run("a", 2.0), "b": lambda: run("b", 3.0)}
    latencies = timing.measure_alternately(runs, warmup=2, repeats=3)
    assert calls == list("abab" + "abbaab")
    assert latencies["a"].milliseconds == [2.0] * 3
    assert latencies["b"].median == 3.0


def test_runs_that_compile_are_reported_and_not_timed(timing: ModuleType) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    shapes = iter([1, 2, 3, 4, 4, 4, 4])  # the first is warm-up; each new one makes TorchDynamo compile

    def run() -> None:
        compiled(torch.zeros(next(shapes)))
        FakeEvent.now += 1

    latency = timing.measure_alternately({"run": run}, warmup=1, repeats=3)["run"]
    assert latency.milliseconds == [1.0] * 3
    assert latency.recompiled == 3


def test_endless_compilation_is_an_error(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = iter(range(1000))
    monkeypatch.setattr(timing, "compilations", lambda: next(counter))
    with pytest.raises(RuntimeError, match="still compiling"):
        timing.measure_alternately({"run": lambda: None}, warmup=1, repeats=2)
