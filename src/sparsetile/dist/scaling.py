"""How long products over many GPUs would take: counted volumes, measured rates, given links.

A rank packs, then receives its halo while it multiplies its local columns, then multiplies the
rest; a product ends with the slowest rank:

    time = max over ranks of (pack + max(local product, exchange) + halo's product + launches)

Rates and links are parameters. Nothing here was measured on several GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.core.device import H200
from sparsetile.dist.halo import Way, choose_way
from sparsetile.dist.volumes import Volumes, cagnet_rows

__all__ = ["Rates", "best_copies", "product_seconds", "scaling_row", "way_of"]


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


def _link_rows(
    volumes: Volumes, way: Way, node: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of each rank within its node and beyond: the larger of in and out."""
    node_of = np.arange(volumes.ranks) // node
    same = node_of[:, None] == node_of[None, :]
    moved = volumes.needed
    if way == "all_gather":
        moved = np.full_like(moved, int(np.diff(volumes.rows).max()))
        np.fill_diagonal(moved, 0)
    inside = np.where(same, moved, 0)
    outside = moved - inside
    return np.maximum(inside.sum(0), inside.sum(1)), np.maximum(outside.sum(0), outside.sum(1))


def way_of(volumes: Volumes) -> Way:
    """Return the exchange that a plan with these shares would choose."""
    bounds = tuple(int(row) for row in volumes.rows)
    return choose_way(torch.from_numpy(volumes.needed), bounds)


def product_seconds(volumes: Volumes, n: int, itemsize: int, rates: Rates) -> dict[str, float]:
    """Return the predicted seconds of one product, and those of its parts on the slowest rank."""
    row, way = n * itemsize, way_of(volumes)
    inside, outside = _link_rows(volumes, way, rates.node)
    exchange = np.maximum(inside * row / rates.nvlink, outside * row / rates.network)
    exchange = exchange + (0.0 if way == "none" else rates.latency)
    packed = volumes.sent if way == "all_to_all" else np.zeros_like(volumes.sent)
    pack = 2 * packed * row / rates.dram
    local = rates.launch + 2.0 * volumes.local_nnz * n / rates.flops
    rest = 2.0 * (volumes.nnz - volumes.local_nnz) * n / rates.flops
    rest = rest + np.where(volumes.nnz > volumes.local_nnz, rates.launch, 0.0)
    total = pack + np.maximum(local, exchange) + rest
    slowest = int(total.argmax())
    return {
        "seconds": float(total[slowest]),
        "pack": float(pack[slowest]),
        "local": float(local[slowest]),
        "exchange": float(exchange[slowest]),
        "halo": float(rest[slowest]),
        "hidden": float(min(local[slowest], exchange[slowest])),
    }


def best_copies(rows: int, ranks: int) -> int:
    """Return the replication c ≥ 2 of 1.5-D that moves least; 0 where c² does not divide P."""
    able = [c for c in range(2, math.isqrt(ranks) + 1) if ranks % (c * c) == 0]
    return min(able, key=lambda c: cagnet_rows(rows, ranks, c)) if able else 0


def scaling_row(
    volumes: Volumes, n: int, itemsize: int, rates: Rates, alone: float, weak: bool
) -> dict[str, Any]:
    """Return one line of the report: volumes, CAGNET's beside, time, efficiency.

    Parameters
    ----------
    alone : float
        Seconds of one GPU: of the same graph, or with ``weak`` of a graph 1/P as large.
    """
    total, ranks = int(volumes.rows[-1]), volumes.ranks
    row = n * itemsize
    way = way_of(volumes)
    inside, outside = _link_rows(volumes, way, rates.node)
    busiest = int((inside + outside).max())
    copies = best_copies(total, ranks)
    times = product_seconds(volumes, n, itemsize, rates)
    ideal = alone if weak else alone / ranks
    return {
        "ranks": ranks,
        "rows": total,
        "nnz": int(volumes.nnz.sum()),
        "most_nnz": int(volumes.nnz.max()),
        "mean_halo_rows": float(volumes.received.mean()),
        "most_halo_rows": int(volumes.received.max()),
        "way": way,
        "busiest_bytes": busiest * row,
        "total_bytes": int(volumes.received.sum()) * row,
        "cagnet_1d_bytes": cagnet_rows(total, ranks) * row,
        "cagnet_15d_copies": copies,
        "cagnet_15d_bytes": cagnet_rows(total, ranks, copies) * row if copies else None,
        "times": times,
        "efficiency": ideal / times["seconds"] if times["seconds"] else 1.0,
    }
