"""Counted volumes are those that real plans exchange; the model's times follow its formula."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sparsetile import dist as st_dist
from sparsetile.cli import main
from sparsetile.data.streamed import STREAMED, streamed
from sparsetile.dist.replicas import grid_bytes
from sparsetile.dist.scaling import (
    Rates,
    best_copies,
    choice_of,
    product_seconds,
    replicate_bytes,
    scaling_row,
    way_of,
)
from sparsetile.dist.volumes import (
    Volumes,
    balanced_bounds,
    cagnet_rows,
    count_volumes,
    grid_volumes,
)
from sparsetile.dist.what_if import coarser, what_if
from sparsetile.intake import as_csr
from tests.dist.test_products import whole_numbers
from tests.dist.test_replicas import count_bytes

GRAPH = "products-like?scale=0.001&seed=3"


def drawn(text: str):
    """A streamed graph held as a matrix, its lengths, and its blocks again."""
    made = streamed(text).made()
    parts = list(made.blocks())
    lengths = np.concatenate([part[0] for part in parts])
    columns = np.concatenate([part[1] for part in parts])
    rows = np.repeat(np.arange(lengths.size), lengths)
    size = lengths.size
    edges = torch.from_numpy(np.stack([rows, columns]).astype(np.int64))
    return as_csr((edges, None, (size, size))), made


def planned(group, text: str, bounds: list[int]) -> tuple[list[list[int]], int, tuple[str, int]]:
    csr, _ = drawn(text)
    chosen = st_dist.plan(csr, 16, group, torch.tensor(bounds))
    made = st_dist.plan(csr, 16, group, torch.tensor(bounds), exchange="all_to_all")
    row = torch.ones(made.local_shape[1], 16)
    assert torch.equal(made.gather(made @ row), csr_rows(csr))
    return made._halo.needed.tolist(), made.halo_rows, (chosen.exchange, chosen.replicas)


def csr_rows(csr) -> torch.Tensor:
    """A · ones: entries of each row, parallel edges counted."""
    values = torch.ones(csr.nnz) if csr.values is None else csr.values
    sums = torch.segment_reduce(values, "sum", lengths=csr.row_lengths())
    return sums.unsqueeze(1).expand(-1, 16)


@pytest.mark.parametrize("shuffle", ["false", "true"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_counts_are_what_ranks_exchange(workers, ranks, shuffle):
    text = f"{GRAPH}&shuffle={shuffle}"
    made = streamed(text).made()
    bounds = balanced_bounds(made.row_lengths, 4, 16, 4)
    counted = count_volumes(made.blocks(), bounds, [1, 2, 4])
    found = counted[ranks]
    real = workers.run(planned, ranks, text=text, bounds=bounds[:: 4 // ranks])
    assert found.needed.tolist() == real[0][0]
    assert found.received.tolist() == [halo for _, halo, _ in real]
    assert choice_of(counted, ranks, 16, 4, node=4) == real[0][2]
    assert way_of(found) != "none" and found.nnz.sum() == made.nnz


def moved(group, text: str, bounds: list[int], copies: int) -> tuple:
    csr, _ = drawn(text)
    made = st_dist.plan(
        csr.with_values(None), 16, group, torch.tensor(bounds), exchange="replicate",
        replicas=copies,
    )  # fmt: skip
    row = torch.ones(made.local_shape[1], 16)
    info = made.info
    return (
        made._halo.needed.tolist(), info["replicate"]["part_nnz"], made._local.nnz,
        count_bytes(made, row), info["busiest_bytes"]["replicate"],
    )  # fmt: skip


@pytest.mark.parametrize("copies", [2, 4])
def test_volumes_of_replication_are_the_bytes_of_a_run(workers, copies):
    """Counted from a stream, beside what torch.distributed is asked to move on four ranks."""
    made = streamed(GRAPH).made()
    bounds = balanced_bounds(made.row_lengths, 4, 16, 4)
    counted = count_volumes(made.blocks(), bounds, [1, 2, 4])
    grid = grid_volumes(counted[4 // copies], counted[4])
    real = workers.run(moved, 4, text=GRAPH, bounds=bounds, copies=copies)
    assert grid.needed.tolist() == real[0][0]
    each = grid_bytes(torch.from_numpy(grid.needed), tuple(bounds), copies, 64, 64)
    assert [tuple(pair) for pair in each.tolist()] == [tuple(one[3]) for one in real]
    assert replicate_bytes(counted, 4, 16, 4)[copies] == real[0][4] == int(each.max())
    # Entries of a stream may repeat; a plan has each once.
    assert sum(one[1] for one in real) <= grid.nnz.sum() == made.nnz
    assert all(one[1] <= count for one, count in zip(real, grid.nnz, strict=True))
    assert all(one[2] <= count for one, count in zip(real, grid.local_nnz, strict=True))
    # No more than CAGNET's scheme moves with all of B, up to the unevenness of the shares.
    assert int(each.max()) <= 1.3 * 64 * cagnet_rows(int(grid.rows[-1]), 4, copies)


def test_counts_do_not_depend_on_how_rows_are_cut():
    csr = whole_numbers(300, 300, 0.02)
    lengths, columns = csr.row_lengths().numpy().astype(np.int32), csr.indices.numpy()
    bounds = balanced_bounds(lengths, 8, 32, 4)

    def cut(step: int):
        for first in range(0, 300, step):
            last = min(first + step, 300)
            yield lengths[first:last], columns[int(csr.indptr[first]) : int(csr.indptr[last])]

    whole, pieces = (count_volumes(cut(step), bounds, [2, 8]) for step in (300, 7))
    for ranks in (2, 8):
        assert np.array_equal(whole[ranks].needed, pieces[ranks].needed)
        assert np.array_equal(whole[ranks].local_nnz, pieces[ranks].local_nnz)
    dense = torch.zeros(300, 300)
    dense[csr.row_ids(), csr.indices.long()] = 1
    middle = whole[2].rows[1]
    assert whole[2].received[0] == int((dense[:middle, middle:].sum(0) > 0).sum())
    assert whole[2].local_nnz[1] == int(dense[middle:, middle:].sum())


def test_counting_refuses_ranks_that_do_not_divide_and_missing_rows():
    blocks = [(np.array([1, 1], dtype=np.int32), np.array([0, 1], dtype=np.int32))]
    with pytest.raises(ValueError, match="ranks must be numbers that divide 2"):
        count_volumes(blocks, [0, 1, 2], [3])
    with pytest.raises(ValueError, match="blocks must be 4 rows, the last of bounds, got 2"):
        count_volumes(blocks, [0, 1, 4], [2])


def test_streamed_graphs_have_their_size_and_communities():
    for name in STREAMED:
        made = streamed(f"{name}?scale=0.0005").made()
        graph = made.graph
        assert abs(made.nnz - graph.nnz) < 0.02 * graph.nnz
        assert made.row_lengths.size == graph.rows
    # Most neighbours are close by in the order of communities, few in a random one.
    near = {}
    for shuffle in ("false", "true"):
        csr, _ = drawn(f"{GRAPH}&communities=20&shuffle={shuffle}")
        gap = (csr.row_ids() - csr.indices.long()).abs()
        near[shuffle] = float((gap < csr.shape[0] / 4).double().mean())
    assert near["false"] > 0.75 > 0.55 > near["true"]


def test_neighbours_are_drawn_from_most_nodes_of_a_graph_with_many_edges(monkeypatch):
    monkeypatch.setattr("sparsetile.data.streamed._TABLE", 1)
    csr, made = drawn("papers100m-like?scale=0.0002&communities=30")
    assert made.nnz > 10 * made.graph.rows, "the table must be a sample"
    assert csr.indices.unique().numel() > 0.7 * made.graph.rows


def test_a_block_depends_on_the_seed_alone():
    first, again = (streamed(GRAPH).made() for _ in range(2))
    for (_, one), (_, two) in zip(first.blocks(), again.blocks(), strict=True):
        assert np.array_equal(one, two)
    other = streamed(GRAPH.replace("seed=3", "seed=4")).made()
    assert not np.array_equal(first.row_lengths, other.row_lengths)


@pytest.mark.parametrize("text", ["nothing", "reddit-like?scael=1", "reddit-like?scale=x"])
def test_an_unknown_streamed_graph_is_refused(text):
    with pytest.raises(ValueError, match="streamed: "):
        streamed(text)


def test_cagnet_volumes():
    assert cagnet_rows(1000, 4) == 750
    assert cagnet_rows(1000, 16, 2) == 500 + 125
    assert best_copies(1000, 256) == 8 and best_copies(1000, 2) == 0
    assert cagnet_rows(1000, 256, 8) < min(cagnet_rows(1000, 256, c) for c in (1, 2, 4))


def test_times_follow_the_formula():
    needed = np.array([[0, 30, 40], [20, 0, 0], [0, 0, 0]])
    volumes = Volumes(
        3, np.array([0, 100, 200, 300]), np.array([900, 500, 100]), np.array([600, 480, 100]),
        needed,
    )  # fmt: skip
    rates = Rates(flops=1e6, dram=1e6, nvlink=1e5, network=1e4, node=2, latency=0.5, launch=0.25)
    times = product_seconds(volumes, 2, 4, rates)
    # Rank 0: 20 rows packed, 30 rows by NVLink and 40 by the network, of 8 bytes each.
    assert times["pack"] == pytest.approx(2 * 20 * 8 / 1e6)
    assert times["exchange"] == pytest.approx(0.5 + 40 * 8 / 1e4)
    assert times["local"] == pytest.approx(0.25 + 2 * 600 * 2 / 1e6)
    assert times["halo"] == pytest.approx(0.25 + 2 * 300 * 2 / 1e6)
    assert times["seconds"] == pytest.approx(times["pack"] + times["exchange"] + times["halo"])
    row = scaling_row({3: volumes}, 3, 2, 4, rates, alone=3 * times["seconds"], weak=False)
    assert row["efficiency"] == pytest.approx(1.0)
    assert row["busiest_bytes"] == 70 * 8 and row["way"] == "all_to_all"


def test_bench_scaling_out_counts_once_and_keeps_records(tmp_path, capsys):
    out = tmp_path / "scaling.jsonl"
    command = ["bench", "scaling-out", "--matrices", "reddit-like?scale=0.002", "--ranks", "2,4",
               "-n", "16", "--rates", "node=2", "--out", str(out)]  # fmt: skip
    assert main([*command, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["order"] for record in records] == ["communities", "shuffled"]
    assert [row["ranks"] for row in records[0]["rows"]] == [2, 4]
    assert records[0]["rates"]["node"] == 2
    assert set(records[0]["rows"][1]["what_if"]) >= {"built", "two-level", "1.5-D"}
    size = out.stat().st_size
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "communities" in shown.out and "best variant" in shown.out and "model" in shown.err
    assert out.stat().st_size == size, "what the file holds was counted again"


def test_bench_scaling_out_weak_grows_the_graph(capsys):
    command = ["bench", "scaling-out", "--matrices", "products-like?scale=0.0005", "--weak",
               "--ranks", "2,4", "--reorder", "communities", "--json"]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)[0]["rows"]
    assert rows[1]["rows"] == pytest.approx(2 * rows[0]["rows"], rel=0.01)


@pytest.mark.parametrize(
    "options, text",
    [
        (["--rates", "speed=1"], "--rates must be one of"),
        (["--rates", "nvlink=fast"], "--rates nvlink must be a positive number"),
        (["--ranks", "two"], "--ranks must be whole numbers"),
        (["-n", "8,16"], "-n and --dtype must be one each"),
        (["--matrices", "gen:banded?rows=9&bandwidth=1", "--weak"], "--weak must be used with"),
        (["--reorder", "rcm"], "--reorder must be one of"),
    ],
)
def test_bench_scaling_out_says_what_is_wrong(options, text, capsys):
    assert main(["bench", "scaling-out", *options]) == 2
    assert text in capsys.readouterr().err


def test_bench_scaling_out_takes_a_matrix_in_a_row_order(capsys):
    command = ["bench", "scaling-out", "--matrices", "gen:banded?rows=400&bandwidth=3", "--ranks",
               "4", "--reorder", "identity,rcm", "--json"]  # fmt: skip
    assert main(command) == 0
    records = json.loads(capsys.readouterr().out)
    assert records[0]["rows"][0]["most_halo_rows"] == 6  # three rows of each neighbour
    assert records[1]["order"] == "rcm"


def test_variants_of_the_exchange_follow_their_formulas():
    """Four ranks, nodes of two: each needs ten rows of every other, of which two nodes share."""
    needed = np.full((4, 4), 10)
    np.fill_diagonal(needed, 0)
    rows = np.array([0, 100, 200, 300, 400])
    fine = Volumes(4, rows, np.full(4, 1000), np.full(4, 600), needed)
    between = np.array([[0, 12], [12, 0]])  # twenty rows each way but for those that both need
    fine_nnz = np.array([[800, 700, 300, 200], [250, 250, 750, 750]])
    fine_needed = np.array([[0, 0, 7, 5], [6, 6, 0, 0]])
    coarse = Volumes(
        2, rows[::2], np.full(2, 2000), np.full(2, 1500), between, fine_nnz, fine_needed
    )
    rates = Rates(flops=1e6, dram=1e9, nvlink=1e5, network=1e4, node=2, latency=0.01, launch=0.0)
    assert coarser(4, 2) == [1, 2] and coarser(2, 2) == [1]
    assert coarser(6, 8) == [1, 2, 3] and coarser(64, 8) == [1, 2, 4, 8, 16, 32]
    found = what_if({4: fine, 2: coarse}, 4, 2, 4, rates, ideal=0.004)
    pack, local, rest = 2 * 30 * 8 / 1e9, 2 * 600 * 2 / 1e6, 2 * 400 * 2 / 1e6
    exchange = 20 * 8 / 1e4 + 0.01
    expected = {
        "built": pack + exchange + rest,
        "overlap": pack + exchange,
        "16-bit halo": pack / 2 + (0.01 + 20 * 4 / 1e4) + rest,
        "two-level": pack + 12 / 2 * 8 / 1e4 + 30 * 8 / 1e5 + 0.02 + rest,
        "all of these": pack / 2 + 12 / 2 * 4 / 1e4 + 30 * 4 / 1e5 + 0.02,
        # Rank 0 receives 7 rows and sends 6; its 100 rows of C come in two parts and are added.
        "1.5-D": 2 * 6 * 8 / 1e9
        + (0.01 + 7 * 8 / 1e4)
        + 2 * 300 * 2 / 1e6
        + 100 * 8 / 1e5
        + 0.01
        + 3 * 100 * 8 / 1e9,
    }
    assert local < exchange
    for name, seconds in expected.items():
        assert found[name]["seconds"] == pytest.approx(seconds), name
        assert found[name]["efficiency"] == pytest.approx(0.004 / seconds)
    grid = found["1.5-D"]
    assert (grid["copies"], grid["received_bytes"], grid["summed_bytes"]) == (2, 7 * 8, 100 * 8)
    alone = what_if({2: coarse}, 2, 2, 4, rates, ideal=0.004)
    assert set(alone) == {"built", "overlap", "16-bit halo", "all of these"}


def test_rows_of_a_sparse_grid_are_those_that_its_ranks_lack():
    """1.5-D volumes of a graph, counted again from its entries."""
    csr = whole_numbers(240, 240, 0.02)
    lengths, columns = csr.row_lengths().numpy().astype(np.int32), csr.indices.numpy()
    bounds = balanced_bounds(lengths, 16, 32, 4)
    counted = count_volumes([(lengths, columns)], bounds, [8, 16])
    grid, first = grid_volumes(counted[8], counted[16]), counted[16].rows
    dense = torch.zeros(240, 240, dtype=torch.bool)
    dense[csr.row_ids(), csr.indices.long()] = True
    for rank in (0, 7, 14):
        begin = rank // 2 * 2
        rows = dense[first[begin] : first[begin + 2]]
        parts = [rows[:, first[k] : first[k + 1]] for k in range(rank % 2, 16, 2)]
        local = rows[:, first[rank] : first[rank + 1]]
        met = sum(int(part.any(0).sum()) for part in parts) - int(local.any(0).sum())
        assert grid.received[rank] == met
        assert grid.nnz[rank] == sum(int(part.sum()) for part in parts)
        assert grid.local_nnz[rank] == int(local.sum())
    assert grid.needed.sum() == counted[8].needed.sum()
    assert grid.received.max() <= cagnet_rows(240, 16, 2)
