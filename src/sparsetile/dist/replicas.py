"""Replication by c (1.5-D, after CAGNET): c ranks share a row group and add up its rows of C.

The world of P ranks is a grid of P/c row groups by c slices. Rank r is in group r // c and slice
r % c. It multiplies the rows of A of its whole group, but only the columns whose rows of B belong
to ranks of its slice, so it exchanges rows of B only within its slice. That gives parts of C: each
rank sends the others of its group the rows that they own, and adds what it receives in rank order.

    rows of B received   at most K/c - K/P, instead of K - K/P
    rows of C received   (c - 1) of its own shares: M (c - 1)/P

The interface of a rank does not change: it passes its own rows of B and receives its own rows of C.
CAGNET keeps the whole C of a group on its c ranks (all-reduce). Here each row of C has one owner,
so a reduce-scatter is enough, which moves half as much. No row of B is stored twice, and one rank
multiplies each entry of A.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import Partition
from sparsetile.dist.shares import check_entries
from sparsetile.intake.csr import CSR

__all__ = [
    "Grid",
    "busiest_bytes",
    "copies_of",
    "default_copies",
    "join_extrema",
    "spread",
]


def copies_of(size: int) -> list[int]:
    """Return the replications that a world can have: its divisors from 2 on."""
    return [c for c in range(2, size + 1) if size % c == 0]


def default_copies(size: int) -> int:
    """Return the replication near the square root of the ranks; 1 if none is possible.

    If each rank needs nearly all of B, it moves the fewest bytes.
    """
    return min(copies_of(size), key=lambda c: (abs(c - size // c), c), default=1)


def _shares(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor([second - first for first, second in itertools.pairwise(bounds)])


def busiest_bytes(needed: Tensor, rows: tuple[int, ...], copies: int, n: int, itemsize: int) -> int:
    """Return the most bytes that a rank receives or sends for one product.

    Parameters
    ----------
    needed : Tensor of int64 [ranks, ranks]
        Rows of B that each rank (row) of the grid needs from each other (column).
    rows : tuple of int
        First row of C of each rank's own share.
    n, itemsize : int
        Columns of B, and bytes of an element. Sums of 16-bit products travel in float32.
    """
    own = _shares(rows)
    group = own.reshape(-1, copies).sum(1).repeat_interleave(copies)
    received = needed.sum(1) * itemsize + (copies - 1) * own * max(4, itemsize)
    sent = needed.sum(0) * itemsize + (group - own) * max(4, itemsize)
    return n * int(torch.maximum(received, sent).max())


def _owners(columns: Tensor, partition: Partition) -> Tensor:
    """Return the rank that owns the row of B of each column."""
    ends = torch.tensor(partition.columns[1:], device=columns.device)
    return torch.searchsorted(ends, columns, right=True)


def _to_group(ranks: Ranks, copies: int, counts: list[int]) -> list[int]:
    """Return counts by rank from counts by slice: all are of this rank's own group."""
    first = ranks.rank // copies * copies
    found = [0] * ranks.size
    found[first : first + copies] = counts
    return found


class _Swap(torch.autograd.Function):
    """Sends rows to their new ranks. The adjoint sends them back; gradients of any order work."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, send: list[int], receive: list[int], function: str
    ) -> Tensor:
        ctx.ranks, ctx.send, ctx.receive = ranks, send, receive
        return ranks.exchange(x.detach(), send, receive, function)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        back = _Swap.apply(grad, ctx.ranks, ctx.receive, ctx.send, "backward")
        return back, None, None, None, None


class Grid:
    """A rank's place in the grid: where its entries go, and where its rows of C come from.

    Attributes
    ----------
    copies : int
        c, the ranks of a row group.
    group, part : int
        This rank's row group and slice.
    group_rows : int
        Rows of C that this rank computes a part of.
    """

    def __init__(self, ranks: Ranks, share: CSR, partition: Partition, copies: int) -> None:
        self._ranks = ranks
        self.copies = copies
        self.group, self.part = divmod(ranks.rank, copies)
        rows = _shares(partition.rows).tolist()
        self.own_rows = rows[ranks.rank]
        members = rows[self.group * copies : (self.group + 1) * copies]
        self.group_rows = sum(members)
        self._send_rows = _to_group(ranks, copies, members)
        self._receive_rows = _to_group(ranks, copies, [self.own_rows] * copies)
        part = _owners(share.indices.long(), partition) % copies
        self._order = torch.argsort(part, stable=True)  # by slice, then by row and column
        counts = torch.bincount(part, minlength=copies).tolist()
        sent = ranks.numbers(_to_group(ranks, copies, counts), share.device, "plan")
        self._send_entries = sent[ranks.rank].tolist()
        self._receive_entries = sent[:, ranks.rank].tolist()
        check_entries("plan", int(sent.sum(0).max()))
        lengths = torch.bincount(share.row_ids() * copies + part, minlength=self.own_rows * copies)
        # Entries of each of this rank's own rows in each slice, [c, own rows].
        self._lengths = lengths.reshape(self.own_rows, copies).t().contiguous()
        self._buffer: Tensor | None = None

    def take(self, share: CSR, dtype: torch.dtype) -> CSR:
        """Return this rank's part of A [group's rows, K] from every rank's share. Waits."""
        ranks, copies = self._ranks, self.copies
        each = _to_group(ranks, copies, [self.own_rows] * copies)
        lengths = ranks.exchange(self._lengths.reshape(-1), each, self._send_rows, "plan")
        indptr = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=share.device)
        torch.cumsum(lengths, 0, out=indptr[1:])
        indices = ranks.exchange(
            share.indices[self._order], self._send_entries, self._receive_entries, "plan"
        )
        values = None
        if share.values is not None:  # ranks may have different types
            values = self.values(share.values.detach().to(dtype), "plan")
        return CSR(indptr, indices, values, (self.group_rows, share.shape[1]))

    def values(self, own: Tensor, function: str = "run") -> Tensor:
        """Return the values of this rank's part of A from those of every rank's own rows."""
        return _Swap.apply(
            own[self._order], self._ranks, self._send_entries, self._receive_entries, function
        )

    # -- rows of C ------------------------------------------------------------------------------

    def summed(self, C: Tensor) -> Tensor:
        """Add up the parts of this rank's rows of C, by rank; keeps one buffer, no gradients.

        Parameters
        ----------
        C : Tensor [..., group's rows, N]
        """
        sent = self._wire(C)
        shape = (self.copies * self.own_rows, *sent.shape[1:])
        if self._buffer is None or (self._buffer.shape, self._buffer.dtype) != (shape, C.dtype):
            with torch.inference_mode(False):  # later products may run outside of it
                self._buffer = sent.new_empty(shape)
        pending = self._ranks.start_all_to_all(
            self._buffer, self._receive_rows, sent, self._send_rows, "run"
        )
        pending.wait()
        return self._add(self._parts(self._buffer, C.shape[:-2]))

    def parts(self, C: Tensor) -> Tensor:
        """Return the parts of this rank's rows of C, [c, ..., own rows, N]; differentiable."""
        rows = _Swap.apply(self._wire(C), self._ranks, self._send_rows, self._receive_rows, "run")
        return self._parts(rows, C.shape[:-2])

    def add(self, C: Tensor) -> Tensor:
        """As :meth:`summed`, differentiable."""
        return self._add(self.parts(C))

    def _wire(self, C: Tensor) -> Tensor:
        """Return C with the rows first, contiguous: [rows, batches, N]."""
        return C.reshape(C.shape[:-2].numel(), *C.shape[-2:]).transpose(0, 1).contiguous()

    def _parts(self, rows: Tensor, lead: torch.Size) -> Tensor:
        parts = rows.reshape(self.copies, self.own_rows, *rows.shape[1:]).transpose(1, 2)
        return parts.reshape(self.copies, *lead, self.own_rows, rows.shape[-1])

    def _add(self, parts: Tensor) -> Tensor:
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    @property
    def present(self) -> Tensor:
        """Whether each own row has an entry in each slice, bool [c, own rows, 1]."""
        return (self._lengths > 0).unsqueeze(-1)


def spread(
    ranks: Ranks, share: CSR, partition: Partition, copies: int, dtype: torch.dtype
) -> tuple[Grid, CSR]:
    """Send every entry of A to the rank of the grid that multiplies it. Waits.

    Returns the grid and this rank's part, [group's rows, K], with values in ``dtype``.
    """
    grid = Grid(ranks, share, partition, copies)
    return grid, grid.take(share, dtype)


def join_extrema(
    parts: Sequence[Tensor] | Tensor, present: Sequence[Tensor] | Tensor, reduce: str
) -> Tensor:
    """Join extrema over disjoint sets of entries, first to last; empty sets do not count.

    Parameters
    ----------
    parts : Tensor [..., rows, N], one per part
    present : Tensor of bool [rows, 1], one per part
        Whether a part has an entry in the row.
    """
    best, known = parts[0], present[0]
    for other, there in zip(parts[1:], present[1:], strict=True):
        better = (other > best if reduce == "max" else other < best) | other.isnan()
        best = torch.where(there & (~known | better), other, best)
        known = known | there
    return best
