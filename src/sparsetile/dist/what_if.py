"""What other exchanges would bring, by the model of ``scaling.py``. Only 1.5-D is built.

    overlap      the exchange behind the whole product, not behind its local part alone: what any
                 order of the two could reach
    16-bit halo  rows of B rounded to 16 bits on the wire
    two-level    a row that several GPUs of a node need passes the network once, then NVLink
    all of these
    1.5-D        replication (``exchange="replicate"``) by the c of least time, which may be another
                 than that of fewest bytes
    1.5-D, 16-bit  the same with rows of B and parts of C in 16 bits

Volumes are counted, as everywhere: those of a node are those of P/node ranks, and the row groups of
a grid are those of P/c ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.dist.replicas import copies_of, grid_bytes, sum_bytes
from sparsetile.dist.scaling import Rates, choice_of, product_seconds
from sparsetile.dist.volumes import Volumes, grid_volumes

__all__ = ["coarser", "what_if"]

_Rows = NDArray[np.float64]


def coarser(ranks: int, node: int) -> list[int]:
    """Return the numbers of ranks whose volumes :func:`what_if` needs beside those of ``ranks``."""
    found = {ranks // c for c in copies_of(ranks)}
    if ranks > node and ranks % node == 0:
        found.add(ranks // node)
    return sorted(found)


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
    _, taken = choice_of(by_ranks, ranks, n, itemsize, rates.node)
    chosen = volumes if taken == 1 else grid_volumes(by_ranks[ranks // taken], volumes)
    seconds = {"built": product_seconds(chosen, n, itemsize, rates, taken)["seconds"]}

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
    able = [c for c in copies_of(ranks) if ranks // c in by_ranks]
    grids = {c: grid_volumes(by_ranks[ranks // c], volumes) for c in able}
    for name, size, sum_row in (
        ("1.5-D", itemsize, sum_bytes(n, itemsize)),
        ("1.5-D, 16-bit", min(itemsize, 2), half),
    ):
        times = {
            c: product_seconds(grid, n, size, rates, c, sum_row)["seconds"]
            for c, grid in grids.items()
        }
        if times:
            best_of = min(times, key=times.__getitem__)
            needed, rows = grids[best_of].needed, tuple(volumes.rows.tolist())
            # Bytes of B and of C's parts apart: the other's rows count nothing.
            moved = [
                int(grid_bytes(torch.from_numpy(needed), rows, best_of, b, c).max())
                for b, c in ((n * size, 0), (0, sum_row))
            ]
            found[name] = {
                "seconds": times[best_of], "efficiency": ideal / times[best_of],
                "copies": best_of, "received_bytes": moved[0], "summed_bytes": moved[1],
            }  # fmt: skip
    return found
