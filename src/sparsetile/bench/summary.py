"""The summary of a run: the report's tables of ratios, every loss, what was omitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sparsetile.bench.analysis import attach_baselines, summarise
from sparsetile.bench.expansion import Entry
from sparsetile.bench.record import Record
from sparsetile.bench.report.markdown import ratio_lines

__all__ = ["summary_data", "summary_lines"]


def summary_data(
    records: Sequence[Record],
    left_out: Sequence[str],
    troubles: Sequence[str],
    not_run: Sequence[Entry] = (),
) -> dict[str, Any]:
    """Return the summary as plain data, for ``--json``."""
    groups = summarise(attach_baselines(records))
    return {
        "schema": 1, "groups": [group.as_dict() for group in groups], "skipped": _skipped(records),
        "left_out": list(left_out), "troubles": list(troubles),
        "not_run": [entry.key for entry in not_run],
    }  # fmt: skip


def _skipped(records: Sequence[Record]) -> list[dict[str, Any]]:
    counted = Counter(
        (record["system"], record["reason"]) for record in records if record["status"] == "skipped"
    )
    return [
        {"system": system, "reason": reason, "entries": count}
        for (system, reason), count in counted.items()
    ]


def summary_lines(
    records: Sequence[Record],
    left_out: Sequence[str],
    troubles: Sequence[str],
    not_run: Sequence[Entry] = (),
) -> list[str]:
    """Return tables of ratios to the best baseline, every loss, what was omitted or not run."""
    lines = ratio_lines(summarise(attach_baselines(records)))
    lines += [
        f"skipped: {item['system']} on {item['entries']} products: {item['reason']}"
        for item in _skipped(records)
    ]
    lines += [f"left out: {text}" for text in left_out]
    lines += [f"failed: {text}" for text in troubles]
    for name, count in Counter(entry.matrix.name for entry in not_run).items():
        products = dict.fromkeys(
            f"N={entry.n} {entry.dtype}" for entry in not_run if entry.matrix.name == name
        )
        lines.append(f"not run: {name}: {count} entries ({', '.join(products)})")
    return lines
