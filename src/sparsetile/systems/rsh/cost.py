"""What rows cost in tiles and on CUDA cores, and what a product of ``rsh`` is predicted to take.

Both parts are charged by the models of the systems that they are made of (``acc/cost.py``,
``csr/cost.py``), row by row instead of matrix by matrix: a tile costs eight rows of B with their
decoding, an entry and a new column what ``csr`` pays for them. A mixed product starts two kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsetile.formats.partition import (
    Counts,
    Partition,
    RowCosts,
    count_columns,
    split_by_cost,
)
from sparsetile.systems.acc.cost import ACC_MODEL
from sparsetile.systems.base import Request
from sparsetile.systems.csr.cost import CSR_MODEL
from sparsetile.systems.shared.cost import GatherModel, rows_once

__all__ = ["Split", "cheapest_split", "predict_rsh", "row_costs"]

# Seconds that a second kernel adds where both are short (ANCHORS: a dependent launch).
SECOND_KERNEL = 2.0e-6


@dataclass(frozen=True, eq=False)
class Split:
    """Rows in tiles and on CUDA cores, and the seconds of one product.

    Attributes
    ----------
    kind : str
        ``tiles`` (all rows), ``rows`` (all rows), or ``mixed``.
    partition : Partition or None
        The windows of a mixed split.
    seconds : float
        Predicted.
    """

    kind: str
    partition: Partition | None
    seconds: float


def _models(request: Request) -> tuple[GatherModel, GatherModel]:
    wide = 4 if request.dtype.itemsize >= 4 else 2
    return ACC_MODEL[wide], CSR_MODEL[wide]


def row_costs(request: Request) -> RowCosts:
    """Return what a request's rows cost either way, in seconds."""
    acc, csr = _models(request)
    machine, row = request.machine, request.row_bytes
    entry_bytes = 4 + (0 if request.csr.values is None else request.dtype.itemsize)
    return RowCosts(
        tile=8 * (row + acc.extra) / acc.pairs / machine.l2_gather,
        window=0.0,
        entry=row / csr.entries / machine.l2_gather + entry_bytes / csr.a / machine.dram,
        new=row / csr.pairs / machine.l2_gather,
        row=0.0,
    )


def counted(request: Request) -> Counts:
    """Count the request's columns, once."""
    return request.once("columns", lambda: count_columns(request.csr, request.permutation.perm))


def _once_seconds(request: Request, model: GatherModel) -> float:
    """Seconds that B and C take, each once."""
    machine, once = request.machine, request.row_bytes * rows_once(request.csr)
    beyond = max(once - machine.l2_bytes, 0)
    return ((once - beyond) / model.held + beyond / model.beyond) / machine.dram


def cheapest_split(request: Request) -> Split:
    """Return the cheapest of all rows in tiles, all on CUDA cores, and the best mixture."""
    return request.once(("split", request.n, request.dtype), lambda: _cheapest_split(request))


def _cheapest_split(request: Request) -> Split:
    acc, csr = _models(request)
    counts, costs = counted(request), row_costs(request)
    rows, windows = costs.of_rows(counts), costs.of_windows(counts)
    partition = split_by_cost(counts, costs)
    mixed = float(windows[partition.windows].sum() + rows[partition.residual].sum())
    candidates = [
        Split("rows", None, csr.start + float(rows.sum()) + _once_seconds(request, csr)),
        Split("tiles", None, acc.start + float(windows[::8].sum()) + _once_seconds(request, acc)),
    ]
    if partition.windows.numel() and partition.residual.numel():
        seconds = acc.start + SECOND_KERNEL + mixed + _once_seconds(request, acc)
        candidates.append(Split("mixed", partition, seconds))
    elif partition.windows.numel():  # windows that begin elsewhere than at multiples of eight
        seconds = acc.start + mixed + _once_seconds(request, acc)
        candidates.append(Split("mixed", partition, seconds))
    return min(candidates, key=lambda split: split.seconds)


def predict_rsh(request: Request) -> float:
    """Return the seconds of one product."""
    return cheapest_split(request).seconds
