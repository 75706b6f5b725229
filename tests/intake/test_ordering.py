"""Both ways of ordering entries give the one stable order."""

from __future__ import annotations

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsetile.intake import ordering


@pytest.mark.parametrize("counting_from", [0, 2**62], ids=["counting", "sorting"])
@given(places=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=2, max_size=40))
@settings(max_examples=80, deadline=None)
def test_sorts_stably_by_row_and_column(counting_from, places):
    rows = torch.tensor([row for row, _ in places])
    columns = torch.tensor([column for _, column in places])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "COUNTING_FROM", counting_from)
        keys, order = ordering.sort_entries(rows, columns, (5, 7))
    expected = sorted(range(len(places)), key=lambda k: places[k])
    assert order.tolist() == expected
    assert order.dtype == torch.int64
    assert keys.tolist() == [7 * places[k][0] + places[k][1] for k in expected]


def test_counting_passes_give_the_same_order_as_a_sort(monkeypatch):
    taken = []
    real = scipy.sparse.csr_array

    def counted(arrays, shape):
        taken.append(shape[1])
        return real(arrays, shape=shape)

    monkeypatch.setattr(scipy.sparse, "csr_array", counted)
    generator = torch.Generator().manual_seed(0)
    count = ordering.COUNTING_FROM
    rows, columns = torch.randint(0, 300, (2, count), generator=generator)
    keys, order = ordering.sort_entries(rows, columns, (300, 400))
    expected = torch.sort(rows * 400 + columns, stable=True)
    assert taken == [400, 300]
    assert torch.equal(keys, expected.values)
    assert torch.equal(order, expected.indices)


def test_a_mostly_empty_matrix_is_sorted_by_keys(monkeypatch, constants):
    constants(ordering, COUNTING_FROM=0)
    monkeypatch.setattr(scipy.sparse, "csr_array", None)  # what counts
    last = 2**31 - 2
    keys, order = ordering.sort_entries(
        torch.tensor([last, 0]), torch.tensor([last, last]), (2**31 - 1, 2**31 - 1)
    )
    assert order.tolist() == [1, 0]
    assert keys.tolist() == [last, last * (2**31 - 1) + last]
