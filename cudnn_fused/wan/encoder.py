"""The encoder of Diffusers' ``AutoencoderKLWan`` (WAN 2.2) as a chain of fused operations.

Activations stay NTHWC from the first convolution to the last. Between two convolutions they exist only as the padded
input of the second: the first one's epilogue adds bias and skip, normalizes, activates, and writes that input together
with the frames that the next chunk needs as history.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from contextlib import nullcontext
from itertools import pairwise

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
from cudnn_fused.wan.offloading import Onloading
from cudnn_fused.wan.packing import CAUSAL_CONV3D, CONV3D, VECTOR, Form, PackedParameters
from cudnn_fused.wan.support import FittingModules

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


class Chunk:
    """One chunk on its way through the encoder: what the next operation reads, the caches, and where weights are.

    Tensors live here and in no local variable while something else runs, so that each is freed as soon as what reads
    it last is done.
    """

    padded: Tensor | None = None
    """The input of the next 3x3x3 convolution: ``[N, T+2, H+2, W+2, C]`` without the frames that are missing."""
    missing_frames: int = 0
    """How many zero frames, which stand for missing history, ``padded`` lacks in front."""
    value: Tensor | None = None
    """What ``padded`` was normalized from, NTHWC, or what is to be normalized next."""
    value_bias: Tensor | None = None
    """A bias that ``value`` still lacks."""

    def __init__(self, history: History, onloading: Onloading) -> None:
        self.history = history
        self.onloading = onloading

    def take_value(self) -> Tensor:
        """``value``, which lives on only as long as the caller needs it."""
        value, self.value, self.value_bias = self.value, None, None
        return value


class FusedWanEncoder(WanEncoder3d):
    """A ``WanEncoder3d`` whose ``forward`` runs on fused operations; submodules, weights and their names are the same.

    It is not constructed: :func:`cudnn_fused.wan.fuse_encoder` turns an encoder that it fits into one.
    """

    TORCH_PARTS = ("_downsample", "_downsample_time", "_shortcut", "_average", "_attend", "_project")
    """The methods that run between the fused operations."""

    _packed: PackedParameters
    _fitting: FittingModules

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
            TypeError, ValueError: the chunk does not fit, caches are missing, or a module was changed into one that
                the fused operations do not compute.
            RuntimeError: the call would have to be differentiated.
        """
        if feat_cache is None or feat_idx is None:
            raise ValueError("the fused WAN encoder encodes chunk by chunk: it needs feat_cache and feat_idx")
        onloading = self._fitting.check(self)
        self._check_chunk(x, onloading)
        chunk = Chunk(History(feat_cache, feat_idx), onloading)
        convolutions = Fp32Convolutions() if x.device.type == "cpu" else nullcontext()
        with torch.autocast(x.device.type, enabled=False), convolutions:
            return self._encode_chunk(x, chunk)

    @property
    def spatial_factor(self) -> int:
        """How many times smaller than a chunk its latent frames are in H and in W."""
        return 2 ** sum(stage.downsampler is not None for stage in self.down_blocks)

    def compile_torch_parts(self, **options: object) -> None:
        """Pass what runs between the fused operations (shortcuts, downsampling, attention...) to ``torch.compile``.

        With ``dynamic=False`` TorchDynamo's default limit of 8 variants of a function is enough for videos of one size.
        That is the default on CPUs, where Inductor (seen in PyTorch 2.13.0) fails to order the symbolic strides of the
        FP32 convolutions that stand in for BF16 ones.
        """
        if self.conv_in.weight.device.type == "cpu":
            options = {"dynamic": False, **options}
        for name in self.TORCH_PARTS:
            setattr(self, name, torch.compile(getattr(self, name), **options))

    def _check_chunk(self, x: Tensor, onloading: Onloading) -> None:
        weight = self.conv_in.weight
        if weight.dtype is not torch.bfloat16:
            raise TypeError(f"the fused WAN encoder computes in torch.bfloat16, but its weights are {weight.dtype}")
        if x.dtype is not torch.bfloat16:
            raise TypeError(f"the fused WAN encoder needs torch.bfloat16 video, got {x.dtype}")
        if x.device != weight.device and not onloading.concerns(self.conv_in):
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

    def _encode_chunk(self, x: Tensor, chunk: Chunk) -> Tensor:
        self._begin(x, chunk)
        average = None
        for stage in self.down_blocks:
            with chunk.onloading.inside(stage):
                self._normalize(chunk, stage.resnets[0].norm1, residual=average, saves_value=True)
                average = self._average(stage.avg_shortcut, chunk.value)
                for block, following in pairwise(stage.resnets):
                    self._residual_block(block, following.norm1, chunk)
                self._last_residual_block(stage.resnets[-1], chunk)
                self._reduce(stage.downsampler, chunk)

        with chunk.onloading.inside(self.mid_block):
            before, after = self.mid_block.resnets
            self._normalize(chunk, before.norm1, residual=average, saves_value=True)
            del average
            self._last_residual_block(before, chunk)
            chunk.value = self._attend(self.mid_block.attentions[0], _without_padding(chunk.take_value()))
            self._normalize(chunk, after.norm1, keeps_value=True)
            self._residual_block(after, self.norm_out, chunk)
        chunk.value = None
        weight, bias = self._as_they_are(self.conv_out, chunk)
        return self._project(chunk.padded, weight, bias, chunk.missing_frames)

    def _begin(self, x: Tensor, chunk: Chunk) -> None:
        """The first convolution, whose bias the normalization behind it adds."""
        weight, chunk.value_bias = self._operands(self.conv_in, CAUSAL_CONV3D, chunk)
        # The caller's device, unless the weights are brought to another one, as offloading does to the video, too.
        chunk.value, frames = cudnn_fused.causal_conv3d_with_cache(
            x.to(weight.device), weight, chunk.history.previous()
        )
        chunk.history.advance(frames)

    def _residual_block(self, block: WanResidualBlock, following: WanRMS_norm, chunk: Chunk) -> None:
        """``block``, and then the norm and activation behind it."""
        with chunk.onloading.inside(block):
            self._open_block(block, chunk)
            self._convolve(block.conv2, following, chunk, adds_value=True)

    def _last_residual_block(self, block: WanResidualBlock, chunk: Chunk) -> None:
        """A ``block`` behind which no norm stands. The value gets a zero row and column: ``[N, T, H+1, W+1, C]``."""
        with chunk.onloading.inside(block):
            self._open_block(block, chunk)
            weight, bias = self._operands(block.conv2, CONV3D, chunk)
            chunk.value = cudnn_fused.conv3d_bias_residual_pad(
                chunk.padded, weight, bias, chunk.value, chunk.value_bias, absent_zero_frames=chunk.missing_frames
            ).padded_output
            chunk.padded = chunk.value_bias = None

    def _open_block(self, block: WanResidualBlock, chunk: Chunk) -> None:
        """The first half of a block: its second convolution's input, and as value the skip."""
        self._convolve(block.conv1, block.norm2, chunk)
        if not isinstance(block.conv_shortcut, nn.Identity):
            weight, bias = self._as_they_are(block.conv_shortcut, chunk)
            chunk.value = self._shortcut(chunk.value, weight)
            chunk.value_bias = bias

    # --- fused operations ------------------------------------------------------------------------------------------

    def _convolve(self, conv: WanCausalConv3d, norm: WanRMS_norm, chunk: Chunk, adds_value: bool = False) -> None:
        """``conv``, plus the value if ``adds_value``, which becomes the sum; then ``norm`` and SiLU."""
        weight, bias = self._operands(conv, CONV3D, chunk)
        history = chunk.history.previous()
        (gamma,) = self._vectors(norm, chunk)
        chunk.padded, cache, total = cudnn_fused.conv3d_rmsnorm_silu_pad(
            chunk.padded,
            weight,
            bias,
            gamma,
            residual=chunk.value if adds_value else None,
            residual_bias=chunk.value_bias if adds_value else None,
            previous=history,
            absent_zero_frames=chunk.missing_frames,
            omit_zero_frames=1,
        )
        chunk.missing_frames = _missing_frames(history)
        if adds_value:
            chunk.value, chunk.value_bias = total, None
        chunk.history.advance(cache)

    def _normalize(
        self,
        chunk: Chunk,
        norm: WanRMS_norm,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        saves_value: bool = False,
        keeps_value: bool = False,
    ) -> None:
        """``norm`` and SiLU of the value plus what it lacks: its bias and the residual.

        The sum becomes the value if there is a residual or ``saves_value``; with ``keeps_value`` it stays as it is.
        """
        history = chunk.history.previous()
        (gamma,) = self._vectors(norm, chunk)
        chunk.padded, cache, total = cudnn_fused.rmsnorm_silu_pad(
            chunk.value,
            gamma,
            chunk.value_bias,
            history,
            residual,
            residual_bias,
            save_input=saves_value,
            omit_zero_frames=1,
        )
        chunk.missing_frames = _missing_frames(history)
        if not keeps_value:
            chunk.value, chunk.value_bias = total, None
        chunk.history.advance(cache)

    # --- parameters ------------------------------------------------------------------------------------------------

    def _operands(self, conv: WanCausalConv3d, form: Form, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The weight and the bias of a convolution as the operations read them."""
        with chunk.onloading.inside(conv):
            return self._packed.get(conv.weight, form), self._packed.get(conv.bias, VECTOR)

    def _vectors(self, module: nn.Module, chunk: Chunk) -> list[Tensor]:
        """All parameters of ``module``, each of them a vector."""
        with chunk.onloading.inside(module):
            return [self._packed.get(parameter, VECTOR) for parameter in module.parameters(recurse=False)]

    def _as_they_are(self, conv: WanCausalConv3d, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The weight and the bias of a convolution that PyTorch runs; the bias can be read by an operation as well."""
        with chunk.onloading.inside(conv):
            return conv.weight.detach(), self._packed.get(conv.bias, VECTOR)

    # --- what stays in PyTorch -------------------------------------------------------------------------------------

    def _reduce(self, downsampler: WanResample | None, chunk: Chunk) -> None:
        """Halve the extents of the value and, in a ``downsample3d``, its frames.

        The first chunk has a single frame. Later ones begin with the last frame before them.
        """
        if downsampler is None:
            chunk.value = _without_padding(chunk.take_value())
            return
        chunk.value = self._downsample(downsampler.resample[1], chunk.take_value())
        if downsampler.mode != "downsample3d":
            return
        previous = chunk.history.previous()
        chunk.history.advance(chunk.value[:, -1:].clone())
        if previous is not None:
            chunk.value = self._downsample_time(downsampler.time_conv, previous, chunk.value)

    @staticmethod
    def _downsample(conv: nn.Conv2d, sums: Tensor) -> Tensor:
        """The strided 2-D convolution, whose zero padding ``sums`` brings along."""
        planes = conv(sums.flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return planes.reshape(*sums.shape[:2], *planes.shape[1:]).contiguous()

    @staticmethod
    def _downsample_time(conv: WanCausalConv3d, previous: Tensor, frames: Tensor) -> Tensor:
        return _nthwc(conv(_ncthw(torch.cat([previous, frames], dim=1))))

    @staticmethod
    def _shortcut(value: Tensor, weight: Tensor) -> Tensor:
        """A 1x1x1 convolution without its bias, which the sum adds with a rounding of its own."""
        return _nthwc(F.conv3d(_ncthw(value), weight))

    @staticmethod
    def _average(average: AvgDown3D, value: Tensor) -> Tensor:
        return _nthwc(average(_ncthw(value)))

    @staticmethod
    def _attend(attention: WanAttentionBlock, value: Tensor) -> Tensor:
        return _nthwc(attention(_ncthw(value)))

    @staticmethod
    def _project(padded: Tensor, weight: Tensor, bias: Tensor, missing_frames: int) -> Tensor:
        """The last convolution, on an input that is padded already but for ``missing_frames`` zero frames in front."""
        if padded.shape[1] + missing_frames == weight.shape[2]:
            weight = weight[:, :, missing_frames:]  # a single window, whose first taps meet zeros
        elif missing_frames:
            padded = F.pad(padded, (0, 0, 0, 0, 0, 0, missing_frames, 0))
        return F.conv3d(_ncthw(padded), weight, bias).contiguous()


def _missing_frames(previous: Tensor | None) -> int:
    return HISTORY_FRAMES if previous is None else HISTORY_FRAMES - previous.shape[1]


def _without_padding(sums: Tensor) -> Tensor:
    return sums[:, :, :-1, :-1].contiguous()


def _ncthw(x: Tensor) -> Tensor:
    """An NTHWC tensor as PyTorch's convolutions take it: the same memory, channels last."""
    return x.permute(0, 4, 1, 2, 3)


def _nthwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 4, 1).contiguous()
