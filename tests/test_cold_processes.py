"""What must work in a process that has not called anything yet: torch.compile first, and importing twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import OPERATION_NAMES

ROOT = Path(__file__).parents[1]

COMPILE_FIRST = """
import sys, torch
import cudnn_fused
from tests.cases import BY_NAME, inputs_only, make_operands

name = sys.argv[1]
function, operation = getattr(cudnn_fused, name), BY_NAME[name]
operands = inputs_only(operation, make_operands(operation))
with torch.no_grad():
    compiled = torch.compile(lambda **named: function(**named), fullgraph=True, backend="aot_eager")(**operands)
    eager = function(**operands)
pairs = zip([compiled] if name == "conv3d_raw" else compiled, [eager] if name == "conv3d_raw" else eager, strict=True)
assert all(got is want is None or torch.equal(got, want) for got, want in pairs)
"""

IMPORT_AGAIN = """
import sys, torch
import cudnn_fused as first

def drop():
    for name in [name for name in sys.modules if name.partition(".")[0] == "cudnn_fused"]:
        del sys.modules[name]

x = torch.randint(-2, 3, (1, 3, 3, 3, 160)).bfloat16()
w = torch.randint(-2, 3, (160, 3, 3, 3, 192)).bfloat16()
with torch.no_grad():
    expected = first.conv3d_raw(x, w)
    drop()
    import cudnn_fused as second
    drop()
    import cudnn_fused as third
    assert first is not second is not third
    for package in (third, second, first):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: package.conv3d_raw(x, w), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        norm = package.rmsnorm_silu_pad(x, w.new_ones(160))
        assert torch.utils._pytree.tree_leaves(norm)[0] is norm["padded_output"]
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_a_full_graph_before_any_eager_call(operation_name: str) -> None:
    run(COMPILE_FIRST, operation_name)


def test_importing_again_after_the_modules_were_dropped() -> None:
    run(IMPORT_AGAIN)
