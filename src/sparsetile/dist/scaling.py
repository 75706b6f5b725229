"""How long products over many GPUs would take: counted volumes, measured rates, given links.

A rank packs, then receives its halo while it multiplies its local columns, then multiplies the
rest; a product ends with the slowest rank:

    time = max over ranks of (pack + max(local product, exchange) + halo's product + launches)

With replication the products give parts of C, whose exchange and addition follow:

    + parts of C to their owners + (c + 1) reads and writes of the own rows of C

Rates and links are parameters. Nothing here was measured on several GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.core.device import H200
from sparsetile.dist.halo import Way, choose_way, wire_rows
from sparsetile.dist.replicas import (
    REPLICATE_GAIN,
    copies_of,
    grid_bytes,
    hides,
    local_bytes,
    pick_copies,
    sum_bytes,
)
from sparsetile.dist.volumes import Volumes, cagnet_rows, grid_volumes

__all__ = [
    "Rates",
    "best_copies",
    "choice_of",
    "product_seconds",
    "replicate_bytes",
    "scaling_row",
    "way_of",
]


@dataclass(frozen=True)
class Rates:
    """One GPU's rate, and the links between GPUs. Bytes and flops per second, each direction.

    Attributes
    ----------
    flops : float
        Of a sparse product, 2 · entries · N per second. The default is ``csr`` in float32 on
        reddit-like at N = 128 on an H200 (results/h200/large.jsonl: 4,510 GFLOP/s).
    dram : float
        Of packing, read and written.
    nvlink, network : float
        Of a GPU within its node and to other nodes: 450 GB/s (NVLink 4), 400 Gb/s.
    node : int
        GPUs of a node.
    latency : float
        Seconds that an exchange takes at least.
    launch : float
        Seconds that a product takes at least.
    """

    flops: float = 4.5e12
    dram: float = H200.dram
    nvlink: float = 450e9
    network: float = 50e9
    node: int = 8
    latency: float = 20e-6
    launch: float = H200.launch


def _moved(volumes: Volumes, way: Way) -> NDArray[np.int64]:
    """Return the rows of B that each rank (line) receives of each other."""
    if way != "all_gather":
        return volumes.needed
    moved = np.full_like(volumes.needed, int(np.diff(volumes.rows).max()))
    np.fill_diagonal(moved, 0)
    return moved


def _parts_of_c(volumes: Volumes, copies: int) -> NDArray[np.int64]:
    """Return the rows of C's parts that each rank (line) receives of each other."""
    group = np.arange(volumes.ranks) // copies
    same = group[:, None] == group[None, :]
    moved = np.where(same, np.diff(volumes.rows)[:, None], 0)
    np.fill_diagonal(moved, 0)
    return moved


def _link_rows(moved: NDArray[np.int64], node: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each rank within its node and beyond: the larger of in and out."""
    node_of = np.arange(moved.shape[0]) // node
    same = node_of[:, None] == node_of[None, :]
    inside = np.where(same, moved, 0)
    outside = moved - inside
    return np.maximum(inside.sum(0), inside.sum(1)), np.maximum(outside.sum(0), outside.sum(1))


def way_of(volumes: Volumes) -> Way:
    """Return the exchange that a plan with these shares would choose without replication."""
    bounds = tuple(int(row) for row in volumes.rows)
    return choose_way(torch.from_numpy(volumes.needed), bounds)


def replicate_bytes(
    by_ranks: Mapping[int, Volumes], ranks: int, n: int, itemsize: int
) -> dict[int, int]:
    """Return the bytes of the busiest rank by replication c, of those whose P/c was counted."""
    volumes, found = by_ranks[ranks], {}
    for c in copies_of(ranks):
        if ranks // c in by_ranks:
            grid = grid_volumes(by_ranks[ranks // c], volumes)
            each = grid_bytes(
                torch.from_numpy(grid.needed), tuple(volumes.rows.tolist()), c, n * itemsize,
                sum_bytes(n, itemsize),
            )  # fmt: skip
            found[c] = int(each.max())
    return found


def choice_of(
    by_ranks: Mapping[int, Volumes], ranks: int, n: int, itemsize: int, node: int
) -> tuple[str, int]:
    """Return the exchange that a plan would choose and its replication, memory permitting.

    Parameters
    ----------
    node : int
        Ranks of a host.
    """
    volumes = by_ranks[ranks]
    way = way_of(volumes)
    if way == "none":
        return way, 1
    bounds = tuple(int(row) for row in volumes.rows)
    others = min(wire_rows(torch.from_numpy(volumes.needed), bounds).values()) * n * itemsize
    sizes = zip(volumes.local_nnz.tolist(), np.diff(volumes.rows).tolist(), strict=True)
    local = min(local_bytes(nnz, rows, n * itemsize, itemsize) for nnz, rows in sizes)
    if hides(others, local, ranks <= node):
        return way, 1
    most = replicate_bytes(by_ranks, ranks, n, itemsize)
    copies = pick_copies(most, REPLICATE_GAIN * others)
    return ("replicate", copies) if copies > 1 else (way, 1)


def product_seconds(
    volumes: Volumes,
    n: int,
    itemsize: int,
    rates: Rates,
    copies: int = 1,
    sum_row: int | None = None,
) -> dict[str, float]:
    """Return the predicted seconds of one product, and those of its parts on the slowest rank.

    Parameters
    ----------
    volumes : Volumes
        With replication those of the grid (:func:`sparsetile.dist.volumes.grid_volumes`).
    copies : int
        The replication c.
    sum_row : int, optional
        Bytes of a row of C's parts; those of plans when None.
    """
    row = n * itemsize
    way: Way = way_of(volumes)
    if copies > 1 and way == "all_gather":
        way = "all_to_all"
    inside, outside = _link_rows(_moved(volumes, way), rates.node)
    exchange = np.maximum(inside * row / rates.nvlink, outside * row / rates.network)
    exchange = exchange + (0.0 if way == "none" else rates.latency)
    packed = volumes.sent if way == "all_to_all" else np.zeros_like(volumes.sent)
    pack = 2 * packed * row / rates.dram
    local = rates.launch + 2.0 * volumes.local_nnz * n / rates.flops
    rest = 2.0 * (volumes.nnz - volumes.local_nnz) * n / rates.flops
    rest = rest + np.where(volumes.nnz > volumes.local_nnz, rates.launch, 0.0)
    summed = np.zeros(volumes.ranks)
    if copies > 1:
        wide = sum_bytes(n, itemsize) if sum_row is None else sum_row
        near, far = _link_rows(_parts_of_c(volumes, copies), rates.node)
        summed = np.maximum(near * wide / rates.nvlink, far * wide / rates.network) + rates.latency
        summed = summed + (copies + 1) * np.diff(volumes.rows) * wide / rates.dram + rates.launch
    total = pack + np.maximum(local, exchange) + rest + summed
    slowest = int(total.argmax())
    return {
        "seconds": float(total[slowest]),
        "pack": float(pack[slowest]),
        "local": float(local[slowest]),
        "exchange": float(exchange[slowest]),
        "halo": float(rest[slowest]),
        "sum": float(summed[slowest]),
        "hidden": float(min(local[slowest], exchange[slowest])),
    }


def best_copies(rows: int, ranks: int) -> int:
    """Return the replication c ≥ 2 of 1.5-D that moves least; 0 where c² does not divide P."""
    able = [c for c in range(2, math.isqrt(ranks) + 1) if ranks % (c * c) == 0]
    return min(able, key=lambda c: cagnet_rows(rows, ranks, c)) if able else 0


def scaling_row(
    by_ranks: Mapping[int, Volumes],
    ranks: int,
    n: int,
    itemsize: int,
    rates: Rates,
    alone: float,
    weak: bool,
) -> dict[str, Any]:
    """Return one line of the report: volumes, CAGNET's beside, time, efficiency.

    Parameters
    ----------
    by_ranks : mapping
        Volumes of ``ranks``, and of P/c ranks for every replication c to look at.
    alone : float
        Seconds of one GPU: of the same graph, or with ``weak`` of a graph 1/P as large.
    """
    volumes = by_ranks[ranks]
    total, row = int(volumes.rows[-1]), n * itemsize
    way, taken = choice_of(by_ranks, ranks, n, itemsize, rates.node)
    most = replicate_bytes(by_ranks, ranks, n, itemsize)
    if taken > 1:
        volumes = grid_volumes(by_ranks[ranks // taken], volumes)
        busiest = most[taken]
    else:
        inside, outside = _link_rows(_moved(volumes, way_of(volumes)), rates.node)
        busiest = int((inside + outside).max()) * row
    copies = best_copies(total, ranks)
    times = product_seconds(volumes, n, itemsize, rates, taken)
    ideal = alone if weak else alone / ranks
    return {
        "ranks": ranks,
        "rows": total,
        "nnz": int(volumes.nnz.sum()),
        "most_nnz": int(volumes.nnz.max()),
        "mean_halo_rows": float(volumes.received.mean()),
        "most_halo_rows": int(volumes.received.max()),
        "way": way,
        "replicas": taken,
        "busiest_bytes": busiest,
        "replicate_bytes": {str(c): count for c, count in most.items()},
        "total_bytes": int(volumes.received.sum()) * row
        + int(_parts_of_c(volumes, taken).sum()) * sum_bytes(n, itemsize),
        "cagnet_1d_bytes": cagnet_rows(total, ranks) * row,
        "cagnet_15d_copies": copies,
        "cagnet_15d_bytes": cagnet_rows(total, ranks, copies) * row if copies else None,
        "times": times,
        "efficiency": ideal / times["seconds"] if times["seconds"] else 1.0,
    }
