"""``group_entries``: edges by row and their transpose, with schedules, run on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.kernels import grouping as kernels
from sparsetile.launch import faults, grouping
from sparsetile.launch.grouping import GroupedRows, group_edges
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import one_processor, unread_scratch

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

KINDS = ("one row", "two rows", "random", "sorted", "descending")
# Lengths of rows, around a segment of 64 entries and two of them; those of neighbours, the first of
# which begins anywhere in a segment.
SEGMENT = 64
LONG_ROWS = [
    [SEGMENT, SEGMENT + 1, 2 * SEGMENT - 1, 2 * SEGMENT, 2 * SEGMENT + 1, 0, 1],
    [1, *[SEGMENT + 1] * 6],
    [SEGMENT // 2 + 1, *[2 * SEGMENT + 1] * 3, 3],
]


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch, folder: Path, torch_cuda) -> Iterator[Tensor]:
    """Kernels run on the host. Yields the words in which they report."""
    words = torch.zeros(4, dtype=torch.int64)
    load_on_host(
        monkeypatch, folder, grouping, processors=one_processor, scratch=unread_scratch,
        faults_address=lambda device: words.data_ptr(),
    )  # fmt: skip
    torch_cuda(synchronize=None)
    # One block, as they run one after the other, of many tiles.
    monkeypatch.setattr(kernels, "BLOCKS_PER_SM", 1)
    for name in ("_LEAST_TILE", "_MOST_TILE"):
        monkeypatch.setattr(kernels, name, 256)
    monkeypatch.setattr(
        faults, "_words", [(faults.ctypes.c_int64 * 4).from_address(words.data_ptr())]
    )
    grouping._launches.clear()
    yield words
    grouping._launches.clear()


def edges_of(kind: str, count: int, shape: tuple[int, int]) -> Tensor:
    """Columns and rows."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(shape[0], (count,), generator=generator)
    columns = torch.randint(shape[1], (count,), generator=generator)
    rows = {
        "one row": torch.full((count,), shape[0] - 1),
        "two rows": rows % 2 * (shape[0] - 1),
        "random": rows,
        "sorted": rows.sort().values,
        "descending": rows.sort(descending=True).values,
    }[kind]
    return torch.stack([columns, rows])


def assert_grouped(made: GroupedRows, rows: Tensor, columns: Tensor) -> None:
    """Row pointers and entries are those of torch's stable sort, and items cover each row once."""
    count = rows.numel()
    want, order = torch.sort(rows, stable=True)
    parts = made.tensors()
    lengths = torch.bincount(rows, minlength=made.shape[0])
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    assert torch.equal(parts["indptr"], ends)
    assert torch.equal(parts["columns"][:count].long(), columns[order])
    assert torch.equal(made.part("sorted", made.entries)[:count].long(), want)
    if made.is_transpose:
        assert torch.equal(made.wide_part("order", made.entries)[:count], order)
    assert_schedule(parts, made, ends)


def assert_schedule(parts: dict[str, Tensor], made: GroupedRows, ends: Tensor) -> None:
    items = parts["items"].tolist()
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for row, begin, end, slot in items:
        if row >= 0:
            pieces.setdefault(row, []).append((begin, end, slot))
    assert sorted(pieces) == list(range(made.shape[0]))
    parents, nodes = parts["parent_of_slot"].tolist(), parts["nodes"].tolist()
    used: set[int] = set()
    for row, found in pieces.items():
        found.sort()
        assert found[0][0] == ends[row] and found[-1][1] == ends[row + 1]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        if len(found) == 1:
            assert found[0][2] == -1 and found[0][1] - found[0][0] <= made.lists.segment
            continue
        assert all(0 < end - begin <= made.lists.segment for begin, end, _ in found)
        level = [slot for *_, slot in found]
        while True:
            assert not used & set(level)
            used |= set(level)
            above = [parents[slot] for slot in level]
            children: list[int] = []
            for node in dict.fromkeys(above):
                first, many, *_ = nodes[node]
                children += range(first, first + many)
            assert children == level
            level = [nodes[node][2] for node in dict.fromkeys(above)]
            if level == [-1]:
                break


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 32, 33, 700, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_edges_are_grouped_as_torch_sorts_them(kind: str, count: int, dtype: torch.dtype):
    for shape in ((1, 1), (31, 40), (1500, 2000)):
        edges = edges_of(kind, count, shape)
        made = group_edges(edges.to(dtype), True, shape, False)
        assert_grouped(made, edges[1], edges[0])
        at_once = group_edges(edges.to(dtype), True, shape, False, transpose=True)
        assert_grouped(at_once, edges[1], edges[0])
        order = torch.sort(edges[1], stable=True).indices
        for turned in (made.transposed, at_once.known_transpose):
            assert_grouped(turned, edges[0][order], edges[1][order])
        assert made.transposed.transposed is made
    other = group_edges(edges.to(dtype), False, shape[::-1], False)
    assert_grouped(other, edges[0], edges[1])


def edges_of_lengths(lengths: Sequence[int], columns: int) -> Tensor:
    """Edges of rows with so many entries, one row after the other."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.stack([torch.arange(rows.numel()) * 7 % columns, rows])


@pytest.mark.parametrize("lengths", LONG_ROWS, ids=str)
def test_long_rows_are_cut_and_their_pieces_do_not_meet(lengths: list[int]):
    edges = edges_of_lengths(lengths, 50)
    made = group_edges(edges, True, (len(lengths), 50), False)
    assert made.lists.segment == SEGMENT
    assert_grouped(made, edges[1], edges[0])
    assert_grouped(made.transposed, edges[0], edges[1])


def test_keys_of_three_digits_are_sorted():
    shape = (2**20 + 5, 7)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(shape[0], (3000,), generator=generator)
    edges = torch.stack([rows % 7, rows])
    made = group_edges(edges, True, shape, False)
    want, order = torch.sort(rows, stable=True)
    assert torch.equal(made.part("columns", 3000).long(), edges[0][order])
    assert torch.equal(made.part("sorted", 3000).long(), want)


def test_self_loops_are_replaced_by_one_for_each_row():
    nodes, count = 40, 900
    edges = edges_of("random", count, (nodes, nodes))
    made = group_edges(edges, True, (nodes, nodes), True)
    kept = edges[:, edges[0] != edges[1]]
    assert kept.shape[1] < count
    looped = torch.cat([kept, torch.arange(nodes).repeat(2, 1)], 1)
    assert_grouped(made, looped[1], looped[0])
    order = torch.sort(looped[1], stable=True).indices
    assert_grouped(made.transposed, looped[0][order], looped[1][order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_made_of_the_lengths_of_rows(dtype: torch.dtype):
    nodes, count = 50, 300
    edges = edges_of("random", count, (nodes, nodes))
    A = torch.zeros(nodes, nodes, dtype=torch.float64)
    A.index_put_((edges[1], edges[0]), A.new_ones(1), accumulate=True)
    lengths = A.sum(1)
    scale = torch.where(lengths == 0, 0.0, lengths.clamp(min=1).rsqrt())
    made = group_edges(edges, True, (nodes, nodes), False)
    turned = made.transposed
    for rows in (made, turned):
        at, to = rows.part("sorted", count).long(), rows.part("columns", count).long()
        found = rows.values(kernels.SYMMETRIC, dtype)
        assert rows.values(kernels.SYMMETRIC, dtype) is found
        torch.testing.assert_close(found, (scale[at] * scale[to]).to(dtype))
    to = turned.part("columns", count).long()
    torch.testing.assert_close(turned.values(kernels.MEAN, dtype), (1 / lengths[to]).to(dtype))


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("number", [-1, 30, 2**31, -(2**40)])
def test_wrong_edges_are_left_out_and_raised(words: Tensor, row: int, number: int):
    shape, count = (25, 30), 200
    limit = shape[1 - row]
    if 0 <= number < limit:
        number = limit
    edges = edges_of("random", count, shape)
    edges[row, 77] = number
    made = group_edges(edges, True, shape, False)
    right = torch.cat([edges[:, :77], edges[:, 78:]], 1)
    assert_grouped(made, right[1], right[0])
    order = torch.sort(right[1], stable=True).indices
    assert_grouped(made.transposed, right[0][order], right[1][order])
    pattern = rf"edge_index must be from 0 to {limit - 1}.*got {number} at edge 77"
    with pytest.raises(ValueError, match=pattern):
        faults.raise_faults()
    assert not words.any()


@pytest.mark.parametrize("pointers", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [torch.int32, torch.int64])
def test_arrays_are_transposed(pointers: torch.dtype, columns: torch.dtype):
    lengths = torch.tensor([0, 5, 0, 0, 300, 1, 40, 0])
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count, cols = int(indptr[-1]), 1200
    indices = torch.randint(cols, (count,), generator=torch.Generator().manual_seed(1))
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends, found, order = grouping.transposed_arrays(indptr.to(pointers), indices.to(columns), cols)
    want = torch.sort(indices, stable=True).indices
    assert torch.equal(order, want) and torch.equal(found.long(), rows[want])
    assert torch.equal(ends.diff(), torch.bincount(indices, minlength=cols)) and ends[0] == 0
