"""How many clusters run at a time: asked of the driver, or expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("cutlass")

from cudnn_fused.kernels import gpu, occupancy
from cudnn_fused.kernels.compiling import DeviceSpec
from cudnn_fused.kernels.occupancy import expected_clusters, resident_clusters
from cudnn_fused.targets import target_of

B200 = 148


def answer(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], dict[int, int]]) -> None:
    monkeypatch.setattr(occupancy, "_ask_driver", ask)


def test_the_driver_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, lambda: {1: 148, 2: 70, 4: 33, 8: 15})
    assert resident_clusters(B200) == {1: 148, 2: 70, 4: 33, 8: 15}


def test_sizes_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, lambda: {1: 7, 2: 3, 4: 1, 8: 0})
    assert resident_clusters(7) == {1: 7, 2: 3, 4: 1}


def test_a_driver_that_refuses_leaves_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[int, int]:
        occupancy._result((999,))
        raise AssertionError

    answer(monkeypatch, refuse)
    assert resident_clusters(B200) == expected_clusters(B200)
    assert expected_clusters(B200)[8] == 16
    assert expected_clusters(132)[4] == 30


@pytest.mark.parametrize("multiprocessors", [2, 3, 8, 78, 132, 148, 160])
def test_expectations_can_be_met(multiprocessors: int) -> None:
    clusters = expected_clusters(multiprocessors)
    assert all(0 < count * size <= multiprocessors for size, count in clusters.items())


@pytest.mark.parametrize("size", occupancy.SIZES)
def test_the_driver_is_asked_about_clusters_of_whole_multiprocessors(size: int) -> None:
    config = occupancy._launch(size)
    (cluster,) = config.attrs
    assert cluster.value.clusterDim.x == config.gridDimX == size
    assert config.numAttrs == 1
    assert config.sharedMemBytes == occupancy.SHARED_BYTES


def test_a_machine_without_a_gpu_expects() -> None:
    assert DeviceSpec("sm_100a", B200).clusters == expected_clusters(B200)
    assert DeviceSpec("sm_100a", B200, "model", {2: 1}).clusters == {2: 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_this_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(torch.cuda.get_device_capability(device))
    if target is None:
        pytest.skip("no kernel serves this GPU")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    gpu.device_spec.cache_clear()
    monkeypatch.setattr(occupancy, "expected_clusters", lambda _: pytest.fail("the driver did not answer"))
    clusters = gpu.device_spec(target, device).clusters
    assert clusters[1] == multiprocessors
    assert all(count * size <= multiprocessors for size, count in clusters.items())
    for size, known in occupancy.KNOWN.get(multiprocessors, {}).items():
        assert abs(clusters[size] - known) <= (2 if size > 2 else 0)  # cards differ in which multiprocessors they have
