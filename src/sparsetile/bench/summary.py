"""What a run prints at its end: per width the geomean, wins, worst case, share of the floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sparsetile.bench.analysis import Group, attach_baselines, summarise
from sparsetile.bench.expansion import Entry
from sparsetile.bench.record import Record

__all__ = ["print_summary", "summary_data"]


def summary_data(
    records: Sequence[Record],
    left_out: Sequence[str],
    troubles: Sequence[str],
    not_run: Sequence[Entry] = (),
) -> dict[str, Any]:
    """Return the summary as plain data, for ``--json``."""
    groups = summarise(attach_baselines(records))
    return {
        "schema": 1,
        "groups": [group.as_dict() for group in groups],
        "skipped": _skipped(records),
        "left_out": list(left_out),
        "troubles": list(troubles),
        "not_run": [entry.key for entry in not_run],
    }


def _skipped(records: Sequence[Record]) -> list[dict[str, Any]]:
    counted = Counter(
        (record["system"], record["reason"]) for record in records if record["status"] == "skipped"
    )
    return [
        {"system": system, "reason": reason, "entries": count}
        for (system, reason), count in counted.items()
    ]


def _share(group: Group) -> str:
    return "" if group.floor_share is None else f"{100 * group.floor_share:.0f} %"


def _title(group: Group) -> tuple[str, str]:
    """What a table is of, and what its ratios are to."""
    op = group.op if group.reduce == "sum" else f"{group.op} {group.reduce}"
    return (
        f"{group.suite}, {op}, {group.dtype}, {group.device_name}",
        group.over or "the best baseline",
    )


def print_summary(
    records: Sequence[Record],
    left_out: Sequence[str],
    troubles: Sequence[str],
    not_run: Sequence[Entry] = (),
    *,
    console: Console,
) -> None:
    """Print tables of ratios to the best baseline, every loss, and what was left out or not run."""
    groups = summarise(attach_baselines(records))
    for title in dict.fromkeys(_title(group) for group in groups):
        table = Table(title=f"{title[0]}: ratio to {title[1]}", title_justify="left")
        table.add_column("N", justify="right")
        table.add_column("system", no_wrap=True)
        for name in ("geomean", "won", "worst"):
            table.add_column(name, justify="right")
        table.add_column("on", no_wrap=True)
        table.add_column("of floor", justify="right")
        table.add_column("GFLOP/s", justify="right")
        previous = None
        for group in groups:
            if _title(group) != title:
                continue
            if previous not in (None, group.n):
                table.add_section()
            previous = group.n
            table.add_row(
                str(group.n),
                group.label,
                f"{group.geomean:.2f}",
                f"{group.won}/{group.count}",
                f"{group.worst:.2f}",
                group.worst_matrix,
                _share(group),
                f"{group.gflops:.0f}",
                style="dim" if group.kind == "baseline" else "",
            )
        console.print(table)
    _print_losses(groups, console)
    for item in _skipped(records):
        console.print(
            f"skipped: {item['system']} on {item['entries']} products: {item['reason']}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
    for text in left_out:
        console.print(f"left out: {text}", soft_wrap=True, highlight=False, markup=False)
    for text in troubles:
        console.print(f"failed: {text}", soft_wrap=True, highlight=False, markup=False)
    for name, members in _by_matrix(not_run).items():
        products = ", ".join(
            dict.fromkeys(f"N={entry.n} {entry.dtype}" for entry in members if entry.n)
        )
        console.print(
            f"not run: {name}: {len(members)} entries ({products})",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip


def _by_matrix(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.matrix.name, []).append(entry)
    return found


def _print_losses(groups: Sequence[Group], console: Console) -> None:
    for group in groups:
        if group.kind == "system" and group.losses:
            listed = ", ".join(f"{loss.matrix} {loss.speedup:.2f}" for loss in group.losses)
            if "ablation=" in group.label:  # a system whose parts are off
                listed = f"{len(group.losses)} of {group.count}"
            console.print(
                f"lost: {group.label} N={group.n} {group.dtype}: {listed}",
                soft_wrap=True, highlight=False, markup=False,
            )  # fmt: skip
