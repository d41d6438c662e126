"""Which GPU, which DSL: what runs where, and what is said where nothing does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cudnn_fused import backends, targets
from cudnn_fused.backends import REFERENCE, select_backend
from cudnn_fused.ops.conv3d_raw import CONV3D_RAW
from cudnn_fused.targets import SM90, SM100

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Kernels:
    """Kernels for nothing."""

    def can_implement(self, problem: object) -> str | None:
        return "these kernels are for tests"

    def compile(self, problem: object) -> object:
        raise AssertionError("nothing is compiled to find out what is supported")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A machine with kernels for both targets, and a DSL for them."""
    kernels = Kernels()
    monkeypatch.setattr(backends, "KERNELS", {"SM90": "somewhere", "SM100": "somewhere"})
    monkeypatch.setattr(backends, "_load", lambda place: kernels)
    monkeypatch.setattr(targets, "installed_dsl", lambda: "4.8.1")
    return kernels


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (11, 0), (10, 1), (8, 9), (9, 0)])
def test_sm100_names_refuse_other_gpus(
    capability: tuple[int, int], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    major, minor = capability
    with pytest.raises(NotImplementedError, match=rf"10\.0 or 10\.3; cuda:0 \(Some GPU\) has {major}\.{minor}"):
        select_backend(CONV3D_RAW, SM100, CUDA)


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_sm100_names_serve_sm100_and_sm103(
    capability: tuple[int, int], arch: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    assert select_backend(CONV3D_RAW, SM100, CUDA) is kernels
    assert SM100.arch(capability) == arch
    assert select_backend(CONV3D_RAW, None, CUDA) is kernels
    with pytest.raises(NotImplementedError, match=r"need compute capability 9\.0"):
        select_backend(CONV3D_RAW, SM90, CUDA)


def test_sm90(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    assert select_backend(CONV3D_RAW, SM90, CUDA) is kernels
    assert select_backend(CONV3D_RAW, None, CUDA) is kernels


@pytest.mark.parametrize("capability", [(12, 0), (11, 0), (10, 1), (8, 9), (7, 5)])
def test_neutral_names_fall_back_to_the_reference(
    capability: tuple[int, int], kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    assert select_backend(CONV3D_RAW, None, CUDA) is REFERENCE


def test_targets_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "KERNELS", {})
    monkeypatch.setattr(targets, "installed_dsl", lambda: None)
    for target in (SM90, SM100):
        pretend_gpu(monkeypatch, target.archs[0][0])
        assert select_backend(CONV3D_RAW, None, CUDA) is REFERENCE
        with pytest.raises(NotImplementedError, match=f"there are no {target.name} kernels"):
            select_backend(CONV3D_RAW, target, CUDA)


def test_every_backend_is_where_it_is_said_to_be() -> None:
    for place in backends.KERNELS.values():
        assert backends._load(place).can_implement


@pytest.mark.parametrize("target", [SM90, SM100])
def test_gpu_names_without_cuda(target: targets.Target, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and none is available"):
        select_backend(CONV3D_RAW, target, CPU)
    assert select_backend(CONV3D_RAW, None, CPU) is REFERENCE
    pretend_gpu(monkeypatch, target.archs[0][0])
    with pytest.raises(ValueError, match="needs CUDA tensors"):
        select_backend(CONV3D_RAW, target, CPU)
    assert select_backend(CONV3D_RAW, None, CPU) is REFERENCE


@pytest.mark.parametrize(
    "version", ["4.8.1", "4.9.0", "4.10.0", "5.0.0", "4.9.0rc1", "4.9", "4.8.1.post1", "4.8.1+cu13", "10.0"]
)
def test_dsl_versions_that_are_new_enough(version: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(targets, "installed_dsl", lambda: version)
    assert select_backend(CONV3D_RAW, SM90, CUDA) is kernels


@pytest.mark.parametrize(
    "version", ["4.8.0", "4.8", "4.8.1rc1", "4.8.1.dev3", "4.7.9", "3.10.0", "0.0.1", "unknown", "", None]
)
def test_dsl_versions_that_are_not(version: str | None, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(targets, "installed_dsl", lambda: version)
    for target in (SM90, None):
        with pytest.raises(NotImplementedError, match=r"nvidia-cutlass-dsl >= 4\.8\.1"):
            select_backend(CONV3D_RAW, target, CUDA)


def test_the_version_is_read_from_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert targets.installed_dsl() is not None
    monkeypatch.setattr(targets, "DSL_PACKAGE", "no-such-package-anywhere")
    assert targets.installed_dsl() is None


def test_asking_does_not_initialize_cuda() -> None:
    code = (
        "import torch, cudnn_fused\n"
        "x = torch.zeros(1, 3, 3, 3, 160, dtype=torch.bfloat16)\n"
        "w = torch.zeros(160, 3, 3, 3, 192, dtype=torch.bfloat16)\n"
        "cudnn_fused.Conv3dRaw(x, w, torch.empty(1, 1, 1, 1, 160, dtype=torch.bfloat16)).check_support()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
