"""Parameters that are laid out as the operations read them."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

from cudnn_fused.wan import packing
from cudnn_fused.wan.packing import CAUSAL_CONV3D, CONV3D, VECTOR, Form, PackedParameters
from cudnn_fused.weights import pack_causal_conv3d_weight, pack_conv3d_weight
from tests.wan.conftest import moments, random_video


def weight(channels: int, outputs: int = 4) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(outputs, channels, 3, 3, 3).bfloat16(), requires_grad=False)


FORMS = pytest.mark.parametrize(
    ("form", "channels", "outputs"),
    [(CONV3D, 160, 4), (CONV3D, 128, 4), (CAUSAL_CONV3D, 12, 160)],
    ids=["padded", "channels-last", "causal"],
)


def packed_copy(parameter: torch.Tensor, form: Form) -> torch.Tensor:
    return (pack_causal_conv3d_weight if form is CAUSAL_CONV3D else pack_conv3d_weight)(parameter)


@FORMS
def test_a_parameter_is_a_view_of_its_packed_form(form: Form, channels: int, outputs: int) -> None:
    parameter, parameters = weight(channels, outputs), PackedParameters()
    values = parameter.clone(memory_format=torch.contiguous_format)
    packed = parameters.get(parameter, form)
    assert torch.equal(packed, packed_copy(values, form))
    assert torch.equal(parameter, values)
    assert packed.is_contiguous()
    assert parameter.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


@FORMS
def test_writes_of_any_kind_are_in_the_packed_form(form: Form, channels: int, outputs: int) -> None:
    parameter, parameters = weight(channels, outputs), PackedParameters()
    parameters.get(parameter, form)
    new = torch.randn(parameter.shape).bfloat16()
    for write in (parameter.copy_, parameter.data.copy_, lambda other: parameter.data.lerp_(other, 0.5)):
        write(new)
        expected = packed_copy(parameter.clone(), form)
        assert torch.equal(parameters.get(parameter, form), expected)
        new = new + 1


@FORMS
def test_other_memory_is_laid_out_again(form: Form, channels: int, outputs: int) -> None:
    parameter, parameters = weight(channels, outputs), PackedParameters()
    address = parameters.get(parameter, form).data_ptr()
    assert parameters.get(parameter, form).data_ptr() == address
    for other in (parameter.data * 2, copy.deepcopy(parameter.data), parameter.data.flip(0), parameter.data.float()):
        parameter.data = other.bfloat16()
        assert torch.equal(parameters.get(parameter, form), packed_copy(other.bfloat16(), form))


def test_padding_of_others_is_not_trusted() -> None:
    """A parameter with the strides of a packed weight, whose padding is not zero."""
    foreign = torch.ones(4, 3, 3, 3, 192).bfloat16()
    parameter = torch.nn.Parameter(foreign[..., :160].permute(0, 4, 1, 2, 3), requires_grad=False)
    packed = PackedParameters().get(parameter, CONV3D)
    assert torch.equal(packed[..., 160:], torch.zeros(4, 3, 3, 3, 32).bfloat16())


def test_vectors_are_read_where_they_are_if_aligned() -> None:
    memory = torch.arange(33).bfloat16()
    aligned, misaligned = (torch.nn.Parameter(memory[i:][:32].view(32, 1, 1), requires_grad=False) for i in (0, 1))
    parameters = PackedParameters()
    assert parameters.get(aligned, VECTOR).data_ptr() == memory.data_ptr()
    for parameter, first in ((aligned, 0), (misaligned, 1)):
        vector = parameters.get(parameter, VECTOR)
        assert vector.data_ptr() % 16 == 0
        assert torch.equal(vector, torch.arange(first, first + 32).bfloat16())
        parameter.data.add_(1)
        assert torch.equal(parameters.get(parameter, VECTOR), torch.arange(first + 1, first + 33).bfloat16())
        parameter.data.sub_(1)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        parameter, parameters = weight(160), PackedParameters()
        assert parameter.is_inference()
        parameters.get(parameter, CONV3D)
        parameter.mul_(2)
        assert torch.equal(parameters.get(parameter, CONV3D), pack_conv3d_weight(parameter.clone()))


def test_freed_memory_is_forgotten() -> None:
    parameters = PackedParameters()
    for _ in range(3):
        parameters.get(weight(160), CONV3D)
    last = weight(160)
    parameters.get(last, CONV3D)
    assert len(parameters._packed) == 1


def test_weights_are_packed_once(fused_vae: AutoencoderKLWan, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Counter[int]()
    for name in ("CONV3D", "CAUSAL_CONV3D"):
        form = getattr(packing, name)

        def count(weight: torch.Tensor, form=form) -> torch.Tensor:
            packed[weight.untyped_storage().data_ptr()] += 1
            return form.pack(weight)

        monkeypatch.setattr("cudnn_fused.wan.encoder." + name, form._replace(pack=count))
    for _ in range(2):
        fused_vae.encode(random_video(5, 16, 16))
    convolutions = [
        name
        for name, module in fused_vae.encoder.named_modules()
        if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3) and name != "conv_out"
    ]
    assert sum(packed.values()) == len(convolutions)


def test_weights_exist_once(fused_vae: AutoencoderKLWan) -> None:
    """An encode leaves nothing but padding: 160 channels are padded to 192, and 12 to 16."""
    expected = moments(fused_vae, random_video(1, 16, 16)).shape
    for name, module in fused_vae.encoder.named_modules():
        if isinstance(module, WanCausalConv3d):
            padding = {12: 448 / 324, 160: 1.2}.get(module.in_channels, 1.0) if module.kernel_size[2] == 3 else 1.0
            assert module.weight.untyped_storage().nbytes() <= padding * module.weight.nbytes + 1, name
    assert expected[1] == 96
