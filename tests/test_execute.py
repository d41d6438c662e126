"""``execute``: what it checks against the samples, memory that is shared, streams, and its results."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cudnn_fused.operands import BF16, byte_span
from tests.cases import (
    ALL_OPERANDS,
    BY_NAME,
    INPUTS,
    OPERATION_NAMES,
    OPTIONAL_OPERANDS,
    WRITTEN,
    Operands,
    assert_same_bits,
    call,
    compiled_plan,
    inputs_only,
    make_operands,
    make_plan,
    operand_of,
)
from tests.test_validation import shifted


def assert_untouched(operation_name: str, operands: Operands) -> None:
    for operand in BY_NAME[operation_name].written:
        if operand.name in operands:
            assert torch.isnan(operands[operand.name]).all(), f"{operand.name} was written"


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("optional", [False, True])
def test_class_and_function_agree(operation_name: str, optional: bool) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, optional=optional)
    expected = call(operation, operands)
    result = compiled_plan(operation, operands).execute(**operands)
    if len(operation.returns) == 1:
        result, expected = (result,), (expected,) if isinstance(expected, torch.Tensor) else expected
    for name, got, want in zip(operation.returns, result, expected, strict=True):
        assert got is operands.get(name)
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_positional_order_is_that_of_the_table(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, optional=False)
    positional = [operands[operand.name] for operand in operation.operands if not operand.optional]
    plan = type(make_plan(operation, operands))(*positional)
    plan.compile()
    plan.execute(*positional)
    assert not any(torch.isnan(tensor).any() for tensor in positional)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_execute_before_compile(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    plan = make_plan(operation, operands)
    plan.check_support()
    with pytest.raises(RuntimeError, match=r"before compile\(\)"):
        plan.execute(**operands)
    assert_untouched(operation_name, operands)


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_a_plan_keeps_no_sample_alive(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    samples = make_operands(operation)
    references = [weakref.ref(tensor) for tensor in samples.values()]
    plan = compiled_plan(operation, samples)
    del samples
    gc.collect()
    assert not any(reference() is not None for reference in references)
    assert plan.check_support()


# --- against the samples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_execute_refuses_what_differs_from_its_sample(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    plan = compiled_plan(operation, operands)
    tensor = operands[name]
    longer = torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=BF16)
    last = torch.cat([tensor, tensor], -1)
    bad = [
        (longer, ValueError, "shape mismatch: .*sample's shape"),
        (last[..., ::2], ValueError, "sample's strides"),
        (tensor.float(), TypeError, "must have dtype"),
        ("x", TypeError, "must be a plain dense torch.Tensor"),
        (None, ValueError, "presence must match .* was given when the plan was made and is absent now"),
        (tensor.to_sparse(), TypeError, "plain dense"),
    ]
    for value, error, match in bad:
        with pytest.raises(error, match=f"{name} .*{match}"):
            plan.execute(**{**operands, name: value})
    assert_untouched(operation_name, operands)


@pytest.mark.parametrize(("operation_name", "name"), OPTIONAL_OPERANDS)
def test_execute_refuses_an_operand_its_samples_lacked(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    bare = {key: tensor for key, tensor in operands.items() if key in required(operation_name)}
    plan = compiled_plan(operation, bare)
    with pytest.raises(
        ValueError, match=f"{name} presence must match .* was absent when the plan was made and is given now"
    ):
        plan.execute(**bare, **{name: operands.get(name, operands["input"])})


def required(operation_name: str) -> set[str]:
    return {operand.name for operand in BY_NAME[operation_name].operands if not operand.optional}


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_strides_of_extent_one_axes_are_free(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, N=1)
    plan = compiled_plan(operation, operands)
    plan.execute(**operands)
    for name, tensor in operands.items():
        if tensor.dim() > 1 and tensor.shape[0] == 1:
            odd = tensor.as_strided(tensor.shape, (999, *tensor.stride()[1:]))
            plan.execute(**{**operands, name: odd})


@pytest.mark.parametrize(("operation_name", "name"), ALL_OPERANDS)
def test_execute_checks_alignment(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    alignment = operand_of(operation, name).alignment
    operands = make_operands(operation)
    plan = compiled_plan(operation, operands)
    for shift in range(0, 16, 2):
        moved = {**operands, name: shifted(operands[name], shift)}
        if shift % alignment:
            with pytest.raises(ValueError, match=f"data pointer of {name} must be {alignment}-byte aligned"):
                plan.execute(**moved)
            assert_untouched(operation_name, {key: value for key, value in operands.items() if key != name})
    for shift in range(0, 16, alignment):
        plan.execute(**{**operands, name: shifted(operands[name], shift)})


@pytest.mark.parametrize(("operation_name", "name"), INPUTS)
def test_gradients_are_refused(operation_name: str, name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    plan = compiled_plan(operation, operands)
    learning = {**operands, name: operands[name].clone().requires_grad_()}
    with torch.enable_grad():
        for run in (lambda: plan.execute(**learning), lambda: call(operation, learning)):
            with pytest.raises(RuntimeError, match=f"inference-only, but {name} requires grad"):
                run()
        assert_untouched(operation_name, operands)
        call(operation, operands)
        with torch.inference_mode():
            plan.execute(**learning)


# --- memory --------------------------------------------------------------------------------------------------------

PAIRS = [
    (operation_name, written, other.name)
    for operation_name, written in WRITTEN
    for other in BY_NAME[operation_name].operands
    if other.name != written
]


@pytest.mark.parametrize(("operation_name", "written", "other"), PAIRS)
def test_written_memory_overlaps_nothing(operation_name: str, written: str, other: str) -> None:
    """Each written operand laid over each other one: exactly, over its last 16 bytes, and, allowed, right behind it."""
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, having="scratch" if "scratch" in (written, other) else "")
    plan = compiled_plan(operation, operands)
    for overlap in (None, 16, 0):
        laid = {**operands, **side_by_side(operands[other], operands[written], other, written, overlap)}
        before = {name: tensor.clone() for name, tensor in laid.items()}
        if overlap == 0:
            plan.execute(**laid)
            continue
        with pytest.raises(ValueError, match=f"{written} must not overlap {other}|{other} must not overlap {written}"):
            plan.execute(**laid)
        for name, tensor in laid.items():
            assert_same_bits(tensor, before[name])


def side_by_side(
    first: torch.Tensor, second: torch.Tensor, first_name: str, second_name: str, overlap: int | None
) -> Operands:
    """Both tensors in one buffer: the second on the first (None), or ``overlap`` bytes before the first one's end."""
    gap = -first.numel() % 8  # whole 16-byte units, so that the second is aligned
    start = 0 if overlap is None else first.numel() + (gap if overlap == 0 else -first.numel() % 8 - overlap // 2)
    storage = torch.zeros(first.numel() + gap + second.numel() + 8, dtype=BF16)
    base = -storage.data_ptr() % 16 // 2
    laid_first = storage[base : base + first.numel()].view(first.shape)
    laid_second = storage[base + start : base + start + second.numel()].view(second.shape)
    laid_second.copy_(second)
    laid_first.copy_(first)
    return {first_name: laid_first, second_name: laid_second}


def test_inputs_may_share_memory() -> None:
    operation = BY_NAME["rmsnorm_silu_pad"]
    operands = make_operands(operation)
    operands["residual"] = operands["input"]
    operands["residual_bias"] = operands["input_bias"] = operands["gamma"]
    compiled_plan(operation, operands).execute(**operands)


def test_span_of_a_strided_operand() -> None:
    tensor = torch.zeros((2, 3, 8), dtype=BF16)
    assert byte_span(tensor) == 2 * 3 * 8 * 2
    assert byte_span(tensor[:, 1:2, ::2]) == 2 * (24 + 6 + 1)
    assert byte_span(tensor[:1, :1, :1].expand(2, 3, 8)) == 2


# --- streams -------------------------------------------------------------------------------------------------------


class CUstream:
    """Stands for the driver's type, which is recognised by its name."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __int__(self) -> int:
        return self._handle


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
def test_streams(operation_name: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation)
    plan = compiled_plan(operation, operands)
    for bad, error in [
        (2, ValueError),
        (CUstream(2), ValueError),
        (-1, ValueError),
        ("s", TypeError),
        (True, TypeError),
    ]:
        with pytest.raises(error, match="current_stream"):
            plan.execute(**operands, current_stream=bad)
        with pytest.raises(error, match="current_stream"):
            call(operation, operands, current_stream=bad)
    assert_untouched(operation_name, operands)
    for good in (None, 0, 1, CUstream(0)):
        plan.execute(**operands, current_stream=good)
        call(operation, operands, current_stream=good)


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("target", ["Sm90", "Sm100"])
def test_gpu_names_need_a_cuda_device(operation_name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=tuple(operation.extensions))
    with pytest.raises(RuntimeError, match=f"{target.upper()} needs a CUDA device"):
        make_plan(operation, operands, target).check_support()
    with pytest.raises(RuntimeError, match=f"{target.upper()} needs a CUDA device"):
        call(operation, operands, f"_wrapper_{target.lower()}")


@pytest.mark.parametrize("operation_name", OPERATION_NAMES)
@pytest.mark.parametrize("target", ["Sm90", "Sm100"])
def test_gpu_names_check_their_operands_before_the_device(operation_name: str, target: str) -> None:
    operation = BY_NAME[operation_name]
    operands = make_operands(operation, without=tuple(operation.extensions))
    operands = {name: tensor.float() for name, tensor in operands.items()}
    with pytest.raises(TypeError, match="input must have dtype"):
        make_plan(operation, operands, target).check_support()
    with pytest.raises(TypeError, match="input must have dtype"):
        call(operation, operands, f"_wrapper_{target.lower()}")


def test_results_do_not_depend_on_inputs_kept() -> None:
    """An output is new memory on every call."""
    operation = BY_NAME["conv3d_raw"]
    operands = inputs_only(operation, make_operands(operation))
    first, second = call(operation, operands), call(operation, operands)
    assert first.data_ptr() != second.data_ptr()
    assert_same_bits(first, second)
