"""``plan(keep="inference")``: the same products from less memory, one error for everything else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import sparsetile as st
from sparsetile.engines.request import Request
from sparsetile.intake import as_csr
from sparsetile.plan.family import Family
from sparsetile.plan.inference import InferencePlan
from sparsetile.plan.plan import Plan
from sparsetile.plan.variant import Variant
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import csr_of
from tests.plans import MATRIX


@pytest.mark.parametrize("system", ["auto", "cpu", "dense"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_products_are_those_of_the_whole_plan(system, reduce):
    csr = csr_of(MATRIX, dtype=torch.float32)
    whole = st.plan(csr, 4, system=system)
    lean = st.plan(csr, 4, system=system, keep="inference")
    B = torch.randn(20, 4)
    assert torch.equal(lean.run(B, reduce=reduce), whole.run(B, reduce=reduce))
    assert torch.equal(lean @ B, whole @ B)
    X, bias = torch.randn(3, 20), torch.randn(30)
    assert torch.equal(lean.linear(X, bias=bias), whole.linear(X, bias=bias))
    assert repr(lean) == repr(whole)
    assert lean.nnz == whole.nnz
    assert lean.explain().splitlines()[0] == repr(whole)
    assert sum(lean.info["bytes"].values()) <= sum(whole.info["bytes"].values())
    compiled = torch.compile(lambda B: lean @ B, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(B), whole @ B)


def test_non_finite_products_are_exact_too():
    csr = csr_of(MATRIX, dtype=torch.float32)
    B = torch.randn(20, 4)
    B[3, 1] = torch.inf
    whole, lean = (st.plan(csr, 4, system="dense", keep=keep) for keep in ("all", "inference"))
    torch.testing.assert_close(lean @ B, whole @ B, equal_nan=True, rtol=0, atol=0)


REFUSED = {
    "values": (lambda plan: plan.values, "values: values must be omitted"),
    "update": (lambda plan: plan.update_values(torch.ones(plan.nnz)), "update_values: values"),
    "given": (lambda plan: plan.run(torch.ones(20, 1), values=torch.ones(plan.nnz)), "run: values"),
    "max": (lambda plan: plan.run(torch.ones(20, 1), reduce="max"), "run: max and min"),
    "T": (lambda plan: plan.T, "run: gradients and transposes"),
    "gradient": (
        lambda plan: plan @ torch.ones(20, 1, requires_grad=True),
        "run: gradients and transposes",
    ),
    "save": (lambda plan: plan.save("a.safetensors"), "save: saving"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_entries_says_so(name):
    plan = st.plan(csr_of(MATRIX, dtype=torch.float32), 4, keep="inference")
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{text}.*keep='inference'.*keep='all'"):
        call(plan)


def test_rejects_other_words():
    with pytest.raises(ValueError, match="plan: keep must be"):
        st.plan(csr_of(MATRIX), 4, keep="some")


def block_plan(sparsity: float = 0.9, zero: bool = False) -> Plan:
    """A plan of ``bcsr`` as it is built for a GPU, on the CPU: it cannot multiply here."""
    torch.manual_seed(0)
    keep = torch.randperm(800).reshape(20, 40) >= int(800 * sparsity)
    weight = torch.ones(1280, 2560) * keep.repeat_interleave(64, 0).repeat_interleave(64, 1)
    if zero:
        weight[tuple(weight.nonzero()[5])] = 0.0
    csr = as_csr(weight.to(torch.bfloat16).to_sparse_csr(), function="test")
    order = Permutation("identity", None)
    request = Request(csr, 64, torch.bfloat16, order)
    built = SYSTEMS["bcsr"].build(request)
    variant = Variant(
        csr, 64, torch.bfloat16, built, order, deterministic=True, report={"seconds": {}}
    )
    return Plan(Family(variant))


def test_blocks_at_ninety_percent_take_twelve_percent_of_the_dense_bytes():
    whole = block_plan()
    before = whole.info["bytes"]
    gone = [whole._variant.built.tensors["places"], whole._csr.indices, whole.values]
    gone = [weakref.ref(tensor) for tensor in gone]
    assert None not in [ref() for ref in gone]
    lean = InferencePlan.of(whole)
    del whole
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    held = lean.info["bytes"]
    dense = 1280 * 2560 * 2
    assert sum(before.values()) > 0.5 * dense
    assert sum(held.values()) <= 0.12 * dense
    assert held["packed values"] == 80 * 64 * 64 * 2
    assert set(held) == {"packed values", "format"}
    flat, _ = lean.flat
    assert sum(tensor.nbytes for tensor in flat) <= 0.02 * dense
    assert lean._variant.values is None
    with pytest.raises(ValueError, match=r"run: B must be torch\.bfloat16 with a plan of keep"):
        lean.operand_values(torch.float16)


def test_blocks_with_missing_cells_keep_what_repairs_them():
    lean = InferencePlan.of(block_plan(zero=True))
    assert "places" not in lean._variant.built.tensors
    assert lean._variant.values is not None
    assert any(name.startswith("exact.") for name in lean._variant.built.tensors)


def test_autocast_runs_and_still_refuses_gradients():
    full = torch.eye(6).to_sparse_csr()
    plan = st.plan(full, 4, keep="inference")
    B = torch.randn(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plan @ B, B.bfloat16())
        with pytest.raises(ValueError, match="keep='inference'"):
            plan @ B.requires_grad_()
