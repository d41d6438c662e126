"""Compiling kernels where there is no device for them, and keeping what the compiler makes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from unittest import mock

from cutlass.cutlass_dsl import CuTeDSL


@contextlib.contextmanager
def targeting(arch: str) -> Iterator[None]:
    """Inside the block kernels are compiled for ``arch`` and never loaded: no driver is needed, and no cache is asked.

    What is compiled has its PTX in ``__ptx__`` and its machine code in ``__cubin__``, and can be exported, not called.
    """
    dsl = CuTeDSL._get_dsl()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        settings = {
            "arch": arch,
            "keep_ptx": True,
            "keep_cubin": True,
            "dump_dir": directory,
            "disable_file_caching": True,
        }
        for name, value in settings.items():
            stack.enter_context(mock.patch.object(dsl.envar, name, value))
        stack.enter_context(mock.patch.object(type(dsl), "_runtime_can_run_compiled", return_value=False))
        yield
