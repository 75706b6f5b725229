"""Paths of the kernels that only large matrices take, forced upon the contract's small ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparsetile.engines.rows import work
from sparsetile.kernels.csr import RowShape
from tests.contracts.cases import MATRICES, assert_close, csr_of, random_matrix, reference, tf32
from tests.contracts.subjects import Subject

pytestmark = [
    pytest.mark.usefixtures("fresh_runners"),  # those of a variant must not outlive it
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

WIDTHS = (1, 7, 64, 130, 512)


CSR = Subject("csr", None)


@pytest.fixture
def sixteen_rows() -> Iterator[Subject]:
    """The acc system with windows of sixteen rows, cut to pieces of a few tiles."""
    with tf32(True):
        yield Subject("acc", "stacked")


@pytest.fixture
def slabs_first(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The csr system with slabs as the fast dimension of the grid."""
    monkeypatch.setattr(RowShape, "slabs_first", lambda shape, bundles: True)
    return CSR


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The csr system that lets the next kernel start, however few its blocks are."""
    monkeypatch.setattr(work, "MANY_WAVES", 0)
    return CSR


@pytest.fixture(params=["sixteen_rows", "slabs_first", "early"])
def variant(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
def test_agrees_with_float64_within_rounding(variant, name, pattern):
    csr = csr_of(MATRICES[name](), pattern=pattern).to("cuda")
    plan = variant.plan(csr, 512)
    for n in WIDTHS:
        B = torch.randn(csr.shape[1], n, device="cuda")
        assert_close(plan @ B, csr, B)


def test_non_finite_values_reach_only_rows_that_reference_them(variant):
    csr = csr_of(random_matrix(301, 90, 0.08)).to("cuda")
    B = torch.randn(90, 256, device="cuda")
    B[0], B[17, 5], B[80, 39] = float("nan"), float("inf"), -float("inf")
    expected = reference(csr, B)
    found = (variant.plan(csr, 256) @ B).cpu().double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def test_scales_adds_and_rectifies(variant):
    csr = csr_of(random_matrix(203, 150, 0.2)).to("cuda")
    B, C = torch.randn(150, 256, device="cuda"), torch.randn(203, 256, device="cuda")
    bias = torch.randn(256, device="cuda")
    plan = variant.plan(csr, 256)
    plain = plan @ B
    scaled = plan.run(B, out=C.clone(), alpha=2.0, beta=-0.5)
    torch.testing.assert_close(scaled, 2.0 * plain - 0.5 * C, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plan.run(B, bias=bias, relu=True), torch.relu(plain + bias))


def test_a_long_window_is_cut_and_joined_in_the_same_order_each_time(sixteen_rows):
    csr = csr_of(random_matrix(40, 9000, 0.3)).to("cuda")
    plan = sixteen_rows.plan(csr, 128)
    B = torch.randn(9000, 128, device="cuda")
    first = plan @ B
    assert_close(first, csr, B)
    assert all(torch.equal(plan @ B, first) for _ in range(100))


def test_a_row_order_goes_with_windows_of_sixteen_rows(sixteen_rows):
    csr = csr_of(random_matrix(333, 200, 0.1)).to("cuda")
    B = torch.randn(200, 64, device="cuda")
    order = torch.randperm(333, device="cuda")
    assert_close(sixteen_rows.plan(csr, 64, reorder=order) @ B, csr, B)


def test_the_variants_are_what_they_say(sixteen_rows, slabs_first, early):
    csr = csr_of(random_matrix(300, 300, 0.1)).to("cuda")
    assert "windows of 16 rows" in str(sixteen_rows.plan(csr, 64).explain())
    made = []

    def noted(*given, **more):
        made.append(launch_of(*given, **more))
        return made[-1]

    launch_of = work.Launch.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.Launch, "of", noted)
        plan = slabs_first.plan(csr, 640)
        plan @ torch.randn(300, 640, device="cuda")
    assert made and all(one.slab_fast and one.early for one in made)
