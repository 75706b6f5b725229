"""What an exchange that is not built would bring, by the model of ``scaling.py``.

    overlap      the exchange behind the whole product, not behind its local part alone: what any
                 order of the two could reach
    16-bit halo  rows of B rounded to 16 bits on the wire
    two-level    a row that several GPUs of a node need passes the network once, then NVLink
    all of these
    1.5-D        CAGNET's grid of P/c by c, c copies of B within a node, with the rows that are
                 needed instead of all; C is summed over the copies

Volumes are counted, as everywhere: those of a node are those of P/node ranks, and the rows of a
1.5-D grid are those of P/c ranks. Of 1.5-D the entries are taken as balanced over the ranks, which
a graph in the order of its communities is not: its time is a lower bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsetile.dist.scaling import Rates, product_seconds
from sparsetile.dist.volumes import Volumes

__all__ = ["coarser", "sparse_15d_rows", "what_if"]

_Rows = NDArray[np.float64]


def coarser(ranks: int, node: int) -> list[int]:
    """Return the numbers of ranks whose volumes :func:`what_if` needs beside those of ``ranks``."""
    found = {ranks // c for c in _copies(ranks, node)}
    if ranks > node and ranks % node == 0:
        found.add(ranks // node)
    return sorted(found)


def _copies(ranks: int, node: int) -> list[int]:
    """Copies that a grid can have whose column sets are equal and whose copies share a node."""
    return [c for c in (2, 4, 8, 16) if c <= node and node % c == 0 and ranks % (c * c) == 0]


def sparse_15d_rows(volumes: Volumes, copies: int) -> NDArray[np.int64]:
    """Return the rows that rank (i, j) of a 1.5-D grid receives, int64 [P/c, c].

    Parameters
    ----------
    volumes : Volumes
        Of P/c ranks. Rank (i, j) has the rows of share i and the columns of every c-th share from
        j on, so it receives what share i lacks of those.
    """
    return _grid_rows(volumes.needed, copies)


def _grid_rows(needed: NDArray[np.int64], copies: int) -> NDArray[np.int64]:
    return np.stack([needed[:, j::copies].sum(1) for j in range(copies)], 1)


def _exchange(inside: _Rows, outside: _Rows, row: int, rates: Rates) -> _Rows:
    return np.maximum(inside * row / rates.nvlink, outside * row / rates.network) + rates.latency


def _links(volumes: Volumes, node: int) -> tuple[_Rows, _Rows]:
    """Rows of each rank within its node and beyond, the larger of in and out; exact halos."""
    node_of = np.arange(volumes.ranks) // node
    same = node_of[:, None] == node_of[None, :]
    inside = np.where(same, volumes.needed, 0)
    outside = volumes.needed - inside
    return (
        np.maximum(inside.sum(0), inside.sum(1)).astype(np.float64),
        np.maximum(outside.sum(0), outside.sum(1)).astype(np.float64),
    )


def _two_level(volumes: Volumes, nodes: Volumes, row: int, rates: Rates) -> _Rows:
    """A node's rows by the network, shared among its GPUs, then every halo by NVLink."""
    once = np.maximum(nodes.received, nodes.sent) / rates.node
    network = np.repeat(once, rates.node) * row / rates.network
    inside = np.maximum(volumes.received, volumes.sent) * row / rates.nvlink
    return network + inside + 2 * rates.latency


def what_if(
    by_ranks: Mapping[int, Volumes],
    ranks: int,
    n: int,
    itemsize: int,
    rates: Rates,
    ideal: float,
) -> dict[str, dict[str, Any]]:
    """Return seconds and efficiency of each variant; ``built`` is what plans do.

    Parameters
    ----------
    by_ranks : mapping
        Volumes of ``ranks`` and of :func:`coarser`.
    ideal : float
        Seconds of a product that scales perfectly.
    """
    volumes = by_ranks[ranks]
    local = rates.launch + 2.0 * volumes.local_nnz * n / rates.flops
    rest = 2.0 * (volumes.nnz - volumes.local_nnz) * n / rates.flops
    rest = rest + np.where(volumes.nnz > volumes.local_nnz, rates.launch, 0.0)
    wide, half = n * itemsize, n * min(itemsize, 2)
    inside, outside = _links(volumes, rates.node)
    seconds = {"built": product_seconds(volumes, n, itemsize, rates)["seconds"]}

    def worst(exchange: _Rows, row: int, overlap: bool) -> float:
        pack = 2 * volumes.sent * row / rates.dram
        both = np.maximum(local + rest, exchange) if overlap else np.maximum(local, exchange) + rest
        return float((pack + both).max())

    seconds["overlap"] = worst(_exchange(inside, outside, wide, rates), wide, True)
    seconds["16-bit halo"] = worst(_exchange(inside, outside, half, rates), half, False)
    if ranks > rates.node and ranks % rates.node == 0:
        nodes = by_ranks[ranks // rates.node]
        seconds["two-level"] = worst(_two_level(volumes, nodes, wide, rates), wide, False)
        best = worst(_two_level(volumes, nodes, half, rates), half, True)
    else:
        best = worst(_exchange(inside, outside, half, rates), half, True)
    seconds["all of these"] = best
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": value, "efficiency": ideal / value if value else 1.0}
        for name, value in seconds.items()
    }
    copies = _copies(ranks, rates.node)
    for name, row in (("1.5-D", wide), ("1.5-D, 16-bit", half)):
        grids = [_grid_seconds(by_ranks[ranks // c], c, volumes, n, row, rates) for c in copies]
        if grids:
            value = min(grids)
            best_of = copies[grids.index(value)]
            shares = by_ranks[ranks // best_of]
            found[name] = {
                "seconds": value, "efficiency": ideal / value, "copies": best_of,
                "received_bytes": int(sparse_15d_rows(shares, best_of).max()) * row,
                "summed_bytes": round(_summed_rows(shares, best_of) * row),
            }  # fmt: skip
    return found


def _summed_rows(shares: Volumes, copies: int) -> float:
    """Rows of C that a ring all-reduce over the copies moves for a rank."""
    return 2 * (copies - 1) / copies * float(np.diff(shares.rows).max())


def _grid_seconds(
    shares: Volumes, copies: int, volumes: Volumes, n: int, row: int, rates: Rates
) -> float:
    """A product on a 1.5-D grid whose copies lie within a node: receive, multiply, sum C."""
    per_node = rates.node // copies
    node_of = np.arange(shares.ranks) // per_node
    same = node_of[:, None] == node_of[None, :]
    ways = []
    for near in (same, ~same):
        moved = np.where(near, shares.needed, 0)
        received = _grid_rows(moved, copies)
        sent = moved.sum(0)[:, None] / copies  # by all copies of a share, in turn
        ways.append(np.maximum(received, sent).ravel())
    exchange = _exchange(ways[0], ways[1], row, rates)
    product = 2 * rates.launch + 2.0 * float(volumes.nnz.mean()) * n / rates.flops
    summed = _summed_rows(shares, copies) * row / rates.nvlink
    return float(np.maximum(exchange, product).max() + summed + rates.latency)
