"""Records -> ratios: best baseline per product, speedups, geomeans, losses, break-even.

Everything that prints or draws figures takes them from here, so that the console and the pages of
docs/results cannot disagree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsetile.bench.record import Record

__all__ = [
    "BASELINE_GROUPS", "Group", "attach_baselines", "break_even", "geomean", "layout_of", "over",
    "product_key", "setting", "summarise", "system_label", "wrong_baselines", "yardstick",
]  # fmt: skip

# What a system has to beat, by device and operation: the fastest of these in the same file.
BASELINE_GROUPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cuda", "spmm"): ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3"),
    ("cuda", "transpose"): ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3"),
    ("cuda", "sddmm"): ("cusparse-sddmm",),
    ("cpu", "spmm"): ("scipy", "torch-csr"),
    ("cpu", "transpose"): ("scipy", "torch-csr"),
    ("cpu", "sddmm"): ("torch-sddmm",),
}

_HALVES = ("float16", "bfloat16")
# Baselines of these types count for a product too: users would take the fastest of them.
_WIDER = {
    "float16": ("float32",),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
}

# Ratios from here on count as won: smaller differences between two p50 are noise.
_TIE = 0.995


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean; NaN if there are no values.

    >>> geomean([1.0, 4.0])
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def layout_of(record: Record) -> str:
    """Layout of B and C: ``rows``, or ``linear`` as a linear layer has them."""
    return str(record["config"].get("layout", "rows"))


def product_key(record: Record) -> tuple[Any, ...]:
    """What two systems must share to be compared: machine, matrix, product and its layout."""
    return (
        record["environment"].get("device_name", ""), record["suite"], record["matrix"],
        record["op"], record["reduce"], record["weights"], record["dtype"], record["n"],
        layout_of(record),
    )  # fmt: skip


def _usual(record: Record) -> tuple[str, ...]:
    device = str(record["environment"].get("device", "cpu"))
    return BASELINE_GROUPS.get((device, record["op"]), ())


def yardstick(record: Record) -> tuple[str, ...]:
    """Baselines that a record is compared with: its own, or the usual ones."""
    return tuple(record.get("yardstick") or _usual(record))


def over(record: Record) -> str:
    """Names of the baselines that a record is compared with if they are not the usual ones."""
    own = yardstick(record)
    return "" if own == _usual(record) else ", ".join(own)


def setting(record: Record) -> tuple[str, str, str, str, str, str, int]:
    """What one row of a table has in common: suite, machine, operation, type, yardstick, width."""
    device_name = record["environment"].get("device_name", "")
    return (
        record["suite"], device_name, record["op"], record["reduce"], record["dtype"],
        over(record), record["n"],
    )  # fmt: skip


def break_even(record: Record, baseline: Record) -> float | None:
    """Products after which planning has paid for itself; None when it never does.

    All of ``plan()``'s time counts, its unnamed parts too (a plan of tiles also prepares ``csr``
    for gradients, after its stages), except compilation, which is cached on disk and happens once
    per machine.
    """
    gain = baseline["time"]["p50"] - record["time"]["p50"]
    if gain <= 0:
        return None

    def cost(planned: Record) -> float:
        split = dict(planned.get("planning") or {})
        compiling = split.pop("compile", 0.0)
        total = split.pop("total", None)
        return sum(split.values()) if total is None else total - compiling

    return max(0.0, (cost(record) - cost(baseline)) / gain)


def attach_baselines(records: Sequence[Record]) -> list[Record]:
    """Return the records with their baselines and ratios.

    Added are ``baseline``, ``baseline_seconds``, ``speedup``, ``break_even``, and for 16-bit
    products ``float32_speedup``, the ratio to the best float32 baseline alone.

    The baseline is the fastest of its group on the same machine, matrix and product. A 16-bit
    product is compared with the float32 baselines too, and one in FP8 with those of 16 bits:
    cuSPARSE is often slower in 16 bits, so users would not choose them for speed. Records without
    a baseline have None.
    """
    timed: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        plain = not set(record["config"]) - {"layout"}
        if record["status"] == "ok" and record["kind"] == "baseline" and plain:
            timed[product_key(record)][record["system"]] = record

    def best(record: Record, dtypes: Sequence[str]) -> Record | None:
        group = set(yardstick(record))
        found = [
            baseline
            for dtype in dtypes
            for name, baseline in timed.get(product_key({**record, "dtype": dtype}), {}).items()
            if name in group
        ]
        return min(found, key=lambda baseline: float(baseline["time"]["p50"]), default=None)

    attached = []
    for record in records:
        dtype = record["dtype"]
        baseline = best(record, (dtype, *_WIDER.get(dtype, ())))
        filled = dict(record)
        filled |= {"baseline": None, "baseline_seconds": None, "speedup": None, "break_even": None}
        if baseline is not None:
            filled |= {"baseline": baseline["system"], "baseline_seconds": baseline["time"]["p50"]}
            if record["status"] == "ok":
                filled["speedup"] = baseline["time"]["p50"] / record["time"]["p50"]
                filled["break_even"] = break_even(record, baseline)
                if dtype in _HALVES:
                    wide = best(record, ("float32",))
                    filled["float32_speedup"] = wide and wide["time"]["p50"] / record["time"]["p50"]
        attached.append(filled)
    return attached


@dataclass(frozen=True)
class Group:
    """One system over one suite at one width."""

    suite: str
    device_name: str
    op: str
    reduce: str
    dtype: str
    over: str  # names of the baselines, if not the usual ones
    n: int
    system: str
    label: str
    kind: str
    count: int
    geomean: float
    won: int
    worst_matrix: str
    worst: float
    best_matrix: str
    best: float
    float32_geomean: float | None  # of 16-bit products, over the best float32 baseline alone
    floor_share: float | None
    gflops: float
    losses: tuple[dict[str, Any], ...]  # matrix and speedup, the slowest first

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def system_label(record: Record) -> str:
    """Name of a system with its configuration: ``csr rcm``, ``acc ablation=cache rcm``.

    Row orders and layouts are shown by their names alone.
    """
    config = dict(record["config"])
    known = [str(config.pop(name)) for name in ("layout", "reorder") if name in config]
    extra = [f"{name}={value}" for name, value in sorted(config.items())]
    return " ".join([record["system"], *extra, *known])


def summarise(records: Sequence[Record]) -> list[Group]:
    """Group by suite, operation, dtype, width and system; systems first, then baselines.

    Each baseline is summarised too, against the best of its group: this is the cost of choosing one
    algorithm for all. Only products with a baseline count.
    """
    if records and "speedup" not in records[0]:
        records = attach_baselines(records)
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.get("speedup") is not None:
            is_baseline = record["kind"] == "baseline"
            key = (*setting(record), is_baseline, record["system"], system_label(record))
            groups[key].append(record)
    return [_group(key, members) for key, members in sorted(groups.items())]


def _group(key: tuple[Any, ...], members: list[Record]) -> Group:
    suite, device_name, op, reduce, dtype, baselines, n, is_baseline, system, label = key
    ordered = sorted(members, key=lambda record: record["speedup"])
    losses = tuple(
        {"matrix": record["matrix"], "speedup": record["speedup"]}
        for record in ordered
        if record["speedup"] < _TIE
    )

    def mean(name: str) -> float:
        return geomean(record[name] for record in members if record.get(name))

    def mean_if_any(name: str) -> float | None:
        return mean(name) if any(record.get(name) for record in members) else None

    return Group(
        suite=suite, device_name=device_name, op=op, reduce=reduce, dtype=dtype,
        over=baselines, n=n, system=system, label=label,
        kind="baseline" if is_baseline else "system",
        count=len(members),
        geomean=mean("speedup"),
        won=len(members) - len(losses),
        worst_matrix=ordered[0]["matrix"],
        worst=ordered[0]["speedup"],
        best_matrix=ordered[-1]["matrix"],
        best=ordered[-1]["speedup"],
        float32_geomean=mean_if_any("float32_speedup"),
        floor_share=mean_if_any("floor_share"),
        gflops=mean("gflops"),
        losses=losses,
    )  # fmt: skip


def wrong_baselines(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """Return (baseline, type) -> how many products were wrong, and by how much.

    They are due to the algorithm: cuSPARSE's first two round partial sums of 16-bit products.
    """
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["status"] == "wrong" and record["kind"] == "baseline":
            found[record["system"], record["dtype"]].append(record)
    counts = {}
    for key, members in found.items():
        worst = [r["error"]["worst"] for r in members if (r.get("error") or {}).get("worst")]
        excess = f", by {min(worst):.0f} to {max(worst):.0f} times the error bound" if worst else ""
        counts[key] = f"{len(members)} product{'' if len(members) == 1 else 's'}{excess}"
    return counts
