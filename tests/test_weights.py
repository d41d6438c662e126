"""Packing of weights."""

from __future__ import annotations

import pytest
import torch

import cudnn_fused
from cudnn_fused.operands import BF16
from cudnn_fused.weights import (
    pack_causal_conv3d_weight,
    pack_conv3d_weight,
    unpack_causal_conv3d_weight,
    unpack_conv3d_weight,
)
from tests.cases import assert_same_bits


@pytest.mark.parametrize("channels", [12, 64, 96, 160, 320])
def test_packing(channels: int) -> None:
    weight = torch.randn(32, channels, 3, 3, 3).to(BF16)
    packed = pack_conv3d_weight(weight)
    assert packed.shape == (32, 3, 3, 3, -(-channels // 64) * 64)
    assert packed.is_contiguous()
    assert (packed[..., channels:] == 0).all()
    for o, i, t, r, s in [(0, 0, 0, 0, 0), (31, channels - 1, 2, 2, 2), (5, 7, 0, 1, 2)]:
        assert packed[o, t, r, s, i] == weight[o, i, t, r, s]
    assert_same_bits(unpack_conv3d_weight(packed, channels), weight)


def test_causal_packing() -> None:
    weight = torch.randn(160, 12, 3, 3, 3).to(BF16)
    packed = pack_causal_conv3d_weight(weight)
    assert packed.shape == (160, 448)
    assert packed.is_contiguous()
    for o, i, t, r, s in [(0, 0, 0, 0, 0), (159, 11, 2, 2, 2), (5, 7, 0, 1, 2)]:
        assert packed[o, ((t * 3 + r) * 3 + s) * 16 + i] == weight[o, i, t, r, s]
    positions = packed.view(160, 28, 16)
    assert (positions[:, :, 12:] == 0).all()
    assert (positions[:, 27] == 0).all()
    assert_same_bits(unpack_causal_conv3d_weight(packed), weight)


def test_any_strides() -> None:
    wide = torch.randn(32, 320, 3, 3, 3).to(BF16)
    for view in (wide[:, :160], wide.contiguous(memory_format=torch.channels_last_3d), wide.flip(0)[::2]):
        assert_same_bits(
            pack_conv3d_weight(view), pack_conv3d_weight(view.clone(memory_format=torch.contiguous_format))
        )
    causal = torch.randn(160, 24, 3, 3, 3).to(BF16)[:, ::2]
    assert_same_bits(pack_causal_conv3d_weight(causal), pack_causal_conv3d_weight(causal.contiguous()))


def test_lazily_negated_weights_keep_their_sign() -> None:
    weight = torch.randn(32, 64, 3, 3, 3).to(BF16)
    assert_same_bits(pack_conv3d_weight(torch._neg_view(weight)), pack_conv3d_weight(-weight))


def test_a_packed_weight_is_detached_and_a_copy() -> None:
    parameter = torch.nn.Parameter(torch.ones(32, 64, 3, 3, 3, dtype=BF16))
    with torch.enable_grad():
        packed = pack_conv3d_weight(parameter)
    assert not packed.requires_grad
    parameter.zero_()
    assert (packed == 1).all()
    single = torch.ones(1, 64, 3, 3, 3, dtype=BF16).contiguous(memory_format=torch.channels_last_3d)
    assert pack_conv3d_weight(single).data_ptr() != single.data_ptr()


@pytest.mark.parametrize("pack", [pack_conv3d_weight, pack_causal_conv3d_weight])
def test_bad_weights(pack: object) -> None:
    assert callable(pack)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(TypeError, match="weight must have dtype"):
            pack(torch.zeros(160, 12, 3, 3, 3, dtype=dtype))
    with pytest.raises(TypeError, match="weight must be a"):
        pack([0.0])
    for shape in [(160, 12, 3, 3), (160, 12, 1, 3, 3), (160, 12, 3, 3, 3, 1), (0, 12, 3, 3, 3), (160, 0, 3, 3, 3)]:
        with pytest.raises(ValueError, match="weight must have shape"):
            pack(torch.zeros(shape, dtype=BF16))


def test_bad_causal_channels() -> None:
    for shape in [(160, 16, 3, 3, 3), (320, 12, 3, 3, 3)]:
        with pytest.raises(ValueError, match=r"weight must have shape \[160, 12, 3, 3, 3\]"):
            pack_causal_conv3d_weight(torch.zeros(shape, dtype=BF16))


def test_sm90_names_are_the_same_functions() -> None:
    assert cudnn_fused.pack_conv3d_weight_sm90 is pack_conv3d_weight
    assert cudnn_fused.pack_causal_conv3d_weight_sm90 is pack_causal_conv3d_weight


def test_sm100_names_take_the_channels_of_the_mirrored_api() -> None:
    """...and say their own names, with errors that are ValueErrors, as there."""
    pack, causal = cudnn_fused.pack_conv3d_weight_sm100, cudnn_fused.pack_causal_conv3d_weight_sm100
    for inputs, outputs in [(160, 160), (160, 320), (320, 320), (320, 640), (640, 640)]:
        weight = torch.randn(outputs, inputs, 3, 3, 3).to(BF16)
        assert_same_bits(pack(weight), pack_conv3d_weight(weight))
    with pytest.raises(ValueError, match=r"^pack_conv3d_weight_sm100: channels 96->160 are not supported; .* 160->160"):
        pack(torch.zeros(160, 96, 3, 3, 3, dtype=BF16))
    weight = torch.randn(160, 12, 3, 3, 3).to(BF16)
    assert_same_bits(causal(weight), pack_causal_conv3d_weight(weight))
    with pytest.raises(ValueError, match=r"^pack_causal_conv3d_weight_sm100: weight must have shape"):
        causal(torch.zeros(160, 16, 3, 3, 3, dtype=BF16))
    for function in (pack, causal):
        for error in (TypeError, ValueError):
            with pytest.raises(error, match=f"^{function.__name__}: weight must have dtype"):
                function(torch.zeros(160, 12, 3, 3, 3))
