"""How well the model chooses, against the times of the records.

    python -m tools.choices results/h200/{core,all,asyncsparse}.jsonl.gz --data DIR
    python -m tools.choices results/h200/{voltrix,rsh,acc}.jsonl --data DIR

For every product with the times of two systems or more, each system's model
(its ``predict``) predicts its time from the matrix alone; the loss is the time of the chosen one
over that of the fastest. Matrices of the core suite, to which the model was fitted, are listed
separately, and so are generated stand-ins. No GPU is needed: the H200's ceilings are known. DIR has
the matrices of the records.

``--as`` predicts with the constants of a GPU that nobody measured, scaled from what its driver
reports: of an H200, or of an A100, which the GPU of the records is not. A fit that is kept for a
GPU of that name (``SPARSETILE_TUNE_DIR``) corrects the predictions.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from sparsetile.bench.analysis import geomean, layout_of
from sparsetile.bench.record import Record, read_records
from sparsetile.bench.suites import load_suite
from sparsetile.cli.console import note, print_table
from sparsetile.core.device import H200, Machine, scaled_machine
from sparsetile.data.catalog import load
from sparsetile.engines.request import Request
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from sparsetile.tune import predict_systems

# Orders of larger matrices than this take minutes.
MOST_ENTRIES = 20_000_000
# What drivers report: clocks in kHz, bits of the memory bus.
FACTS = {
    "h200": SimpleNamespace(
        name="NVIDIA H200, scaled", multi_processor_count=132, clock_rate=1_980_000,
        memory_clock_rate=3_201_000, memory_bus_width=6016, L2_cache_size=60 * 2**20,
    ),
    "a100": SimpleNamespace(
        name="NVIDIA A100-SXM4-40GB", multi_processor_count=108, clock_rate=1_410_000,
        memory_clock_rate=1_215_000, memory_bus_width=5120, L2_cache_size=40 * 2**20,
    ),
}  # fmt: skip
CEILINGS = {
    "h200": scaled_machine(FACTS["h200"], (9, 0)),
    "a100": scaled_machine(FACTS["a100"], (8, 0)),
}


@dataclass(frozen=True)
class Product:
    """One product of the records: a matrix in a row order, a type and a width."""

    matrix: str
    order: str
    dtype: str
    n: int
    weighted: bool
    entries: int
    source: str

    @property
    def part(self) -> str:
        """Which matrices it belongs to: the model was fitted to the core ones."""
        if self.source != "file":
            return f"{self.source}s"
        return "core" if self.matrix in _core() else "others"


@functools.cache
def _core() -> frozenset[str]:
    return frozenset(name for part in load_suite("core").parts for name in part.matrices)


@dataclass(frozen=True)
class Choice:
    """Measured and predicted times, and cuSPARSE's time if it is known."""

    product: Product
    measured: dict[str, float]
    predicted: dict[str, float]
    cusparse: float

    @property
    def taken(self) -> str:
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def loss(self) -> float:
        return self.measured[self.taken] / min(self.measured.values())


def _is_plain(record: Record) -> bool:
    """Whether ``auto`` could have chosen it: a sum, with no option but a row order."""
    plain = record["op"] == "spmm" and record["reduce"] == "sum" and layout_of(record) == "rows"
    return (
        record["status"] == "ok"
        and record["environment"].get("device_name") == H200.name
        and plain
        and set(record["config"]) <= {"reorder"}
    )


def collect(
    records: Iterable[Record],
) -> tuple[dict[Product, dict[str, float]], dict[Product, float]]:
    """Return the times of our systems, and of the best cuSPARSE, by product.

    If several records have the same product, the first counts.
    """
    ours: dict[Product, dict[str, float]] = defaultdict(dict)
    theirs: dict[tuple[str, Product], float] = {}
    for record in filter(_is_plain, records):
        product = Product(
            record["matrix"], record["reorder"], record["dtype"], record["n"], record["weighted"],
            record["nnz"], record["source"],
        )  # fmt: skip
        name, seconds = record["system"], record["time"]["p50"]
        if name in SYSTEMS:
            ours[product].setdefault(name, seconds)
        elif name.startswith("cusparse-csr"):
            key = (record["suite"], product)
            theirs[key] = min(seconds, theirs.get(key, math.inf))
    best: dict[Product, float] = {}
    for (_, product), seconds in theirs.items():
        best.setdefault(product, seconds)
    return {product: times for product, times in ours.items() if len(times) > 1}, best


def choices(
    ours: dict[Product, dict[str, float]], best: dict[Product, float], data: Path,
    ceilings: Machine = H200,
) -> Iterator[Choice]:  # fmt: skip
    """Yield the model's choice for each product, matrix by matrix."""
    by_matrix: dict[str, list[Product]] = defaultdict(list)
    for product in ours:
        by_matrix[product.matrix].append(product)
    for matrix, products in sorted(by_matrix.items()):
        if products[0].source == "generated" or products[0].entries > MOST_ENTRIES:
            note(f"choices: {matrix} is left out, too large or no matrix of its own")
            continue
        csr = load(matrix, data)
        orders = {name: REORDERERS[name](csr) for name in {p.order for p in products}}
        for product in products:
            request = Request(
                csr.with_values(torch.ones(csr.nnz) if product.weighted else None),
                n=product.n,
                dtype=getattr(torch, product.dtype),
                permutation=orders[product.order],
                ceilings=ceilings,
            )
            given = dataclasses.replace(product, order="identity")
            yield Choice(
                product,
                ours[product],
                predict_systems(request, list(ours[product])),
                best.get(given, math.nan),
            )


def rows(found: Sequence[Choice]) -> list[list[str]]:
    """Return the table: one row for each group of matrices, type, order, width and systems."""
    groups: dict[tuple, list[Choice]] = defaultdict(list)
    for choice in found:
        p = choice.product
        systems = ", ".join(sorted(choice.measured))
        groups[p.part, p.dtype, p.order, p.n, systems].append(choice)
    table = []
    for (part, dtype, order, n, systems), group in sorted(groups.items()):
        worst = max(group, key=lambda choice: choice.loss)
        taken = Counter(choice.taken for choice in group)
        over = [c.cusparse / c.measured[c.taken] for c in group if not math.isnan(c.cusparse)]
        table.append([
            part, dtype, order, str(n), systems, str(len(group)),
            f"{(geomean(c.loss for c in group) - 1) * 100:.1f} %",
            f"{worst.loss:.2f} {worst.product.matrix}" if worst.loss > 1 else "none",
            ", ".join(f"{name} {count}" for name, count in taken.most_common()),
            f"{geomean(over):.2f}" if over else "",
        ])  # fmt: skip
    return table


def accuracy(found: Sequence[Choice]) -> list[list[str]]:
    """Return predicted over measured by system: mean, typical factor off, least and most."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for choice in found:
        wide = "float32" if choice.product.dtype == "float32" else "16 bits"
        for name, seconds in choice.predicted.items():
            ratios[name, wide, choice.product.part].append(seconds / choice.measured[name])
    return [
        [
            name, wide, part, str(len(values)), f"{geomean(values):.2f}",
            f"{math.exp(math.sqrt(sum(math.log(v) ** 2 for v in values) / len(values))):.2f}",
            f"{min(values):.2f}", f"{max(values):.2f}",
        ]
        for (name, wide, part), values in sorted(ratios.items())
    ]  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR")
    parser.add_argument("--as", dest="ceilings", choices=sorted(CEILINGS), metavar="GPU")
    given = parser.parse_args(words)
    torch.backends.cuda.matmul.allow_tf32 = True  # the records of tiles in float32 are TF32
    try:
        records = [record for path in given.records for record in read_records(path)[0]]
        ceilings = H200 if given.ceilings is None else CEILINGS[given.ceilings]
        found = list(choices(*collect(records), given.data, ceilings))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print_table(
        ("matrices", "type", "order", "N", "systems", "products", "loss", "most", "taken",
         "over cuSPARSE"),
        rows(found),
        right=("N", "products", "loss", "over cuSPARSE"),
    )  # fmt: skip
    columns = ("predictions", "mean", "typical factor off", "least", "most")
    print_table(("system", "type", "matrices", *columns), accuracy(found), right=columns)


if __name__ == "__main__":
    main()
