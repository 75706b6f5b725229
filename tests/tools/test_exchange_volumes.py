"""Counted volumes are those of a search through all entries; matchings are as large as scipy's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import random as random_sparse
from scipy.sparse.csgraph import maximum_bipartite_matching
from tools.exchange_volumes import Cut, Pattern, copies, savings, table, volumes
from tools.matching import matching_size

from sparsetile.data import generators
from sparsetile.dist.partition import Partition, find_partition
from tools import exchange_volumes

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "cpu" / "exchange_volumes.jsonl"


def covers(entries: set[tuple[int, int]]) -> int:
    """The size of a smallest set of rows and columns that every entry has one of."""
    rows, columns = sorted({i for i, _ in entries}), sorted({j for _, j in entries})
    graph = np.zeros((len(rows), len(columns)), dtype=np.int8)
    for i, j in entries:
        graph[rows.index(i), columns.index(j)] = 1
    from scipy.sparse import csr_array

    return int((maximum_bipartite_matching(csr_array(graph)) >= 0).sum()) if entries else 0


@pytest.mark.parametrize("order", ["identity", "rcm", "louvain"])
@pytest.mark.parametrize("ranks", [2, 3, 16, 24])
def test_counts_are_those_of_every_pair_of_ranks(ranks, order):
    csr = generators.power_law(rows=200, nnz=1500, symmetric=False, seed=2)
    partition = find_partition("volumes", csr, ranks, order, 128, 4)
    place = torch.arange(200)
    if partition.order is not None:
        place[partition.order] = torch.arange(200)
    rows, columns = place[csr.row_ids()].tolist(), place[csr.indices.long()].tolist()

    def part(at: int) -> int:
        return max(p for p in range(ranks) if partition.rows[p] <= at)

    pairs: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for i, j in zip(rows, columns, strict=True):
        if part(i) != part(j):
            pairs.setdefault((part(i), part(j)), set()).add((i, j))
    found = volumes(Pattern(csr, partition.order), partition)
    lacking = {pair: len({j for _, j in each}) for pair, each in pairs.items()}
    least = {pair: min(lacking[pair], len({i for i, _ in each})) for pair, each in pairs.items()}
    assert found["cut"] == pytest.approx(sum(map(len, pairs.values())) / csr.nnz)
    assert found["rows"] * ranks == pytest.approx(sum(lacking.values()))
    assert found["either"] * ranks == pytest.approx(sum(least.values()))
    assert found["joint"] * ranks == pytest.approx(sum(map(covers, pairs.values())))
    for name, counts in (("rows", lacking), ("either", least)):
        ends = [
            sum(count for pair, count in counts.items() if pair[side] == rank)
            for side in (0, 1) for rank in range(ranks)
        ]  # fmt: skip
        assert found[f"busiest_{name}"] == max(ends)
    if ranks > exchange_volumes.NODE:
        node = exchange_volumes.NODE
        once = {
            (p // node, j)
            for (p, q), each in pairs.items()
            for _, j in each
            if p // node != q // node
        }
        assert found["node_rows"] * ranks == pytest.approx(len(once))
        far = sum(count for (p, q), count in lacking.items() if p // node != q // node)
        assert found["network_rows"] * ranks == pytest.approx(far)


def test_one_share_exchanges_nothing():
    csr = generators.power_law(rows=50, nnz=300, seed=1)
    cut = Cut(Pattern(csr, None), (0, 50))
    assert cut.entries == 0 and cut.rows.tolist() == [[0]] and cut.joint() == 0
    assert volumes(Pattern(csr, None), Partition("auto", (0, 50), (0, 50)))["cagnet_1d"] == 0


@pytest.mark.parametrize("ranks, expected", [(1, 0.0), (2, 50.0), (4, 75.0), (64, 32.8125)])
def test_the_15d_scheme_is_given_its_best_number_of_copies(ranks, expected):
    """100 rows on 64 ranks, c = 4: 25 - 100/64 rows of B, and 2 · 3/64 · 100 in the all-reduce."""
    assert copies(100, ranks) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_matchings_are_maximum(seed):
    graph = random_sparse(60, 50, 0.02 + 0.004 * seed, format="csr", random_state=seed)
    indptr, indices = graph.indptr.astype(np.int64), graph.indices.astype(np.int64)
    expected = int((maximum_bipartite_matching(graph) >= 0).sum())
    assert matching_size(indptr, indices, 50) == expected


def test_the_table_in_the_docs_is_that_of_the_record():
    records = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert {record["ranks"] for record in records} == set(exchange_volumes.RANKS)
    page = (ROOT / "docs" / "explanation" / "notes" / "exchange.md").read_text()
    assert table(records) in page and savings(records) in page
