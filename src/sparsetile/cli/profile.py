"""What a matrix looks like, in numbers: rows, symmetry, bandwidth, sharing of columns."""

from __future__ import annotations

from typing import Any

import torch

from sparsetile.intake.csr import CSR
from sparsetile.tune import distinct_pairs

__all__ = ["QUANTILES", "WINDOWS", "length_bins", "profile"]

WINDOWS = (8, 16, 64)
QUANTILES = {
    "min": 0.0,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p99": 0.99,
    "max": 1.0,
}


def _quantiles(lengths: torch.Tensor) -> dict[str, int]:
    if lengths.numel() == 0:
        return dict.fromkeys(QUANTILES, 0)
    ordered = torch.sort(lengths).values  # torch.quantile refuses more than 16 million elements
    last = ordered.numel() - 1
    return {name: int(ordered[round(share * last)]) for name, share in QUANTILES.items()}


def length_bins(lengths: torch.Tensor) -> list[dict[str, int]]:
    """Return row counts by length: 0, 1, 2-3, 4-7, and so on; bins below the shortest row left out.

    Parameters
    ----------
    lengths : Tensor [M], int64
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    edges = [0, 1]
    while edges[-1] <= longest:
        edges.append(2 * edges[-1])
    counts = torch.bincount(
        torch.bucketize(lengths, torch.tensor(edges), right=True) - 1, minlength=len(edges) - 1
    )
    bins = [
        {"from": low, "to": high - 1, "rows": int(count)}
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    filled = [index for index, item in enumerate(bins) if item["rows"]]
    return bins[filled[0] :] if filled else []


def _symmetric(csr: CSR) -> bool:
    if csr.shape[0] != csr.shape[1]:
        return False
    # Column counts differ from row counts in most asymmetric matrices, and cost no sorting.
    columns = torch.bincount(csr.indices, minlength=csr.shape[1])
    if not torch.equal(columns, csr.row_lengths()):
        return False
    return torch.equal(csr.transposed().indices, csr.indices)


def profile(csr: CSR) -> dict[str, Any]:
    """Return the measures of a matrix as plain data.

    Returns
    -------
    dict
        ``shape, nnz, density, values, empty_rows, empty_columns, row_lengths`` (``mean`` and
        quantiles), ``histogram`` (row counts by length), ``symmetric_pattern, bandwidth``
        (``lower``, ``upper``: furthest entry below and above the diagonal), ``windows`` (per
        height: distinct (window, column) pairs, and entries that share one).
    """
    rows, columns = csr.shape
    lengths = csr.row_lengths()
    offsets = csr.indices.to(torch.int64) - csr.row_ids()
    windows = []
    for window in WINDOWS:
        pairs = distinct_pairs(csr, window)
        windows.append(
            {"window": window, "pairs": pairs, "nnz_per_pair": csr.nnz / pairs if pairs else 0.0}
        )
    return {
        "shape": [rows, columns],
        "nnz": csr.nnz,
        "density": csr.nnz / (rows * columns) if rows and columns else 0.0,
        "values": "pattern" if csr.values is None else str(csr.values.dtype).removeprefix("torch."),
        "empty_rows": int((lengths == 0).sum()),
        "empty_columns": columns - int(torch.unique(csr.indices).numel()),
        "row_lengths": {"mean": csr.nnz / rows if rows else 0.0, **_quantiles(lengths)},
        "histogram": length_bins(lengths),
        "symmetric_pattern": _symmetric(csr),
        "bandwidth": {
            "lower": max(int(-offsets.min()), 0) if csr.nnz else 0,
            "upper": max(int(offsets.max()), 0) if csr.nnz else 0,
        },
        "windows": windows,
    }
