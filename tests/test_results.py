"""What an operation returns: a tuple to unpack and a dict by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree

from cudnn_fused import Result
from tests.cases import BY_NAME, OPERATION_NAMES, call, compiled_plan, make_operands

WITH_RESULTS = [name for name in OPERATION_NAMES if name != "conv3d_raw"]


@pytest.fixture
def result() -> Result:
    return Result(("output", "residual_output"), (torch.ones(2), None))


@pytest.mark.parametrize("operation_name", WITH_RESULTS)
def test_every_way_to_get_at_an_output(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    result = call(operation, make_operands(operation))
    assert isinstance(result, dict)
    assert tuple(result.keys()) == operation.returns
    assert len(result) == len(operation.returns)
    unpacked = [*result]
    for position, (name, value) in enumerate(zip(operation.returns, unpacked, strict=True)):
        assert name in result
        assert result[name] is result[position] is getattr(result, name) is result.get(name) is value
        assert dict(result)[name] is {**result}[name] is (lambda **named: named)(**result)[name] is value
    assert [value for _, value in result.items()] == [*result.values()] == unpacked
    assert result[-1] is value
    assert "count" not in result
    for unknown in ("count", "nothing"):
        with pytest.raises(KeyError):
            result[unknown]
        with pytest.raises(AttributeError, match=f"no output '{unknown}'"):
            getattr(result, unknown)
    with pytest.raises(IndexError):
        result[len(operation.returns)]


def test_slices_are_tuples(result: Result) -> None:
    assert result[:] == (result.output, None)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_results_can_be_copied_and_pickled(duplicate: object, result: Result) -> None:
    twin = duplicate(result)  # type: ignore[operator]
    assert type(twin) is Result
    assert list(twin.keys()) == ["output", "residual_output"]
    assert torch.equal(twin.output, result.output)
    assert twin.residual_output is None


def test_results_are_pytrees(result: Result) -> None:
    doubled = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, result)
    assert type(doubled) is Result
    assert torch.equal(doubled["output"], torch.full((2,), 2.0))
    assert doubled["residual_output"] is None
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(result)[0]]
    assert paths[0] == "['output']"


def test_operations_with_one_output() -> None:
    """The convolution alone is a tensor from both. The padded one is a result of one from the function."""
    raw, padded = BY_NAME["conv3d_raw"], BY_NAME["conv3d_bias_residual_pad"]
    operands = make_operands(raw)
    assert type(call(raw, operands)) is torch.Tensor
    assert compiled_plan(raw, operands).execute(**operands) is operands["output"]
    operands = make_operands(padded)
    result = call(padded, operands)
    (unpacked,) = result
    assert unpacked is result["padded_output"] is result[0]
    assert compiled_plan(padded, operands).execute(**operands) is operands["padded_output"]
