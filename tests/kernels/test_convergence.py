"""Instructions that are `.aligned`: all lanes of a warp have to be there at once."""

from __future__ import annotations

import re

import pytest

from cudnn_fused.kernels import tiling_sm90, tiling_sm100
from cudnn_fused.kernels.conv3d_sm90 import Conv3dSm90
from cudnn_fused.kernels.conv3d_sm100 import Conv3dSm100
from cudnn_fused.kernels.conv3d_spec import Conv3dSpec
from cudnn_fused.kernels.launching import CONV_OPERANDS, compiled
from cudnn_fused.kernels.postops import PostOps
from cudnn_fused.kernels.rows import Layout, RowFinish
from cudnn_fused.testing.ptx import targeting

EVERYTHING = PostOps(160, bias=True, residual=True, residual_bias=True, norm=True)
SPECS = {
    "raw": Conv3dSpec(160, RowFinish(PostOps(160))),
    "padded-norm": Conv3dSpec(
        160, RowFinish(EVERYTHING, Layout.PADDED, saves_value=True, history=2, copies_history=True)
    ),
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
        ("sm_90a", Conv3dSm90, tiling_sm90.tiles_for(spec)),
        ("sm_100a", Conv3dSm100, tiling_sm100.tiles_for(spec, shared_taps=False)),
    )
    for arch, build, tiles in kernels:
        with targeting(arch):
            for tile in tiles:
                launcher = compiled(arch, build, spec, tile, addresses=len(CONV_OPERANDS), numbers=2)
                assert ".aligned" in launcher.__ptx__
                assert after_a_wait(launcher.__ptx__) == []
