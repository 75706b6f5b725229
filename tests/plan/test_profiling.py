"""torch's profiler names our operators, and its counter of flops counts them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import sparsetile as st
from tests.contracts.cases import csr_of, random_matrix

ROWS, COLS, N = 12, 10, 4


@pytest.fixture(params=["cpu", "dense"])
def plan(request):
    return st.plan(csr_of(random_matrix(ROWS, COLS, 0.3)), N, system=request.param)


def named(function) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return {e.key: e.count for e in seen.key_averages() if e.key.startswith("sparsetile::")}


def test_the_profiler_names_products_and_their_gradients(plan):
    B = torch.randn(COLS, N)
    assert named(lambda: plan @ B) == {"sparsetile::spmm": 1}
    given = B.clone().requires_grad_()
    assert named(lambda: (plan @ given).sum().backward()) == {"sparsetile::spmm": 2}
    assert named(lambda: plan.run(B, reduce="max")) == {"sparsetile::spmm_extremum": 1}
    values = plan.values.clone().requires_grad_()
    seen = named(lambda: plan.run(B, values=values).sum().backward())
    assert seen == {"sparsetile::spmm": 1, "sparsetile::sddmm": 1}


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_flops_are_two_for_each_entry_and_column(plan, lead):
    B = torch.randn(*lead, COLS, N)
    once = 2 * plan.nnz * N * B[..., 0, 0].numel()
    out = torch.empty(*lead, ROWS, N)
    given, values = B.clone().requires_grad_(), plan.values.clone().requires_grad_()
    for function, expected in (
        (lambda: plan @ B, once),
        (lambda: plan.run(B, out=out), once),
        (lambda: plan.run(B, reduce="max"), once),
        (lambda: (plan @ given).sum().backward(), 2 * once),
        (lambda: plan.run(given, values=values).sum().backward(), 3 * once),
    ):
        with FlopCounterMode(display=False) as counter:
            function()
        assert counter.get_total_flops() == expected


def test_flops_of_a_fused_linear_layer(plan):
    """Only GPU systems fuse it, so its formula is called with shapes, as the counter does."""
    recipe = plan.flat[1]
    formula = torch.utils.flop_counter.flop_registry[torch.ops.sparsetile.linear]
    shapes = ([], None, [], torch.empty(7, COLS), None, recipe, 1.0, False, None)
    assert formula(*shapes, out_val=torch.empty(7, ROWS)) == 2 * plan.nnz * 7
