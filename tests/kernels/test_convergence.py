"""Instructions that are `.aligned`: all lanes of a warp have to be there at once."""

from __future__ import annotations

import re

import pytest

from cudnn_fused.kernels.compiling import compiled
from cudnn_fused.kernels.conv.sm90 import Conv3dSm90
from cudnn_fused.kernels.conv.sm100 import Conv3dSm100
from cudnn_fused.kernels.conv.spec import Conv3dSpec
from cudnn_fused.kernels.conv.tile_sm90 import Sm90Tiling
from cudnn_fused.kernels.conv.tile_sm100 import Sm100Tiling
from cudnn_fused.kernels.cross_compile import targeting
from cudnn_fused.kernels.epilogue.declaration import Epilogue
from cudnn_fused.kernels.epilogue.stores import Padded
from cudnn_fused.ops.common import NORM_STEPS

SPECS = {
    "raw": Conv3dSpec(160, Epilogue(160)),
    "padded-norm": Conv3dSpec(160, Epilogue(160, NORM_STEPS, Padded(history=2))),
}
_MEETING = re.compile(r"\b(bar\.warp\.sync|elect\.sync|shfl\.sync|barrier\.)")


def after_a_wait(ptx: str) -> list[str]:
    """The `.aligned` instructions that stand behind a wait with nothing in between that brings lanes together."""
    found, waited = [], False
    for line in ptx.splitlines():
        if "mbarrier.try_wait" in line:
            waited = True
        elif _MEETING.search(line):
            waited = False
        elif ".aligned" in line and waited:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("name", SPECS)
def test_lanes_meet_behind_waits(name: str) -> None:
    """Each lane leaves the loop of a wait when it sees the barrier complete."""
    spec = SPECS[name]
    kernels = (
        ("sm_90a", Conv3dSm90, Sm90Tiling().candidates(spec)),
        ("sm_100a", Conv3dSm100, Sm100Tiling().candidates(spec)),
    )
    for arch, build, tiles in kernels:
        with targeting(arch):
            for tile in tiles:
                launcher = compiled(arch, build, spec, tile, "input", "packed_weight")
                assert ".aligned" in launcher.__ptx__
                assert after_a_wait(launcher.__ptx__) == []
