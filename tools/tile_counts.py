"""Tiles and bytes of a matrix under row orders: Acc-SpMM's tables (sections 3.3, 4.3.1, 4.3.2).

    python -m tools.tile_counts MATRIX... --data DIR [--orders identity,affinity] --out tiles.jsonl

Every figure is counted on the whole matrix, none is estimated from a sample.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsetile.core.checks import one_of
from sparsetile.data.catalog import load
from sparsetile.formats.bittcf import TILE_COLUMNS
from sparsetile.formats.window_split import count_columns
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS
from tools.study import find_order

# Heights of the windows in which distinct columns are counted.
WINDOWS = (8, 16, 64)


@dataclass(frozen=True)
class Counts:
    """Windows and tiles of a matrix under one row order."""

    rows: int
    nnz: int
    pairs: dict[int, int]  # distinct (window, column) pairs with an entry, by window height
    tiles: dict[int, int]  # of eight condensed columns, by height of the window

    @property
    def nnz_per_tile(self) -> float:
        """Mean entries of an 8x8 tile, of 64: the paper's MeanNNZTC; 0 if there is no tile."""
        return self.nnz / self.tiles[8] if self.tiles[8] else 0.0


# Bytes of a format without the values, which are the same in every format; 32-bit indices
# throughout, as all of these papers have.
STORAGES: dict[str, Callable[[Counts], int]] = {
    # Acc-SpMM, section 3.3: RowWindowOffset, TCOffset, SparseAToB, TCLocalBit of 64 bits
    "BitTCF": lambda c: 4 * (_windows(c, 8) + 11 * c.tiles[8] + 2),
    "CSR": lambda c: 4 * (c.rows + 1 + c.nnz),
    "COO": lambda c: 8 * c.nnz,
    # DTC-SpMM: RowWindowOffset, TCOffset, SparseAToB, TCLocalId of 8 bits, tiles of 16x8
    "ME-TCF": lambda c: 4 * (_windows(c, 16) + 9 * c.tiles[16] + 2) + c.nnz,
    # the same with tiles of 8x8, as Acc-SpMM, section 3.3, compares it
    "ME-TCF 8x8": lambda c: 4 * (_windows(c, 8) + 9 * c.tiles[8] + 2) + c.nnz,
    # TC-GNN: nodePointer, blockPartition, edgeList, edgeToColumn, edgeToRow
    "TCF": lambda c: 4 * (c.rows + 1 + _windows(c, 16) + 3 * c.nnz),
}


def _windows(counts: Counts, height: int) -> int:
    return -(-counts.rows // height)


def count_tiles(csr: CSR, perm: Tensor | None = None) -> Counts:
    """Count pairs and tiles of a matrix in the row order ``perm``."""
    pairs, tiles = dict[int, int](), dict[int, int]()
    for height in WINDOWS:
        columns = count_columns(csr, perm, height).pairs[::height]
        pairs[height] = int(columns.sum())
        tiles[height] = int(((columns + TILE_COLUMNS - 1) // TILE_COLUMNS).sum())
    return Counts(csr.shape[0], csr.nnz, pairs, tiles)


def counted(matrix: str, csr: CSR, order: str) -> dict[str, Any]:
    """Find a row order of a matrix on the CPU, count, and return what is found."""
    found = find_order(csr, order)
    counts = count_tiles(csr, None if found is None else found.perm)
    return {
        "matrix": matrix,
        "rows": csr.shape[0],
        "nnz": csr.nnz,
        "order": order,
        "seconds": 0.0 if found is None else found.seconds,
        "pairs": {str(window): count for window, count in counts.pairs.items()},
        "tiles": {"8x8": counts.tiles[8], "16x8": counts.tiles[16]},
        "nnz_per_tile": counts.nnz_per_tile,
        "bytes": {name: size(counts) for name, size in STORAGES.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write one JSON line per matrix and order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("matrices", nargs="+", metavar="MATRIX")
    parser.add_argument("--data", type=Path, help="folder in which names are looked up")
    parser.add_argument("--orders", default="identity,rcm,louvain,lsh,affinity")
    parser.add_argument("--out", type=Path, help="file to write; printed if omitted")
    asked = parser.parse_args(arguments)
    orders = [
        one_of("tile_counts", "--orders", name, REORDERERS) for name in asked.orders.split(",")
    ]
    with contextlib.ExitStack() as stack:
        file = sys.stdout if asked.out is None else stack.enter_context(asked.out.open("w"))
        for name in asked.matrices:
            csr = load(name, asked.data)
            for order in orders:
                print(json.dumps(counted(name, csr, order)), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
