"""``sparsetile run``: read, plan, multiply, check against float64, time, print a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import sparsetile
from sparsetile.check.judge import check_product
from sparsetile.cli.against import LIBRARIES, compare, print_comparison
from sparsetile.cli.console import activity, duration, note, print_json, print_table
from sparsetile.cli.options import (
    Data,
    Device,
    Dtype,
    Json,
    Matrices,
    Reorder,
    Runs,
    SystemName,
    Tune,
    dtype_of,
    load_matrix,
    resolve_device,
)
from sparsetile.core.checks import one_of, reduce_name
from sparsetile.core.errors import value_error
from sparsetile.core.timer import measure, time_product
from sparsetile.intake.csr import CSR
from sparsetile.plan.plan import Plan
from sparsetile.reorder import REORDERERS
from sparsetile.tune import KEPT_RUNS

__all__ = ["run"]

_COLUMNS = (
    "matrix", "shape", "nnz", "system", "N", "dtype", "time", "GFLOP/s", "GB/s", "of floor",
    "error", "checked", "verdict",
)  # fmt: skip
# Products (entries · N) up to which every element is checked: seconds on a CPU.
_CHECKED_ELEMENTS = 2**27
_RIGHT = ("nnz", "N", "time", "GFLOP/s", "GB/s", "of floor", "error")


def _note_overflow(name: str, csr: CSR, dtype: torch.dtype) -> None:
    if csr.values is None:
        return
    lost = int((torch.isfinite(csr.values) & ~torch.isfinite(csr.values.to(dtype))).sum())
    if lost:
        label = str(dtype).removeprefix("torch.")
        note(f"sparsetile: {name}: {lost} values of A are too large for {label} and become Inf")


def _compulsory_bytes(plan: Plan, n: int) -> int:
    """Return the bytes that any product must move: A, the used rows of B, and C, once each."""
    item, csr = plan.dtype.itemsize, plan._csr
    used = int(torch.unique(csr.indices).numel())
    entry = 4 + (0 if plan.values is None else item)
    return entry * plan.nnz + item * n * (used + plan.shape[0])


def _product(
    name: str, csr: CSR, n: int, dtype: torch.dtype, device: torch.device, options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Plan, multiply, check and time one matrix; return its row of the table as plain data."""
    reduce, seed = options["reduce"], options["seed"]

    def planned() -> tuple[Plan, float]:
        started = time.perf_counter()
        made = sparsetile.plan(
            csr, n, dtype=dtype, system=options["system"], reorder=options["reorder"],
            tune=options["tune"], expected_runs=options["expected_runs"], device=device,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return made, time.perf_counter() - started

    plan, planning = planned()
    generator = torch.Generator().manual_seed(seed)
    # Always drawn on the CPU, so that a seed gives the same B everywhere.
    wide = torch.promote_types(dtype, torch.float32)
    B = torch.randn(csr.shape[1], n, generator=generator, dtype=wide).to(dtype).to(device)
    tf32 = device.type == "cuda" and dtype is torch.float32 and options["tf32"]

    def product() -> Tensor:
        return plan.run(B, reduce=reduce)

    with torch.no_grad():
        verdict = check_product(
            csr.with_values(plan.values), B, product(),
            reduce=reduce, tf32=tf32, limit=_CHECKED_ELEMENTS, seed=seed,
        )  # fmt: skip
        call = measure(product, device, options["repeats"])
        timing = time_product(product, device, samples=options["repeats"]).summary()
    seconds = timing["p50"]
    # A CPU's ceilings are not known well enough to call anything a floor.
    floor, term = plan.floor() if device.type == "cuda" else (None, None)
    row = {
        "matrix": name, "shape": list(plan.shape), "nnz": plan.nnz,
        "weighted": plan.values is not None, "system": plan.system, "reorder": plan.reorder, "n": n,
        "dtype": str(dtype).removeprefix("torch."), "tf32": tf32, "reduce": reduce,
        "device": str(device), "plan_seconds": planning, "seconds": seconds,
        "p20_seconds": timing["p20"], "p80_seconds": timing["p80"], "timing": timing["method"],
        "call_seconds": call, "gflops": 2 * plan.nnz * n / seconds / 1e9,
        "gbytes_per_second": _compulsory_bytes(plan, n) / seconds / 1e9, "floor_seconds": floor,
        "floor_term": term, "floor_share": None if floor is None else floor / seconds,
        "error": verdict.worst, "rows_checked": verdict.rows_checked, "checked": verdict.coverage,
        "ok": verdict.ok,
    }  # fmt: skip
    if options["against"]:
        row["plan_again_seconds"] = planned()[1]  # nothing is imported or compiled any more
        row["against"] = compare(row, csr, B, options["against"], options["repeats"])
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    share = row["floor_share"]
    return [
        row["matrix"], f"{row['shape'][0]} x {row['shape'][1]}", str(row["nnz"]), row["system"],
        str(row["n"]), row["dtype"], duration(row["seconds"]), f"{row['gflops']:.1f}",
        f"{row['gbytes_per_second']:.1f}", "-" if share is None else f"{100 * share:.0f} %",
        f"{row['error']:.3f}" if row["error"] < 1e6 else f"{row['error']:.0e}", row["checked"],
        "ok" if row["ok"] else "WRONG",
    ]  # fmt: skip


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif rows:
        print_table(_COLUMNS, [_cells(row) for row in rows], right=_RIGHT)
        if "against" in rows[0]:
            print_comparison(rows)


def _widths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise value_error("run", "-n", "whole numbers above 0, such as 1,32,128", repr(text),
                          "Give the columns of B")  # fmt: skip
    return [int(word) for word in words]


def run(
    matrix: Matrices,
    n: Annotated[
        str, typer.Option("-n", "--n", metavar="N,...", help="Columns of the dense matrix B.")
    ] = "128",
    dtype: Dtype = "auto",
    system: SystemName = "auto",
    reduce: Annotated[
        str, typer.Option("--reduce", metavar="HOW", help="sum, mean, max or min.")
    ] = "sum",
    device: Device = "auto",
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Timed runs.")] = 20,
    data: Data = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of random numbers.")] = 0,
    reorder: Reorder = "auto",
    tune: Tune = "model",
    expected_runs: Runs = KEPT_RUNS,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Give a matrix without values random ones.")
    ] = False,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Allow TF32 in float32 products on a GPU.")
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help=f"Compare with other libraries: {', '.join(LIBRARIES)}."
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Multiply MATRIX by a random dense matrix; check and time it.

    The error column is the largest error against float64 in units of what rounding allows:
    above 1 the product is wrong and the exit code is 1.
    """
    dtype_of("run", dtype)  # refused before anything is read
    place = resolve_device("run", device)
    options: dict[str, Any] = {
        "system": one_of(
            "run", "--system", system, ["auto", *(row["name"] for row in sparsetile.systems())]
        ),
        "reduce": reduce_name("run", reduce),
        "reorder": one_of("run", "--reorder", reorder, ["auto", *REORDERERS]),
        "tune": one_of("run", "--tune", tune, ["model", "measure"]),
        "expected_runs": expected_runs,
        "seed": seed,
        "repeats": repeats,
        "tf32": tf32,
        "against": [
            one_of("run", "--against", word.strip(), LIBRARIES)
            for word in against.split(",")
            if word.strip()
        ],
    }
    widths = _widths(n)
    rows: list[dict[str, Any]] = []
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        for name in matrix:
            rows += _products(name, data, weighted, widths, dtype, place, options)
    except Exception:
        _print(rows, as_json)  # print what was measured before the error
        raise
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    _print(rows, as_json)
    return 0 if all(row["ok"] for row in rows) else 1


def _products(
    name: str, data: Path | None, weighted: bool, widths: Sequence[int], dtype: str,
    device: torch.device, options: dict[str, Any],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    with activity(f"reading {name}"):
        csr = load_matrix(name, data)
        if weighted and csr.values is None:
            generator = torch.Generator().manual_seed(options["seed"] + 1)
            csr = csr.with_values(torch.randn(csr.nnz, generator=generator))
        kind = dtype_of("run", dtype, csr)
        _note_overflow(name, csr, kind)
    for n in widths:
        with activity(f"multiplying {name}"):
            row = _product(name, csr, n, kind, device, options)
        yield row
