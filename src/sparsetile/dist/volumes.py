"""Which rows each rank would exchange, counted on a graph that is never held.

Rows are streamed once, in order. Shares are contiguous, and the shares of fewer ranks are unions
of those of more, so all numbers of ranks are counted in the same pass. Counts are exact: they
equal what :func:`sparsetile.dist.plan` finds with the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.core.errors import value_error
from sparsetile.dist.partition import row_costs, share_bounds

__all__ = ["Volumes", "balanced_bounds", "cagnet_rows", "count_volumes", "grid_volumes"]

Blocks = Iterable[tuple[NDArray[np.int32], NDArray[np.int32]]]

# Columns of one share that are kept before they are made distinct.
_PENDING = 2**25


@dataclass(frozen=True, eq=False)
class Volumes:
    """What the ranks of one number of ranks hold and exchange.

    Attributes
    ----------
    rows : int64 [ranks + 1]
        First row of each share, of A and of B.
    nnz, local_nnz : int64 [ranks]
        Entries, and those whose row of B is the rank's own.
    needed : int64 [ranks, ranks]
        Rows of B that each rank (line) lacks of each other (column).
    fine_nnz, fine_needed : int64 [ranks, finest shares], optional
        The same of each of the finest shares: entries of a rank (line), and rows of B that it
        lacks. What replication needs (:func:`grid_volumes`).
    """

    ranks: int
    rows: NDArray[np.int64]
    nnz: NDArray[np.int64]
    local_nnz: NDArray[np.int64]
    needed: NDArray[np.int64]
    fine_nnz: NDArray[np.int64] | None = None
    fine_needed: NDArray[np.int64] | None = None

    @property
    def received(self) -> NDArray[np.int64]:
        """Rows that each rank receives, int64 [ranks]."""
        return self.needed.sum(1)

    @property
    def sent(self) -> NDArray[np.int64]:
        """Rows that each rank sends, int64 [ranks]."""
        return self.needed.sum(0)


def balanced_bounds(lengths: NDArray[np.int32], parts: int, n: int, itemsize: int) -> list[int]:
    """Return shares of equal predicted time, as ``dist.plan`` takes them."""
    costs = row_costs(torch.from_numpy(np.ascontiguousarray(lengths)), n, itemsize)
    return list(share_bounds(costs, parts))


class _Counter:
    """Counts of one number of ranks, as the finest shares go by."""

    def __init__(self, ranks: int, finest: NDArray[np.int64]) -> None:
        self.ranks = ranks
        self._step = (finest.size - 1) // ranks
        self._finest = finest
        self.rows = finest[:: self._step]
        kind = np.int16 if ranks < 2**15 else np.int32
        self._seen = np.full(int(finest[-1]), -1, dtype=kind)  # the last share that met a column
        self._nnz = np.zeros((ranks, finest.size - 1), dtype=np.int64)
        self._needed = np.zeros((ranks, finest.size - 1), dtype=np.int64)

    def entries(self, part: int, ordered: NDArray[np.int32]) -> None:
        """Count sorted columns of some entries of a finest share."""
        share = part // self._step
        self._nnz[share] += np.diff(np.searchsorted(ordered, self._finest))

    def columns(self, part: int, distinct: NDArray[np.int32]) -> None:
        """Count sorted distinct columns of a finest share."""
        share = part // self._step
        fresh = distinct[self._seen[distinct] != share]
        self._seen[fresh] = share
        self._needed[share] += np.diff(np.searchsorted(fresh, self._finest))

    def done(self) -> Volumes:
        for share in range(self.ranks):  # what it meets of its own is no halo
            self._needed[share, share * self._step : (share + 1) * self._step] = 0
        entries = _coarse(self._nnz, self.ranks)
        return Volumes(
            self.ranks,
            self.rows,
            entries.sum(1),
            entries.diagonal().copy(),
            _coarse(self._needed, self.ranks),
            self._nnz,
            self._needed,
        )


def _coarse(fine: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return counts by ``parts`` shares from counts by the finest ones."""
    return fine.reshape(fine.shape[0], parts, -1).sum(2)


def grid_volumes(groups: Volumes, volumes: Volumes) -> Volumes:
    """Return what the ranks of a grid (``replicas.py``) hold and exchange of B.

    Parameters
    ----------
    groups : Volumes
        Of P/c ranks, the row groups.
    volumes : Volumes
        Of P ranks, counted together with ``groups``.
    """
    ranks, copies = volumes.ranks, volumes.ranks // groups.ranks
    assert groups.fine_nnz is not None and groups.fine_needed is not None
    entries = _coarse(groups.fine_nnz, ranks).reshape(groups.ranks, groups.ranks, copies)
    lacking = _coarse(groups.fine_needed, ranks).reshape(groups.ranks, groups.ranks, copies)
    needed = np.zeros((groups.ranks, copies, groups.ranks, copies), dtype=np.int64)
    for j in range(copies):  # ranks of a slice lack rows of each other alone
        needed[:, j, :, j] = lacking[:, :, j]
    own = np.arange(groups.ranks)
    return Volumes(
        ranks,
        volumes.rows,
        entries.sum(1).ravel(),
        entries[own, own].ravel(),
        needed.reshape(ranks, ranks),
    )


def count_volumes(
    blocks: Blocks, bounds: Sequence[int], ranks: Sequence[int]
) -> dict[int, Volumes]:
    """Count what ranks would exchange of a square matrix, for several numbers of ranks.

    Parameters
    ----------
    blocks : iterable of (lengths, columns)
        The rows in order, any number at a time: the length of each, and their columns, which may
        repeat within a row.
    bounds : sequence of int
        First row of each of the finest shares, and the number of rows.
    ranks : sequence of int
        Each must divide the number of finest shares.
    """
    finest = np.asarray(bounds, dtype=np.int64)
    parts = finest.size - 1
    for count in ranks:
        if count < 1 or parts % count:
            raise value_error(
                "count_volumes", "ranks", f"numbers that divide {parts}, the finest shares", count,
                "Take powers of two",
            )  # fmt: skip
    counters = [_Counter(count, finest) for count in ranks]
    pending: list[NDArray[np.int32]] = []
    part, row, held = 0, 0, 0

    def flush() -> None:
        nonlocal held
        if not pending:
            return
        ordered = np.sort(np.concatenate(pending))
        pending.clear()
        held = 0
        first = np.ones(ordered.size, dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
        distinct = ordered[first]
        for counter in counters:
            counter.entries(part, ordered)
            counter.columns(part, distinct)

    for lengths, columns in blocks:
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        done = 0
        while done < lengths.size:
            while part < parts - 1 and row >= finest[part + 1]:
                flush()
                part += 1
            take = lengths.size - done
            if part < parts - 1:
                take = min(take, int(finest[part + 1]) - row)
            piece = columns[ends[done] : ends[done + take]]
            if piece.size:
                pending.append(piece)
                held += piece.size
                if held > _PENDING:
                    flush()
            done += take
            row += take
    flush()
    if row != finest[-1]:
        raise value_error(
            "count_volumes", "blocks", f"{finest[-1]} rows, the last of bounds", row,
            "Stream every row once",
        )  # fmt: skip
    return {counter.ranks: counter.done() for counter in counters}


def cagnet_rows(rows: int, ranks: int, copies: int = 1) -> float:
    """Return the rows that CAGNET's dense schemes move for the busiest rank, per product.

    1-D (``copies = 1``): every other rank's rows of B are broadcast, K (P - 1) / P. 1.5-D: on a
    grid of P/c by c, a rank receives P/c² blocks of K c/P rows, K/c together, and the c copies of
    its rows of C are summed by a ring all-reduce, 2 (c - 1)/c of M c/P rows. Leading terms of
    Tripathy, Yelick and Buluç, "Reducing Communication in Graph Neural Network Training", 2020.
    """
    if copies == 1:
        return rows * (ranks - 1) / ranks
    return rows / copies + 2 * rows * (copies - 1) / ranks
