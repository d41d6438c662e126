"""The encoder of Diffusers' ``AutoencoderKLWan`` (WAN 2.2) as a chain of fused operations.

Activations stay NTHWC from the first convolution to the last. Between two convolutions they exist only as the padded
input of the second: the first one's epilogue adds bias and skip, normalizes, activates, and writes that input together
with the frames that the next chunk needs as history.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AvgDown3D,
    WanAttentionBlock,
    WanCausalConv3d,
    WanEncoder3d,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
)
from torch import Tensor, nn

import cudnn_fused
from cudnn_fused.wan.fp32_convolutions import Fp32Convolutions
from cudnn_fused.wan.packing import PackedParameters, as_vector, as_weight
from cudnn_fused.wan.support import Structure

HISTORY_FRAMES = 2  # what a 3x3x3 causal convolution looks back on


class History:
    """The slots of Diffusers' ``feat_cache``, one for each causal convolution, in the order of the convolutions.

    A slot holds the last frames that its convolution read, NTHWC, or None before the first chunk. The list belongs to
    the caller, so that no state of an encode is kept anywhere else.
    """

    def __init__(self, feat_cache: MutableSequence[Tensor | None], feat_idx: MutableSequence[int]) -> None:
        self._slots = feat_cache
        self._next = feat_idx

    def previous(self) -> Tensor | None:
        """The frames in the next slot."""
        return self._slots[self._next[0]]

    def advance(self, frames: Tensor) -> None:
        """Put ``frames`` into the next slot for the next chunk, and go on to the slot after it."""
        self._slots[self._next[0]] = frames
        self._next[0] += 1


class Padded(NamedTuple):
    """The input of a 3x3x3 convolution: ``[N, T+2, H+2, W+2, C]``, of whose first frames some are missing history."""

    frames: Tensor
    leading_zero_frames: int


@dataclass
class Flow:
    """What exists between two operations. Each step drops what no later one reads, before it makes anything new."""

    padded: Padded | None = None  # the next convolution's input
    value: Tensor | None = None  # the sum of which that is the activation
    skip: Tensor | None = None  # what the next sum adds
    skip_bias: Tensor | None = None  # what the skip still lacks

    def activated(self, padded: Padded, value: Tensor | None) -> None:
        """A sum was activated, with the skip in it. Without a skip it is not saved, and the last one stays."""
        self.padded, self.skip, self.skip_bias = padded, None, None
        if value is not None:
            self.value = value


class FusedWanEncoder(WanEncoder3d):
    """A ``WanEncoder3d`` whose ``forward`` runs on fused operations; submodules, weights and their names are the same.

    It is not constructed: :func:`cudnn_fused.wan.fuse_encoder` turns an encoder that it fits into one.
    """

    TORCH_PARTS = ("_downsample", "_downsample_time", "_shortcut", "_average", "_attend", "_project")
    """The methods that run between the fused operations."""

    _packed: PackedParameters
    _structure: Structure
    _laid_out: list[str]

    def forward(
        self,
        x: Tensor,
        feat_cache: MutableSequence[Tensor | None] | None = None,
        feat_idx: MutableSequence[int] | None = None,
    ) -> Tensor:
        """Encode one chunk.

        Args:
            x: BF16 ``[N, 12, T, H, W]``; H and W multiples of :attr:`spatial_factor`. T is 1 in the first chunk of a
                video and 4 afterwards.
            feat_cache: the caller's list of caches, all None before the first chunk; it is updated.
            feat_idx: a list that holds 0; counts the slots of ``feat_cache`` that were used.

        Returns:
            BF16 ``[N, 2 * z_dim, T', H', W']``: moments of the latent frames.

        Raises:
            TypeError, ValueError: the chunk does not fit, or caches are missing.
            RuntimeError: the call would have to be differentiated, or a module was changed since the encoder was fused.
        """
        if feat_cache is None or feat_idx is None:
            raise ValueError("the fused WAN encoder encodes chunk by chunk: it needs feat_cache and feat_idx")
        self._check_chunk(x)
        history = History(feat_cache, feat_idx)
        convolutions = Fp32Convolutions() if x.device.type == "cpu" else nullcontext()
        with self._one_encode(), torch.autocast(x.device.type, enabled=False), convolutions:
            return self._encode_chunk(x, history)

    @property
    def spatial_factor(self) -> int:
        """How many times smaller than a chunk its latent frames are in H and in W."""
        return 2 ** sum(stage.downsampler is not None for stage in self.down_blocks)

    def compile_torch_parts(self, **options: object) -> None:
        """Pass what runs between the fused operations (shortcuts, downsampling, attention...) to ``torch.compile``.

        With ``dynamic=False`` TorchDynamo's default limit of 8 variants of a function is enough for videos of one size.
        """
        for name in self.TORCH_PARTS:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    @contextmanager
    def _one_encode(self) -> Iterator[None]:
        """Around all chunks of an encode: the modules are checked, and parameters are packed, once."""
        with self._packed.for_one_encode() as is_outermost:
            if is_outermost:
                self._structure.check()
            yield

    def _check_chunk(self, x: Tensor) -> None:
        weight = self.conv_in.weight
        if weight.dtype is not torch.bfloat16:
            raise TypeError(f"the fused WAN encoder computes in torch.bfloat16, but its weights are {weight.dtype}")
        if x.dtype is not torch.bfloat16:
            raise TypeError(f"the fused WAN encoder needs torch.bfloat16 video, got {x.dtype}")
        if x.device != weight.device:
            raise ValueError(f"the video is on {x.device}, but the weights of the WAN encoder are on {weight.device}")
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise RuntimeError(
                "the fused WAN encoder is inference-only, but its weights or the video require grad; "
                "call it under torch.no_grad() or torch.inference_mode()"
            )
        factor = self.spatial_factor
        if x.dim() != 5 or any(extent == 0 or extent % factor for extent in x.shape[-2:]):
            raise ValueError(
                f"a chunk of the WAN encoder must be [N, {self.conv_in.in_channels}, T, H, W] with H and W positive "
                f"multiples of {factor}, got {list(x.shape)}"
            )

    # --- the chain -------------------------------------------------------------------------------------------------

    def _encode_chunk(self, x: Tensor, history: History) -> Tensor:
        flow = self._enter(x, history)
        openings = [stage.resnets[0].norm1 for stage in self.down_blocks[1:]] + [self.mid_block.resnets[0].norm1]
        for stage, opening in zip(self.down_blocks, openings, strict=True):
            self._run_stage(stage, opening, flow, history)
        self._run_middle(flow, history)
        return self._project(self.conv_out, flow.padded.frames)

    def _enter(self, x: Tensor, history: History) -> Flow:
        weight = self._packed.get(self.conv_in.weight, cudnn_fused.pack_causal_conv3d_weight)
        raw, frames = cudnn_fused.causal_conv3d_with_cache(x, weight, history.previous())
        history.advance(frames)
        flow = Flow()
        self._normalize(raw, flow, self.down_blocks[0].resnets[0].norm1, history, self.conv_in.bias, save_input=True)
        return flow

    def _run_stage(self, stage: nn.Module, opening: WanRMS_norm, flow: Flow, history: History) -> None:
        """Run a stage, then ``opening``, the first normalization of what follows it."""
        average = self._average(stage.avg_shortcut, flow.value)
        self._residual_blocks(stage.resnets, flow, history)
        reduced = self._reduce(stage.downsampler, flow, history)
        flow.skip = average
        self._normalize(reduced, flow, opening, history)

    def _run_middle(self, flow: Flow, history: History) -> None:
        """Run the middle blocks, then the last normalization."""
        before, after = self.mid_block.resnets
        self._residual_blocks([before], flow, history)
        flow.value = _without_padding(flow.value)
        flow.value = self._attend(self.mid_block.attentions[0], flow.value)
        self._normalize(flow.value, flow, after.norm1, history)
        self._open_block(after, flow, history)
        self._convolve(after.conv2, flow, self.norm_out, history)
        flow.value = None

    def _residual_blocks(self, blocks: Sequence[WanResidualBlock], flow: Flow, history: History) -> None:
        """Run ``blocks`` on ``flow.value``, whose activation is ``flow.padded``.

        Afterwards ``flow.value`` is their output behind which a zero row and column stand: ``[N, T, H+1, W+1, C]``.
        """
        for block, following in pairwise(blocks):
            self._open_block(block, flow, history)
            self._convolve(block.conv2, flow, following.norm1, history)
        last = blocks[-1]
        self._open_block(last, flow, history)
        flow.value = cudnn_fused.conv3d_bias_residual_pad(
            flow.padded.frames,
            self._weight(last.conv2),
            self._vector(last.conv2.bias),
            flow.skip,
            self._vector(flow.skip_bias),
            leading_zero_frames=flow.padded.leading_zero_frames,
        ).padded_output
        flow.padded = flow.skip = flow.skip_bias = None

    def _open_block(self, block: WanResidualBlock, flow: Flow, history: History) -> None:
        """The first half of a block; then the sum that entered it is the skip, or what its shortcut makes of it."""
        self._convolve(block.conv1, flow, block.norm2, history)
        if isinstance(block.conv_shortcut, nn.Identity):
            flow.skip = flow.value
        else:
            flow.skip = self._shortcut(block.conv_shortcut, flow.value)
            flow.skip_bias = block.conv_shortcut.bias
        flow.value = None

    # --- fused operations ------------------------------------------------------------------------------------------

    def _convolve(self, conv: WanCausalConv3d, flow: Flow, norm: WanRMS_norm, history: History) -> None:
        """``conv`` of ``flow.padded`` plus the skip, then ``norm`` and SiLU."""
        weight, zeros = self._weight(conv), flow.padded.leading_zero_frames
        previous = history.previous()
        frames, cache, value = cudnn_fused.conv3d_rmsnorm_silu_pad(
            flow.padded.frames,
            weight,
            self._vector(conv.bias),
            self._vector(norm.gamma),
            residual=flow.skip,
            residual_bias=self._vector(flow.skip_bias),
            previous=previous,
            leading_zero_frames=zeros,
        )
        history.advance(cache)
        flow.activated(Padded(frames, _missing_frames(previous)), value)

    def _normalize(
        self,
        x: Tensor,
        flow: Flow,
        norm: WanRMS_norm,
        history: History,
        bias: Tensor | None = None,
        save_input: bool = False,
    ) -> None:
        """``norm`` and SiLU of ``x`` plus ``bias`` and the skip, which may be saved before that."""
        previous = history.previous()
        frames, cache, value = cudnn_fused.rmsnorm_silu_pad(
            x,
            self._vector(norm.gamma),
            self._vector(bias),
            previous,
            flow.skip,
            self._vector(flow.skip_bias),
            save_input=save_input,
        )
        history.advance(cache)
        flow.activated(Padded(frames, _missing_frames(previous)), value)

    def _weight(self, conv: WanCausalConv3d) -> Tensor:
        return self._packed.get(conv.weight, as_weight)

    def _vector(self, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else self._packed.get(parameter, as_vector)

    # --- what stays in PyTorch -------------------------------------------------------------------------------------

    def _reduce(self, downsampler: WanResample | None, flow: Flow, history: History) -> Tensor:
        """``flow.value``, of which nothing is left, with its extents and, in a ``downsample3d``, its frames halved.

        The first chunk has a single frame. Later ones begin with the last frame before them.
        """
        reduce = _without_padding if downsampler is None else partial(self._downsample, downsampler.resample[1])
        frames = reduce(flow.value)
        flow.value = None
        if downsampler is None or downsampler.mode != "downsample3d":
            return frames
        previous = history.previous()
        history.advance(frames[:, -1:].clone())
        return frames if previous is None else self._downsample_time(downsampler.time_conv, previous, frames)

    @staticmethod
    def _downsample(conv: nn.Conv2d, sums: Tensor) -> Tensor:
        """The strided 2-D convolution, whose zero padding ``sums`` brings along."""
        planes = conv(sums.flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return planes.reshape(*sums.shape[:2], *planes.shape[1:]).contiguous()

    @staticmethod
    def _downsample_time(conv: WanCausalConv3d, previous: Tensor, frames: Tensor) -> Tensor:
        return _nthwc(conv(_ncthw(torch.cat([previous, frames], dim=1))))

    @staticmethod
    def _shortcut(conv: WanCausalConv3d, value: Tensor) -> Tensor:
        """A 1x1x1 convolution without its bias, which the sum adds with a rounding of its own."""
        return _nthwc(F.conv3d(_ncthw(value), conv.weight))

    @staticmethod
    def _average(average: AvgDown3D, value: Tensor) -> Tensor:
        return _nthwc(average(_ncthw(value)))

    @staticmethod
    def _attend(attention: WanAttentionBlock, value: Tensor) -> Tensor:
        return _nthwc(attention(_ncthw(value)))

    @staticmethod
    def _project(conv: WanCausalConv3d, padded: Tensor) -> Tensor:
        """The last convolution, on an input that is padded already."""
        return F.conv3d(_ncthw(padded), conv.weight, conv.bias).contiguous()


def _missing_frames(previous: Tensor | None) -> int:
    return HISTORY_FRAMES if previous is None else HISTORY_FRAMES - previous.shape[1]


def _without_padding(sums: Tensor) -> Tensor:
    return sums[:, :, :-1, :-1].contiguous()


def _ncthw(x: Tensor) -> Tensor:
    """An NTHWC tensor as PyTorch's convolutions take it: the same memory, channels last."""
    return x.permute(0, 4, 1, 2, 3)


def _nthwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 4, 1).contiguous()
