"""The float64 reference: entry by entry, on samples, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from tools.attention import attended

from sparsetile.check import reference as module
from sparsetile.check.reference import dot_products, reference, row_chunks
from sparsetile.data.generators import one_dense_row, random
from sparsetile.intake.csr import FP8
from tests.check.products import entries, exact, row_by_row

REDUCES = ("sum", "mean", "max", "min")


def case(n: int = 24, weighted: bool = True):
    csr = random(90, 70, nnz=900, weighted=weighted, seed=3)
    return csr, torch.randn(70, n, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduce", REDUCES)
def test_it_is_the_product_in_float64(reduce: str, weighted: bool):
    csr, B = case(weighted=weighted)
    result, magnitude = reference(csr, B, reduce)
    assert result.dtype is torch.float64
    assert torch.allclose(result, exact(csr, B, reduce), rtol=1e-13, atol=1e-14)
    if reduce in ("max", "min"):
        assert torch.equal(magnitude, result.abs())
    else:
        plain = csr.with_values(None if csr.values is None else csr.values.abs())
        assert torch.allclose(magnitude, exact(plain, B.abs(), reduce), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("reduce", REDUCES)
def test_samples_of_rows_and_columns_are_parts_of_the_whole(reduce: str):
    csr, B = case()
    rows, columns = torch.tensor([80, 3, 3, 41]), torch.tensor([7, 0, 23])
    whole = reference(csr, B, reduce)
    part = reference(csr, B, reduce, rows=rows, columns=columns)
    for one, all_of_it in zip(part, whole, strict=True):
        assert torch.equal(one, all_of_it[rows][:, columns])


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("most", [1, 50, 3000])
def test_memory_is_bounded_without_a_change_of_the_result(reduce, most, calls_of, constants):
    csr = one_dense_row(40, 300, background=2.0)
    B = torch.randn(300, 11, generator=torch.Generator().manual_seed(5))
    whole = reference(csr, B, reduce)
    held = calls_of(module, "_reduced")
    constants(module, CHUNK_ELEMENTS=most)
    for one, all_of_it in zip(reference(csr, B, reduce), whole, strict=True):
        assert torch.allclose(one, all_of_it, rtol=1e-13, atol=1e-14)
    longest = int(csr.row_lengths().max())
    assert all(call.given[0].numel() <= max(most, longest) for call in held)


def test_values_are_rounded_to_the_type_of_B():
    csr, B = case()
    assert csr.values is not None
    rounded = csr.with_values(csr.values.half())
    assert torch.equal(reference(csr, B.half())[0], reference(rounded, B.half())[0])
    assert not torch.equal(reference(csr, B.half())[0], reference(csr, B.half().double())[0])
    eight = csr.with_values(csr.values.to(FP8).float())
    expected = exact(eight, B.to(FP8).float())
    assert torch.allclose(reference(csr, B.to(FP8))[0], expected, rtol=1e-13, atol=1e-14)
    chosen = torch.tensor([5, 2])
    found, _ = reference(csr, B.to(FP8), columns=chosen)
    assert torch.allclose(found, expected[:, chosen], rtol=1e-13, atol=1e-14)


def test_inf_and_nan_go_where_the_entries_say_and_nowhere_else():
    csr, B = case()
    B[3], B[9, 2], B[40, 5] = float("nan"), float("inf"), -float("inf")
    expected, found = row_by_row(csr, B), reference(csr, B)[0]
    assert torch.equal(found.isnan(), expected.isnan()) and bool(expected.isnan().any())
    assert torch.equal(found.isinf(), expected.isinf()) and bool(expected.isinf().any())
    assert bool(found.isfinite().any())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (5, 5)])
@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_rows_are_zero(shape: tuple[int, int], reduce: str):
    result, magnitude = reference(random(*shape, nnz=0), torch.randn(shape[1], 3), reduce)
    assert result.shape == magnitude.shape == (shape[0], 3)
    assert not bool(result.any()) and not bool(magnitude.any())


@pytest.mark.parametrize("rows", [None, torch.tensor([80, 3, 41])])
@pytest.mark.parametrize("most", [10, 2**24])
def test_dot_products_are_those_of_the_entries(rows, most, constants):
    constants(module, CHUNK_ELEMENTS=most)
    csr, B = case()
    G = torch.randn(90, 24, generator=torch.Generator().manual_seed(6))
    places, result, magnitude = dot_products(csr, G, B, rows)
    if rows is None:
        assert places.tolist() == list(range(csr.nnz))
    else:
        assert sorted(set(csr.row_ids()[places].tolist())) == [3, 41, 80]
        assert places.numel() == int(csr.row_lengths()[rows].sum())
    dense = G.double() @ B.double().T
    at = (csr.row_ids()[places], csr.indices[places].long())
    assert torch.allclose(result, dense[at], rtol=1e-12, atol=1e-13)
    assert torch.allclose(magnitude, (G.double().abs() @ B.double().abs().T)[at])


def test_chunks_hold_every_row_once_in_order():
    csr, _ = case()
    rows = torch.arange(90)
    for width in (1, 10**6, 10**9):
        assert torch.equal(torch.cat(list(row_chunks(csr, rows, width))), rows)
    assert entries(csr).count_nonzero() == csr.nnz  # the matrix of these tests has no stored zero


def test_graph_attention_row_by_row():
    csr = random(9, 7, nnz=20, weighted=False, seed=3)
    generator = torch.Generator().manual_seed(5)
    messages = torch.randn(7, 2, 3, generator=generator)
    of_source = torch.randn(7, 2, generator=generator)
    of_target = torch.randn(9, 2, generator=generator)
    counts = torch.randint(1, 4, (csr.nnz,), generator=generator).float()
    out = attended(csr, messages, of_source, of_target, 0.2, counts)
    assert out.dtype is torch.float64 and out.shape == (9, 6)
    for row in range(9):
        span = slice(int(csr.indptr[row]), int(csr.indptr[row + 1]))
        # Parallel edges one by one.
        source = csr.indices[span].long().repeat_interleave(counts[span].long())
        score = torch.nn.functional.leaky_relu(of_source[source] + of_target[row], 0.2).double()
        weights = torch.softmax(score, 0)
        wanted = (weights[..., None] * messages[source]).sum(0).flatten()
        torch.testing.assert_close(out[row], wanted)
    single = attended(csr, messages, of_source, None, 0.2, scales=torch.zeros(csr.nnz, 2))
    assert not single.any()
