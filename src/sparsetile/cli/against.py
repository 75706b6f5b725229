"""``sparsetile run --against``: the same product by other libraries, and when a plan pays."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsetile.cli.console import activity, duration, print_table, print_text
from sparsetile.intake.csr import CSR

__all__ = ["LIBRARIES", "compare", "paid_after", "pays_from", "print_comparison"]

# Library -> its baselines (``sparsetile.bench``), of which the fastest counts.
LIBRARIES = {
    "scipy": ("scipy",),
    "torch": ("torch-csr",),
    "cusparse": (
        "cusparse-csr1", "cusparse-csr2", "cusparse-csr3", "cusparse-spmv1", "cusparse-spmv2",
    ),
    "dense": ("torch-dense",),
}  # fmt: skip
# Whoever uses these has A in their form already.
_READY = ("scipy", "torch")


def paid_after(planning: float, seconds: float, preparation: float, others: float) -> float:
    """Return the products after which a plan has cost less; infinite if it never has.

    >>> paid_after(1e-3, 1e-5, 2e-4, 3e-5)
    40.0
    """
    extra, gain = planning - preparation, others - seconds
    if extra <= 0 and gain >= 0:
        return 0.0
    return round(max(0.0, extra / gain), 6) if gain > 0 else math.inf


def pays_from(planning: float, seconds: float, preparation: float, others: float) -> int | None:
    """Return the same as a number of products, at least one; None: a plan never pays."""
    after = paid_after(planning, seconds, preparation, others)
    return None if after == math.inf else max(1, math.ceil(after))


def compare(
    row: dict[str, Any], csr: CSR, B: Tensor, names: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Return what each library takes for the product of a row of ``sparsetile run``."""
    return [
        {"matrix": row["matrix"], "n": row["n"], "library": name}
        | _fastest(row, csr, B, name, repeats)
        for name in names
    ]


def _fastest(
    row: dict[str, Any], csr: CSR, B: Tensor, library: str, repeats: int
) -> dict[str, Any]:
    from sparsetile.bench.baselines import BASELINES
    from sparsetile.bench.operands import Operands

    # Baselines read A's values in B's type, and its arrays where B is.
    operands = Operands(csr.to(B.device), B, None, "spmm", row["reduce"])
    found, reasons = list[dict[str, Any]](), list[str]()
    for name in LIBRARIES[library]:
        baseline = BASELINES[name]
        on_device = B.device.type in baseline.devices
        reason = baseline.reason(operands) if on_device else f"does not run on {B.device.type}"
        if reason is not None:
            reasons.append(reason)
            continue
        with activity(f"multiplying {row['matrix']} by {name}"):
            found.append(_measured(name, operands, library in _READY, repeats))
    if not found:
        return {"reason": reasons[0]}
    best = min(found, key=lambda each: each["seconds"])
    pays = pays_from(
        row["plan_again_seconds"], row["seconds"], best["prepare_seconds"], best["seconds"]
    )
    return best | {"over_sparsetile": best["seconds"] / row["seconds"], "pays_from": pays}


def _measured(name: str, operands: Any, ready: bool, repeats: int) -> dict[str, Any]:
    from sparsetile.bench.baselines import BASELINES
    from sparsetile.bench.worker import judge
    from sparsetile.core.timer import time_product

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that sparse tensors are beta
        started = time.perf_counter()
        prepared = BASELINES[name].prepare(operands)
        if operands.device.type == "cuda":
            torch.cuda.synchronize(operands.device)
        preparation = 0.0 if ready else time.perf_counter() - started
        verdict = judge(operands, torch.as_tensor(prepared.run()), tf32=prepared.uses_tf32)
        timing = time_product(prepared.run, operands.device, samples=repeats)
    return {
        "baseline": name, "seconds": timing.median, "prepare_seconds": preparation,
        "error": verdict.worst, "ok": verdict.ok,
    }  # fmt: skip


def _products(count: int) -> str:
    return f"{count} product" + "s" * (count > 1)


def print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each library, and a sentence for each product."""
    cells = []
    for row in rows:
        for each in row["against"]:
            begin = [row["matrix"], str(row["n"]), each["library"]]
            if "reason" in each:
                cells.append([*begin, "-", "-", "-", "-", each["reason"]])
                continue
            pays = each["pays_from"]
            cells.append([
                *begin, duration(each["seconds"]), f"{each['over_sparsetile']:.2f}",
                duration(each["prepare_seconds"]), f"{each['error']:.3f}",
                "never" if pays is None else _products(pays),
            ])  # fmt: skip
    headings = (
        "matrix", "N", "library", "time", "over ours", "prepared in", "error", "a plan pays from",
    )  # fmt: skip
    print_table(headings, cells, right=headings[1:2] + headings[3:7])
    for row in rows:
        print_text(_sentence(row))


def _sentence(row: dict[str, Any]) -> str:
    able = [each for each in row["against"] if "reason" not in each]
    product = f"{row['matrix']}, N = {row['n']}"
    if not able:
        return f"{product}: no other library can compute this product here."
    best = min(able, key=lambda each: each["seconds"])
    planning = duration(row["plan_again_seconds"])
    if best["pays_from"] is None:
        return f"{product}: {best['library']} is faster, so planning ({planning}) does not pay."
    return (
        f"{product}: planning ({planning}) pays from {_products(best['pays_from'])} on over "
        f"{best['library']}, the fastest other."
    )
