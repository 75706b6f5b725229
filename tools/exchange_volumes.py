"""Rows that ranks exchange in one product, counted exactly, for 2 to 1,024 ranks. Needs no GPU.

    python -m tools.exchange_volumes --data DIR --out results/cpu     # exchange_volumes.jsonl
    python -m tools.exchange_volumes --table results/cpu/exchange_volumes.jsonl

A graph is cut into contiguous shares of equal cost, in its own order and in others (``--orders``;
``metis`` if pymetis is installed). One JSON line per graph, order and number of ranks, in rows of B
or C (N elements each), the mean of the ranks unless it says otherwise:

    cut            entries of A whose column another rank owns, of all entries
    rows           rows of B that a rank receives today: each once for each rank that needs it
    either         for each pair of ranks: rows of B or partial sums of rows of C, whichever is less
    joint          the least of both together: a minimum vertex cover of each pair's entries, which
                   is as large as a maximum matching (König). Only of
                   graphs with at most MATCHED cut entries
    node_rows      rows that come over the network if each node of 8 ranks receives a row once
    node_either    for each pair of nodes: rows of B or partial sums, whichever is less
    network_rows   what comes over the network today: ``rows`` from ranks of other nodes
    cagnet_1d      K·(P - 1)/P: every rank receives all of B
    cagnet_15d     K/c - K/P of B and 2·(c - 1)/P·M in the all-reduce of partial sums, for the best
                   number c of copies of B, a power of 2 up to the square root of P
    busiest_*      the same of the rank that receives or sends most

Nothing but integers is counted, from the pattern alone. A row is counted by walking entries in the
order of rows, and of columns: nothing grows with the square of the ranks but a table of pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsetile.data import generators
from sparsetile.dist.partition import PARTITIONS, Partition, find_partition
from sparsetile.intake import CSR, as_csr
from tools.matching import matching_size

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8
# Cut entries up to which the joint strategy is counted.
MATCHED = 2_000_000
REAL = (
    "web-NotreDame", "soc-Epinions1", "cit-HepPh", "email-Enron", "CoauthorPhysics",
    "AmazonComputers", "NELL", "DD", "usroads", "3D_51448_3D", "bcsstk32",
)  # fmt: skip
# Share of edges that leave their community; 0.3 is the default of the stand-ins.
MIXING = (0.002, 0.01, 0.05, 0.3)
GENERATED: dict[str, Any] = {"rows": 2**18, "nnz": 2**22, "communities": 2**10}
ORDERS = ("identity", "rcm", "louvain", "rabbit")
_Ints = NDArray[np.int64]


class Pattern:
    """A square pattern in the order of shares, by rows and by columns.

    Parameters
    ----------
    csr : CSR
    order : Tensor or None
        The row of A at each place.
    """

    def __init__(self, csr: CSR, order: torch.Tensor | None) -> None:
        rows = csr.row_ids()
        columns = csr.indices.long()
        if order is not None:
            place = torch.empty_like(order)
            place[order] = torch.arange(order.numel())
            rows, columns = place[rows], place[columns]
        self.size, self.entries = csr.shape[0], csr.nnz
        keys = rows * self.size + columns
        ordered = torch.sort(keys).values
        self.rows: _Ints = (ordered // self.size).numpy()
        self.columns: _Ints = (ordered % self.size).numpy()
        self.by_column: _Ints = torch.argsort(torch.from_numpy(self.columns), stable=True).numpy()


def changes(major: _Ints, minor: _Ints) -> NDArray[np.bool_]:
    """Where a pair differs from the one before: equal pairs are neighbours."""
    first = np.ones(major.size, dtype=bool)
    first[1:] = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1])
    return first


class Cut:
    """Entries between shares with these bounds, and the distinct rows and columns of each pair."""

    def __init__(self, pattern: Pattern, bounds: Sequence[int]) -> None:
        self.parts = len(bounds) - 1
        ends = np.asarray(bounds[1:])
        owner = np.searchsorted(ends, np.arange(pattern.size), side="right")
        receiver, sender = owner[pattern.rows], owner[pattern.columns]
        cut = receiver != sender
        self.entries = int(cut.sum())
        # A row of B goes to each receiver once: entries by column, receivers ascend within one.
        order = pattern.by_column[cut[pattern.by_column]]
        self._column_pair = changes(pattern.columns[order], receiver[order])
        self._order, self._cut = order, cut
        self.rows = self._count(receiver[order], sender[order], self._column_pair)
        # A partial sum of a row of C comes from each sender once.
        self._row_pair = changes(pattern.rows[cut], sender[cut])
        self.sums = self._count(receiver[cut], sender[cut], self._row_pair)

    def _count(self, receiver: _Ints, sender: _Ints, first: NDArray[np.bool_]) -> _Ints:
        """Distinct lines of each (receiver, sender)."""
        pairs = receiver[first] * self.parts + sender[first]
        return np.bincount(pairs, minlength=self.parts**2).reshape(self.parts, self.parts)

    def joint(self) -> int:
        """Rows of B and partial sums together, at least: a matching of all pairs' entries."""
        left = np.cumsum(self._row_pair) - 1
        right = np.empty(self._cut.size, dtype=np.int64)
        right[self._order] = np.cumsum(self._column_pair) - 1
        shape = (int(self._row_pair.sum()), int(self._column_pair.sum()))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(left, minlength=shape[0]))])
        return int(matching_size(indptr, right[self._cut], shape[1]))


def busiest(table: _Ints) -> int:
    """Rows of the rank that receives or sends most."""
    return int(max(table.sum(0).max(), table.sum(1).max()))


def copies(rows: int, ranks: int) -> float:
    """Rows that a rank of CAGNET's 1.5-D scheme receives, with the best number of copies."""
    found, c = [], 1
    while c * c <= ranks:
        found.append(rows / c - rows / ranks + 2 * (c - 1) / ranks * rows)
        c *= 2
    return min(found)


def volumes(pattern: Pattern, partition: Partition) -> dict[str, Any]:
    """The fields of a line."""
    ranks = partition.parts
    cut = Cut(pattern, partition.rows)
    either = np.minimum(cut.rows, cut.sums)
    found: dict[str, Any] = {
        "ranks": ranks,
        "cut": cut.entries / max(pattern.entries, 1),
        "rows": cut.rows.sum() / ranks,
        "either": either.sum() / ranks,
        "joint": cut.joint() / ranks if cut.entries <= MATCHED else None,
        "busiest_rows": busiest(cut.rows),
        "busiest_either": busiest(either),
        "cagnet_1d": pattern.size * (ranks - 1) / ranks,
        "cagnet_15d": copies(pattern.size, ranks),
    }
    if ranks > NODE:
        nodes = Cut(pattern, partition.rows[::NODE])
        node_of = np.arange(ranks) // NODE
        apart = node_of[:, None] != node_of[None, :]
        found |= {
            "network_rows": cut.rows[apart].sum() / ranks,
            "network_either": either[apart].sum() / ranks,
            "node_rows": nodes.rows.sum() / ranks,
            "node_either": np.minimum(nodes.rows, nodes.sums).sum() / ranks,
        }
    return found


def graphs(data: Path | None, names: Sequence[str]) -> Iterator[tuple[str, CSR]]:
    """Real graphs that the folder has, then generated ones."""
    for name in names:
        if data is not None and (data / f"{name}.npz").is_file():
            yield name, as_csr(data / f"{name}.npz", device="cpu")
    for mixing in MIXING:
        name = f"communities-{100 * mixing:g}%"
        if name in names or names == REAL:
            yield name, generators.power_law(**GENERATED, mixing=mixing, seed=1)


def orders_of(csr: CSR, orders: Sequence[str]) -> Iterator[tuple[str, float, list[Partition]]]:
    """The shares for each number of ranks, in each order, and the seconds to find the order."""
    ranks = [count for count in RANKS if count * 4 <= csr.shape[0]]
    for name in orders:
        started = time.perf_counter()
        found = [find_partition("volumes", csr, ranks[0], name, 128, 4)]
        seconds = time.perf_counter() - started
        for count in ranks[1:]:
            again = find_partition("volumes", csr, count, "auto", 128, 4)
            if found[0].order is not None and name != "metis":
                again = reordered(csr, found[0].order, count, name)
            elif name == "metis":
                again = find_partition("volumes", csr, count, name, 128, 4)
            found.append(again)
        yield name, seconds, found


def reordered(csr: CSR, order: torch.Tensor, ranks: int, name: str) -> Partition:
    """Shares of equal cost in an order that is known."""
    rows, _ = csr.select_rows(order)
    cut = find_partition("volumes", rows, ranks, "auto", 128, 4)
    return Partition(name, cut.rows, cut.rows, order)


def lines(data: Path | None, names: Sequence[str], orders: Sequence[str]) -> Iterator[str]:
    for graph, csr in graphs(data, names):
        pattern_of: dict[str, Pattern] = {}
        for order, seconds, partitions in orders_of(csr, orders):
            for partition in partitions:
                if order not in pattern_of or order == "metis":
                    pattern_of[order] = Pattern(csr, partition.order)
                facts = {
                    "graph": graph, "size": csr.shape[0], "entries": csr.nnz, "order": order,
                    "order_seconds": round(seconds, 3),
                }  # fmt: skip
                found = {
                    name: each if isinstance(each, int) or each is None else float(f"{each:.5g}")
                    for name, each in volumes(pattern_of[order], partition).items()
                }
                yield json.dumps(facts | found)
            pattern_of.clear()


def table(records: Sequence[dict[str, Any]], ranks: int = 64) -> str:
    """The docs' table: rows per rank, as shares of B's rows, as given and in the best order."""
    head = ["graph", "order", "cut", "today", "either", "joint", "network today", "once per node"]
    out = ["| " + " | ".join(head) + " |", "| --- " * 2 + "| ---: " * 6 + "|"]

    def share(record: dict[str, Any], name: str) -> str:
        rows = record[name]
        return "" if rows is None else f"{100 * rows / record['size']:.3g} %"

    for graph in dict.fromkeys(record["graph"] for record in records):
        mine = [each for each in records if (each["graph"], each["ranks"]) == (graph, ranks)]
        best = min(mine, key=lambda each: each["rows"])
        for each in [each for each in mine if each["order"] == "identity" or each is best]:
            cells = [share(each, name) for name in (
                "rows", "either", "joint", "network_rows", "node_rows",
            )]  # fmt: skip
            order = "given" if each["order"] == "identity" else each["order"]
            out.append(
                "| " + " | ".join([graph, order, f"{100 * each['cut']:.3g} %", *cells]) + " |"
            )
    return "\n".join(out)


def savings(records: Sequence[dict[str, Any]]) -> str:
    """The docs' second table: by number of ranks, in each graph's best order, geometric means."""
    head = ["ranks", "either / today", "joint / today", "once per node / network today",
            "today / CAGNET 1-D", "today / CAGNET 1.5-D"]  # fmt: skip
    out = ["| " + " | ".join(head) + " |", "| ---: " * len(head) + "|"]
    pairs = (("either", "rows"), ("joint", "rows"), ("node_rows", "network_rows"),
             ("rows", "cagnet_1d"), ("rows", "cagnet_15d"))  # fmt: skip
    for count in sorted({record["ranks"] for record in records}):
        best = [
            min((each for each in records if (each["graph"], each["ranks"]) == (graph, count)),
                key=lambda each: each["rows"])
            for graph in dict.fromkeys(record["graph"] for record in records)
        ]  # fmt: skip
        cells = [str(count)]
        for above, below in pairs:
            ratios = [
                each[above] / each[below] for each in best if each.get(above) and each.get(below)
            ]
            cells.append(f"{np.exp(np.mean(np.log(ratios))):.3g}" if ratios else "")
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--graphs", default=",".join(REAL))
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        records = [json.loads(line) for line in options.table.read_text().splitlines()]
        print(table(records), savings(records), sep="\n\n")
        return
    names, orders = tuple(options.graphs.split(",")), tuple(options.orders.split(","))
    unknown = set(orders) - set(PARTITIONS)
    if unknown:
        parser.error(f"--orders: unknown {sorted(unknown)}; choose from {list(PARTITIONS)}")
    file = None if options.out is None else (options.out / "exchange_volumes.jsonl").open("w")
    for line in lines(options.data, names, orders):
        print(line, flush=True)
        if file is not None:
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
