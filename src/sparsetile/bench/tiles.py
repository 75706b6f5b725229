"""Tiles and bytes of a matrix under row orders: Acc-SpMM's tables (sections 3.3, 4.3.1, 4.3.2).

Every figure is counted on the whole matrix, none is estimated from a sample. A record is one JSON
object a line, complete in itself, for one matrix and one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.bench.orders import find_order, matrix_hash
from sparsetile.bench.record import Record, append_record, read_records
from sparsetile.check.tiling import Sample, sample_pairs, take_rows
from sparsetile.core.checks import one_of
from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.data.catalog import find, load
from sparsetile.data.generators import SPEC_PREFIX
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS

__all__ = [
    "STORAGES",
    "WINDOWS",
    "Counts",
    "Storage",
    "count_tiles",
    "measure_tiles",
    "saved_percent",
    "tile_record",
    "validate_tiles",
]

SCHEMA = 1
# Heights of the windows in which distinct columns are counted; each divides the next.
WINDOWS = (8, 16, 64)
# Columns of a tile, in every format that has tiles.
_TILE_COLUMNS = 8
# Entries that are counted at a time: their keys stay within a few hundred megabytes.
_CHUNK_ENTRIES = 8_000_000


@dataclass(frozen=True)
class Counts:
    """How a matrix falls into windows of rows under one order.

    Attributes
    ----------
    rows, nnz : int
        Of the matrix.
    pairs : dict of int to int
        Distinct (window, column) pairs that hold an entry, by height of the window.
    tiles : dict of int to int
        Tiles of eight condensed columns, by height of the window.
    """

    rows: int
    nnz: int
    pairs: dict[int, int]
    tiles: dict[int, int]

    @property
    def nnz_per_tile(self) -> float:
        """Mean entries of an 8x8 tile, of 64: the paper's MeanNNZTC; 0 where there is no tile."""
        return self.nnz / self.tiles[8] if self.tiles[8] else 0.0


@dataclass(frozen=True)
class Storage:
    """Bytes that a format takes beside the values, which every format stores alike.

    Attributes
    ----------
    formula : str
        M rows, Z nonzeros, T8 tiles of 8x8, T16 tiles of 16x8.
    source : str
        Where the arrays are from.
    size : callable
        Counts -> bytes.
    """

    formula: str
    source: str
    size: Callable[[Counts], int]


# 32-bit indices throughout, as all of these papers have.
STORAGES: dict[str, Storage] = {
    "BitTCF": Storage(
        "4·(⌈M/8⌉ + 11·T8 + 2)",
        "Acc-SpMM, section 3.3: RowWindowOffset, TCOffset, SparseAToB, TCLocalBit of 64 bits",
        lambda c: 4 * (_windows(c, 8) + 11 * c.tiles[8] + 2),
    ),
    "CSR": Storage(
        "4·(M + 1 + Z)", "row pointers and column ids", lambda c: 4 * (c.rows + 1 + c.nnz)
    ),
    "COO": Storage("8·Z", "row ids and column ids", lambda c: 8 * c.nnz),
    "ME-TCF": Storage(
        "4·(⌈M/16⌉ + 9·T16 + 2) + Z",
        "DTC-SpMM: RowWindowOffset, TCOffset, SparseAToB, TCLocalId of 8 bits, tiles of 16x8",
        lambda c: 4 * (_windows(c, 16) + 9 * c.tiles[16] + 2) + c.nnz,
    ),
    "ME-TCF 8x8": Storage(
        "4·(⌈M/8⌉ + 9·T8 + 2) + Z",
        "the same with tiles of 8x8, as Acc-SpMM, section 3.3, compares it",
        lambda c: 4 * (_windows(c, 8) + 9 * c.tiles[8] + 2) + c.nnz,
    ),
    "TCF": Storage(
        "4·(M + 1 + ⌈M/16⌉ + 3·Z)",
        "TC-GNN: nodePointer, blockPartition, edgeList, edgeToColumn, edgeToRow",
        lambda c: 4 * (c.rows + 1 + _windows(c, 16) + 3 * c.nnz),
    ),
}


def _windows(counts: Counts, height: int) -> int:
    return -(-counts.rows // height)


def _chunks(csr: CSR, perm: torch.Tensor | None, most: int) -> Iterator[Sample]:
    """Cut a matrix, rows in order, at multiples of the highest window; ``most`` entries a piece."""
    rows, block = csr.shape[0], WINDOWS[-1]
    order = np.arange(rows) if perm is None else perm.cpu().numpy()
    ends = np.cumsum(np.diff(csr.indptr.numpy())[order])
    begin = before = 0
    while begin < rows:
        last = int(np.searchsorted(ends, before + most, side="right"))
        end = min(max(last // block * block, begin + block), rows)
        yield take_rows(csr, order[begin:end])
        begin, before = end, int(ends[end - 1])


def count_tiles(csr: CSR, perm: torch.Tensor | None = None, most: int = _CHUNK_ENTRIES) -> Counts:
    """Count pairs and tiles of a whole matrix on the host.

    Parameters
    ----------
    csr : CSR
        On the CPU.
    perm : Tensor [M], optional
        Row order; the given one when None.
    most : int
        Entries to look at together. Memory goes with it, the result does not.
    """
    pairs, tiles = dict.fromkeys(WINDOWS, 0), dict.fromkeys(WINDOWS, 0)
    for chunk in _chunks(csr, perm, most):
        for window, owner in sample_pairs(chunk, WINDOWS):
            pairs[window] += owner.size
            tiles[window] += int((-(-np.bincount(owner) // _TILE_COLUMNS)).sum())
    return Counts(csr.shape[0], csr.nnz, pairs, tiles)


def _key(matrix: str, order: str) -> str:
    return f"{matrix}|{order}"


def tile_record(matrix: str, source: str, csr: CSR, order: str, digest: str = "") -> Record:
    """Find a row order, count, and return the record; an order that fails is recorded as such.

    Parameters
    ----------
    matrix, source : str
        Name; ``file``, ``stand-in`` or ``generated``.
    csr : CSR
        On the CPU.
    order : str
        Of ``sparsetile.reorder``.
    digest : str
        ``matrix_hash(csr)`` when known.
    """
    record: Record = {
        "schema": SCHEMA,
        "key": _key(matrix, order),
        "matrix": matrix,
        "matrix_hash": digest or matrix_hash(csr),
        "source": source,
        "rows": csr.shape[0],
        "cols": csr.shape[1],
        "nnz": csr.nnz,
        "order": order,
        "environment": {**describe_environment("cpu"), "commit": commit()},
    }
    try:
        found = find_order(csr, order)
    except (ValueError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        return record | {"status": "error", "reason": reason}
    counts = count_tiles(csr, None if found is None else found.perm)
    return record | {
        "status": "ok",
        "seconds": 0.0 if found is None else found.seconds,
        "pairs": {str(window): count for window, count in counts.pairs.items()},
        "tiles": {"8x8": counts.tiles[8], "16x8": counts.tiles[16]},
        "nnz_per_tile": counts.nnz_per_tile,
        "bytes": {name: storage.size(counts) for name, storage in STORAGES.items()},
    }


def saved_percent(record: Record, name: str) -> float:
    """How much less BitTCF takes than the format ``name``, in percent; below 0 where it is more."""
    held: dict[str, int] = record["bytes"]
    return 100 * (1 - held["BitTCF"] / held[name]) if held[name] else 0.0


def _fault(name: str, expected: str, actual: object) -> DataError:
    return DataError(describe("tiles", name, expected, actual, "Make the record again"))


def _number(found: Record, name: str, kinds: tuple[type, ...] = (int,)) -> None:
    value: Any = found.get(name)
    right = isinstance(value, kinds) and not isinstance(value, bool)
    if not right or not 0 <= value < math.inf:
        raise _fault(name, "a number of 0 or more", repr(value))


def validate_tiles(found: object) -> Record:
    """Return ``found`` if it is a record of tiles, else raise DataError saying why not."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise _fault("line", f"a record of schema {SCHEMA}", f"{str(found)[:40]!r}")
    for name in ("key", "matrix", "matrix_hash", "source", "order", "status"):
        if not isinstance(found.get(name), str):
            raise _fault(name, "text", repr(found.get(name)))
    for name in ("rows", "cols", "nnz"):
        _number(found, name)
    if found["status"] != "ok":
        if not isinstance(found.get("reason"), str):
            raise _fault("reason", "text", repr(found.get("reason")))
        return found
    for name in ("seconds", "nnz_per_tile"):
        _number(found, name, (int, float))
    wanted = {
        "pairs": {str(window) for window in WINDOWS},
        "tiles": {"8x8", "16x8"},
        "bytes": set(STORAGES),
    }
    for name, keys in wanted.items():
        held = found.get(name)
        if not isinstance(held, dict) or set(held) != keys:
            raise _fault(name, f"an object with {sorted(keys)}", repr(held))
        for key in keys:
            _number(held, key)
    return found


def _held(out: Path | None) -> dict[str, Record]:
    """Records that a file holds already, by key."""
    if out is None or not out.exists():
        return {}
    records, damaged = read_records(out, validate_tiles)
    if damaged:
        raise DataError(
            describe(
                "tiles", "--out", "a file of tile records", f"the line {damaged[0]}",
                "Remove the line, or give another file",
            )
        )  # fmt: skip
    return {record["key"]: record for record in records}


def _labels(matrices: Sequence[str], data: Path | None) -> dict[str, tuple[str, str]]:
    """Name as given -> (name in the record, source); unknown ones are refused before any work."""
    found: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(matrices):
        path = find(name, data)
        if path is None:
            source = "generated" if name.startswith(SPEC_PREFIX) else "stand-in"
            found[name] = (name, source)
        else:
            label = path.name.removesuffix(".gz").removesuffix(".mtx").removesuffix(".npz")
            found[name] = (label, "file")
    labels = [label for label, _ in found.values()]
    for label in labels:
        if labels.count(label) > 1:
            raise value_error(
                "tiles", "MATRIX", "files of different names", f"{label!r} twice",
                "Give one of them at a time, each with its own --out",
            )  # fmt: skip
    return found


def measure_tiles(
    matrices: Sequence[str],
    orders: Sequence[str],
    *,
    data: Path | None = None,
    out: Path | None = None,
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure each matrix under each order; what ``out`` holds already is not measured again.

    Parameters
    ----------
    matrices : sequence of str
        Files, names within ``data``, stand-ins, specs.
    orders : sequence of str
        Of ``sparsetile.reorder``.
    data : Path, optional
        Folder in which names are looked up.
    out : Path, optional
        File of records, appended to; of two for one matrix and order the later counts.
    again : bool
        Measure also what ``out`` holds, for an order that has changed.
    say : callable
        Told what is being done; large graphs take a while.

    Returns
    -------
    list of dict
        One record a matrix and order, in the order asked for.

    Raises
    ------
    ValueError
        A matrix or an order is unknown.
    DataError
        ``out`` has a damaged line, or figures of another matrix of the same name.
    """
    orders = list(dict.fromkeys(orders))
    if not orders:
        raise value_error(
            "tiles", "--orders", "at least one row order", "none", f"Name some of {[*REORDERERS]}"
        )
    for order in orders:
        one_of("tiles", "--orders", order, REORDERERS)
    labels = _labels(matrices, data)
    held = _held(out)
    records = []
    for name, (label, source) in labels.items():
        missing = [order for order in orders if again or _key(label, order) not in held]
        if missing:
            say(f"reading {name}")
            csr = load(name, data)
            digest = matrix_hash(csr)
            for record in held.values():
                if record["matrix"] == label and record["matrix_hash"] != digest:
                    raise DataError(
                        describe(
                            "tiles", "--out", f"a file of records of this {label}",
                            f"records of another matrix of that name in {str(out)!r}",
                            "Give another file",
                        )
                    )  # fmt: skip
            for order in missing:
                say(f"{label}: {order}")
                record = tile_record(label, source, csr, order, digest)
                held[record["key"]] = record
                if out is not None:
                    append_record(out, record, validate_tiles)
        records += [held[_key(label, order)] for order in orders]
    return records
