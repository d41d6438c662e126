"""`python -m tests.kernels.sm90_probe NAME` runs one case on the SM90 kernels in the emulator and says how it went."""

from __future__ import annotations

import sys

import torch

from cudnn_fused.kernels import sm90
from cudnn_fused.kernels.launching import Machine
from cudnn_fused.kernels.sm90 import Sm90Kernels
from cudnn_fused.kernels.tiling_sm90 import TILES
from cudnn_fused.testing.agreement import against_reference
from cudnn_fused.testing.cases import Case
from ptxemu import EmulatorError
from tests.kernels.emulated import LATE, run

TALL = TILES[0]
# A case and the split of its reduction, which is as many CTAs as there are.
PROBES = {
    "raw": (Case("conv3d_raw", 1, 1, 3, 5, (160, 160)), 1),
    "full": (Case("conv3d_raw", 1, 1, 2, 120, (160, 160)), 1),
    "tiles": (Case("conv3d_raw", 1, 2, 2, 129, (160, 160)), 1),
    "split": (Case("conv3d_raw", 1, 2, 3, 29, (160, 160)), 4),
}


def main(name: str) -> int:
    case, split = PROBES[name]
    sm90.choose = lambda *_: (TALL, split)
    try:
        prepared, _ = run(Sm90Kernels(Machine("sm_90a", split)), case, schedule=LATE)
    except EmulatorError as error:
        print(f"fault: {error}")
        return 1
    faults = against_reference(case, prepared.operands, {n: t.clone() for n, t in prepared.initial.items()})
    print("\n".join(faults) or "agrees")
    return bool(faults)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main(sys.argv[1]))
