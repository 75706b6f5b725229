"""Replication by c (1.5-D, after CAGNET): c ranks share a row group and add up its rows of C.

The world of P ranks is a grid of P/c row groups by c slices. Rank r is in group r // c and slice
r % c. It multiplies the rows of A of its whole group, but only the columns whose rows of B belong
to ranks of its slice, so it exchanges rows of B within its slice alone. That gives parts of C:
each rank sends every other of its group the rows that those own, and adds what it receives by
rank, first to last.

    rows of B received   at most K/c - K/P, instead of K - K/P
    rows of C received   (c - 1) of its own shares: M (c - 1)/P

What a rank passes and gets stays as it was: its own rows of B, its own rows of C. CAGNET keeps the
whole C of a group on its c ranks (all-reduce); here each row of C has one owner, so a
reduce-scatter is enough, half of that. No row of B is held twice, and every entry of A is
multiplied by one rank.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import Partition
from sparsetile.dist.shares import check_entries
from sparsetile.intake.csr import CSR

__all__ = [
    "REPLICATE_GAIN",
    "Choice",
    "Grid",
    "choose_copies",
    "copies_of",
    "hides",
    "join_extrema",
    "local_bytes",
    "spread",
    "sum_bytes",
]

# The sum over the replicas hides behind no product, and is a second collective. So replication must
# bring the busiest rank's bytes down to this share of those of the best other exchange.
REPLICATE_GAIN = 0.8
# Parts of C may take this share of a rank's memory. Of all of it, not of what is free: the choice,
# and with it the order of additions, must be the same in every run.
_MEMORY_SHARE = 1 / 8
# Bytes that a product gathers while one byte crosses a link: 9.1 TB/s from an H200's L2 beside
# 450 GB/s of NVLink within a host and 400 Gb/s between hosts.
_HIDING_WITHIN, _HIDING_BETWEEN = 20, 180


def copies_of(size: int) -> list[int]:
    """Return the replications that a world can have: its divisors from 2 on."""
    return [c for c in range(2, size + 1) if size % c == 0]


def sum_bytes(n: int, itemsize: int) -> int:
    """Return the bytes of a row of C's parts: sums of 16-bit products travel in float32."""
    return n * max(4, itemsize)


def _shares(bounds: tuple[int, ...]) -> Tensor:
    return torch.tensor([second - first for first, second in itertools.pairwise(bounds)])


def _c_rows(rows: tuple[int, ...], copies: int) -> tuple[Tensor, Tensor]:
    """Return the rows of C's parts that each rank receives and sends, int64 [ranks]."""
    own = _shares(rows)
    whole = own.reshape(-1, copies).sum(1).repeat_interleave(copies)
    return (copies - 1) * own, whole - own


def _grid_bytes(
    needed: Tensor, rows: tuple[int, ...], copies: int, row: int, sum_row: int
) -> Tensor:
    """Return the bytes that each rank receives and sends for one product, int64 [ranks, 2].

    Parameters
    ----------
    needed : Tensor of int64 [ranks, ranks]
        Rows of B that each rank (line) of the grid lacks of each other (column).
    rows : tuple of int
        First row of C of each rank's own share.
    row, sum_row : int
        Bytes of a row of B, and of a row of C's parts (:func:`sum_bytes`).
    """
    taken, given = _c_rows(rows, copies)
    return torch.stack(
        [needed.sum(1) * row + taken * sum_row, needed.sum(0) * row + given * sum_row], 1
    )


def hides(others: int, local: float, one_host: bool) -> bool:
    """Whether an exchange is predicted to end before the local product that runs beside it.

    Parameters
    ----------
    others : int
        Bytes of the busiest rank, without replication.
    local : float
        Bytes that the smallest local product moves (:func:`local_bytes`).
    """
    return others * (_HIDING_WITHIN if one_host else _HIDING_BETWEEN) <= local


def local_bytes(nnz: int, rows: int, row: int, itemsize: int) -> int:
    """Return the bytes that a local product moves, as ``row_costs`` counts them."""
    return nnz * (row + 4 + itemsize) + rows * row


def _memory(device: torch.device, processes: int) -> int:
    """Return the bytes of this rank's memory; of a host it is shared by all ranks, at worst."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes


@dataclass(frozen=True)
class Choice:
    """Which replication was taken, and what the others would move.

    Attributes
    ----------
    copies : int
        c; 1 where nothing is replicated.
    most : dict of int to int
        Bytes of the busiest rank, by replication. Where C's parts alone are too many, B's rows
        were not counted and these are C's.
    too_large : tuple of int
        Replications whose parts of C do not fit in memory.
    hidden : bool
        Without replication the exchange hides behind the local product: none was looked at.
    """

    copies: int = 1
    most: dict[int, int] | None = None
    too_large: tuple[int, ...] = ()
    hidden: bool = False

    @property
    def best(self) -> int:
        """The replication of fewest bytes, whether taken or not; 0 where none was looked at."""
        if self.copies > 1:
            return self.copies
        return min(self.most, key=self.most.__getitem__) if self.most else 0


def choose_copies(
    ranks: Ranks,
    share: CSR,
    partition: Partition,
    row: int,
    sum_row: int,
    others: int,
    local: int,
    *,
    forced: bool,
    copies: int | None,
) -> Choice:
    """Return the replication of fewest predicted bytes for the busiest rank. Waits.

    Of equal ones the smallest is taken.

    Parameters
    ----------
    share : CSR [own rows, K]
        In the partition's numbering of columns.
    others : int
        Bytes of the best exchange without replication.
    local : int
        Bytes of this rank's local product without replication.
    forced : bool
        Replicate whatever the bytes and the memory.
    copies : int, optional
        The only replication to look at.
    """
    able = [copies] if copies is not None else copies_of(ranks.size)
    if not able:
        return Choice()
    limit = float("inf") if forced else REPLICATE_GAIN * others
    told = ranks.objects((socket.gethostname(), _memory(share.device, ranks.size), local), "plan")
    hosts, room = {host for host, _, _ in told}, min(size for _, size, _ in told)
    if not forced and hides(others, min(size for _, _, size in told), len(hosts) == 1):
        return Choice(hidden=True)
    most: dict[int, int] = {}
    too_large = []
    columns = torch.unique(share.indices.long())
    for c in able:
        taken, given = _c_rows(partition.rows, c)
        # The parts that a rank computes, and those that it receives.
        held = int((given + taken + 2 * _shares(partition.rows)).max()) * sum_row
        if held > _MEMORY_SHARE * room:
            too_large.append(c)
            if not forced:
                continue
        most[c] = int(torch.maximum(taken, given).max()) * sum_row
        if most[c] <= limit:
            needed = _grid_needed(ranks, columns, partition, c)
            most[c] = int(_grid_bytes(needed, partition.rows, c, row, sum_row).max())
    fewest = min(most, key=most.__getitem__, default=1)
    best = fewest if most and most[fewest] <= limit else 1
    return Choice(best, most, tuple(too_large))


def _owners(columns: Tensor, partition: Partition) -> Tensor:
    """Return the rank that owns the row of B of each column."""
    ends = torch.tensor(partition.columns[1:], device=columns.device)
    return torch.searchsorted(ends, columns, right=True)


def _to_group(ranks: Ranks, copies: int, counts: list[int]) -> list[int]:
    """Return counts by rank from counts by slice: all go to this rank's own group."""
    first = ranks.rank // copies * copies
    found = [0] * ranks.size
    found[first : first + copies] = counts
    return found


def _grid_needed(ranks: Ranks, columns: Tensor, partition: Partition, copies: int) -> Tensor:
    """Return the rows of B that each rank of a grid would lack of each other, on the CPU.

    Parameters
    ----------
    columns : Tensor of int64
        Different columns of this rank's rows of A, rising.
    """
    owner = _owners(columns, partition)
    # A row of B that a rank of the group owns is that rank's local part.
    away = owner // copies != ranks.rank // copies
    columns, part = columns[away], owner[away] % copies
    order = torch.argsort(part, stable=True)
    counts = torch.bincount(part, minlength=copies).tolist()
    told = ranks.numbers(_to_group(ranks, copies, counts), columns.device, "plan")
    received = ranks.exchange(
        columns[order], told[ranks.rank].tolist(), told[:, ranks.rank].tolist(), "plan"
    )
    lacking = _owners(torch.unique(received), partition)
    mine = torch.bincount(lacking, minlength=ranks.size).tolist()
    return ranks.numbers(mine, columns.device, "plan")


class _Swap(torch.autograd.Function):
    """Rows to their new ranks. The adjoint sends them back, so gradients of any order pass."""

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
        told = ranks.numbers(_to_group(ranks, copies, counts), share.device, "plan")
        self._send_entries = told[ranks.rank].tolist()
        self._receive_entries = told[:, ranks.rank].tolist()
        check_entries("plan", int(told.sum(0).max()))
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
        if share.values is not None:  # ranks may have brought different types
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
    """Join extrema over disjoint sets of entries, first to last; one without entries has no say.

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
