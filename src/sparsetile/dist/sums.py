"""The exchange of rows of B or partial sums of C, whichever is fewer, for each pair of ranks.

A rank's entries in the columns of another may need few rows of B for many rows of C, or many for
few. In the second case (``exchange="fewest"``) the entries themselves move to the owner of the
columns, once, while planning. In each product the owner multiplies them by its own rows of B and
sends the sums, which are added like received rows of B with a weight of 1 (SHIRO's idea). So what a
rank sends is a sparse matrix times its rows of B,

    sent = W · B,   a row of W is one entry of 1 (a row of B) or a row of A's entries that moved,

and its gradient is the gradient of that product. New values of A move in every product that has
them, and their gradients back. Additions have a fixed order: a row's received parts by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.dist.group import Ranks
from sparsetile.dist.halo import Halo, column_part
from sparsetile.dist.partition import Partition
from sparsetile.intake.csr import CSR, offsets

__all__ = ["Sums", "find_sums"]


@dataclass(frozen=True, eq=False)
class Sums:
    """What a rank sends, and the entries of its rows that other ranks multiply."""

    sent: CSR  # W: a pattern [sent rows, own rows of B]
    moved: Tensor  # bool: the entries of W that are A's; the others are 1
    pushed: Tensor  # int64: the share's entries that moved, by rank
    pushed_counts: tuple[int, ...]  # to each rank, and from each
    pulled_counts: tuple[int, ...]
    rows: dict[str, int]  # most rows that a rank receives or sends, by exchange

    def sent_values(self, ranks: Ranks, values: Tensor) -> Tensor:
        """Return W's values for those of this rank's rows. Every rank must call it."""
        moved = _Move.apply(values[self.pushed], ranks, self.pushed_counts, self.pulled_counts)
        whole = values.new_ones(self.moved.numel())
        return whole.masked_scatter(self.moved, moved)


def remote_values(halo: Halo, values: Tensor) -> Tensor:
    """Return the values of the halo's product: A's, and 1 for a partial sum."""
    if not values.numel():
        return values.new_ones(halo.remote_entries.numel())
    own = values[halo.remote_entries.clamp(min=0)]
    return torch.where(halo.remote_entries >= 0, own, 1.0)


class _Move(torch.autograd.Function):
    """Values to the ranks that multiply their entries; gradients go back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, ranks: Ranks, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchange(values.detach(), sent, received, "run")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _Move.apply(grad, ctx.ranks, ctx.received, ctx.sent), None, None, None


def find_sums(
    ranks: Ranks, share: CSR, partition: Partition, function: str
) -> tuple[Halo, Sums, int]:
    """Choose for each pair of ranks, and tell the owners of columns what to send.

    Returns the halo, whose received rows are rows of B and partial sums, what this rank sends, and
    the entries of the whole A.
    """
    device, size = share.device, ranks.size
    first, last = partition.columns[ranks.rank], partition.columns[ranks.rank + 1]
    bounds = torch.tensor(partition.columns, device=device)
    columns, rows = share.indices.long(), share.row_ids()
    inside = (columns >= first) & (columns < last)
    local_entries = torch.nonzero(inside).flatten()
    # Entries by owner of the column, then row, then column.
    outside = torch.nonzero(~inside).flatten()
    owner = torch.searchsorted(bounds[1:], columns[outside], right=True)
    by_owner = torch.sort(owner, stable=True)
    outside, owner = outside[by_owner.indices], by_owner.values
    column, row = columns[outside], rows[outside]
    entry_counts = torch.bincount(owner, minlength=size)
    lacking, column_place = torch.unique(column, return_inverse=True)
    groups, row_place = torch.unique(owner * share.shape[0] + row, return_inverse=True)
    column_counts = torch.diff(torch.searchsorted(lacking, bounds))
    row_counts = torch.bincount(groups // max(share.shape[0], 1), minlength=size)
    pushes = row_counts < column_counts
    received = torch.minimum(row_counts, column_counts)
    # Place of an entry's row of B, or partial sum, among what its owner sends.
    place = torch.where(
        pushes[owner],
        row_place - offsets(row_counts)[owner],
        column_place - offsets(column_counts)[owner],
    )
    pushed = pushes[owner]
    # What the owners receive: (place, column of theirs) of each entry of W.
    request = torch.stack([place, column - bounds[owner]], 1)
    lone = torch.zeros_like(pushed)
    lone[_first_of_each(column_place)] = True  # a row of B is asked for once
    told = pushed | lone
    request_counts = torch.bincount(owner[told], minlength=size)
    # Rows of B in the order of columns, which is that of their places.
    order = torch.argsort(owner[told] * 2**32 + place[told], stable=True)
    pushed_counts = torch.where(pushes, entry_counts, 0)
    facts = torch.cat([received, request_counts, pushed_counts, column_counts]).tolist()
    table = ranks.numbers([share.nnz, *facts], device, function)
    received_by, told_by, pushed_by, lacking_by = table[:, 1:].reshape(size, 4, size).unbind(1)
    send_rows = received_by[:, ranks.rank].tolist()
    told_rows = told_by[:, ranks.rank].tolist()
    asked = ranks.exchange(request[told][order], request_counts.tolist(), told_rows, function)
    starts = torch.tensor([0, *send_rows[:-1]], device=device).cumsum(0)
    asker = torch.repeat_interleave(
        torch.arange(size, device=device), torch.tensor(told_rows, device=device)
    )
    sent_row = asked[:, 0] + starts[asker]
    total = sum(send_rows)
    sent = CSR(
        offsets(torch.bincount(sent_row, minlength=total)), asked[:, 1].to(torch.int32), None,
        (total, last - first),
    )  # fmt: skip
    moved = (pushed_by[:, ranks.rank] > 0).to(device)[asker]
    halo_csr, remote_entries = _halo_product(
        share, outside, pushed, row, place + offsets(received)[owner], int(received.sum())
    )
    halo = Halo(
        "fewest",
        column_part(share, inside, columns[local_entries] - first, last - first), halo_csr,
        local_entries, remote_entries, torch.arange(total, device=device), tuple(send_rows),
        tuple(received.tolist()), lacking.numel(), received_by, 0,
    )  # fmt: skip
    most = {
        name: int(torch.maximum(counts.sum(0), counts.sum(1)).max())
        for name, counts in (("fewest", received_by), ("all_to_all", lacking_by))
    }
    sums = Sums(
        sent, moved, outside[pushed], tuple(pushed_counts.tolist()),
        tuple(pushed_by[:, ranks.rank].tolist()), most,
    )  # fmt: skip
    return halo, sums, int(table[:, 0].sum())


def _first_of_each(numbers: Tensor) -> Tensor:
    """Return where each of the numbers from 0 on, all of which occur, is met first."""
    count = int(numbers.max()) + 1 if numbers.numel() else 0
    found = torch.full((count,), numbers.numel(), dtype=torch.int64, device=numbers.device)
    places = torch.arange(numbers.numel(), device=numbers.device)
    return found.scatter_reduce_(0, numbers, places, "amin")


def _halo_product(
    share: CSR, outside: Tensor, pushed: Tensor, row: Tensor, number: Tensor, width: int
) -> tuple[CSR, Tensor]:
    """Return the pattern of the halo's product, and the share's entry that is each of its own: -1
    for a partial sum, which is one entry for all that it adds."""
    keys = row * width + number
    own, order = torch.sort(keys[~pushed], stable=True)
    sums = torch.unique(keys[pushed])
    everything, places = torch.sort(torch.cat([own, sums]), stable=True)
    entries = torch.cat([outside[~pushed][order], torch.full_like(sums, -1)])[places]
    lengths = torch.bincount(everything // max(width, 1), minlength=share.shape[0])
    columns = (everything % max(width, 1)).to(torch.int32)
    return CSR(offsets(lengths), columns, None, (share.shape[0], width)), entries
