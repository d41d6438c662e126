"""What becomes of a fused VAE: it is changed, offloaded, copied, freed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.hooks import apply_group_offloading
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanEncoder3d
from torch.multiprocessing.reductions import StorageWeakRef

from cudnn_fused.wan import FusedWanEncoder, fuse_encoder, unfuse_encoder
from tests.wan.conftest import Mutate, moments, random_video


def first_block(vae: AutoencoderKLWan) -> torch.nn.Module:
    return vae.encoder.down_blocks[0].resnets[0]


# --- freed -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_keeps_a_vae_alive(small_vae: AutoencoderKLWan, no_collector: None, compiled: bool) -> None:
    vae = fuse_encoder(copy.deepcopy(small_vae))
    if compiled:
        torch._dynamo.reset()
        vae.encoder.compile_torch_parts(backend="eager")
    moments(vae, random_video(5, 16, 16))
    left = [weakref.ref(vae), weakref.ref(vae.encoder), weakref.ref(first_block(vae).conv1.weight)]
    del vae
    assert [reference() for reference in left] == [None] * len(left)


def test_no_copy_of_a_weight_stays_behind(fused_vae: AutoencoderKLWan, no_collector: None) -> None:
    """``vae.to`` another device, and offloading, leave nothing in the memory of the first."""
    moments(fused_vae, random_video(1, 16, 16))
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in fused_vae.encoder.parameters()]
    fused_vae.to("meta")
    assert all(storage.expired() for storage in storages)


# --- changed ---------------------------------------------------------------------------------------------------------


def average_into_the_data(vae: AutoencoderKLWan) -> None:
    for parameter in vae.encoder.parameters():
        parameter.data.lerp_(torch.ones_like(parameter.data), 0.01)


def copy_into_the_data(vae: AutoencoderKLWan) -> None:
    for parameter in vae.encoder.parameters():
        parameter.data.copy_(parameter.data * 0.9)


def write_through_the_state(vae: AutoencoderKLWan) -> None:
    for tensor in vae.encoder.state_dict().values():
        tensor.mul_(0.9)


def write_through_numpy(vae: AutoencoderKLWan) -> None:
    first_block(vae).conv1.weight.data.view(torch.int16).numpy()[...] = 0


def replace_a_block(vae: AutoencoderKLWan) -> None:
    block = copy.deepcopy(first_block(vae))
    block.conv1.weight.mul_(0.5)
    vae.encoder.down_blocks[0].resnets[0] = block


@pytest.mark.parametrize(
    "change",
    [average_into_the_data, copy_into_the_data, write_through_the_state, write_through_numpy, replace_a_block],
)
def test_changes_after_an_encode_take_effect(small_vae: AutoencoderKLWan, change: Mutate) -> None:
    video = random_video(5, 16, 16)
    fused = fuse_encoder(copy.deepcopy(small_vae))
    before = moments(fused, video)
    change(fused)
    change(small_vae)
    after = moments(fused, video)
    assert not torch.equal(after, before)
    assert torch.equal(after, moments(fuse_encoder(small_vae), video))


class Lora(torch.nn.Module):
    """An adapter in the place of what it adapts."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 2


def with_another_forward(block: torch.nn.Module) -> None:
    forward = block.conv_shortcut.forward
    block.conv_shortcut.forward = lambda x: forward(x) * 2


def with_an_adapter(block: torch.nn.Module) -> None:
    block.conv_shortcut = Lora(block.conv_shortcut)


def with_a_hook(block: torch.nn.Module) -> None:
    block.conv_shortcut.register_forward_hook(lambda module, inputs, output: output * 2)


def with_a_pre_hook(block: torch.nn.Module) -> None:
    block.conv_shortcut.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def with_another_class(block: torch.nn.Module) -> None:
    block.conv_shortcut.__class__ = type("Other", (WanCausalConv3d,), {})


def with_another_setting(block: torch.nn.Module) -> None:
    block.conv_shortcut.padding_mode = "replicate"


def with_a_parametrization(block: torch.nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(block.conv_shortcut)


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        with_another_forward,
        with_an_adapter,
        with_a_hook,
        with_a_pre_hook,
        with_another_class,
        with_another_setting,
        with_a_parametrization,
    ],
)
def test_modules_that_would_be_bypassed_are_named(fused_vae: AutoencoderKLWan, change: Mutate, encoded: bool) -> None:
    video = random_video(1, 16, 16)
    if encoded:
        moments(fused_vae, video)
    change(fused_vae.encoder.down_blocks[1].resnets[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"encoder\.down_blocks\.1\.resnets\.0\.conv_shortcut.*unfuse_encoder"):
            fused_vae.encode(video)


def test_what_fits_again_runs_again(fused_vae: AutoencoderKLWan) -> None:
    video = random_video(1, 16, 16)
    expected = moments(fused_vae, video)
    hook = first_block(fused_vae).conv1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="conv1 has hooks"):
        fused_vae.encode(video)
    hook.remove()
    assert torch.equal(moments(fused_vae.train(), video), expected)
    assert torch.equal(moments(fused_vae.eval(), video), expected)


def test_another_encoder_in_its_place_is_refused(small_vae: AutoencoderKLWan) -> None:
    other = copy.deepcopy(small_vae).encoder
    fuse_encoder(small_vae).encoder = other
    with pytest.raises(ValueError, match=r"replaced.*fuse_encoder"):
        small_vae.encode(random_video(1, 16, 16))
    assert isinstance(fuse_encoder(small_vae).encoder, FusedWanEncoder)
    moments(small_vae, random_video(1, 16, 16))


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_loaded_with_swapping_on(fused_vae: AutoencoderKLWan, swapping: None, assign: bool) -> None:
    video = random_video(1, 16, 16)
    before = moments(fused_vae, video)
    state = {name: tensor * 0.75 for name, tensor in fused_vae.state_dict().items()}
    expected = moments(fuse_encoder(loaded(fused_vae, state)), video)
    fused_vae.load_state_dict(state, assign=assign)
    assert torch.equal(moments(fused_vae, video), expected)
    assert not torch.equal(before, expected)
    fused_vae.to(torch.float32).to(torch.bfloat16)
    assert torch.equal(moments(fused_vae, video), expected)


def loaded(vae: AutoencoderKLWan, state: dict[str, torch.Tensor]) -> AutoencoderKLWan:
    other = unfuse_encoder(copy.deepcopy(vae))
    other.load_state_dict(state)
    return other


def torch_save(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    file = io.BytesIO()
    torch.save(vae, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae)), torch_save])
def test_copies_have_their_own_weights(fused_vae: AutoencoderKLWan, duplicate: Mutate) -> None:
    video = random_video(1, 16, 16)
    expected = moments(fused_vae, video)
    duplicated = duplicate(fused_vae)
    for parameter in fused_vae.encoder.parameters():
        parameter.data.zero_()
    assert torch.equal(moments(duplicated, video), expected)
    assert duplicated._encode._vae() is duplicated
    with_another_forward(duplicated.encoder.down_blocks[1].resnets[0])
    with pytest.raises(ValueError, match="conv_shortcut"):
        duplicated.encode(video)


# --- offloaded -------------------------------------------------------------------------------------------------------


def whole_model(vae: AutoencoderKLWan) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload_with_hook(vae, "cpu")


def sequentially(vae: AutoencoderKLWan) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(vae, torch.device("cpu"))
    assert first_block(vae).conv1.weight.is_meta


def leaf_by_leaf(vae: AutoencoderKLWan) -> None:
    vae.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


def block_by_block(vae: AutoencoderKLWan) -> None:
    vae.enable_group_offload(torch.device("cpu"), torch.device("cpu"), num_blocks_per_group=1)


def two_blocks_at_a_time(vae: AutoencoderKLWan) -> None:
    vae.enable_group_offload(torch.device("cpu"), torch.device("cpu"), num_blocks_per_group=2)


def blocks_in_the_middle(vae: AutoencoderKLWan) -> None:
    apply_group_offloading(
        vae.encoder, torch.device("cpu"), num_blocks_per_group=1, block_modules=["mid_block"],
        exclude_kwargs=["feat_cache", "feat_idx"],
    )  # fmt: skip


OFFLOADING = pytest.mark.parametrize(
    "offload", [whole_model, sequentially, leaf_by_leaf, block_by_block, two_blocks_at_a_time, blocks_in_the_middle]
)


@OFFLOADING
def test_offloading_changes_no_result(small_vae: AutoencoderKLWan, offload: Mutate) -> None:
    video = random_video(9, 16, 16)
    fused = fuse_encoder(copy.deepcopy(small_vae))
    expected = moments(fused, video)
    offload(fused)
    for _ in range(2):
        assert torch.equal(moments(fused, video), expected)


class Elsewhere:
    """Plays the memory to which groups are offloaded: what is used without being brought back is NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from diffusers.hooks.group_offloading import ModuleGroup

        self.away: dict[torch.Tensor, torch.Tensor] = {}
        monkeypatch.setattr(ModuleGroup, "offload_", lambda group: self.offload(group))
        monkeypatch.setattr(ModuleGroup, "onload_", lambda group: self.onload(group))

    @staticmethod
    def parameters(group: object) -> list[torch.Tensor]:
        return [*group.parameters, *(parameter for module in group.modules for parameter in module.parameters())]

    def offload(self, group: object) -> None:
        for parameter in self.parameters(group):
            if parameter not in self.away:
                self.away[parameter] = parameter.data.clone()
                parameter.data = torch.empty_like(parameter.data).fill_(float("nan"))

    def onload(self, group: object) -> None:
        for parameter in self.parameters(group):
            if parameter in self.away:
                parameter.data = self.away.pop(parameter)


@pytest.mark.parametrize("offload", [leaf_by_leaf, block_by_block, two_blocks_at_a_time, blocks_in_the_middle])
def test_weights_are_brought_before_they_are_read(
    small_vae: AutoencoderKLWan, offload: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = random_video(5, 16, 16)
    fused = fuse_encoder(copy.deepcopy(small_vae))
    expected = moments(fused, video)
    elsewhere = Elsewhere(monkeypatch)
    offload(fused)
    count = len(elsewhere.away)
    assert count > 10
    for _ in range(2):
        assert torch.equal(moments(fused, video), expected)
        assert len(elsewhere.away) == count, "something stayed after its use"


def test_hooks_that_do_more_than_offload_are_refused(fused_vae: AutoencoderKLWan) -> None:
    fused_vae.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=r"encoder\..*(hooks|bfloat16).*unfuse_encoder"):
        fused_vae.encode(random_video(1, 16, 16))


def test_offloading_comes_after_fusing(small_vae: AutoencoderKLWan) -> None:
    block_by_block(small_vae)
    with pytest.raises(ValueError, match="offloading is set up after fusing"):
        fuse_encoder(small_vae)
    assert type(small_vae.encoder) is WanEncoder3d


def test_unfusing_comes_before_offloading(fused_vae: AutoencoderKLWan) -> None:
    block_by_block(fused_vae)
    with pytest.raises(ValueError, match=r"hooks.*remove|remove.*hooks"):
        unfuse_encoder(fused_vae)
    assert isinstance(fused_vae.encoder, FusedWanEncoder)
