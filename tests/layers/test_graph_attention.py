"""Operators of graph attention where there is no GPU: what they refuse, shapes without data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparsetile as st
from sparsetile.layers.graph_attention import graph_attention, node_scores

A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(2, 2)


def test_a_plan_of_the_cpu_is_refused_with_the_way_out():
    plan = st.plan(A, n=8)
    with pytest.raises(RuntimeError, match=r"attend: tensors must be those of a plan on a CUDA"):
        graph_attention(plan.flat, *operands(), None, None, None, 0.2)
    with pytest.raises(RuntimeError, match=r"sparsetile\.nn\.GATConv, which also runs"):
        graph_attention(plan.flat, *operands(), None, None, None, 0.2)


def test_shapes_and_types_are_known_without_data():
    plan = st.plan(A, n=8)
    plan.flat_with_transpose()
    tensors, recipe = plan.flat
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        FlopCounterMode(display=False) as counted,
    ):
        messages, of_source, of_target = operands()
        flat = messages.to(torch.bfloat16).flatten(1)
        out, terms, sums = torch.ops.sparsetile.attend(
            tensors, flat, of_source, of_target, None, None, None, recipe, 0.2, True
        )
        grads = torch.ops.sparsetile.attend_backward(
            tensors, out, flat, of_source, terms, sums, None, None, recipe, 0.2, True
        )
    assert (out.shape, out.dtype) == ((2, 8), torch.bfloat16)
    assert (terms.shape, sums.shape) == ((2, 2, 4), (2, 2, 8))
    assert {terms.dtype, sums.dtype} == {torch.float32}
    assert [tuple(each.shape) for each in grads] == [(3, 8), (3, 2), (2, 2)]
    assert [each.dtype for each in grads] == [torch.bfloat16, torch.float32, torch.float32]
    assert counted.get_total_flops() == (2 + 4) * 3 * 8


def test_terms_of_scores_are_torch_s_where_a_mode_looks_on():
    messages, vector = torch.randn(3, 2, 4, requires_grad=True), torch.randn(2, 4)
    with FlopCounterMode(display=False):
        (found,) = node_scores(messages, vector)
    torch.testing.assert_close(found, (messages * vector).sum(-1))
    found.sum().backward()
    torch.testing.assert_close(messages.grad, vector.expand(3, 2, 4))
