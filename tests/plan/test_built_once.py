"""What several threads ask of a plan at the same time is built once."""

from __future__ import annotations

import pytest
import torch

import sparsetile as st
from sparsetile.plan import family
from sparsetile.plan.family import Family
from tests.locks import at_once, slowed, waits_for

ROWS, N = 60, 8


@pytest.fixture
def plan() -> st.Plan:
    generator = torch.Generator().manual_seed(3)
    dense = torch.rand(ROWS, ROWS, generator=generator)
    return st.plan((dense * (dense < 0.1)).to_sparse_csr(), N)


def test_one_transpose_for_threads_that_ask_together(plan: st.Plan, monkeypatch):
    slow = slowed(monkeypatch, st.CSR, "transposed")
    one, other = at_once(lambda: plan._family.main(True))
    assert one is other is not None and slow.calls == 1


def test_one_plan_of_the_transpose_for_threads_that_ask_together(plan: st.Plan, monkeypatch):
    slow = slowed(monkeypatch, Family, "main")
    one, other = at_once(lambda: plan.T)
    assert one is other is not None and slow.calls == 1


def test_one_order_of_the_transpose_s_entries(plan: st.Plan, monkeypatch):
    slow = slowed(monkeypatch, st.CSR, "transpose_order")
    one, other = at_once(plan._family.entry_order)
    assert one is other is not None and slow.calls == 1


def test_one_pair_of_plans_for_gradients(plan: st.Plan, monkeypatch):
    plan._family.main(True)
    slow = slowed(monkeypatch, family, "flatten")
    one, other = at_once(lambda: plan._family.differentiable(plan._family.forward))
    assert one is other is not None and slow.calls == 1


def test_one_scale_of_rows_for_means(plan: st.Plan, monkeypatch):
    slow = slowed(monkeypatch, family, "row_scale")
    one, other = at_once(lambda: plan._family.row_scale(plan._family.forward))
    assert one is other is not None and slow.calls == 1


def test_one_look_at_symmetry(plan: st.Plan, monkeypatch):
    slow = slowed(monkeypatch, Family, "_is_symmetric")
    one, other = at_once(lambda: plan._family.for_gradients(plan._family.forward))
    assert one is other is not None and slow.calls == 1


def test_a_tracer_finds_autocast_s_type_built(plan: st.Plan, monkeypatch):
    """It cannot trace what builds, and takes what it read before to be constant."""
    prepared = []
    monkeypatch.setattr(Family, "prepare", lambda self, *given: prepared.append(given))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = plan._family.in_type(plan._family.forward, torch.float64)
    assert found.dtype is torch.float64 and prepared == [(False, torch.float64, N, False)]


@pytest.mark.parametrize("name", ["variants", "new values", "move"])
def test_values_are_neither_listed_nor_written_while_a_variant_is_built(plan: st.Plan, name: str):
    calls = {
        "variants": plan._family.variants,
        "new values": lambda: plan.update_values(torch.ones(plan._family.forward.csr.nnz)),
        "move": lambda: plan.to("cpu", torch.float64),
    }
    assert waits_for(plan._family.lock, calls[name])
