"""Products of several kernels that own disjoint rows of one C: tiles for some, rows for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import sparsetile as st
from sparsetile.systems.acc.system import AccSystem
from sparsetile.systems.base import BuiltSystem, Request, System, part
from sparsetile.systems.csr.system import CSRSystem
from sparsetile.systems.registry import register, runner, unregister
from sparsetile.systems.shared.hybrid import HybridRunner, join_parts
from tests.contracts.cases import (
    MATRICES,
    assert_close,
    csr_of,
    random_matrix,
    reference,
    tf32,
    with_dense_row,
)
from tests.systems.requests import request_for

F32 = torch.float32


class Halves(System):
    """Tiles for every other eight rows, CUDA cores for the rows between them."""

    name = "halves"
    summary = "a test's hybrid"
    devices = ("cuda",)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    deterministic = True
    ordered = True
    rounds_to_tf32 = True
    kernels = ("spmm_bittcf", "spmm_csr")

    def predict(self, request: Request) -> float:
        return 1.0

    def build(self, request: Request) -> BuiltSystem:
        rows = torch.arange(request.csr.shape[0], device=request.csr.device)
        if request.permutation.perm is not None:
            rows = request.permutation.perm
        tiled = torch.arange(rows.numel(), device=rows.device) // 8 % 2 == 0
        parts = {
            "tiles": AccSystem().build_rows(request, rows[tiled]),
            "rows": CSRSystem().build_rows(request, rows[~tiled]),
        }
        tensors, meta = join_parts(parts)
        choices = {"format": "halves", "schedule": "halves"}
        return self.built(request, tensors, choices, {"format": 0.0, "schedule": 0.0}, **meta)

    def make_runner(self, meta: Mapping[str, Any]) -> HybridRunner:
        return HybridRunner(meta)


@pytest.fixture
def halves() -> Iterator[str]:
    register(Halves())
    with tf32(True):
        yield "halves"
    unregister("halves")


@pytest.mark.parametrize("name", MATRICES)
def test_each_row_belongs_to_one_part_and_each_entry_to_its_row(halves, name):
    csr = csr_of(MATRICES[name]())
    built = Halves().build(request_for(F32, csr=csr))
    tiles, rows = part("tiles", built.tensors), part("rows", built.tensors)
    own = tiles["order"].long()
    others = rows["items"][:, 0].long().unique()
    assert torch.equal(torch.cat([own, others]).sort().values, torch.arange(csr.shape[0]))
    assert torch.equal(
        tiles["entries"].long().sort().values,
        torch.nonzero(torch.isin(csr.row_ids(), own)).flatten(),
    )


def test_packed_values_of_parts_have_names_of_their_own(halves):
    csr = csr_of(random_matrix(100, 80, 0.2))
    built = Halves().build(request_for(F32, csr=csr))
    work = runner(built.recipe)
    assert work.packed_names == ("tiles.values",) and work.needs_packed_values
    packed = work.pack(built.tensors, csr.values, F32)
    entries = built.tensors["tiles.entries"].long()
    assert torch.allclose(packed["tiles.values"][: entries.numel()], csr.values[entries], rtol=1e-3)


def test_a_part_without_rows_launches_nothing(halves):
    csr = csr_of(random_matrix(5, 9, 0.5))  # all five rows are in the first window
    built = Halves().build(request_for(F32, csr=csr))
    work = runner(built.recipe)
    B, out = torch.ones(9, 4), torch.empty(5, 4)
    rows, tensors = work.parts["rows"], part("rows", built.tensors)
    assert rows.spmm(tensors, csr.values, None, B, out) is None
    assert rows.prepare_launches(tensors, csr.values, None, B) == ()


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


@pytest.fixture(params=[pytest.param("cuda", marks=gpu)])
def on_gpu(request: pytest.FixtureRequest, halves: str) -> str:
    return halves


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_parts_write_all_of_one_product(on_gpu, name, pattern):
    csr = csr_of(MATRICES[name](), pattern=pattern).to("cuda")
    plan = st.plan(csr, 64, system=on_gpu)
    for n in (1, 7, 64, 130):
        B = torch.randn(csr.shape[1], n, device="cuda")
        out = torch.full((csr.shape[0], n), float("nan"), device="cuda")
        assert_close(plan.run(B, out=out), csr, B)
        assert_close(plan @ B, csr, B)


def test_each_part_finishes_the_rows_that_it_owns(on_gpu):
    csr = csr_of(with_dense_row(203, 900, 13)).to("cuda")
    B, bias = torch.randn(900, 64, device="cuda"), torch.randn(64, device="cuda")
    plan = st.plan(csr, 64, system=on_gpu)
    plain = plan @ B
    before = torch.randn_like(plain)
    scaled = plan.run(B, out=before.clone(), alpha=2.0, beta=-0.5)
    torch.testing.assert_close(scaled, 2 * plain - 0.5 * before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plan.run(B, bias=bias, relu=True), torch.relu(plain + bias))
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    torch.testing.assert_close(plan.run(B, reduce="mean"), plain / lengths, rtol=1e-5, atol=1e-6)


def test_non_finite_values_reach_only_rows_that_reference_them(on_gpu):
    csr = csr_of(random_matrix(300, 90, 0.05)).to("cuda")
    B = torch.randn(90, 64, device="cuda")
    B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), -float("inf")
    expected, found = reference(csr, B), (st.plan(csr, 64, system=on_gpu) @ B).cpu().double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def test_a_bound_product_and_a_captured_one_launch_both_parts(on_gpu):
    csr = csr_of(random_matrix(400, 300, 0.05)).to("cuda")
    plan, B = st.plan(csr, 32, system=on_gpu), torch.randn(300, 32, device="cuda")
    expected = plan @ B
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan @ B
    plan.update_values(2 * csr.values)
    graph.replay()
    torch.testing.assert_close(C, 2 * expected)
    assert all(torch.equal(plan @ B, C) for _ in range(20))
