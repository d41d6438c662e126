"""How many clusters run at a time, if each CTA takes a whole multiprocessor.

A cluster stays inside a group of multiprocessors, so a large one leaves some of each group idle, and groups differ from
GPU to GPU. The driver knows how many clusters fit. Without a GPU, a table and a rule stand in for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = (1, 2, 4, 8)  # CTAs of a cluster; every GPU takes up to 8
SHARED_BYTES = 227 * 1024  # of a CTA, the most there is: no second one fits beside it
PROBE_THREADS = 128

# By the multiprocessors of a GPU: clusters by their size. 132 is what the driver said of an H200 (2026-12-01); cards of
# one model differ in which multiprocessors they have, and so by a cluster or two. 148 is the B200, of which it is known
# for clusters of 8; for those of 4 the rule stands in.
KNOWN: Mapping[int, Mapping[int, int]] = {
    132: {1: 132, 2: 66, 4: 30, 8: 15},
    148: {1: 148, 2: 74, 4: 36, 8: 16},
}

# A kernel that does nothing: only how it would be launched matters.
PROBE_NAME = b"probe"
PROBE = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry probe()\n{\n    ret;\n}\n\0"


def expected_clusters(multiprocessors: int) -> Mapping[int, int]:
    """Clusters that run at a time, by their size, on a GPU that cannot be asked.

    The rule for GPUs that are not in the table: of large clusters one fewer than multiprocessors would allow.
    """
    if multiprocessors in KNOWN:
        return KNOWN[multiprocessors]
    return {size: max(1, multiprocessors // size - (size > 2)) for size in SIZES if size <= multiprocessors}


def resident_clusters(multiprocessors: int) -> Mapping[int, int]:
    """Clusters that run at a time on the current device, by their size. Sizes that it cannot run are left out.

    What is expected of the number of multiprocessors, if the driver does not answer.
    """
    try:
        counts = _ask_driver()
    except RuntimeError:
        counts = {}
    return {size: count for size, count in counts.items() if count} or expected_clusters(multiprocessors)


def _ask_driver() -> dict[int, int]:
    """What ``cuOccupancyMaxActiveClusters`` says of CTAs with all of the shared memory, in the current context.

    Raises RuntimeError if the driver refuses.
    """
    from cuda.bindings import driver

    # Loading a module is allowed while this thread captures a graph only in the relaxed mode.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _result(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        module = _result(driver.cuModuleLoadData(PROBE))
        try:
            function = _result(driver.cuModuleGetFunction(module, PROBE_NAME))
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _result(driver.cuFuncSetAttribute(function, limit, SHARED_BYTES))
            return {size: _result(driver.cuOccupancyMaxActiveClusters(function, _launch(size))) for size in SIZES}
        finally:
            driver.cuModuleUnload(module)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)


def _launch(size: int) -> Any:
    """The configuration of a launch in clusters of ``size`` CTAs."""
    from cuda.bindings import driver

    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = PROBE_THREADS, 1, 1
    config.sharedMemBytes = SHARED_BYTES
    config.attrs, config.numAttrs = [cluster], 1
    return config


def _result(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returned. Raises RuntimeError unless it succeeded."""
    status, *values = answer
    if status != 0:
        raise RuntimeError(f"the driver answered {status!r}")
    return values[0] if values else None
