"""The rows of B that a rank needs from others (its halo), and the plan of their exchange.

A rank's rows of A are split by columns. Columns whose rows of B the rank owns make the local
product, which needs no exchange. The others make the halo's product, whose columns are numbered in
the order of the received rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import Partition
from sparsetile.intake.csr import CSR, offsets

__all__ = ["Collective", "Halo", "column_part", "find_halo", "join_extrema", "wire_rows"]

Collective = Literal["none", "all_to_all", "all_gather", "fewest"]

# All-gather packs nothing and needs no list of rows, so it may receive this much more.
_GATHER_CREDIT = 1.1


@dataclass(frozen=True, eq=False)
class Halo:
    """A rank's rows of A in two parts, and the exchange that the second needs."""

    collective: Collective  # the same on every rank; ``none`` if no rank needs a row
    # local, remote: [rows, own rows of B] and [rows, received rows]; patterns.
    local: CSR
    remote: CSR
    # local_entries, remote_entries: int64: the share's entries in each of them; -1: a partial sum.
    local_entries: Tensor
    remote_entries: Tensor
    send_ids: Tensor  # int64: own rows of B that others need, by receiver, ascending for each
    # send_rows, receive_rows: rows to and from each rank, of ``all_to_all``.
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    rows: int  # distinct rows of B that this rank needs
    # int64 [ranks, ranks]: rows that each rank (row) needs from each other (column), on the CPU.
    needed: Tensor
    padded: int  # rows that each rank gives to an all-gather: the largest share


def wire_rows(needed: Tensor, columns: tuple[int, ...]) -> dict[str, int]:
    """Return the most rows that a rank receives or sends, by collective."""
    parts = len(columns) - 1
    largest = max(columns[i + 1] - columns[i] for i in range(parts))
    busiest = int(torch.maximum(needed.sum(0), needed.sum(1)).max()) if parts else 0
    return {"all_to_all": busiest, "all_gather": (parts - 1) * largest}


def _choose_collective(needed: Tensor, columns: tuple[int, ...]) -> Collective:
    """Return the collective with fewer predicted bytes for the busiest rank."""
    rows = wire_rows(needed, columns)
    if int(needed.sum()) == 0:
        return "none"
    return (
        "all_gather" if rows["all_gather"] <= _GATHER_CREDIT * rows["all_to_all"] else "all_to_all"
    )


def column_part(share: CSR, inside: Tensor, columns: Tensor, width: int) -> CSR:
    """Return the pattern of the entries selected by ``inside``, with their new column numbers."""
    shape = (share.shape[0], width)
    return CSR(offsets(inside)[share.indptr], columns.to(torch.int32), None, shape)


def find_halo(
    ranks: Ranks,
    share: CSR,
    partition: Partition,
    function: str,
    collective: Collective | None = None,
) -> tuple[Halo, int]:
    """Split this rank's rows of A, and request the rows of B that it needs from their owners.

    ``share`` is in the partition's numbering of columns. The collective is the one with fewer
    predicted bytes when None. Returns the halo and the entries of the whole A.
    """
    device = share.device
    first, last = partition.columns[ranks.rank], partition.columns[ranks.rank + 1]
    bounds = torch.tensor(partition.columns, device=device)
    columns = share.indices.long()
    inside = (columns >= first) & (columns < last)
    local_entries = torch.nonzero(inside).flatten()
    remote_entries = torch.nonzero(~inside).flatten()
    outside = columns[remote_entries]
    lacking = torch.unique(outside)  # sorted, so it is grouped by owner
    edges = torch.searchsorted(lacking, bounds)
    receive = (edges[1:] - edges[:-1]).tolist()
    counts = ranks.numbers([share.nnz, *receive], device, function)
    needed = counts[:, 1:]
    send = needed[:, ranks.rank].tolist()
    starts = torch.repeat_interleave(bounds[:-1], edges[1:] - edges[:-1])
    send_ids = ranks.exchange(lacking - starts, receive, send, function)
    chosen = collective or _choose_collective(needed, partition.columns)
    padded = max(partition.columns[i + 1] - partition.columns[i] for i in range(ranks.size))
    if chosen == "all_gather":
        owner = torch.searchsorted(bounds[1:], outside, right=True)
        numbers, width = owner * padded + outside - bounds[owner], ranks.size * padded
    else:
        numbers, width = torch.searchsorted(lacking, outside), lacking.numel()
    halo = Halo(
        chosen, column_part(share, inside, columns[local_entries] - first, last - first),
        column_part(share, ~inside, numbers, width), local_entries, remote_entries, send_ids,
        tuple(send), tuple(receive), lacking.numel(), needed, padded,
    )  # fmt: skip
    return halo, int(counts[:, 0].sum())


def join_extrema(
    parts: Sequence[Tensor] | Tensor, present: Sequence[Tensor] | Tensor, reduce: str
) -> Tensor:
    """Join extrema over disjoint sets of entries, first to last; empty sets do not count.

    ``present``: whether a part has an entry in the row, bool [rows, 1], one per part.
    """
    best, known = parts[0], present[0]
    for other, there in zip(parts[1:], present[1:], strict=True):
        better = (other > best if reduce == "max" else other < best) | other.isnan()
        best = torch.where(there & (~known | better), other, best)
        known = known | there
    return best
