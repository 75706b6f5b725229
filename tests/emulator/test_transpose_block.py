"""``transpose_block``: a stable sort whose work depends on the number of edges alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.kernels.blocks import MAX_TRANSPOSED
from sparsetile.layers import edge_rows as blocks
from tests.emulator.build import host_compiler
from tests.emulator.test_blocks import host_blocks

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

KINDS = ("one source", "two sources", "random", "sorted", "descending")
EDGES, COLUMNS = MAX_TRANSPOSED


def columns_of(kind: str, edges: int, count: int) -> Tensor:
    drawn = torch.randint(count, (edges,), generator=torch.Generator().manual_seed(edges))
    return {
        "one source": torch.full((edges,), count - 1),
        "two sources": drawn % 2 * (count - 1),
        "random": drawn,
        "sorted": drawn.sort().values,
        "descending": drawn.sort(descending=True).values,
    }[kind].int()


def assert_sorted(columns: Tensor, count: int) -> None:
    """Columns, the order of the edges and the columns' ends are those of torch's stable sort."""
    edges = columns.numel()
    # What lies before and behind the columns must not count.
    around = torch.cat([columns.new_full((3,), -1), columns, columns.new_full((5,), -1)])
    made = blocks._sorted(around, 3, edges, count).long()
    want, order = torch.sort(columns.long(), stable=True)
    assert torch.equal(made[:edges], want) and torch.equal(made[edges : 2 * edges], order)
    assert torch.equal(made[2 * edges :], torch.bincount(want, minlength=count).cumsum(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edges", [0, 1, 31, 32, 33, 1024, 1025, 3000])
def test_edges_are_sorted_as_torch_sorts_them(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, edges: int
):
    host_blocks(monkeypatch, folder)
    for count in (1, 2, 256, 257, 5000):
        assert_sorted(columns_of(kind, edges, count), count)


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_edges_of_the_most_columns_are_sorted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str
):
    host_blocks(monkeypatch, folder)
    assert_sorted(columns_of(kind, EDGES, COLUMNS), COLUMNS)


def test_edges_from_one_source_take_no_more_work_than_others(
    monkeypatch: pytest.MonkeyPatch, folder: Path
):
    loaded = host_blocks(monkeypatch, folder, counted=True)
    taken = {}
    for kind in KINDS:
        before = sum(loaded[0].steps) if loaded else 0
        blocks._sorted(columns_of(kind, EDGES, 1000), 0, EDGES, 1000)
        taken[kind] = sum(loaded[0].steps) - before
    assert 0 < max(taken.values()) <= 1.1 * taken["random"]
