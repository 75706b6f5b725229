"""A variant's values: written in place, packed again; those of its family: cast once, followed."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.plan.eager import operand_values

F16, F32 = torch.float16, torch.float32
A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])


@pytest.fixture(params=["cpu", "dense"])
def plan(request):
    """``dense`` packs its values, ``cpu`` does not."""
    return st.plan(A.to_sparse_csr(), 2, system=request.param)


def test_new_values_are_written_where_the_old_ones_are(plan):
    """Captured graphs and bindings have the addresses."""
    variant = plan._variant
    values, packed = variant.values, variant.packed
    plan.update_values(torch.tensor([4.0, 5.0, 6.0], dtype=torch.float64))
    assert variant.values is values and values.tolist() == [4.0, 5.0, 6.0] and values.dtype is F32
    assert (packed is None) == (plan.system == "cpu")
    if packed is not None:
        assert variant.packed is packed and packed["A"].flatten().sum() == 15.0


def test_a_pattern_can_get_values(plan):
    pattern = st.plan((A.nonzero().T, None, (2, 3)), 2, system=plan.system)
    assert "pattern" in repr(pattern) and pattern.values is None
    pattern.update_values(torch.tensor([1.0, 2.0, 3.0]))
    B = torch.randn(3, 2)
    assert "weighted" in repr(pattern) and torch.equal(pattern @ B, plan @ B)


def test_a_cast_is_made_once_and_has_new_values(plan):
    family = plan._family
    cast = family.in_type(plan._variant, torch.bfloat16)
    if plan.system == "cpu":
        assert cast.values.dtype is torch.bfloat16
    assert family.in_type(plan._variant, torch.bfloat16) is cast
    plan.update_values(torch.tensor([5.0, 6.0, 7.0]))
    assert cast.values.tolist() == [5.0, 6.0, 7.0]


def test_followed_and_given_values_come_before_own_ones_and_are_not_packed(plan):
    family, variant = plan._family, plan._variant
    source = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    plan.update_values(source)
    assert torch.equal(plan.values, source)
    values, packed = operand_values(family, variant, None)
    assert values.requires_grad and packed is None
    given, packed = operand_values(family, variant, torch.ones(3, dtype=torch.float64))
    assert given.tolist() == [1.0] * 3 and given.dtype is F32 and packed is None
