"""Function calls inside ``torch.compile``, and the custom operators they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

import cudnn_fused
from cudnn_fused import backends
from cudnn_fused.operands import BF16
from tests.cases import BY_NAME, OPERATION_NAMES, assert_same_bits, call, inputs_only, make_operands

COMPILED = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_stays_in_the_graph(operation_name: str, optional: bool, dynamic: bool) -> None:
    operation = BY_NAME[operation_name]
    function = getattr(cudnn_fused, operation_name)

    def around(operands: dict[str, torch.Tensor]) -> Any:
        result = function(**{**operands, "input": operands["input"] * 2})
        return (
            result + 1 if isinstance(result, torch.Tensor) else [None if part is None else part + 1 for part in result]
        )

    compiled = torch.compile(around, dynamic=dynamic, **COMPILED)
    for height in (5, 7):
        operands = inputs_only(operation, make_operands(operation, optional=optional, H=height))
        expected, result = around(operands), compiled(operands)
        if isinstance(result, torch.Tensor):
            expected, result = [expected], [result]
        for got, want in zip(result, expected, strict=True):
            assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("optional", [False, True])
def test_operators_are_well_formed(operation_name: str, optional: bool) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, optional=optional)
    inputs = tuple(operands.get(operand.name) for operand in operation.inputs)
    arguments = (*inputs, *(option.default for option in operation.options), False, "")
    operator = getattr(torch.ops.cudnn_fused, operation_name).default
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_save_input_in_a_graph() -> None:
    operation = BY_NAME["rmsnorm_silu_pad"]
    operands = inputs_only(operation, make_operands(operation, optional=False))

    def around(**operands: torch.Tensor) -> Any:
        return cudnn_fused.rmsnorm_silu_pad(**operands, save_input=True)

    result = torch.compile(around, **COMPILED)(**operands)
    assert_same_bits(result["residual_output"], operands["input"])


def test_history_options_in_a_graph() -> None:
    operation = BY_NAME["conv3d_rmsnorm_silu_pad"]
    operands = inputs_only(operation, make_operands(operation, optional=False))
    for history in (0, 1, 2):
        result = torch.compile(cudnn_fused.conv3d_rmsnorm_silu_pad, **COMPILED)(**operands, history_frames=history)
        expected = call(operation, operands, history_frames=history)
        assert [part is None or part.shape for part in result] == [part is None or part.shape for part in expected]
        assert_same_bits(result.padded_output[:, 2:], expected.padded_output[:, 2:])


def test_faults_in_a_graph_are_reported() -> None:
    packed = torch.zeros(160, 3, 3, 3, 192, dtype=BF16)
    compiled = torch.compile(cudnn_fused.conv3d_raw, **COMPILED)
    with pytest.raises(Exception, match="channels 100->160 are not supported"):
        compiled(torch.zeros(1, 3, 3, 3, 100, dtype=BF16), packed)
    with pytest.raises(Exception, match="current_stream must be None"):
        compiled(torch.zeros(1, 3, 3, 3, 160, dtype=BF16), packed, 0)
    with pytest.raises(Exception, match="SM100 needs a CUDA device"):
        torch.compile(cudnn_fused.conv3d_raw_wrapper_sm100, **COMPILED)(
            torch.zeros(1, 3, 3, 3, 160, dtype=BF16), packed
        )


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_gradients_are_refused_in_a_graph(operation_name: str, fullgraph: bool) -> None:
    operation = BY_NAME[operation_name]
    operands = inputs_only(operation, make_operands(operation, optional=False))
    compiled = torch.compile(getattr(cudnn_fused, operation_name), backend="aot_eager", fullgraph=fullgraph)
    learning = {**operands, "input": operands["input"].clone().requires_grad_()}
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference-only, but input requires grad"):
        compiled(**learning)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="inference-only, but input requires grad"):
        torch.compile(lambda x: getattr(cudnn_fused, operation_name)(**{**operands, "input": x * 2}), **COMPILED)(
            learning["input"]
        )
    for got, want in zip(compiled(**learning), call(operation, operands), strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_negated_views_are_refused_in_a_graph(backend: str) -> None:
    """Made inside the graph or outside of it, also after the graph of a plain tensor is there."""
    operation = BY_NAME["conv3d_raw"]
    operands = inputs_only(operation, make_operands(operation))
    x, w = operands["input"], operands["packed_weight"]
    inside = torch.compile(lambda x: cudnn_fused.conv3d_raw(torch._neg_view(x), w), backend=backend, fullgraph=True)
    outside = torch.compile(lambda x: cudnn_fused.conv3d_raw(x, w), backend=backend, fullgraph=True)
    assert_same_bits(outside(x), cudnn_fused.conv3d_raw(x, w))
    for run in (lambda: inside(x), lambda: outside(torch._neg_view(x))):
        with pytest.raises(Exception, match="input is a lazily negated view"):
            run()


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_vmap_is_refused_in_a_graph(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = inputs_only(operation, make_operands(operation, optional=False))
    others = {name: tensor for name, tensor in operands.items() if name != "input"}

    def around(batch: torch.Tensor) -> Any:
        return torch.vmap(lambda each: getattr(cudnn_fused, operation_name)(input=each, **others)[0])(batch)

    with pytest.raises(Exception, match=r"cannot run under torch\.vmap"):
        torch.compile(around, **COMPILED)(torch.stack([operands["input"]] * 2))


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_one_graph_serves_many_sizes(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(getattr(cudnn_fused, operation_name), backend=counter, fullgraph=True, dynamic=True)
    # No two extents of the first call are equal, which the compiler would take for a rule.
    for n, t, h, w in [(2, 7, 11, 15), (3, 5, 7, 9), (4, 6, 8, 5), (2, 4, 5, 6)]:
        operands = inputs_only(operation, make_operands(operation, optional=False, N=n, T=t, H=h, W=w))
        for got, want in zip(compiled(**operands), call(operation, operands), strict=True):
            assert got is want is None or torch.equal(got, want)
    assert counter.frame_count == 1


def test_whole_numbers_in_a_graph() -> None:
    operation = BY_NAME["conv3d_raw"]
    operands = inputs_only(operation, make_operands(operation))
    compiled = torch.compile(lambda value: cudnn_fused.conv3d_raw(**operands, leading_zero_frames=value), **COMPILED)
    assert_same_bits(compiled(1), cudnn_fused.conv3d_raw(**operands, leading_zero_frames=1))
    for bad in (True, 1.0):
        with pytest.raises(Exception, match="leading_zero_frames must be one of 0, 1, 2"):
            compiled(bad)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("suffix", ["_wrapper_sm90", "_wrapper_sm100"])
def test_functions_for_one_target_stay_in_the_graph(operation_name: str, suffix: str) -> None:
    operation = BY_NAME[operation_name]
    operands = inputs_only(operation, make_operands(operation, without=tuple(operation.extensions)))
    function = getattr(cudnn_fused, operation_name + suffix)
    with backends.using(backends.REFERENCE):
        expected, result = function(**operands), torch.compile(function, **COMPILED)(**operands)
    assert type(result) is type(expected)
    if isinstance(result, torch.Tensor):
        expected, result = [expected], [result]
    for got, want in zip(result, expected, strict=True):
        assert_same_bits(got, want)
