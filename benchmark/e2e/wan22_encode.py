"""Encode video with the WAN 2.2 VAE of Diffusers and with the fused encoder, compare them, and on a GPU time them.

    python -m benchmark.e2e.wan22_encode                       # production architecture, random weights
    python -m benchmark.e2e.wan22_encode --model CHECKPOINT --video clip.mp4

Nothing is downloaded. The exit status is 0 if the fused encoder agrees with Diffusers, 1 if it does not, and 2 if it
could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import AutoencoderKLWan

from benchmark.e2e import runner
from benchmark.e2e.clips import load_clips
from benchmark.e2e.task import Task
from benchmark.options import positive
from cudnn_fused.wan import fuse_encoder

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
CHUNK_FRAMES = 4  # after a first chunk of one frame
UNUSED = ("decoder.", "post_quant_conv.")  # weights that encoding does without
NAMED = 3  # missing weights that a message names
GAMMA_RANGE = (0.5, 1.5)  # random weights: a gamma of 1 would hide how it is applied


class Size(NamedTuple):
    batch_size: int
    frames: int
    height: int
    width: int


DEFAULT_SIZES = {"cuda": Size(32, 17, 480, 832), "cpu": Size(1, 5, 192, 336)}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    return runner.exit_status(lambda: encode_and_compare(arguments))


def encode_and_compare(arguments: argparse.Namespace) -> bool:
    """Everything that ``arguments`` ask for. Returns whether the results agree."""
    diffusers.utils.logging.set_verbosity_error()
    runner.check_outputs(arguments)
    device = runner.usable_device(arguments.device)
    video = make_video(arguments).to(device, torch.bfloat16)
    vae = load_vae(arguments.model, arguments.seed).to(device)
    return runner.execute(task_for(video), vae, video, arguments)


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
    parser.add_argument("--video", type=Path, metavar="FILE", help="encode this clip's first frames, not random video")
    runner.add_options(parser)
    arguments = parser.parse_args(argv)
    runner.finish_options(parser, arguments)
    for name, value in DEFAULT_SIZES[arguments.device.partition(":")[0]]._asdict().items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


# --- the model -----------------------------------------------------------------------------------------------------


def task_for(video: torch.Tensor) -> Task:
    """Encoding ``video``."""
    samples, _, frames, height, width = video.shape
    return Task(
        title=f"WAN 2.2 VAE encode of {samples} x {frames} frames of {height}x{width}",
        run=moments,
        part=lambda vae: vae.encoder,
        fuse=fuse_encoder,
        compile_fused=lambda vae: vae.encoder.compile_torch_parts(dynamic=False),
        chunks=lambda inputs: 1 + (inputs.shape[2] - 1) // CHUNK_FRAMES,
    )


def moments(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """The moments of the latents of ``video``."""
    return vae.encode(video).latent_dist.parameters


def load_vae(model: Path | None, seed: int) -> AutoencoderKLWan:
    """The VAE of a checkpoint, or the production architecture with random weights, in BF16 and without its decoder.

    Raises:
        FileNotFoundError: ``model`` holds no VAE.
        ValueError: it lacks weights that encoding needs.
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
        vae = load_checkpoint(directory)
    vae.decoder = None
    return vae.eval().requires_grad_(False)


def load_checkpoint(directory: Path) -> AutoencoderKLWan:
    """The VAE that ``save_pretrained`` wrote into ``directory``, all weights of its encoder among it."""
    vae, loaded = AutoencoderKLWan.from_pretrained(
        directory, torch_dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
    )
    missing = [name for name in loaded["missing_keys"] if not name.startswith(UNUSED)]
    if missing:
        unknown = loaded["unexpected_keys"]
        instead = f"; it holds others, which no WAN VAE has: {some(unknown)}" if unknown else ""
        raise ValueError(f"the checkpoint in {directory} lacks weights of the encoder: {some(missing)}{instead}")
    return vae


def some(names: Iterable[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(islice(names, NAMED)) + more


def make_video(arguments: argparse.Namespace) -> torch.Tensor:
    """FP32 ``[N, 3, T, H, W]`` in [-1, 1]."""
    size = (arguments.frames, arguments.height, arguments.width)
    if arguments.video is not None:
        return load_clips(arguments.video, arguments.batch_size, *size)
    generator = torch.Generator().manual_seed(arguments.seed)
    return torch.rand((arguments.batch_size, 3, *size), generator=generator) * 2 - 1


if __name__ == "__main__":
    sys.exit(main())
