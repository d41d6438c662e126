"""What type checkers see: the stubs are those of the operand tables, and mypy finds misuse of every public name."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from mypy import api as mypy

import cudnn_fused
from cudnn_fused import plans
from cudnn_fused.operands import Operand, Operation
from cudnn_fused.ops import OPERATIONS
from tests.cases import BY_NAME, OPERATION_NAMES

ROOT = Path(__file__).parents[1]
SUFFIXES = {"": "", "Sm90": "_wrapper_sm90", "Sm100": "_wrapper_sm100"}
BARE = {"conv3d_raw"}  # operations whose function returns a tensor


def test_the_stubs_are_fresh() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "make_stubs.py"))
    assert tool["main"](["--check"]) == 0, "run python -m tools.make_stubs"
    stale = (ROOT / "cudnn_fused" / "plans.pyi").read_text().replace("sample_output", "sample_outputs", 1)
    assert tool["stub"](plans) != stale


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_functions_have_the_signatures_of_their_tables(operation_name: str) -> None:
    written = inspect.signature(getattr(cudnn_fused, operation_name), eval_str=True)
    assert written == plans.CLASSES[operation_name].variant.function()


def classes_and_functions(operation: Operation) -> Iterable[tuple[str, str, bool]]:
    """The names of an operation's classes and functions, and whether they have its extensions."""
    base = plans.CLASSES[operation.name].__name__
    return [(base + suffix, operation.name + more, suffix != "Sm100") for suffix, more in SUFFIXES.items()]


def typed(operand: Operand) -> str:
    return "torch.Tensor | None" if operand.optional else "torch.Tensor"


def lines_of(operation: Operation) -> list[str]:
    """Uses of an operation's names with the types that its table says."""
    lines = []
    returned = [next(each for each in operation.operands if each.name == name) for name in operation.returns]
    for plan_class, function, extensions in classes_and_functions(operation):

        def given(operands: Iterable[Operand], prefix: str = "", extensions: bool = extensions) -> str:
            kept = [operand for operand in operands if extensions or not operand.extension]
            return ", ".join(f"{prefix}{operand.name}=tensor" for operand in kept)

        options = "".join(f", {each.name}=1" for each in operation.options if extensions or not each.extension)
        result, plan = f"result_of_{function}", f"plan_of_{plan_class}"
        lines += [
            f"{result} = cudnn_fused.{function}({given(operation.inputs)}, current_stream=None{options})",
            f"{plan} = cudnn_fused.{plan_class}({given(operation.operands, 'sample_')}{options})",
        ]
        executed = [f"{plan}.execute({given(operation.operands)})", f"{plan}({given(operation.operands)})"]
        tensors = [result] if operation.name in BARE else []
        results = [] if operation.name in BARE else [result]
        (tensors if len(returned) == 1 else results).extend(executed)
        lines += [f"assert_type({value}, torch.Tensor)" for value in tensors]
        for position, operand in enumerate(returned):
            places = (f".{operand.name}", f"[{operand.name!r}]", f"[{position}]", f"[{position - len(returned)}]")
            lines += [f"assert_type({value}{place}, {typed(operand)})" for value in results for place in places]
    return lines


def check(folder: Path, lines: Iterable[str]) -> list[str]:
    """What mypy says of a program, one message a line."""
    head = ["import torch", "from typing_extensions import assert_type", "import cudnn_fused", "tensor = torch.ones(1)"]
    program = folder / "program.py"
    program.write_text("\n".join([*head, *lines, ""]))
    output, errors, _ = mypy.run(["--config-file", str(ROOT / "pyproject.toml"), str(program)])
    assert not errors
    return [line for line in output.splitlines() if ": error: " in line]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mypy finds the package, and keeps what it knows of others between runs."""
    monkeypatch.chdir(ROOT)


def test_every_name_has_the_types_of_its_table(tmp_path: Path) -> None:
    assert check(tmp_path, [line for operation in OPERATIONS for line in lines_of(operation)]) == []


MISUSES = {
    "cudnn_fused.conv3d_raw(tensor)": 'Missing positional argument "packed_weight"',
    "cudnn_fused.conv3d_raw(tensor, 1)": 'Argument 2 to "conv3d_raw" has incompatible type "int"',
    "cudnn_fused.conv3d_raw_wrapper_sm90(tensor)": 'Missing positional argument "packed_weight"',
    "cudnn_fused.conv3d_raw_wrapper_sm100(tensor, tensor, leading_zero_frames=1)": "Unexpected keyword argument",
    "cudnn_fused.Conv3dRaw(tensor, tensor)": 'Missing positional argument "sample_output"',
    "cudnn_fused.Conv3dRawSm90(tensor, tensor)": 'Missing positional argument "sample_output"',
    "cudnn_fused.Conv3dRawSm100(tensor, tensor, tensor, leading_zero_frames=1)": "Unexpected keyword argument",
    "cudnn_fused.Conv3dRaw(tensor, tensor, tensor).execute(tensor)": 'Missing positional arguments "packed_weight"',
    "cudnn_fused.Conv3dRaw(tensor, tensor, tensor)(tensor)": 'Missing positional arguments "packed_weight"',
    "cudnn_fused.causal_conv3d_with_cache(tensor, tensor).residual_output": "has no attribute",
    'cudnn_fused.causal_conv3d_with_cache(tensor, tensor)["residual_output"]': "No overload variant",
    "cudnn_fused.causal_conv3d_with_cache(tensor, tensor)[2]": "No overload variant",
    "cudnn_fused.rmsnorm_silu_pad(tensor, tensor).residual_output.shape": 'Item "None" of "Tensor | None"',
    "cudnn_fused.pack_conv3d_weight_sm100(1)": "incompatible type",
}


def test_misuse_is_found(tmp_path: Path) -> None:
    found = check(tmp_path, MISUSES)
    assert len(found) == len(MISUSES)
    for message, expected in zip(found, MISUSES.values(), strict=True):
        assert expected in message


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_python_checks_arguments_too(operation_name: str) -> None:
    plan_class = plans.CLASSES[operation_name]
    operation = BY_NAME[operation_name]
    missing = rf"{plan_class.__name__}\.__init__\(\) missing {sum(not each.optional for each in operation.operands)}"
    with pytest.raises(TypeError, match=missing):
        plan_class()
    execute: Callable[..., Any] = plan_class.execute
    with pytest.raises(TypeError, match=rf"{plan_class.__name__}\.execute\(\) got an unexpected keyword .*'nothing'"):
        execute(object(), nothing=1)
