"""Rows of B or partial sums of C, whichever are fewer for a pair of ranks; and 16-bit halos."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import sparsetile as st
from sparsetile import dist as st_dist
from tests.contracts.cases import assert_close
from tests.dist.test_products import operand, whole_numbers

ROWS, WIDTH = 60, 5


def crossed(weighted: bool = True) -> st.CSR:
    """Row 0 needs every column, and every row needs the last column; a few more entries."""
    dense = torch.zeros(ROWS, ROWS, dtype=torch.float64)
    dense[0], dense[:, -1] = 2.0, -1.0
    dense[range(ROWS), range(ROWS)] = 3.0
    A = dense.to_sparse_csr()
    values = A.values() if weighted else None
    return st.CSR(A.crow_indices(), A.col_indices().int(), values, (ROWS, ROWS))


def fewer_rows(group, weighted: bool) -> list[int]:
    csr, B = crossed(weighted), operand(ROWS, WIDTH)
    made = st_dist.plan(csr, WIDTH, group, "even", exchange="fewest", dtype=torch.float64)
    usual = st_dist.plan(csr, WIDTH, group, "even", exchange="all_to_all", dtype=torch.float64)
    C = made @ made.shard(B)
    assert torch.equal(made.gather(C), st.plan(csr, WIDTH, dtype=torch.float64) @ B)
    assert made.exchange == "fewest" and made.halo_rows == usual.halo_rows
    assert made.info["busiest_bytes"]["all_to_all"] == usual.info["busiest_bytes"]["all_to_all"]
    text = made.explain()
    assert "rows of B or partial sums of C" in text and "fewest chosen: " in text
    return [sum(usual._halo.receive_rows), sum(made._halo.receive_rows), made._sums.pushed.numel()]


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "pattern"])
def test_a_dense_row_is_summed_where_its_columns_are(workers, weighted):
    """Rank 0 of 4 would receive the 45 rows of B that row 0 needs. Ranks 1 and 2 send a sum each.
    It needs 15 rows of B of rank 3, for as many rows of C: those are sent. Ranks 1 and 2 need one
    row of B, for all of their rows."""
    found = workers.run(fewer_rows, 4, weighted=weighted)
    assert found == [[45, 1 + 1 + 15, 2 * 15], [1, 1, 0], [1, 1, 0], [0, 0, 0]]


def new_values(group) -> None:
    csr, B = whole_numbers(ROWS, ROWS, 0.1), operand(ROWS, WIDTH)
    made = st_dist.plan(csr, WIDTH, group, exchange="fewest")
    mine = torch.arange(made.local_nnz) + int(csr.indptr[int(made.rows[0])])
    assert torch.equal(made.values, csr.values[mine])
    other = csr.with_values(csr.values.flip(0))
    expected = st.plan(other, WIDTH) @ B
    C = made.run(made.shard(B), values=other.values[mine])
    assert torch.equal(made.gather(C), expected)
    made.update_values(other.values[mine])
    assert torch.equal(made.values, other.values[mine])
    assert torch.equal(made.gather(made @ made.shard(B)), expected)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_new_values_are_sent_to_the_ranks_that_multiply_them(workers, ranks):
    workers.run(new_values, ranks)


def refuses(group) -> list[str]:
    made = st_dist.plan(crossed(), WIDTH, group, exchange="fewest")
    B = made.shard(operand(ROWS, WIDTH))
    texts = []
    for options in ({"reduce": "max"}, {"values": made.values} if dist.get_rank(group) else {}):
        with pytest.raises(ValueError) as caught:
            made.run(B, **options)
        texts.append(str(caught.value))
    return texts


def test_what_partial_sums_cannot_do_is_refused_on_every_rank(workers):
    for reduction, values in workers.run(refuses, 2):
        assert reduction == (
            "run: reduce must be 'sum' or 'mean' with exchange='fewest', got 'max'. "
            "Plan with another exchange."
        )
        assert values.startswith("run: whether A has new values must be the same on every rank")


def halved(group, exchange: str, half: torch.dtype) -> None:
    csr = whole_numbers(90, 90, 0.06)
    csr = csr.with_values(csr.values.float())
    made = st_dist.plan(csr, WIDTH, group, exchange=exchange, halo_dtype=half)
    exact = st_dist.plan(csr, WIDTH, group, exchange=exchange)
    assert made.halo_dtype is half
    assert 2 * made.info["busiest_bytes"][made.exchange] == exact.info["busiest_bytes"][exchange]
    small = operand(90, WIDTH, torch.float32)  # whole numbers: 16 bits hold them and their sums
    rows = made.shard(small)
    assert torch.equal(made @ rows, exact @ rows)
    B = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(1))
    found, expected = made @ made.shard(B), exact @ made.shard(B)
    scale = csr.row_sums(csr.values.abs()).max() * B.abs().max()
    assert (found - expected).abs().max() <= 2 * torch.finfo(half).eps * scale
    assert not torch.equal(found, expected)
    leaves = [made.shard(B).requires_grad_() for _ in range(2)]
    for plan, leaf in zip((made, exact), leaves, strict=True):
        (plan @ leaf).square().sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    largest = gradients[1].abs().max()
    assert (gradients[0] - gradients[1]).abs().max() <= 16 * torch.finfo(half).eps * largest


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "fewest"])
def test_a_halo_may_be_sent_in_16_bits(workers, exchange, half):
    workers.run(halved, 3, exchange=exchange, half=half)


def wrong_type(group) -> str:
    with pytest.raises(TypeError) as caught:
        st_dist.plan(crossed(), WIDTH, group, halo_dtype=torch.float32)
    return str(caught.value)


def test_a_halo_has_16_bits_or_those_of_b(workers):
    assert set(workers.run(wrong_type, 2)) == {
        "plan: halo_dtype must be torch.float16, torch.bfloat16 or None, got torch.float32. "
        "Omit it to send rows as they are."
    }


def rectangular(group) -> None:
    csr = whole_numbers(40, 90, 0.1)
    made = st_dist.plan(csr, WIDTH, group, exchange="fewest")
    B = operand(90, WIDTH)
    assert_close(made.gather(made @ made.shard(B)), csr, B)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rectangular_matrices(workers, ranks):
    workers.run(rectangular, ranks)
