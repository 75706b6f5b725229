"""The summary of a run: tables of ratios, every loss, what was omitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sparsetile.bench.analysis import Group, attach_baselines, summarise
from sparsetile.bench.expansion import Entry
from sparsetile.bench.record import DTYPES, OPS, Record

__all__ = [
    "counted_products", "folded", "product_title", "ratio_lines", "summary_data", "summary_lines",
]  # fmt: skip

# Treats A as dense. Its losses are only counted, since it loses on nearly all matrices.
_DENSE = "dense"
# So are losses of ablations, which have a table of their own.
_STEP = "ablation="


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


def product_title(op: str, reduce: str, dtype: str, device_name: str, over: str = "") -> str:
    """Return what a table or a row of one is about."""
    product = op if reduce == "sum" else f"{op} {reduce}"
    against = f", ratio to {over}" if over else ""
    return f"{product}, {dtype}, {device_name}{against}"


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Return lines that a page shows when its reader opens them."""
    return ["", "<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def _table_key(group: Group) -> tuple[str, str, str, str, str]:
    return (group.op, group.reduce, group.dtype, group.device_name, group.over)


def ratio_lines(groups: Sequence[Group]) -> list[str]:
    """Return tables of ratios and every loss, a table for each product and yardstick."""
    lines: list[str] = []
    keys = dict.fromkeys(_table_key(g) for g in groups)
    # The plain product in float32 first: most readers look for it.
    for key in sorted(
        keys, key=lambda k: (OPS.index(k[0]), k[1] != "sum", DTYPES.index(k[2]), k[4])
    ):
        mine = [g for g in groups if _table_key(g) == key]
        halves = any(g.float32_geomean is not None for g in mine)
        names = ["N", "system", "geomean", *(["over float32"] if halves else []), "won", "worst",
                 "best", "of floor", "GFLOP/s"]  # fmt: skip
        left = ("system", "worst", "best")
        lines += ["", f"### {product_title(*key)}", "", f"| {' | '.join(names)} |"]
        lines.append("|" + "|".join(" --- " if n in left else " ---: " for n in names) + "|")
        for g in mine:
            wide = "" if g.float32_geomean is None else f"{g.float32_geomean:.2f}"
            share = "" if g.floor_share is None else f"{100 * g.floor_share:.0f} %"
            cells = [str(g.n), g.label, f"{g.geomean:.2f}", *([wide] if halves else []),
                     f"{g.won}/{g.count}", f"{g.worst:.2f} {g.worst_matrix}",
                     f"{g.best:.2f} {g.best_matrix}", share, f"{g.gflops:.0f}"]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += _losses(mine)
    return lines


def _losses(groups: Sequence[Group]) -> list[str]:
    lines: list[str] = []
    for group in groups:
        if group.kind != "system" or not group.losses:
            continue
        if group.system == _DENSE or _STEP in group.label:
            listed = f"{len(group.losses)} of {group.count}"
        else:
            listed = ", ".join(f"{loss['matrix']} {loss['speedup']:.2f}" for loss in group.losses)
        lines.append(f"- {group.label}, N = {group.n}: {listed}")
    count = sum(len(group.losses) for group in groups if group.kind == "system")
    return folded(f"Losses: {counted_products(count)}", lines) if lines else []


def counted_products(count: int) -> str:
    """Return ``3 products``."""
    return f"{count} product{'' if count == 1 else 's'}"
