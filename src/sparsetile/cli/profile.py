"""Measures of a matrix: rows, symmetry, bandwidth, shared columns, row orders."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from sparsetile.check.tiling import TILES, length_bins, sample_rows, sharing, tile_stats
from sparsetile.data.generators import banded
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS

__all__ = ["compile_orders", "profile", "view_order"]

# Sorting a larger matrix's entries by window takes minutes on the host.
_EXACT_ENTRIES = 20_000_000
QUANTILES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99,
             "max": 1.0}  # fmt: skip


def _quantiles(lengths: torch.Tensor) -> dict[str, int]:
    if lengths.numel() == 0:
        return dict.fromkeys(QUANTILES, 0)
    ordered = torch.sort(lengths).values  # torch.quantile refuses more than 16 million elements
    last = ordered.numel() - 1
    return {name: int(ordered[round(share * last)]) for name, share in QUANTILES.items()}


def _symmetric(csr: CSR) -> bool:
    if csr.shape[0] != csr.shape[1]:
        return False
    # Column counts differ from row counts in most asymmetric matrices, and cost no sorting.
    columns = torch.bincount(csr.indices, minlength=csr.shape[1])
    if not torch.equal(columns, csr.row_lengths()):
        return False
    return torch.equal(csr.transposed().indices, csr.indices)


def _windows(csr: CSR) -> tuple[list[dict[str, Any]], float]:
    """Shared columns by height of the window, and the share of the entries that were counted."""
    sample = sample_rows(csr, most=_EXACT_ENTRIES)
    found = sharing(sample)
    return [
        {"window": window, "pairs": round(csr.nnz / ratio) if ratio else 0, "nnz_per_pair": ratio}
        for window, ratio in found.items()
    ], sample.share


def profile(csr: CSR) -> dict[str, Any]:
    """Return the measures of a matrix as plain data.

    ``bandwidth``: furthest entry below and above the diagonal. ``windows``: per height, distinct
    (window, column) pairs and entries that share one, counted in ``windows_share`` of the entries:
    evenly spread groups of rows of a large matrix.
    """
    rows, columns = csr.shape
    lengths = csr.row_lengths()
    offsets = csr.indices.to(torch.int64) - csr.row_ids()
    windows, share = _windows(csr)
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
        "windows_share": share,
    }


def view_order(csr: CSR, name: str) -> dict[str, Any]:
    """Return statistics of windows and tiles of a matrix, on the CPU, under a row order.

    ``seconds`` is the time to find the order, with compilation the first time on a machine,
    ``share`` the share of counted entries, ``nnz_per_pair`` the entries per distinct (window,
    column), by height of the window.
    """
    begun = time.perf_counter()
    perm = REORDERERS[name](csr).perm
    seconds = time.perf_counter() - begun
    sample = sample_rows(csr, perm)
    tiles = (tile_stats(sample, *shape) for shape in TILES)
    return {
        "order": name,
        "seconds": seconds,
        "share": sample.share,
        "nnz_per_pair": {str(w): value for w, value in sharing(sample).items()},
        "tiles": [
            {
                "format": tile.name,
                "tiles": tile.tiles,
                "nnz_per_tile": tile.mean_entries,
                "fill": tile.fill,
            }
            for tile in tiles
        ],
    }


def compile_orders(names: Sequence[str]) -> None:
    """Compile row orders in a thread; a call of one waits for its code.

    Compiling takes about 10 s for some, once on a machine: as long as reading a large matrix.
    """

    def compile_all() -> None:
        small = banded(64, 3)
        for name in names:
            with contextlib.suppress(Exception):  # the call itself reports it
                REORDERERS[name](small)

    threading.Thread(target=compile_all, name="sparsetile-compile", daemon=True).start()
