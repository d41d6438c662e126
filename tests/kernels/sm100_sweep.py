"""Every setting of every operation on the SM100 kernels in the emulator, against the reference.

    python -m tests.kernels.sm100_sweep [--share I/N]

About an hour on one core; ``--share 0/8`` to ``7/8`` cut it into eight runs. Prints what disagrees, and a line at last.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.kernels.emulated import check, sm100
from tests.kernels.sm100_cases import everything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", default="0/1", help="which of how many parts, such as 0/8")
    index, count = map(int, parser.parse_args().share.split("/"))
    torch.set_grad_enabled(False)
    began, faults = time.perf_counter(), 0
    # Neighbours differ in few settings and often share a compiled kernel, so a share is a run of them.
    entries = list(everything())
    entries = entries[len(entries) * index // count : len(entries) * (index + 1) // count]
    for entry in entries:
        try:
            kernels = sm100(shared_taps=entry.shared_taps, turn=entry.tile, multiprocessors=entry.multiprocessors)
            check(kernels, entry.case, schedule=entry.schedule)
        except Exception as error:  # every case is wanted
            faults += 1
            print(f"{entry}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(entries)} cases, {faults} faults, {time.perf_counter() - began:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
