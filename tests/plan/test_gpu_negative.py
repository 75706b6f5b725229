"""Trained values on a GPU and matrices that torch shows negated: imaginary parts of conjugates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsetile as st

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

A = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0], [0.0, 3.0, 4.0]])


def negated(like: Tensor) -> Tensor:
    """The same numbers, negated in memory."""
    made = torch.complex(torch.zeros_like(like), -like).conj().imag
    assert made.is_neg() and torch.equal(made, like)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["B", "values", "bias", "gradient"])
def test_negated_views_are_read_as_shown(part, dtype):
    dense = A.to("cuda", dtype)
    B = torch.arange(6.0, device="cuda", dtype=dtype).view(3, 2)
    values, bias = dense[dense != 0], torch.tensor([5.0, -7.0], device="cuda", dtype=dtype)
    grad = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]], device="cuda", dtype=dtype)
    given = {"B": B, "values": values, "bias": bias, "gradient": grad}
    given[part] = negated(given[part])
    leaves = [given[name].detach().requires_grad_() for name in ("B", "values", "bias")]
    plan = st.plan(dense.to_sparse_csr(), n=2)
    C = plan.run(leaves[0], values=leaves[1], bias=leaves[2])
    assert torch.equal(C, dense @ B + bias)
    d_B, d_values, d_bias = torch.autograd.grad(C, leaves, given["gradient"])
    assert torch.equal(d_B, dense.T @ grad)
    assert torch.equal(d_values, (grad @ B.T)[dense != 0])
    assert torch.equal(d_bias, grad.sum(0))
