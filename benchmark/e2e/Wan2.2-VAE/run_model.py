"""Encode video with the WAN 2.2 VAE of Diffusers and with the fused encoder, compare them, and on a GPU time them.

    python benchmark/e2e/Wan2.2-VAE/run_model.py                       # production architecture, random weights
    python benchmark/e2e/Wan2.2-VAE/run_model.py --model CHECKPOINT --video clip.mp4

Nothing is downloaded. The exit status is 0 if the fused encoder agrees with Diffusers, 1 if it does not, and 2 if it
could not run.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from agreement import MAX_ERROR_RATIO, Agreement, Difference, judge
from diffusers import AutoencoderKLWan
from timing import Latency, measure_alternately, write_kernel_shares
from tqdm import tqdm
from video import load_clips

from cudnn_fused.reference import full_precision
from cudnn_fused.wan import fuse_encoder
from cudnn_fused.wan.fp32_convolutions import Fp32Convolutions, cpu_convolves_bf16

PRODUCTION: Mapping[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 16,  # production has 256; only the encoder runs here
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
GAMMA_RANGE = (0.5, 1.5)  # random weights: a gamma of 1 would hide how it is applied


class Size(NamedTuple):
    batch_size: int
    frames: int
    height: int
    width: int


DEFAULT_SIZES = {"cuda": Size(32, 17, 480, 832), "cpu": Size(1, 5, 192, 336)}


def main(argv: Sequence[str] | None = None) -> int:
    diffusers.utils.logging.set_verbosity_error()
    arguments = parse(argv)
    device = torch.device(arguments.device)
    try:
        vae = load_vae(arguments.model, arguments.seed).to(device)
        video = make_video(arguments).to(device, torch.bfloat16)
        with torch.no_grad():
            return compare(vae, video, arguments)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = "; default {cuda.%s} on a GPU, {cpu.%s} on a CPU"
    parser.add_argument("--model", type=Path, help="a directory that save_pretrained made: a VAE's, or one with vae/")
    for name, meaning in (
        ("batch_size", "videos to encode at once"),
        ("frames", "frames of each, 1 + 4k"),
        ("height", "pixels, a multiple of 16"),
        ("width", "pixels, a multiple of 16"),
    ):
        text = meaning + (sizes % (name, name)).format(**DEFAULT_SIZES)
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of random weights and video (default 0)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="untimed rounds (default 3)")
    parser.add_argument("--repeats", type=positive, default=10, metavar="N", help="timed rounds (default 10)")
    parser.add_argument("--atol", type=float, help="absolute tolerance to eager (default 0.2 of the latents' RMS)")
    parser.add_argument("--rtol", type=float, default=0.02, help="relative tolerance to eager (default 0.02)")
    parser.add_argument("--profile-path", type=Path, metavar="FILE", help="write the kernels' shares of the time here")
    parser.add_argument("--check-only", action="store_true", help="compare the results, time nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--video", type=Path, metavar="FILE", help="encode this clip's first frames, not random video")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    arguments = parser.parse_args(argv)
    kind = arguments.device.partition(":")[0]
    if kind not in DEFAULT_SIZES:
        parser.error(f"--device must be cpu or cuda, got {arguments.device}")
    if arguments.profile_path and (kind == "cpu" or arguments.check_only):
        parser.error("--profile-path needs a GPU and no --check-only")
    for name, value in DEFAULT_SIZES[kind]._asdict().items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def load_vae(model: Path | None, seed: int) -> AutoencoderKLWan:
    """The VAE of a checkpoint, or the production architecture with random weights, in BF16 and without its decoder.

    Raises:
        FileNotFoundError: ``model`` holds no VAE.
    """
    if model is None:
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(**PRODUCTION)
        for name, parameter in vae.named_parameters():
            if name.endswith("gamma"):
                torch.nn.init.uniform_(parameter, *GAMMA_RANGE)
        vae = vae.to(torch.bfloat16)
    else:
        directory = next((at for at in (model / "vae", model) if (at / "config.json").is_file()), None)
        if directory is None:
            raise FileNotFoundError(f"neither {model} nor {model / 'vae'} holds a config.json")
        vae = AutoencoderKLWan.from_pretrained(directory, torch_dtype=torch.bfloat16, local_files_only=True)
    vae.decoder = None
    return vae.eval().requires_grad_(False)


def make_video(arguments: argparse.Namespace) -> torch.Tensor:
    """FP32 ``[N, 3, T, H, W]`` in [-1, 1]."""
    size = (arguments.frames, arguments.height, arguments.width)
    if arguments.video is not None:
        return load_clips(arguments.video, arguments.batch_size, *size)
    generator = torch.Generator().manual_seed(arguments.seed)
    return torch.rand((arguments.batch_size, 3, *size), generator=generator) * 2 - 1


def compare(vae: AutoencoderKLWan, video: torch.Tensor, arguments: argparse.Namespace) -> int:
    """Run and report everything that ``arguments`` ask for; returns the exit status."""
    timed = video.is_cuda and not arguments.check_only
    fused_vae = fuse_encoder(copy.deepcopy(vae))
    results = {"fused": encode(fused_vae, video, "fused")}
    eager = encode_eagerly(vae, video)
    fp32 = encode_in_fp32(vae, video)
    if timed:
        fused_vae.encoder.compile_torch_parts(dynamic=False)
        results["fused, compiled"] = encode(fused_vae, video, "fused, compiled")

    print(f"WAN 2.2 VAE encode of {describe(video)}")
    judged = {name: judge(result, eager, fp32, arguments.atol, arguments.rtol) for name, result in results.items()}
    eager_difference = Difference.between(eager, fp32)
    print_agreement(eager_difference, judged)
    report: dict[str, Any] = {
        "video": list(video.shape),
        "device": device_name(video.device),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "eager_to_fp32": asdict(eager_difference),
        "fused": {name: agreement.as_dict() for name, agreement in judged.items()},
    }
    agree = all(agreement.holds for agreement in judged.values())
    if timed and agree:
        latencies = measure(vae, fused_vae, video, arguments)
        print_latencies(latencies)
        report["milliseconds"] = {name: asdict(latency) for name, latency in latencies.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if agree else 1


def encode(vae: AutoencoderKLWan, video: torch.Tensor, name: str) -> torch.Tensor:
    """The moments of the latents of ``video``, with a progress bar over the encoder's chunks."""
    chunks = 1 + (video.shape[2] - 1) // 4
    with tqdm(total=chunks, desc=f"encoding, {name}", unit="chunk", leave=False) as bar:
        hook = vae.encoder.register_forward_hook(lambda *_: bar.update() and None)
        try:
            return vae.encode(video).latent_dist.parameters
        finally:
            hook.remove()


def encode_eagerly(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Diffusers in BF16, as PyTorch runs it, except on CPUs for which PyTorch has no BF16 convolution."""
    emulated = video.device.type == "cpu" and not cpu_convolves_bf16()
    if emulated:
        print("This CPU has no BF16 convolution: for eager BF16 it is done in FP32 and rounded once, as others do it.")
    with Fp32Convolutions() if emulated else nullcontext():
        return encode(vae, video, "eager BF16")


def encode_in_fp32(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """The same BF16 weights and video in FP32 arithmetic, one video at a time, which takes less memory."""
    exact = copy.deepcopy(vae).float()
    with full_precision(video.device):
        return torch.cat([encode(exact, one.float(), "FP32") for one in video.split(1)])


def measure(
    vae: AutoencoderKLWan, fused_vae: AutoencoderKLWan, video: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Latency]:
    """Latency of compiled Diffusers and of the fused encoder, whose parts between the operations are compiled."""
    compiled_vae = copy.deepcopy(vae)
    compiled_vae.encoder.compile(dynamic=False)
    runs = {
        "Diffusers, compiled": partial(compiled_vae.encode, video),
        "fused, compiled": partial(fused_vae.encode, video),
    }
    latencies = measure_alternately(runs, arguments.warmup, arguments.repeats)
    if arguments.profile_path:
        write_kernel_shares(runs, arguments.profile_path)
    return latencies


def print_agreement(eager: Difference, judged: Mapping[str, Agreement]) -> None:
    print(f"\n{'':28} {'max_abs':>10} {'mean_abs':>10} {'relative_l2':>12}")
    rows = {"eager BF16 vs FP32": eager}
    for name, agreement in judged.items():
        rows |= {f"{name} vs FP32": agreement.to_fp32, f"{name} vs eager BF16": agreement.to_eager}
    for name, row in rows.items():
        print(f"{name:28} {row.max_abs:10.3e} {row.mean_abs:10.3e} {row.relative_l2:12.4e}")
    print()
    for name, agreement in judged.items():
        inside = "within" if agreement.within_tolerance else "NOT within"
        print(
            f"{name}: {agreement.ratio:.3f} times as far from FP32 as eager BF16 (limit {MAX_ERROR_RATIO}), "
            f"{inside} {agreement.atol:.3g} + {agreement.rtol:g} |eager| of it: "
            f"{'agrees' if agreement.holds else 'DOES NOT AGREE'}"
        )


def print_latencies(latencies: Mapping[str, Latency]) -> None:
    baseline, ours = latencies.values()
    print()
    for name, latency in latencies.items():
        discarded = f", {latency.recompiled} runs that compiled not counted" if latency.recompiled else ""
        print(f"{name:28} {latency.median:10.2f} ms (median of {len(latency.milliseconds)}{discarded})")
    print(f"{'speedup':28} {baseline.median / ours.median:10.2f}")


def describe(video: torch.Tensor) -> str:
    samples, _, frames, height, width = video.shape
    return f"{samples} x {frames} frames of {height}x{width} in BF16 on {device_name(video.device)}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
