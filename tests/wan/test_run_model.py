"""The end-to-end program: what it accepts, what it reports, and that it notices a wrong result."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from benchmark import agreement
from benchmark.e2e import progress, wan22_encode
from benchmark.e2e.baselines import BASELINES, Baseline
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


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is done quickly: TorchDynamo without Inductor behind it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


TIMED = ["--device", "cpu", "--frames", "1", "--height", "32", "--width", "48", "--no-check-only", "--rtol", "9"]
SHORT = ["--warmup", "1", "--repeats", "2"]


@pytest.mark.usefixtures("eager_compiler")
def test_all_baselines_are_timed_and_the_strongest_is_compared(
    small_run_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them cannot be built: it is named with its reason, and the others are timed all the same."""
    monkeypatch.setattr(agreement, "MAX_ERROR_RATIO", 9.0)  # a single latent pixel is no sample
    build = Baseline.build

    def build_or_fail(self: Baseline, *arguments: object) -> object:
        if self.channels_last_input:
            raise RuntimeError("no\nsuch format")
        return build(self, *arguments)

    monkeypatch.setattr(Baseline, "build", build_or_fail)
    files = ["--json", str(tmp_path / "report.json"), "--profile-path", str(tmp_path / "profile.md")]
    assert small_run_model.main([*TIMED, *SHORT, *files]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    contenders = report["contenders"]
    assert list(contenders) == [baseline.name for baseline in BASELINES] + ["fused, compiled"]
    unbuilt = contenders.pop("compile, channels-last weights and input")
    assert unbuilt["failure"] == "no such format"
    assert unbuilt["median_ms"] is None
    for result in contenders.values():
        assert len(result["milliseconds"]) == 2
        assert 0 < result["ratio"] < 9
    ours = contenders.pop("fused, compiled")["median_ms"]
    least = min(contenders, key=lambda name: contenders[name]["median_ms"])
    assert report["strongest"] == least
    assert report["speedup"] == pytest.approx(contenders[least]["median_ms"] / ours)
    printed = capsys.readouterr()
    assert f"the strongest baseline is: {least}\nfused is {report['speedup']:.2f} times as fast" in printed.out
    assert re.search("channels-last weights and input +not timed: no such format", printed.out)
    assert all(re.search(f"^{name} +[0-9]+[.][0-9]{{2}} ", printed.out, re.MULTILINE) for name in contenders)
    profile = (tmp_path / "profile.md").read_text()
    assert re.findall("^## (.*):", profile, re.MULTILINE) == [least, "fused, compiled"]
    assert "conv" in profile


def test_one_bar_for_the_whole_program(
    small_run_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = []

    class Bar(tqdm):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            bars.append(self)

    monkeypatch.setattr(progress, "tqdm", Bar)
    assert small_run_model.main([*TINY, "--batch-size", "3"]) == 0
    assert [(bar.n, bar.total) for bar in bars] == [(18, 18)]  # three runs on three videos of two chunks
    shown = capsys.readouterr().err
    assert "0/18" in shown
    assert not re.search(r"/(?!18 )[0-9]+ \[", shown)  # nor does anything else show another


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

    def project_and_corrupt(*operands: object) -> torch.Tensor:
        moments = project(*operands)
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
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
        (["--json", f"{__file__}/x.json"], "test_run_model.py/x.json"),
        (["--no-check-only", "--profile-path", "no/such/folder/x.md"], "no/such/folder"),
        (["--device", "cuda:99"], "no device cuda:99"),
        (["--device", "cuda:x"], "cuda:x is not a device"),
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
    printed = capsys.readouterr().err
    assert re.search(f"^error: .*{message}.*$", printed.rpartition("\r")[2].strip(), re.MULTILINE)
    assert "Traceback" not in printed


def save(
    vae: AutoencoderKLWan, directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """A checkpoint whose weights went through ``change``."""
    vae.decoder = unused_decoder(vae)
    vae.save_pretrained(directory)
    path = directory / "diffusion_pytorch_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


LOST = "encoder.mid_block.resnets.0.conv1.weight"


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (lambda weights: {n: w for n, w in weights.items() if n != LOST}, 2, f"lacks weights of the encoder: {LOST}$"),
        (
            lambda weights: {f"vae.{n}": w for n, w in weights.items()},
            2,
            "lacks weights of the encoder: encoder[.].* and [0-9]+ more; it holds others.*: vae[.]decoder[.]",
        ),
        (lambda weights: weights | {LOST: torch.full_like(weights[LOST], math.nan)}, 1, "DOES NOT AGREE"),
        (lambda weights: {n: w for n, w in weights.items() if not n.startswith("decoder.")}, 0, "agrees"),
    ],
    ids=["one missing", "all prefixed", "NaN", "no decoder"],
)
def test_checkpoints(
    small_run_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, status: int, message: str
) -> None:
    save(small_run_model.load_vae(None, seed=3), tmp_path, change)
    assert small_run_model.main([*TINY, "--model", str(tmp_path)]) == status
    printed = capsys.readouterr()
    assert re.search(message, printed.err.strip() if status == 2 else printed.out, re.MULTILINE)
    assert "Traceback" not in printed.err


def test_the_entry_point_runs_from_anywhere(tmp_path: Path) -> None:
    """Nothing of the project needs to be installed, and relative paths stay relative to where it is called."""
    script = Path(wan22_encode.__file__).parent / "Wan2.2-VAE" / "run_model.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(script), "--device", "cpu", "--video", "clip.mkv", "--json", "report.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: .*No such file or directory: 'clip.mkv'\n", done.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--frames", "0"],
        ["--device", "tpu"],
        ["--device", "cpu", "--profile-path", "x"],
        ["--device", "cuda", "--check-only", "--profile-path", "x"],
        ["--repeats", "many"],
    ],
)
def test_wrong_options_are_usage_errors(run_model: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_model.parse(arguments)
    assert stopped.value.code == 2


def test_defaults_depend_on_the_device(run_model: ModuleType) -> None:
    on_gpu, on_cpu = run_model.parse(["--device", "cuda:1"]), run_model.parse(["--device", "cpu", "--width", "64"])
    assert (on_gpu.batch_size, on_gpu.frames, on_gpu.height, on_gpu.width) == (32, 17, 480, 832)
    assert (on_cpu.batch_size, on_cpu.frames, on_cpu.width) == (1, 5, 64)
