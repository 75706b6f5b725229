"""The floor against hand computations, term by term."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile import CSR
from sparsetile.core.device import Machine
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.tune import floor_seconds
from tests.contracts.cases import csr_of, random_matrix

H200 = Machine("H200", 132, 60 * 2**20, 4.2e12, 9.1e12, 250e12, 350e12, 390e12, 2.5e-6)
# Rates at which nothing but the term under test takes any time.
FREE = Machine("free", 132, 1, 1e30, 1e30, 1e30, 1e30, 1e30, 0.0)


def ladder() -> CSR:
    """70 rows: rows r and r+1 share column r; 139 entries, 70 columns used of 100."""
    rows = np.concatenate([np.arange(70), np.arange(1, 70)])
    columns = np.concatenate([np.arange(70), np.arange(69)])
    return csr_of(sp.csr_array((np.ones(139), (rows, columns)), shape=(70, 100)))


def test_a_small_product_costs_a_launch():
    found = floor_seconds(ladder(), 8, torch.float32, H200)
    assert (found.seconds, found.term) == (2.5e-6, "launch")


@pytest.mark.parametrize(
    "kind, dtype, entry_bytes",
    [("weighted", torch.float32, 8), ("pattern", torch.float32, 4), ("weighted", torch.float16, 6)],
)
def test_compulsory_traffic_is_A_the_used_rows_of_B_and_C(kind, dtype, entry_bytes):
    """A column of four bytes an entry, and its value; N of each of 70 columns used and 70 rows."""
    slow = replace(FREE, dram=1000.0)
    csr = ladder() if kind == "weighted" else ladder().with_values(None)
    found = floor_seconds(csr, 8, dtype, slow)
    assert found.seconds == pytest.approx(
        (entry_bytes * 139 + dtype.itemsize * 8 * (70 + 70)) / 1000
    )
    assert found.term == "compulsory traffic"


def test_the_cheapest_gather_sets_the_floor():
    slow = replace(FREE, l2_gather=1000.0)
    found = floor_seconds(ladder(), 8, torch.float32, slow)
    # Windows of 64 rows gather the fewest rows of B, 71, and multiplying costs nothing here.
    assert found.seconds == pytest.approx(4 * 8 * (71 + 70) / 1000)
    assert found.term == "gather by 64-row window"


def test_windows_pay_for_the_products_they_do():
    # Multiplying in windows is dear, so gathering row by row is the way: nnz + M rows of N.
    dear = replace(FREE, l2_gather=1e6, tensor_flops_16=1.0, tensor_flops_64=1.0)
    found = floor_seconds(ladder(), 8, torch.float32, dear)
    assert found.seconds == pytest.approx(4 * 8 * (139 + 70) / 1e6)
    assert found.term == "gather by row"


@pytest.mark.parametrize(
    "dtype, rate", [(torch.float32, 1), (torch.float16, 2), (torch.float64, 0.5)]
)
def test_tensor_cores_bind_if_gathering_row_by_row_is_dearer(dtype, rate):
    slow = replace(FREE, l2_gather=100.0, tensor_flops_16=1000.0, tensor_flops_64=1e-3)
    size = dtype.itemsize
    multiply = 2 * 16 * 74 * 8 / (1000 * rate)
    by_row, gather = size * 8 * (139 + 70) / 100, size * 8 * (74 + 70) / 100
    found = floor_seconds(ladder(), 8, dtype, slow)
    assert found.seconds == pytest.approx(min(by_row, max(gather, multiply)))
    if dtype is torch.float32:
        assert found.term == "gather by 16-row window"


def test_the_whole_formula_on_an_h200():
    csr = csr_of(random_matrix(3000, 2000, 0.02))
    n, nnz = 512, csr.nnz
    u16, u64 = distinct_pairs(csr, 16), distinct_pairs(csr, 64)
    gather = lambda pairs: 4 * n * (pairs + 3000) / 9.1e12  # noqa: E731
    compulsory = (8 * nnz + 4 * n * (2000 + 3000)) / 4.2e12
    best = min(
        gather(nnz),
        max(gather(u16), 2 * 16 * u16 * n / 250e12),
        max(gather(u64), 2 * 64 * u64 * n / 350e12),
    )
    found = floor_seconds(csr, n, torch.float32, H200)
    assert found.seconds == pytest.approx(max(2.5e-6, compulsory, best), rel=1e-12)


def test_an_order_that_brings_equal_rows_together_lowers_the_floor():
    rows = 256
    scattered = csr_of(sp.csr_array((np.ones(rows), (np.arange(rows), np.arange(rows) % 4))))
    slow = replace(FREE, l2_gather=1000.0)
    together = torch.argsort(torch.arange(rows) % 4, stable=True)
    before = floor_seconds(scattered, 8, torch.float32, slow)
    after = floor_seconds(scattered, 8, torch.float32, slow, together)
    assert before.seconds == pytest.approx(32 * (4 * 4 + rows) / 1000)
    assert after.seconds == pytest.approx(32 * (4 * 1 + rows) / 1000)


def test_a_matrix_without_entries_costs_a_launch_or_the_zeros_of_C():
    empty = csr_of(sp.csr_array((9, 6)))
    assert floor_seconds(empty, 4, torch.float32, H200).term == "launch"
    slow = replace(FREE, dram=1000.0)
    assert floor_seconds(empty, 4, torch.float32, slow).seconds == pytest.approx(4 * 4 * 9 / 1000)
