"""Compares pruned linear layers and a pruned decoder with dense ones.

    python -m tools.llm_study --out llm.jsonl --time-limit 100

docs/how-to/sparse-llm.md describes what is measured. What ``--out`` has of this commit and device
is printed and not measured again. Exit code 1 if a result is wrong, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsetile.bench.environment import commit, describe_environment
from sparsetile.bench.record import append_record, read_records
from sparsetile.cli.console import note, note_some, print_json, print_table
from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from tools.llm_times import LlmSelection, run_llm, validate_llm
from tools.record import command_of

_DTYPES = ("bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="llm_study", description=(__doc__ or "").split("\n")[0])
    listed = "comma-separated; the defaults when omitted"
    parser.add_argument("--settings", default="", help="layers, prefill, prefill-sparse, decode")
    parser.add_argument("--matrices", default="", help="gate, up, down, q, k, v, o: of the layers")
    parser.add_argument("--sparsity", default="", help=f"0.8,0.9,0.95, say; {listed}")
    parser.add_argument("-n", default="", help=f"tokens; {listed}")
    parser.add_argument("--dtype", default=_DTYPES[0], help="bfloat16 or float16")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU, if there is one")
    parser.add_argument("--out", type=Path, help="records; what it holds is not measured again")
    parser.add_argument(
        "--time-limit", type=float, help="seconds after which no measurement begins"
    )
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    asked = parser.parse_args(list(arguments))
    try:
        return _study(asked, command_of("llm_study", arguments))
    except (ValueError, TypeError, OSError) as error:
        note(f"{parser.prog}: error: {error}")
        return 2


def _several(option: str, text: str, kind: Callable[[str], Any], expected: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part)
    except ValueError:
        raise value_error(
            "llm_study", option, expected, repr(text), f"Omit {option} for the defaults"
        ) from None


def _study(asked: argparse.Namespace, command: str) -> int:
    limit = asked.time_limit
    if limit is not None and not 0 < limit < math.inf:
        raise value_error("llm_study", "--time-limit", "seconds above 0", limit, "Write 120")
    dtype = one_of("llm_study", "--dtype", asked.dtype, _DTYPES)
    given = {
        "parts": _several("--settings", asked.settings, str, "names"),
        "projections": _several("--matrices", asked.matrices, str, "names"),
        "sparsities": _several("--sparsity", asked.sparsity, float, "numbers"),
        "tokens": _several("-n", asked.n, int, "whole numbers from 1 up"),
    }
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    selection = LlmSelection(
        device, getattr(torch, dtype), time_limit=limit,
        **{name: each for name, each in given.items() if each},  # type: ignore[arg-type]
    )  # fmt: skip
    head = {
        "suite": "llm", "commit": asked.commit or commit(), "command": command,
        "environment": describe_environment(device),
    }  # fmt: skip
    found = [] if asked.out is None else _earlier(asked.out, head)
    for record in run_llm(selection, note, found):
        found.append(record)
        if asked.out is not None:
            append_record(asked.out, {**head, **record}, validate_llm)
    if asked.json:
        print_json({"records": found})
    else:
        _show(found)
    return 1 if any(record["status"] == "wrong" for record in found) else 0


def _earlier(out: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Records that the same code wrote on the same device."""
    if not out.is_file():
        return []
    records, damaged = read_records(out, validate_llm)
    note_some([f"skipped {line}" for line in damaged])
    return [
        record
        for record in records
        if record["commit"] == head["commit"]
        and record["environment"]["device_name"] == head["environment"]["device_name"]
        and record["status"] == "ok"
    ]


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _share(record: dict[str, Any]) -> str:
    return "dense" if record["sparsity"] is None else f"{record['sparsity']:.0%}"


def _show(records: list[dict[str, Any]]) -> None:
    numbers = ("tokens", "us", "dense us", "over dense", "host us", "MB", "dense MB", "error")
    layers = [record for record in records if record["part"] == "layers"]
    if layers:
        print_table(
            ("layer", "bias", "zeros", "sparsity", "way", *numbers),
            [
                [
                    record["name"], "yes" if record["bias"] else "no", f"{record['zeros']:.1%}",
                    _share(record), record["way"], str(record["tokens"]),
                    _microseconds(record["seconds"]), _microseconds(record["dense_seconds"]),
                    f"{record['over_dense']:.2f}", _microseconds(record["host_seconds"]),
                    f"{record['bytes'] / 1e6:.1f}", f"{record['dense_bytes'] / 1e6:.1f}",
                    f"{record['error']:.1e}",
                ]
                for record in layers
            ],
            right=numbers,
        )  # fmt: skip
    models = [record for record in records if record["part"] != "layers"]
    if models:
        right = ("tokens", "ms", "over dense", "model MB", "peak MB")
        print_table(
            ("decoder", "feed-forward", *right),
            [
                [
                    record["part"], _share(record), str(record["tokens"]),
                    f"{record['seconds'] * 1e3:.2f}", f"{record['over_dense']:.2f}",
                    f"{record['bytes'] / 1e6:.0f}",
                    "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 1e6:.0f}",
                ]
                for record in models
            ],
            right=right,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
