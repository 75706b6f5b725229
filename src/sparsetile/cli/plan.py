"""``sparsetile plan``: plan a matrix, say what was chosen and why, and save the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsetile.cli.console import activity, note, print_json, print_text
from sparsetile.cli.options import (
    Data,
    Device,
    Dtype,
    Json,
    Matrix,
    Reorder,
    Runs,
    SystemName,
    Tune,
    Width,
    check_output,
    dtype_of,
    load_matrix,
    resolve_device,
)
from sparsetile.core.checks import one_of
from sparsetile.plan.planner import build_plan
from sparsetile.reorder import REORDERERS
from sparsetile.tune import KEPT_RUNS

__all__ = ["plan"]


def plan(
    matrix: Matrix,
    n: Width = 128,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.safetensors", help="Save the plan to this file."),
    ] = None,
    dtype: Dtype = "auto",
    system: SystemName = "auto",
    device: Device = "auto",
    reorder: Reorder = "auto",
    tune: Tune = "model",
    expected_runs: Runs = KEPT_RUNS,
    data: Data = None,
    as_json: Json = False,
) -> int:
    """Plan a product, explain each choice, and save the plan for `sparsetile.load_plan`."""
    check_output("plan", "--out", out, (".safetensors",))
    dtype_of("plan", dtype)  # refused before anything is read
    place = resolve_device("plan", device)
    how = one_of("plan", "--tune", tune, ["model", "measure"])
    order = one_of("plan", "--reorder", reorder, ["auto", *REORDERERS])
    with activity(f"planning {matrix}"):
        csr = load_matrix(matrix, data)
        made = build_plan(
            csr,
            n,
            dtype=dtype_of("plan", dtype, csr),
            system=system,
            reorder=order,
            tune=how,
            expected_runs=expected_runs,
            device=place,
            timed=True,
        )
    if as_json:
        floor, term = made.floor()
        print_json({"matrix": matrix, **made.info, "floor_seconds": floor, "floor_term": term})
    else:
        print_text(made.explain())
    if out is not None:
        made.save(out)
        note(f"sparsetile: saved {out} ({out.stat().st_size} bytes)")
    return 0
