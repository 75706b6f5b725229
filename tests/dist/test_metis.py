"""Shares by METIS, whose stand-in here cuts a graph in order of its numbers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sparsetile import UnsupportedError
from sparsetile.dist.partition import find_partition
from tests.contracts.cases import csr_of, random_matrix

SQUARE = csr_of(random_matrix(30, 30, 0.1))


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, list[int], list[int]]]:
    """What METIS is given; row i goes to part i modulo the parts."""
    calls: list[tuple[int, list[int], list[int]]] = []

    def part_graph(parts, *, xadj, adjncy):
        calls.append((parts, xadj, adjncy))
        return 0, [row % parts for row in range(len(xadj) - 1)]

    monkeypatch.setitem(sys.modules, "pymetis", SimpleNamespace(part_graph=part_graph))
    return calls


def test_metis_gets_the_undirected_graph_without_loops(asked):
    found = find_partition("plan", SQUARE, 3, "metis", 8, 4)
    ((parts, first, neighbours),) = asked
    graph = torch.zeros(30, 30, dtype=torch.bool)
    for row in range(30):
        own = neighbours[first[row] : first[row + 1]]
        assert own == sorted(set(own)) and row not in own
        graph[row, own] = True
    dense = torch.zeros(30, 30, dtype=torch.bool)
    dense[SQUARE.row_ids(), SQUARE.indices.long()] = True
    assert parts == 3 and torch.equal(graph, (dense | dense.T).fill_diagonal_(False))
    assert found.name == "metis" and found.rows == found.columns == (0, 10, 20, 30)
    assert found.order is not None and found.ids(1).tolist() == list(range(1, 30, 3))


def test_without_pymetis_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(UnsupportedError) as caught:
        find_partition("plan", SQUARE, 3, "metis", 8, 4)
    assert str(caught.value) == (
        "plan: partition must be one that is installed, got 'metis' without pymetis. "
        "Install pymetis, or name a row order such as 'rabbit'."
    )


def test_only_square_matrices_are_cut_by_metis(asked):
    with pytest.raises(ValueError, match=r"^plan: partition must be auto or even for a matrix of "):
        find_partition("plan", csr_of(random_matrix(20, 30, 0.1)), 3, "metis", 8, 4)
    assert not asked
