"""The float64 reference of every product: entry by entry, on the device that holds B.

Each stored entry of A is multiplied by its row of B and added to its row of C, so that Inf and NaN
go exactly where A's entries say. A's values are rounded to B's type first, as a plan does.
Memory stays bounded: rows, and columns of very long rows, are handled in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR, FP8

__all__ = ["dot_products", "reference", "row_chunks"]

# Products of entries with columns of B per chunk: 128 MiB in float64.
CHUNK_ELEMENTS = 2**24


def reference(
    csr: CSR, B: Tensor, reduce: str = "sum", rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return A·B in float64 on B's device, and the magnitude that bounds its rounding error.

    A matrix without values has ones; empty rows give 0. ``rows`` and ``columns`` choose those of
    the product to compute. ``magnitude`` is |A||B| for a sum, divided by the row length for a mean.
    For max and min it is |result|: rounding keeps the order of products, so the result is the
    rounded extremum.
    """
    csr, B = csr.to(B.device), _as_bytes(B.detach())
    dtype = B.dtype if B.dtype is not torch.uint8 else FP8
    values = None if csr.values is None else csr.values.detach().to(dtype).double()
    chosen = torch.arange(csr.shape[0], device=B.device) if rows is None else rows.to(B.device)
    width = B.shape[1] if columns is None else columns.numel()
    shape = (chosen.numel(), width)
    result = torch.zeros(shape, dtype=torch.float64, device=B.device)
    magnitude = torch.zeros_like(result)
    begin = 0
    for part in row_chunks(csr, chosen, width):
        end = begin + part.numel()
        entries, local = _entries(csr, part)
        of_b = csr.indices[entries].long()
        slab = max(1, CHUNK_ELEMENTS // max(entries.numel(), 1))
        for left in range(0, width, slab):
            span = slice(left, min(left + slab, width))
            if columns is None:
                gathered = B[of_b, span]
            else:
                gathered = B[of_b.unsqueeze(1), columns[span].to(B.device).unsqueeze(0)]
            terms = gathered.view(dtype).double()
            if values is not None:
                terms *= values[entries].unsqueeze(1)
            found = _reduced(terms, local, part.numel(), reduce)
            result[begin:end, span], magnitude[begin:end, span] = found
        begin = end
    return result, magnitude


def dot_products(
    csr: CSR, G: Tensor, B: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return SDDMM in float64: G[i]·B[j] for each entry (i, j) of A's pattern, or of some rows.

    Returns the entries' places in A, the dot products, and the same of absolute values.
    """
    csr, G, B = csr.to(B.device), G.detach(), B.detach()
    chosen = torch.arange(csr.shape[0], device=B.device) if rows is None else rows.to(B.device)
    places, sums, sizes = [chosen.new_zeros(0)], [], []
    for part in row_chunks(csr, chosen, B.shape[1]):
        entries, local = _entries(csr, part)
        terms = G[part[local]].double() * B[csr.indices[entries].long()].double()
        places.append(entries)
        sums.append(terms.sum(1))
        sizes.append(terms.abs().sum(1))
    empty = torch.zeros(0, dtype=torch.float64, device=B.device)
    return torch.cat(places), torch.cat([empty, *sums]), torch.cat([empty, *sizes])


def row_chunks(csr: CSR, rows: Tensor, width: int) -> Iterator[Tensor]:
    """Split rows so that a chunk gathers at most ``CHUNK_ELEMENTS`` of B, or is a single row."""
    if rows.numel() == 0:
        return
    work = (csr.row_lengths()[rows] + 1) * max(width, 1)
    sizes = torch.bincount(((torch.cumsum(work, 0) - 1) // CHUNK_ELEMENTS).cpu())
    yield from torch.split(rows, [int(size) for size in sizes if size])


def _as_bytes(dense: Tensor) -> Tensor:
    """FP8 as bytes: torch does not index it on every device."""
    return dense.view(torch.uint8) if dense.dtype is FP8 else dense


def _entries(csr: CSR, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the rows' entries in A, and for each the number of its row among ``rows``."""
    lengths = csr.row_lengths()[rows]
    total = int(lengths.sum())
    numbers = torch.arange(rows.numel(), device=csr.device)
    local = torch.repeat_interleave(numbers, lengths, output_size=total)
    starts = csr.indptr[rows] - (torch.cumsum(lengths, 0) - lengths)
    return starts[local] + torch.arange(total, device=csr.device), local


def _reduced(terms: Tensor, local: Tensor, rows: int, reduce: str) -> tuple[Tensor, Tensor]:
    zero = terms.new_zeros((rows, terms.shape[1]))
    if reduce in ("max", "min"):
        index = local.unsqueeze(1).expand_as(terms)
        result = zero.scatter_reduce(0, index, terms, f"a{reduce}", include_self=False)
        return result, result.abs()
    result = zero.index_add(0, local, terms)
    magnitude = zero.index_add(0, local, terms.abs_())
    if reduce == "mean":
        count = torch.bincount(local, minlength=rows).clamp(min=1).unsqueeze(1)
        return result / count, magnitude / count
    return result, magnitude
