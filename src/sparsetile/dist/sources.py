"""Reads a rank's share of A from any source. The result is a :class:`Found`, or one error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.folder import MatrixRows, open_folder
from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import Partition, column_bounds, find_partition
from sparsetile.dist.shares import Found, Share, check_entries, content_digest, renumbered
from sparsetile.intake import CSR, as_csr, current_values
from sparsetile.intake.csr import offsets

__all__ = ["kind_of_source", "read_source"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Wanted:
    """The request to a source; ``itemsize`` is the bytes of an element of B."""

    ranks: Ranks
    partition: str | Tensor
    columns: Sequence[int] | None
    n: int
    itemsize: int
    device: torch.device

    @property
    def automatic(self) -> bool:
        """Whether the partition is left to the plan."""
        return isinstance(self.partition, str) and self.partition == "auto"

    def find(self, csr: CSR) -> Partition:
        """Return the partition of a matrix over the ranks."""
        return find_partition(
            "plan", csr, self.ranks.size, self.partition, self.n, self.itemsize, self.columns
        )


def _detached(csr: CSR) -> CSR:
    return csr.with_values(None if csr.values is None else csr.values.detach())


def kind_of_source(A: Any) -> str:
    """Return how A is given: ``nothing``, ``share``, ``folder``, ``npz`` or ``whole``."""
    if A is None:
        return "nothing"
    if isinstance(A, Share):
        return "share"
    if isinstance(A, (str, os.PathLike)):
        if os.path.isdir(A):
            return "folder"
        return "npz" if str(A).lower().endswith(".npz") else "whole"
    return "whole"


def read_source(
    ranks: Ranks,
    A: Any,
    partition: str | Tensor,
    columns: Sequence[int] | None,
    n: int,
    itemsize: int,
    device: torch.device,
) -> Found:
    """Return this rank's rows of A on ``device``; the same error on every rank if it cannot."""
    wanted = Wanted(ranks, partition, columns, n, itemsize, device)
    kinds = [str(kind) for kind in ranks.objects(kind_of_source(A), "plan")]
    holders = [rank for rank, kind in enumerate(kinds) if kind != "nothing"]
    if len(holders) == 1 and ranks.size > 1:
        return _from_one(wanted, A, holders[0])
    if "nothing" in kinds:
        raise type_error(
            "plan", "A", "a sparse matrix on every rank, or on one alone",
            f"None on rank {kinds.index('nothing')}", "Pass it on all ranks, or None on all but one"
        )  # fmt: skip
    ranks.same("plan", "the kind of A", kinds)
    kind = kinds[0]
    if kind == "share":
        return _from_shares(wanted, A)
    if kind == "folder":
        return _from_folder(wanted, A)
    if kind == "npz":
        by_parts = isinstance(partition, str) and partition in ("auto", "even", "identity")

        def rows_of_file() -> MatrixRows:
            rows = MatrixRows(A, "plan")
            if not by_parts:
                rows.pattern()  # reads all of it
            return rows

        rows = ranks.together(
            "plan", "A", rows_of_file,
            lambda rows: {"whether A is read by parts": rows.whole is None},
        )  # fmt: skip
        if rows.whole is None:
            return _from_file(wanted, rows)
        A = rows.whole
    return _from_whole(wanted, A)


def _shares(partition: Partition) -> dict[str, Any]:
    """What must be the same on every rank."""
    order, mark = partition.order, 0
    if order is not None:  # it is long: a checksum of it is compared
        mark = int((order * (torch.arange(order.numel()) % 8191 + 1)).sum())
    return {
        "partition": f"{partition.name}, rows {partition.rows}",
        "columns": partition.columns,
        "the partition's order": mark,
    }


def _from_whole(wanted: Wanted, A: Any) -> Found:
    """Every rank has all of A and takes its own rows."""
    ranks, device = wanted.ranks, wanted.device

    def read() -> tuple[CSR, CSR, Partition, str]:
        given = as_csr(A, function="plan")
        csr = _detached(given)
        found = wanted.find(csr)
        return given, csr, found, content_digest(csr)

    given, csr, found, _ = ranks.together(
        "plan", "A", read, lambda made: {"A": made[3], **_shares(made[2])}
    )
    mine = renumbered(csr, found, ranks.rank)
    follow = None
    if given.values is not None and given.values.requires_grad:
        known, ids = given.with_values(None), found.ids(ranks.rank)
        entries = csr.select_rows(ids.to(csr.device))[1]

        def follow() -> Tensor | None:
            values = current_values(A, known, function="run")
            return None if values is None else mine.canonical_values(values[entries]).to(device)

    share = CSR(mine.indptr, mine.indices, mine.values, mine.shape)
    return Found(share.to(device), found, csr.shape, "whole on every rank", follow)


def _from_file(wanted: Wanted, rows: MatrixRows) -> Found:
    """Each rank reads the row pointers and its own entries of an ``.npz``."""
    ranks = wanted.ranks
    nothing = torch.zeros(0, dtype=torch.int32)
    pointers = CSR(rows.indptr, nothing, None, rows.shape)

    def read() -> tuple[Partition, CSR]:
        found = wanted.find(pointers)
        return found, rows.read(found.rows[ranks.rank], found.rows[ranks.rank + 1])

    facts = {"the shape of A": rows.shape, "entries of A": rows.nnz}
    found, mine = ranks.together("plan", "A", read, lambda made: {**facts, **_shares(made[0])})
    return Found(mine.to(wanted.device), found, rows.shape, "rows of a file")


def _from_shares(wanted: Wanted, share: Share) -> Found:
    """Each rank has its own rows."""
    ranks, device = wanted.ranks, wanted.device

    def read() -> CSR:
        if not wanted.automatic:
            raise value_error(
                "plan", "partition", "'auto' if A is given as shares", repr(wanted.partition),
                "Omit partition=: the shares are the partition",
            )  # fmt: skip
        csr = as_csr(share.matrix, function="plan")
        if csr.shape[1] != share.shape[1]:
            raise value_error(
                "plan", "A", f"of {share.shape[1]} columns like the whole matrix", csr.shape,
                "Number the columns of a share as in the whole A",
            )  # fmt: skip
        return csr

    given = ranks.together("plan", "A", read, lambda _: {"the shape of A": share.shape})
    places = ranks.objects((share.first_row, given.shape[0]), "plan")
    bounds = [0]
    for rank, (first, count) in enumerate(places):
        if first != bounds[-1]:
            raise value_error(
                "plan", "first_row", f"{bounds[-1]} on rank {rank}, where the share before ends",
                first, "Give the shares in rank order, without gaps",
            )  # fmt: skip
        bounds.append(first + count)
    if bounds[-1] != share.shape[0]:
        raise value_error(
            "plan", "the shares of A", f"{share.shape[0]} rows together", bounds[-1],
            "Give every row to a rank",
        )  # fmt: skip
    rows = tuple(bounds)

    def place() -> Partition:
        return Partition("given", rows, column_bounds("plan", wanted.columns, rows, share.shape))

    found = ranks.together("plan", "columns", place, _shares)
    plain = _detached(given)
    follow = None
    if given.values is not None and given.values.requires_grad:
        known = given.with_values(None)

        def follow() -> Tensor | None:
            values = current_values(share.matrix, known, function="run")
            return None if values is None else values.to(device)

    return Found(plain.to(device), found, share.shape, "a share from each rank", follow)


def _from_folder(wanted: Wanted, path: str | os.PathLike[str]) -> Found:
    """Each rank reads its own parts of a folder that ``sparsetile partition`` wrote."""
    ranks = wanted.ranks

    def read() -> tuple[Any, Partition, CSR]:
        if not wanted.automatic or wanted.columns is not None:
            raise value_error(
                "plan", "partition", "'auto' (and columns None) if A is a folder of parts",
                repr(wanted.partition), "Omit partition= and columns=",
            )  # fmt: skip
        folder = open_folder(Path(path))
        parts = folder.partition.parts
        if parts < ranks.size:
            raise value_error(
                "plan", "A", f"in at least {ranks.size} parts, one per rank", parts,
                "Partition it again with more parts, or use fewer ranks",
            )  # fmt: skip
        cuts = [rank * parts // ranks.size for rank in range(ranks.size + 1)]
        whole = folder.partition
        found = Partition(
            whole.name,
            tuple(whole.rows[cut] for cut in cuts),
            tuple(whole.columns[cut] for cut in cuts),
            whole.order,
        )
        return folder, found, folder.read(cuts[ranks.rank], cuts[ranks.rank + 1])

    folder, found, mine = ranks.together(
        "plan", "A", read, lambda made: {"A": f"{made[0].nnz} entries, {made[0].digest[:16]}"}
    )
    return Found(mine.to(wanted.device), found, folder.shape, "a folder of parts")


def _from_one(wanted: Wanted, A: Any, source: int) -> Found:
    """One rank has A and sends the others their rows."""
    ranks, device = wanted.ranks, wanted.device
    csr: CSR | None = None
    header: dict[str, Any] | None = None

    def read() -> None:
        nonlocal csr, header
        if ranks.rank != source:
            return
        if isinstance(A, Share):
            raise type_error(
                "plan", "A", "the whole matrix where one rank holds it", "a Share",
                "Pass the matrix itself",
            )  # fmt: skip
        csr = _detached(as_csr(A, function="plan"))
        found = wanted.find(csr)
        header = {
            "shape": csr.shape,
            "name": found.name,
            "rows": found.rows,
            "columns": found.columns,
            "order": found.order,
            "values": None if csr.values is None else _DTYPES.index(csr.values.dtype),
        }

    ranks.together("plan", "A", read)
    header = ranks.objects(header, "plan")[source]
    assert header is not None
    found = Partition(header["name"], header["rows"], header["columns"], header["order"])
    pieces = []
    if csr is not None:
        pieces = [renumbered(csr, found, part) for part in range(ranks.size)]
    counts = ranks.objects([piece.nnz for piece in pieces], "plan")[source]
    check_entries("plan", max(counts))
    own = counts[ranks.rank]
    rows = [found.rows[part + 1] - found.rows[part] for part in range(ranks.size)]

    def scatter(parts: list[Tensor], sizes: list[int], dtype: torch.dtype) -> Tensor:
        given = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        send = sizes if parts else [0] * ranks.size
        take = [sizes[ranks.rank] if rank == source else 0 for rank in range(ranks.size)]
        return ranks.exchange(given.to(device=device, dtype=dtype), send, take, "plan")

    lengths = scatter([piece.row_lengths() for piece in pieces], rows, torch.int64)
    indices = scatter([piece.indices for piece in pieces], counts, torch.int32)
    values = None
    if header["values"] is not None:
        kind = _DTYPES[header["values"]]
        values = scatter([piece.values for piece in pieces], counts, kind)  # type: ignore[misc]
    assert indices.numel() == own
    mine = CSR(offsets(lengths), indices, values, (lengths.numel(), header["shape"][1]))
    return Found(mine, found, header["shape"], f"sent by rank {source}")
