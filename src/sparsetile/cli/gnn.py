"""``sparsetile bench gnn``: the suite that trains graph networks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, note_some, print_json, print_table, print_text
from sparsetile.core.errors import value_error

__all__ = ["GNN", "refuse_options", "run_gnn_suite"]

GNN = "gnn"


def refuse_options(given: Mapping[str, object], suite: str = GNN) -> None:
    """Raise for an option that a suite does not have."""
    for option, value in given.items():
        if value:
            raise value_error(
                "bench", option, f"omitted with the suite {suite}", "a value", f"Omit {option}"
            )


def run_gnn_suite(
    device: str,
    epochs: int | None,
    chosen: Mapping[str, list[str]],
    data: Path | None,
    out: Path | None,
    run: Mapping[str, Any],
    as_json: bool,
) -> int:
    """Train, print the tables, and return the exit code: 1 if losses of ours differ."""
    from sparsetile.bench.gnn import EPOCHS, Selection, run_gnn

    path = out or Path("sparsetile-gnn.jsonl")
    if path.is_dir():
        raise value_error(
            "bench", "--out", "a file for the records", f"the folder {str(path)!r}", "Name a file"
        )
    narrowed = {name: tuple(names) for name, names in chosen.items() if names}
    selection = Selection(
        device=device, epochs=EPOCHS[device] if epochs is None else epochs, **narrowed
    )
    try:
        outcome = run_gnn(selection, data=data, out=path, say=note, **run)
    except KeyboardInterrupt:
        note(f"interrupted: the same command goes on where it stopped ({path} is kept)")
        raise
    _show(outcome.records, as_json)
    note_some([f"omitted: {line}" for line in outcome.absent])
    note(f"{outcome.measured} measured, {outcome.resumed} already in {path}")
    if outcome.not_run:
        note(f"time limit: {outcome.not_run} runs not begun; the same command goes on with them")
    ours = (record for record in outcome.records if record["kind"] == "system")
    return 1 if any(record["status"] == "wrong" for record in ours) else 0


def _number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
    from sparsetile.bench.gnn import geometric_means, gnn_rows

    rows = gnn_rows(records)
    means = geometric_means(rows)
    if as_json:
        print_json({"rows": rows, "means": means})
        return
    numbers = (
        "step ms", "host ms", "plan ms", "peak GB", "over pyg-sparse", "with planning",
        "over pyg-edges", "loss difference",
    )  # fmt: skip
    print_table(
        ("graph", "network", "type", "path", "order", *numbers),
        [
            [
                row["matrix"], row["setting"], row["dtype"], row["path"], row["reorder"],
                _number(row["step_seconds"], 1e3), _number(row["host_seconds"], 1e3),
                _number(row["prepare_seconds"], 1e3), _number(row["peak_bytes"], 1e-9),
                _number(row["step_over_sparse"]), _number(row["total_over_sparse"]),
                _number(row["step_over_edges"]),
                "-" if row["loss_difference"] is None else f"{row['loss_difference']:.1e}",
            ]
            for row in rows
            if row["status"] in ("ok", "wrong")
        ],
        right=numbers,
    )  # fmt: skip
    for row in rows:
        if row["status"] != "ok":
            what = row["reason"] or f"losses differ by {row['loss_difference']:.1e}"
            run = " ".join(row[name] for name in ("matrix", "setting", "dtype", "path"))
            note(f"{run}: {row['status']}, {what}")
    for mean in means:
        print_text(
            f"{mean['setting']} {mean['dtype']} {mean['path']} {mean['reorder']}: geometric mean "
            f"over {mean['graphs']} graphs {_number(mean['step_over_sparse'])} x pyg-sparse "
            f"({_number(mean['total_over_sparse'])} with planning, least "
            f"{_number(mean['least_step_over_sparse'])}), {_number(mean['step_over_edges'])} x "
            "pyg-edges"
        )
