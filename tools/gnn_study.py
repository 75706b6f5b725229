"""Trains GCNs of the papers' sizes with PyG's products and with sparsetile's, and compares losses.

    python -m tools.gnn_study --data DIR --out gnn.jsonl

docs/results/benchmarks.md describes networks, paths and records. The same command continues a run
that was stopped. Exit code 1 if losses of ours differ, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparsetile.cli.console import note, note_some, print_json, print_table, print_text
from sparsetile.core.errors import value_error
from tools.gnn_records import EPOCHS, Selection, geometric_means, gnn_rows, run_gnn
from tools.record import command_of

# Options that list names, and the fields of ``Selection`` that they choose.
_NAMES = {
    "--matrices": "graphs", "--settings": "settings", "--dtype": "dtypes", "--systems": "paths",
    "--reorder": "orders",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Train, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="gnn_study", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of matrix files")
    parser.add_argument("--out", type=Path, default=Path("sparsetile-gnn.jsonl"), help="records")
    for option in _NAMES:
        parser.add_argument(option, default="", help="comma-separated; the defaults when omitted")
    parser.add_argument("--device", choices=tuple(EPOCHS), help="the GPU, if there is one")
    parser.add_argument("--epochs", type=int, help="500 on a GPU, 10 on the host")
    parser.add_argument("--retry", action="store_true", help="train again what failed or differed")
    parser.add_argument("--time-limit", type=float, help="seconds after which no run begins")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    asked = parser.parse_args(list(arguments))
    try:
        return _study(asked, command_of("gnn_study", arguments))
    except (ValueError, TypeError, OSError) as error:
        note(f"{parser.prog}: error: {error}")
        return 2


def _study(asked: argparse.Namespace, command: str) -> int:
    if asked.out.is_dir():
        raise value_error(
            "gnn_study", "--out", "a file for the records", f"the folder {str(asked.out)!r}",
            "Name a file",
        )  # fmt: skip
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    listed = {
        field: tuple(filter(None, getattr(asked, option[2:]).split(",")))
        for option, field in _NAMES.items()
    }
    epochs = EPOCHS[device] if asked.epochs is None else asked.epochs
    selection = Selection(device, epochs, **{name: each for name, each in listed.items() if each})
    outcome = run_gnn(
        selection, data=asked.data, out=asked.out, retry=asked.retry,
        time_limit=asked.time_limit, commit=asked.commit, command=command, say=note,
    )  # fmt: skip
    _show(outcome.records, asked.json)
    note_some([f"omitted: {line}" for line in outcome.absent])
    note(f"{outcome.measured} measured, {outcome.resumed} already in {asked.out}")
    if outcome.not_run:
        note(f"time limit: {outcome.not_run} runs not begun; the same command goes on with them")
    ours = (record for record in outcome.records if record["kind"] == "system")
    return 1 if any(record["status"] == "wrong" for record in ours) else 0


def _number(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _show(records: list[dict[str, Any]], as_json: bool) -> None:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
