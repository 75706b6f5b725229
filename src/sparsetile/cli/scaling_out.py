"""``sparsetile bench scaling-out``: what ranks exchange on large graphs, counted; times by model.

Volumes are exact counts of streamed graphs. Times come from a model whose rates are parameters;
see ``sparsetile.dist.scaling``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.cli.console import note, print_json, print_table, progress_bar
from sparsetile.cli.options import append_line, dtype_of, load_matrix
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.data.streamed import STREAMED, StreamedGraph, streamed
from sparsetile.dist.partition import Partition
from sparsetile.dist.scaling import Rates, product_seconds, scaling_row
from sparsetile.dist.shares import renumbered
from sparsetile.dist.volumes import Volumes, balanced_bounds, count_volumes
from sparsetile.dist.what_if import coarser, what_if
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS

__all__ = ["ORDERS", "scaling_out"]

# Of streamed graphs: communities contiguous, as after a partitioner, or numbered at random.
ORDERS = ("communities", "shuffled")
_STRONG = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_WEAK = (2, 4, 8, 16, 32, 64)


class _Source:
    """Rows of a graph as the counter takes them."""

    def __init__(self, lengths: NDArray[np.int32], blocks: Any) -> None:
        self.lengths = lengths
        self.blocks = blocks


def _csr_blocks(csr: CSR, block: int = 65536) -> Iterator[tuple[Any, Any]]:
    lengths, columns = csr.row_lengths().to(torch.int32).numpy(), csr.indices.numpy()
    pointers = csr.indptr.numpy()
    for first in range(0, csr.shape[0], block):
        last = min(first + block, csr.shape[0])
        yield lengths[first:last], columns[pointers[first] : pointers[last]]


def _source(graph: StreamedGraph | CSR, order: str) -> _Source:
    if isinstance(graph, StreamedGraph):
        made = dataclasses.replace(graph, shuffle=order == "shuffled").made()
        return _Source(made.row_lengths, made.blocks())
    found = REORDERERS[order](graph)
    csr = graph
    if found.perm is not None:
        whole = (0, graph.shape[0])
        csr = renumbered(graph, Partition(order, whole, whole, found.perm.cpu().long()), 0)
    return _Source(csr.row_lengths().to(torch.int32).numpy(), _csr_blocks(csr))


def _count(
    graph: StreamedGraph | CSR, order: str, ranks: Sequence[int], n: int, itemsize: int
) -> dict[int, Volumes]:
    source = _source(graph, order)
    # Shares of every number of ranks are unions of the finest ones.
    finest = int(np.lcm.reduce(np.array(ranks, dtype=np.int64)))
    bounds = balanced_bounds(source.lengths, finest, n, itemsize)
    return count_volumes(source.blocks, bounds, ranks)


def _rates(texts: Sequence[str]) -> Rates:
    """Read ``--rates nvlink=450e9,node=8``."""
    fields = {field.name: field for field in dataclasses.fields(Rates)}
    given: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        one_of("bench", "--rates", name, fields)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf") or (number == 0 and name not in ("latency", "launch")):
            raise value_error(
                "bench", f"--rates {name}", "a positive number", repr(value), f"Write {name}=1e9"
            )
        given[name] = int(number) if name == "node" else number
    return Rates(**given)


def scaling_out(
    matrices: Sequence[str],
    ranks: Sequence[int],
    n: int,
    dtype: str,
    orders: Sequence[str],
    rates: Sequence[str],
    weak: bool,
    data: Path | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Count, time by model, print, and keep one JSON line a graph and order in ``out``."""
    kind, given = dtype_of("bench", dtype), _rates(rates)
    counts = sorted(set(ranks or (_WEAK if weak else _STRONG)))
    records: list[dict[str, Any]] = []
    kept = _kept(out)
    names = list(matrices) or ["reddit-like", "products-like"]
    tasks: list[tuple[str, StreamedGraph | CSR, str]] = []
    for name in names:
        graph: StreamedGraph | CSR
        allowed: tuple[str, ...]
        usual: tuple[str, ...]
        if name.partition("?")[0] in STREAMED:
            graph, allowed, usual = streamed(name), ORDERS, ORDERS
        else:
            if weak:
                raise value_error(
                    "bench", "--weak", f"used with a graph that can grow: {list(STREAMED)}", name,
                    "Omit --weak",
                )  # fmt: skip
            graph, allowed, usual = load_matrix(name, data), tuple(REORDERERS), ("identity",)
            if graph.shape[0] != graph.shape[1]:
                raise value_error(
                    "bench", "--matrices", "square for scaling-out", f"{name} of {graph.shape}",
                    "Name a square matrix: rows of A and of B are shared alike",
                )  # fmt: skip
        for order in orders or usual:
            tasks.append((name, graph, one_of("bench", "--reorder", order, allowed)))
    with progress_bar("counting", len(tasks)) as advance:
        for name, graph, order in tasks:
            key = {
                "suite": "scaling-out", "matrix": name, "order": order, "weak": weak, "n": n,
                "dtype": dtype, "rates": dataclasses.asdict(given), "ranks": counts,
            }  # fmt: skip
            found = kept.get(json.dumps(key, sort_keys=True))
            if found is None:
                found = {**key, "rows": _measure(graph, order, counts, n, kind, given, weak)}
                if out is not None:
                    append_line(out, json.dumps(found))
            records.append(found)
            advance()
    if as_json:
        print_json(records)
        return 0
    _print(records)
    note("sparsetile: volumes are counted; times are a model with the rates given (--rates)")
    return 0


def _measure(
    graph: StreamedGraph | CSR,
    order: str,
    ranks: Sequence[int],
    n: int,
    kind: torch.dtype,
    rates: Rates,
    weak: bool,
) -> list[dict[str, Any]]:
    size = kind.itemsize
    asked = sorted({1, *ranks, *(few for count in ranks for few in coarser(count, rates.node))})
    if not weak:
        found = _count(graph, order, asked, n, size)
        alone = product_seconds(found[1], n, size, rates)["seconds"]
        return [_row(found, count, n, size, rates, alone, weak) for count in ranks]
    assert isinstance(graph, StreamedGraph)
    alone = product_seconds(_count(graph, order, [1], n, size)[1], n, size, rates)["seconds"]
    rows = []
    for count in ranks:
        grown = graph.scaled(count)
        found = _count(grown, order, [*coarser(count, rates.node), count], n, size)
        rows.append(_row(found, count, n, size, rates, alone, weak))
    return rows


def _row(
    found: dict[int, Volumes],
    ranks: int,
    n: int,
    size: int,
    rates: Rates,
    alone: float,
    weak: bool,
) -> dict[str, Any]:
    """One number of ranks: what plans choose, and what else could be done."""
    row = scaling_row(found, ranks, n, size, rates, alone, weak)
    ideal = alone if weak else alone / ranks
    return {**row, "what_if": what_if(found, ranks, n, size, rates, ideal)}


def _kept(out: Path | None) -> dict[str, dict[str, Any]]:
    """Return the records that a file holds, by their key."""
    if out is None or not out.exists():
        return {}
    found = {}
    for line in out.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            note(f"sparsetile: skipped a damaged line of {out}")
            continue
        key = {name: value for name, value in record.items() if name != "rows"}
        found[json.dumps(key, sort_keys=True)] = record
    return found


def _print(records: Sequence[dict[str, Any]]) -> None:
    columns = [
        "graph", "order", "ranks", "entries", "halo rows", "way", "busiest", "1-D",
        "CAGNET 1.5-D",
        "product", "exchange", "hidden", "efficiency", "best variant",
    ]  # fmt: skip
    cells = []
    for record in records:
        for row in record["rows"]:
            times, copied = row["times"], row["cagnet_15d_bytes"]
            cells.append(
                [
                    record["matrix"],
                    record["order"] + (", weak" if record["weak"] else ""),
                    str(row["ranks"]),
                    f"{row['nnz']:,}",
                    f"{row['mean_halo_rows']:,.0f}",
                    row["way"] + (f" (c={row['replicas']})" if row["replicas"] > 1 else ""),
                    _megabytes(row["busiest_bytes"]),
                    _megabytes(row["cagnet_1d_bytes"]),
                    "-" if copied is None
                    else f"{_megabytes(copied)} (c={row['cagnet_15d_copies']})",
                    f"{1e3 * times['seconds']:.3f} ms",
                    f"{1e3 * times['exchange']:.3f} ms",
                    f"{1e3 * times['hidden']:.3f} ms",
                    f"{100 * row['efficiency']:.0f} %",
                    _best(row["what_if"]),
                ]
            )  # fmt: skip
    print_table(columns, cells, right=columns[2:])


def _best(variants: dict[str, dict[str, Any]]) -> str:
    """The variant of the exchange that scales best, where it is not what plans do."""
    name = max(variants, key=lambda name: variants[name]["efficiency"])
    return "-" if name == "built" else f"{100 * variants[name]['efficiency']:.0f} % ({name})"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
