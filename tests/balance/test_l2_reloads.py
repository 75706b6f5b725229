"""How often rows of B come into the cache: near columns, far ones, and the order of the rows."""

from __future__ import annotations

import pytest
import torch

from sparsetile import CSR
from sparsetile.balance import l2_reload_factor, l2_reloads
from sparsetile.core.device import H200, SMALLEST_L2_BYTES

ROWS, EACH = 4096, 8
ROW_BYTES = 128


@pytest.fixture(autouse=True)
def cache(constants) -> None:
    """A cache of 512 rows of B, an eighth of the matrices here."""
    constants(l2_reloads, CACHE_BYTES=512 * ROW_BYTES)


def matrix(columns: torch.Tensor) -> CSR:
    """A pattern with ``columns`` [rows, entries]."""
    rows, each = columns.shape
    indptr = torch.arange(rows + 1) * each
    ordered = columns.sort(1).values.flatten().to(torch.int32)
    return CSR(indptr, ordered, None, (rows, ROWS))


def band() -> CSR:
    return matrix((torch.arange(ROWS)[:, None] + torch.arange(EACH)).clamp(max=ROWS - 1))


def scattered() -> CSR:
    generator = torch.Generator().manual_seed(0)
    return matrix(torch.randint(ROWS, (ROWS, EACH), generator=generator))


def test_a_B_that_fits_the_cache_is_not_reloaded(constants):
    assert l2_reload_factor(scattered(), None, ROW_BYTES // 8) == 0
    constants(l2_reloads, CACHE_BYTES=ROWS * ROW_BYTES)
    assert l2_reload_factor(scattered(), None, ROW_BYTES) == 0
    assert l2_reload_factor(scattered(), None, ROW_BYTES + 1) > 0


def test_rows_of_a_band_come_in_about_once():
    # Windows of 512 entries are 64 rows; each uses 7 columns of the next one's again.
    assert l2_reload_factor(band(), None, ROW_BYTES) == pytest.approx(1 + 7 / 64, abs=0.01)


def test_columns_in_no_order_come_in_about_every_time():
    found = l2_reload_factor(scattered(), None, ROW_BYTES)
    assert 0.9 * EACH < found < EACH
    assert found > 5 * l2_reload_factor(band(), None, ROW_BYTES)


def test_the_order_of_the_rows_counts_not_the_rows_themselves():
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    far = l2_reload_factor(band(), shuffled, ROW_BYTES)
    assert far > 5
    # The same matrix with its rows shuffled: the order that undoes it makes it a band again.
    columns = band().indices.reshape(ROWS, EACH)
    mixed = matrix(columns[shuffled])
    assert l2_reload_factor(mixed, None, ROW_BYTES) == far
    assert l2_reload_factor(mixed, torch.argsort(shuffled), ROW_BYTES) == l2_reload_factor(
        band(), None, ROW_BYTES
    )


def test_a_given_order_that_is_the_identity_changes_nothing():
    identity = torch.arange(ROWS)
    for csr in (band(), scattered()):
        assert l2_reload_factor(csr, identity, ROW_BYTES) == l2_reload_factor(csr, None, ROW_BYTES)


def test_a_matrix_without_entries_or_a_B_without_columns_is_not_reloaded():
    empty = CSR(
        torch.zeros(5, dtype=torch.int64), torch.empty(0, dtype=torch.int32), None, (4, 9999)
    )
    assert l2_reload_factor(empty, None, ROW_BYTES) == 0
    assert l2_reload_factor(scattered(), None, 0) == 0


def test_the_cache_is_the_smallest_that_plans_are_made_for():
    assert SMALLEST_L2_BYTES == 40 * 2**20 < H200.l2_bytes


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_of_very_many_entries_stretches_stand_for_all(far, ordered, constants):
    columns = torch.stack([torch.randperm(ROWS)[:EACH] for _ in range(ROWS)]) if far else None
    A = band() if columns is None else matrix(columns)
    order = torch.randperm(ROWS) if ordered else None
    exact = l2_reload_factor(A, order, ROW_BYTES)
    constants(l2_reloads, MOST_ENTRIES=A.nnz - 1, SAMPLED_ENTRIES=2048)
    assert l2_reload_factor(A, order, ROW_BYTES) == pytest.approx(exact, rel=0.1)


def test_a_row_longer_than_a_stretch_is_counted_once(constants):
    indices = torch.arange(ROWS, dtype=torch.int32)
    A = CSR(torch.tensor([0, ROWS]), indices, None, (1, ROWS))
    constants(l2_reloads, MOST_ENTRIES=100, SAMPLED_ENTRIES=10)
    assert l2_reload_factor(A, None, ROW_BYTES) == 1.0
