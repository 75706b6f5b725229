"""``sparsetile bench llm``: the suite of pruned decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsetile.cli.console import note, note_some, print_json, print_table
from sparsetile.core.checks import one_of

__all__ = ["LLM", "run_llm_suite"]

LLM = "llm"
_DTYPES = ("bfloat16", "float16")


def run_llm_suite(
    device: str, chosen: Mapping[str, Sequence[Any]], out: Path | None, command: str, as_json: bool,
    time_limit: float | None,
) -> int:  # fmt: skip
    """Measure, print the tables, and return the exit code: 1 if a result is wrong.

    ``chosen`` has the fields of ``LlmSelection`` that were given; ``dtype`` is a list of names.
    Records of this commit and device in ``out`` are printed and not measured again.
    """
    import torch

    from sparsetile.bench.environment import commit, describe_environment
    from sparsetile.bench.llm import LlmSelection, run_llm, validate_llm
    from sparsetile.bench.record import append_record

    given = {name: tuple(values) for name, values in chosen.items() if values}
    dtype = one_of("bench llm", "--dtype", given.pop("dtype", _DTYPES)[0], _DTYPES)
    selection = LlmSelection(device, getattr(torch, dtype), **given, time_limit=time_limit)  # type: ignore[arg-type]
    head: dict[str, Any] = {"suite": LLM, "commit": commit(), "command": command}
    head["environment"] = describe_environment(device)
    found = [] if out is None else _earlier(out, head)
    for record in run_llm(selection, note, found):
        found.append(record)
        if out is not None:
            append_record(out, {**head, **record}, validate_llm)
    if as_json:
        print_json({"records": found})
    else:
        _show(found)
    return 1 if any(record["status"] == "wrong" for record in found) else 0


def _earlier(out: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Records that the same code wrote on the same device."""
    from sparsetile.bench.llm import validate_llm
    from sparsetile.bench.record import read_records

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
