"""What row orders cost and bring on a GPU: seconds to find, columns shared, product times.

    python -m tools.row_orders --data DIR --out DIR --time-limit 200

The record ``orders.jsonl`` in the folder of --out has the environment in its first line, then one
line per matrix and order: the seconds to find the order, those to predict products in it, entries
per distinct (window of 16 or 64 rows, column) pair, and products with the system that ``auto``
chooses: predicted and measured seconds, and after how many products the order has paid for itself
(``break_even``; null if never). The line of the order ``auto`` has what a plan for AUTO_RUNS
products takes, and the seconds to plan. Matrices are the core suite and those of GENERATED, which
are made on the device and only ordered. What does not fit the time limit is named in the last line.
Exit code 1 if a product differed from that in the given order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_table
from sparsetile.core.streams import settle
from sparsetile.core.timer import percentiles, time_product
from sparsetile.data.catalog import load
from sparsetile.engines.request import Request
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.reorder import REORDERERS, Permutation
from sparsetile.systems.registry import candidates
from sparsetile.tune import predict_systems
from tools.study import dtype_name, error_of

ORDERS = ("identity", "lsh", "merging")
WINDOWS = (16, 64)
# Products: columns of B, type. float32 is TF32.
PRODUCTS = ((128, torch.float16), (512, torch.float32))
# Rows and entries per row of the generated matrices: 1 to 100 million entries.
GENERATED = ((50_000, 20), (200_000, 20), (2_000_000, 10), (5_000_000, 20))
# Products that plans which choose an order themselves are made for.
AUTO_RUNS = 2_000
# Times that an order is found, after one that is not timed.
REPEATS = 5
# Largest difference of two products over the largest element: both only round.
WRONG = 0.01
# Seconds of measured work of a product.
BUDGET = 0.004


def mixed_band(rows: int, length: int, device: torch.device) -> CSR:
    """Return a band matrix whose rows are in a random order.

    Entry k of a row is one of two columns; eight rows in a row of the band have the same two.
    """
    draw = torch.Generator(device=device).manual_seed(rows)
    first = torch.randperm(rows, generator=draw, device=device)
    stretch = torch.arange(length, device=device) * 4
    columns = torch.randint(0, 2, (rows, length), generator=draw, device=device)
    columns = (first[:, None] // 8 * 8 + stretch + columns).to(torch.int32).flatten()
    indptr = torch.arange(rows + 1, device=device) * length
    return CSR(indptr, columns, None, (rows, rows + 4 * length), checked=True)


def found_order(csr: CSR, name: str, repeats: int) -> tuple[Permutation, float]:
    """Find an order several times; return it and the median of the seconds."""
    seconds = []
    order = REORDERERS[name](csr)
    for _ in range(repeats):
        settle(csr.device)
        begun = time.perf_counter()
        order = REORDERERS[name](csr)
        settle(csr.device)
        seconds.append(time.perf_counter() - begun)
    return order, percentiles(seconds)[1]


def predicted(csr: CSR, n: int, dtype: torch.dtype, order: Permutation) -> float | None:
    """Return the seconds of a product that ``auto`` would choose by; None if it would not."""
    request = Request(csr, n, dtype, order)
    able, _ = candidates(request)
    return min(predict_systems(request, able).values(), default=None)


class Measured:
    """One matrix: its products in the given order, which come first."""

    def __init__(self, name: str, csr: CSR) -> None:
        self.name, self.csr, self.wrong = name, csr, False
        self._given: dict[tuple[int, torch.dtype], tuple[Tensor, float]] = {}

    def line(self, order_name: str, products: bool) -> dict[str, Any]:
        """Measure an order."""
        csr = self.csr
        order, seconds = found_order(csr, order_name, REPEATS)
        pairs = {window: distinct_pairs(csr, window, order.perm) for window in WINDOWS}
        n, dtype = PRODUCTS[-1]
        settle(csr.device)
        begun = time.perf_counter()
        predicted(csr, n, dtype, order)
        predicting = time.perf_counter() - begun
        return {
            "matrix": self.name,
            "rows": csr.shape[0],
            "entries": csr.nnz,
            "order": order_name,
            "seconds": seconds if order.perm is not None else 0.0,
            "predict_seconds": predicting,
            "entries_per_pair": {w: csr.nnz / max(count, 1) for w, count in pairs.items()},
            "products": [self._product(order, seconds, *each) for each in PRODUCTS]
            if products
            else [],
        }

    def chosen(self) -> dict[str, Any]:
        """Measure plans that choose the order; those in the given order come first."""
        products = [self._chosen(*each) for each in PRODUCTS]
        rows, entries = self.csr.shape[0], self.csr.nnz
        return {
            "matrix": self.name, "rows": rows, "entries": entries, "order": "auto",
            "products": products,
        }  # fmt: skip

    def _chosen(self, n: int, dtype: torch.dtype) -> dict[str, Any]:
        settle(self.csr.device)
        begun = time.perf_counter()
        plan = build_plan(self.csr, n, dtype=dtype, expected_runs=AUTO_RUNS)
        settle(self.csr.device)
        planning = time.perf_counter() - begun
        seconds, error = self._timed(plan)
        return {
            "n": n, "dtype": dtype_name(dtype), "order": plan.reorder, "system": plan.system,
            "plan_seconds": planning, "seconds": seconds, "error": error,
        }  # fmt: skip

    def _timed(self, plan: Plan) -> tuple[float, float | None]:
        """Return the seconds of a product, and its error over the one in the given order."""
        n, dtype = plan.n, plan.dtype
        draw = torch.Generator(device=self.csr.device).manual_seed(n)
        B = torch.randn(self.csr.shape[1], n, generator=draw, device=self.csr.device).to(dtype)
        C = plan.run(B).float()
        given, _ = self._given.setdefault((n, dtype), (C, math.nan))
        error = error_of(C, given)
        self.wrong |= error is None or error > WRONG
        return time_product(lambda: plan.run(B), B.device, budget=BUDGET).median, error

    def _product(
        self, order: Permutation, found_in: float, n: int, dtype: torch.dtype
    ) -> dict[str, Any]:
        reorder = "identity" if order.perm is None else order.perm
        plan = build_plan(self.csr, n, dtype=dtype, reorder=reorder, expected_runs=100_000)
        seconds, error = self._timed(plan)
        C, before = self._given[n, dtype]
        if order.perm is None:
            self._given[n, dtype] = C, seconds
        return {
            "n": n,
            "dtype": dtype_name(dtype),
            "system": plan.system,
            "predicted": predicted(self.csr, n, dtype, order),
            "seconds": seconds,
            "error": error,
            "break_even": math.ceil(found_in / (before - seconds)) if seconds < before else None,
        }


def measured_lines(
    data: Path, names: Sequence[str], device: torch.device, end: float
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield lines and whether a product was wrong; the last one has what there was no time for."""
    left = [*(f"mixed_band-{rows}x{length}" for rows, length in GENERATED), *names]
    for rows, length in (*GENERATED, *((0, 0) for _ in names)):
        if time.monotonic() > end:
            break
        name = left.pop(0)
        if rows:
            csr = mixed_band(rows, length, device)
        else:
            csr = load(name, data).with_values(None).to(device)
        case = Measured(name, csr)
        for order in ORDERS:
            yield case.line(order, products=not rows), case.wrong
        if not rows:
            yield case.chosen(), case.wrong
    yield {"not_run": left}, False


def summary(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of a table: an order of a matrix each."""
    rows = []
    for line in lines:
        if line["order"] == "auto":
            taken = ", ".join(
                f"{p['order']} {p['system']} {p['seconds'] * 1e6:.1f}" for p in line["products"]
            )
            planning = ", ".join(f"{p['plan_seconds'] * 1e3:.0f}" for p in line["products"])
            rows.append([line["matrix"], "auto", planning, "", taken, ""])
            continue
        fill = " / ".join(f"{x:.2f}" for x in line["entries_per_pair"].values())
        products = ", ".join(
            f"{p['system']} {p['seconds'] * 1e6:.1f} ({(p['predicted'] or 0) * 1e6:.1f})"
            for p in line["products"]
        )
        even = ", ".join(str(p["break_even"]) for p in line["products"])
        name, milliseconds = line["matrix"], f"{line['seconds'] * 1e3:.2f}"
        rows.append([name, line["order"], milliseconds, fill, products, even])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, and print a table."""
    parser = argparse.ArgumentParser(
        prog="row_orders", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--matrices", help="names with commas; the core suite if omitted")
    parser.add_argument("--time-limit", type=float, default=400.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, none is here. Pass --device cpu")
    core = asked.data / "CORE.txt"
    if asked.matrices is None and not core.is_file():
        parser.error(f"--data must be a folder with CORE.txt, got {str(asked.data)!r}")
    names = core.read_text().split() if asked.matrices is None else asked.matrices.split(",")
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.time_limit
    lines, failed = list[dict[str, Any]](), False
    before = torch.backends.cuda.matmul.allow_tf32
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", before)
        torch.backends.cuda.matmul.allow_tf32 = True
        file: TextIO = stack.enter_context((asked.out / "orders.jsonl").open("w"))
        about = describe_environment(asked.device) | {"commit": asked.commit or commit()}
        print(json.dumps({"environment": about}), file=file)
        for line, wrong in measured_lines(asked.data, names, torch.device(asked.device), end):
            print(json.dumps(line), file=file, flush=True)
            failed |= wrong
            if "order" in line:
                lines.append(line)
            elif line["not_run"]:
                note(f"row_orders: no time for {', '.join(line['not_run'])}")
    headings = (
        "matrix",
        "order",
        "ms",
        "entries per pair",
        "products, us (predicted)",
        "pays after",
    )
    print_table(headings, summary(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
