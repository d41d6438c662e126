"""The rules by which results are compared with the reference, and the operands for that."""

from __future__ import annotations

import pytest
import torch

from cudnn_fused.operands import BF16
from cudnn_fused.testing.agreement import Accuracy, ambiguous_pairs, differing, ordered
from cudnn_fused.testing.cases import BY_NAME, CHANNELS, Case, Skip, make_inputs, make_outputs, sample_of


def every_bf16(largest: float) -> torch.Tensor:
    """All finite BF16 numbers up to a magnitude."""
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16)
    return values[values.abs() <= largest]


def neighbour(values: torch.Tensor) -> torch.Tensor:
    """The BF16 numbers that follow positive ``values``."""
    return (values.view(torch.int16) + 1).view(BF16)


def test_order() -> None:
    values = torch.tensor([-2.0, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 2.0]).to(BF16)
    keys = ordered(values)
    assert keys.tolist() == sorted(keys.tolist())
    assert keys[3] == keys[4] == 0
    assert (ordered(neighbour(values[4:])) - keys[4:]).tolist() == [1, 1, 1, 1]


def test_differing_bits() -> None:
    values = torch.tensor([0.0, 1.0, torch.nan, torch.inf]).to(BF16)
    assert differing(values, values.clone()) == 0
    other_nan = values.clone()
    other_nan.view(torch.int16)[2] = -1
    assert differing(other_nan, values) == 0
    for index, value in ((0, -0.0), (1, torch.nan), (2, 1.0), (3, -torch.inf)):
        changed = values.clone()
        changed[index] = value
        assert differing(changed, values) == 1
        assert differing(changed, values, activated=True) == 1
    with pytest.raises(AssertionError, match="shapes differ"):
        differing(values, values[:3])


def test_silu_in_fp32_differs_on_ambiguous_pairs_alone() -> None:
    """FP32 arithmetic of any kind, against the exact value, for every BF16 number."""
    affine = every_bf16(64)
    exact = (affine.double() / (1 + torch.exp(-affine.double()))).to(BF16)
    wide = affine.float()
    for computed in (
        wide / (1 + torch.exp(-wide)),
        wide * (1 / (1 + torch.exp2(wide * -1.4426950408889634))),
        torch.nn.functional.silu(wide),
    ):
        got, want = ordered(computed.to(BF16)), ordered(exact)
        other = got != want
        assert (got - want).abs().max() <= 1
        assert ambiguous_pairs()[torch.minimum(got, want)[other].long() + (1 << 15)].all()


def test_few_pairs_are_ambiguous() -> None:
    """Otherwise an error of one unit would pass."""
    activated = torch.nn.functional.silu(every_bf16(64).float()).to(BF16)
    keys = ordered(activated).unique()
    assert ambiguous_pairs()[keys.long() + (1 << 15)].float().mean() < 0.01


def test_one_unit_is_tolerated_where_ambiguous_in_one_of_ten_thousand() -> None:
    key = (ambiguous_pairs()[(1 << 15) + 1 :].nonzero()[0] + 1).to(torch.int16)
    ambiguous = key.view(BF16)
    values = ambiguous.repeat(30_000)
    changed = values.clone()
    changed[:3] = neighbour(ambiguous)
    assert differing(changed, values, activated=True) == 0
    assert differing(changed, values) == 3
    changed[3] = neighbour(ambiguous)
    assert differing(changed, values, activated=True) == 4
    two_units = values.clone()
    two_units[0] = neighbour(neighbour(ambiguous))
    assert differing(two_units, values, activated=True) == 1
    certain = torch.ones(30_000, dtype=BF16)
    unit = certain.clone()
    unit[0] = neighbour(certain[:1])[0]
    assert differing(unit, certain, activated=True) == 1


def test_accuracy() -> None:
    assert Accuracy("output", 0.2, 0.1, 1.0).holds
    assert not Accuracy("output", 0.21, 0.1, 1.0).holds
    assert not Accuracy("output", torch.nan, 0.1, 1.0).holds


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_operands_fit_the_tables(name: str) -> None:
    """Shapes, weights with zero padding, and what a sample of a batch is."""
    operation = BY_NAME[name]
    case = Case(name, 2, 2, 3, 4, CHANNELS[operation.name][0], skip=Skip.PLAIN, history=1, leading_zero_frames=1)
    operands = {**make_inputs(case, "cpu", integers=False), **make_outputs(case, "cpu")}
    assert set(operands) == case.present
    for operand in operation.operands:
        if operand.name in operands:
            assert tuple(operands[operand.name].shape) == operand.shape.evaluate(case.extents)
            assert operands[operand.name].isnan().all() == operand.written
    one, sample = sample_of(case, operands, 1)
    assert one == case.at(1, 2, 3, 4)
    assert sample["input"].data_ptr() == operands["input"][1].data_ptr()
    assert all(sample[n].shape[0] == 1 for n in sample if n not in ("packed_weight", "gamma", "bias"))
    knows_zeros = any(option.name == "leading_zero_frames" for option in operation.options)
    assert operands["input"][:, :1].any() != knows_zeros
