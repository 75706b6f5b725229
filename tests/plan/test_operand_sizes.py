"""Operands at the sizes from which they are treated differently: results, and 16-bit sums."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st


def plan_of(rows: int, dtype: torch.dtype = torch.float32) -> st.Plan:
    return st.plan(torch.ones(rows, 3, dtype=dtype).to_sparse_csr(), 4)


def test_a_result_of_two_rows_in_the_memory_of_one_is_refused():
    plan, B = plan_of(2), torch.ones(3, 4)
    with pytest.raises(ValueError) as caught:
        plan.run(B, out=torch.empty(1, 4).expand(2, 4))
    assert str(caught.value) == (
        "run: out must be a tensor whose elements have memory of their own, got strides (0, 1). "
        "Allocate it with torch.empty, or omit out=."
    )


def test_a_result_of_one_row_may_have_any_stride():
    out = torch.empty(4).as_strided((1, 4), (0, 1))
    assert torch.equal(plan_of(1).run(torch.ones(3, 4), out=out), torch.full((1, 4), 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
def test_the_gradient_of_a_wide_bias_is_not_rounded_to_sixteen_bits(dtype, relu):
    """257 needs one bit more than bfloat16 has, and 2049 than float16."""
    rows = 257 if dtype is torch.bfloat16 else 2049
    plan, B = plan_of(rows, dtype), torch.ones(3, 4, dtype=dtype)
    bias = torch.zeros(4, requires_grad=True)
    C = plan.run(B, bias=bias, relu=relu)
    assert C.dtype is dtype
    C.sum(dtype=torch.float32).backward()
    assert bias.grad.dtype is torch.float32
    assert torch.equal(bias.grad, torch.full((4,), float(rows)))
