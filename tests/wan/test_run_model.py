"""The end-to-end program: what it accepts, what it reports, and that it notices a wrong result."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import AutoencoderKLWan

from cudnn_fused.wan import FusedWanEncoder
from tests.benchmark.make_clips import flat_clip
from tests.wan.conftest import SMALL, unused_decoder

TINY = ["--device", "cpu", "--frames", "5", "--height", "32", "--width", "48"]


@pytest.fixture
def small_run_model(run_model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with the small architecture in place of the production one."""
    monkeypatch.setattr(run_model, "PRODUCTION", {**run_model.PRODUCTION, **SMALL})
    return run_model


# --- the whole program -----------------------------------------------------------------------------------------------


def test_random_weights_agree_and_are_reported(
    small_run_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_run_model.main([*TINY, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    fused = report["fused"]["fused"]
    assert report["inputs"] == [1, 3, 5, 32, 48]
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


def test_a_clip_is_encoded(small_run_model: ModuleType, tmp_path: Path) -> None:
    """Whatever it is called: a colon does not begin a protocol."""
    for name in ("12:30.mkv", "it's.mkv", "concat:a|b.mkv"):
        clip = flat_clip(tmp_path / name, [(10, 200, 30)] * 6)
        assert small_run_model.main([*TINY, "--frames", "1", "--batch-size", "2", "--video", str(clip)]) == 0


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
