"""Who owns which rows: contiguous shares of A's rows and of B's, in one order of the rows.

A partition is an order of the rows (None for the given one) and the first row of each rank's share
in that order. If A is square, B's rows are split like A's, so that C may be the next product's B.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.core.checks import one_of
from sparsetile.core.errors import UnsupportedError, type_error, value_error
from sparsetile.intake.csr import CSR, offsets
from sparsetile.reorder import REORDERERS, Permutation

__all__ = ["PARTITIONS", "Partition", "even_bounds", "find_partition", "row_costs", "share_bounds"]

# Besides row orders: contiguous shares in the given order, torch's chunks, METIS's parts.
PARTITIONS = ("auto", "even", "metis", *REORDERERS)


@dataclass(frozen=True, eq=False)
class Partition:
    """Shares of the rows of A (and of C), and of the rows of B.

    Attributes
    ----------
    name : str
        How it was found.
    rows, columns : tuple of int, one more than there are ranks
        First row of each rank's share of A and of B, and the number of rows at the end.
    order : Tensor of int64 [M] or None
        The row of A at each place, of a square A whose rows and columns are renumbered together.
        None for the given order.
    """

    name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    order: Tensor | None = None

    @property
    def parts(self) -> int:
        return len(self.rows) - 1

    def ids(self, part: int, *, of_columns: bool = False) -> Tensor:
        """Row numbers, in A's own numbering, of one share; int64, on the CPU."""
        bounds = self.columns if of_columns else self.rows
        places = torch.arange(bounds[part], bounds[part + 1])
        return places if self.order is None else self.order[places]


def even_bounds(size: int, parts: int) -> tuple[int, ...]:
    """Return the shares of ``torch.chunk``, which are those of a DTensor."""
    step = -(-size // parts)
    return tuple(min(step * part, size) for part in range(parts + 1))


def row_costs(lengths: Tensor, n: int, itemsize: int) -> Tensor:
    """Return the bytes that each row moves, float64: B's rows and the entries, then C's row.

    Products are bound by memory, so predicted time is proportional to these.
    """
    row = n * itemsize
    return lengths.double() * (row + 4 + itemsize) + row


def share_bounds(costs: Tensor, parts: int) -> tuple[int, ...]:
    """Cut rows into contiguous shares of about the same cost; shares may be empty."""
    total = torch.cumsum(costs.double().cpu(), 0)
    if total.numel() == 0:
        return (0,) * (parts + 1)
    aims = total[-1] * torch.arange(1, parts, dtype=torch.float64) / parts
    # The row that crosses a target goes to the side with the smaller error.
    ends = torch.searchsorted(total, aims)
    before = torch.where(ends > 0, total[(ends - 1).clamp(min=0)], 0.0)
    ends = ends + ((total[ends.clamp(max=total.numel() - 1)] - aims) < (aims - before)).long()
    return (0, *(int(end) for end in ends.clamp(max=total.numel())), total.numel())


def _given(function: str, partition: Tensor, csr: CSR, parts: int) -> tuple[Tensor, Tensor | None]:
    """Return (bounds, order) of a partition given as first rows [parts + 1] or as parts [M]."""
    rows = csr.shape[0]
    if partition.is_floating_point() or partition.dtype is torch.bool or partition.dim() != 1:
        raise type_error(
            function, "partition", "a name or a 1-D tensor of whole numbers",
            f"{partition.dtype} of shape {tuple(partition.shape)}", "Call .to(torch.int64)",
        )  # fmt: skip
    given = partition.to(device="cpu", dtype=torch.int64)
    falls = given.numel() and bool((given[1:] < given[:-1]).any())
    if given.numel() == parts + 1 and not falls and int(given[0]) == 0 and int(given[-1]) == rows:
        return given, None
    if given.numel() != rows or (rows and not 0 <= int(given.min()) <= int(given.max()) < parts):
        raise value_error(
            function, "partition",
            f"the first row of each of {parts} shares and {rows} at the end, or a part from 0 to "
            f"{parts - 1} for each of {rows} rows", f"{given.numel()} numbers",
            "Give one of those, or a name",
        )  # fmt: skip
    counts = torch.bincount(given, minlength=parts)
    bounds = torch.cat([counts.new_zeros(1), torch.cumsum(counts, 0)])
    if not falls:
        return bounds, None
    return bounds, torch.argsort(given, stable=True)


def _by_metis(function: str, csr: CSR, parts: int) -> Tensor:
    """Return METIS's part of each row: parts of about the same size that cut few entries."""
    try:
        import pymetis
    except ImportError:
        raise UnsupportedError(
            f"{function}: partition must be one that is installed, got 'metis' without pymetis. "
            "Install pymetis, or name a row order such as 'rabbit'."
        ) from None
    rows, columns = csr.row_ids().cpu(), csr.indices.cpu().long()
    if csr.shape[0] != csr.shape[1]:
        raise value_error(
            function, "partition", f"auto or even for a matrix of {csr.shape[0]}x{csr.shape[1]}",
            "'metis'", "Rows are renumbered together with columns, which needs a square A",
        )  # fmt: skip
    # METIS takes undirected graphs without loops, each edge once in both directions.
    ends = torch.stack([torch.cat([rows, columns]), torch.cat([columns, rows])])
    ends = torch.unique(ends[:, ends[0] != ends[1]], dim=1)
    first = offsets(torch.bincount(ends[0], minlength=csr.shape[0]))
    _, found = pymetis.part_graph(parts, xadj=first.tolist(), adjncy=ends[1].tolist())
    return torch.tensor(found, dtype=torch.int64)


def find_partition(
    function: str,
    csr: CSR,
    parts: int,
    partition: str | Tensor,
    n: int,
    itemsize: int,
    columns: Sequence[int] | None = None,
) -> Partition:
    """Return the shares of a whole matrix, by a name or a tensor of :func:`sparsetile.dist.plan`.

    ``columns``: first row of B of each share; those of A if it is square, else even ones.
    """
    rows, cols = csr.shape
    order: Tensor | None = None
    name = "given"
    if not isinstance(partition, Tensor):
        name = one_of(function, "partition", partition, PARTITIONS)
        if name == "metis":
            partition = _by_metis(function, csr, parts)
    if isinstance(partition, Tensor):
        found, order = _given(function, partition, csr, parts)
        bounds = tuple(found.tolist())
    else:
        if name == "even":
            bounds = even_bounds(rows, parts)
        else:
            made: Permutation = REORDERERS["identity" if name == "auto" else name](csr)
            order = None if made.perm is None else made.perm.cpu().long()
            lengths = csr.row_lengths() if order is None else csr.row_lengths().cpu()[order]
            bounds = share_bounds(row_costs(lengths, n, itemsize), parts)
    if order is not None and rows != cols:
        raise value_error(
            function, "partition", f"contiguous for a matrix of {rows}x{cols}", repr(name),
            "Rows are renumbered together with columns, which needs a square A: use auto or even",
        )  # fmt: skip
    return Partition(name, bounds, column_bounds(function, columns, bounds, csr.shape), order)


def column_bounds(
    function: str, given: Sequence[int] | None, rows: tuple[int, ...], shape: tuple[int, int]
) -> tuple[int, ...]:
    """Return the first row of B of each share: as given, as A's rows, or even."""
    parts = len(rows) - 1
    if given is None:
        return rows if shape[0] == shape[1] else even_bounds(shape[1], parts)
    bounds = tuple(int(first) for first in given)
    falls = any(second < first for first, second in itertools.pairwise(bounds))
    if len(bounds) != parts + 1 or falls or bounds[0] != 0 or bounds[-1] != shape[1]:
        raise value_error(
            function, "columns", f"the first row of B of each of {parts} shares and {shape[1]} at "
            "the end, rising", list(bounds)[:8], "Give one number more than there are ranks",
        )  # fmt: skip
    return bounds
