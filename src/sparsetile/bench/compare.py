"""Compares two runs of the same suite: what got slower beyond the noise of both.

A product regressed if the new p20 is above the old p80 (the spreads do not overlap) and the medians
differ by more than both spreads together, and at least by 3 %. A product that was correct and now
fails has regressed too. Baselines are compared by the same rule and listed, but they do not count
as regressions: they show that the machine or its libraries changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsetile.bench.analysis import geomean, system_label
from sparsetile.bench.record import Record
from sparsetile.core.errors import value_error

__all__ = ["Change", "Comparison", "compare", "comparison_lines"]

_LEAST_CHANGE = 0.03


@dataclass(frozen=True)
class Change:
    """One product in both files."""

    key: str
    matrix: str
    n: int
    dtype: str
    system: str  # with its configuration
    kind: str
    ratio: float  # new time over old; above 1 is slower
    noise: float
    verdict: str  # "slower", "faster", "same", "broken"
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """All changes, and the products of only one of the files."""

    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    machines: tuple[str, ...]

    @property
    def regressions(self) -> list[Change]:
        return [
            change
            for change in self.changes
            if change.verdict in ("slower", "broken") and change.kind == "system"
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _noise(record: Record) -> float:
    spread: float = (record["time"]["p80"] - record["time"]["p20"]) / record["time"]["p50"]
    return spread


def _change(old: Record, new: Record) -> Change | None:
    if old["status"] != "ok":
        return None
    shared = {name: new[name] for name in ("key", "matrix", "n", "dtype", "kind")}
    shared["system"] = system_label(new)
    if new["status"] != "ok":
        reason = f"{new['status']}, {new['reason']}"
        return Change(**shared, ratio=float("inf"), noise=0.0, verdict="broken", reason=reason)
    ratio = new["time"]["p50"] / old["time"]["p50"]
    noise = max(_LEAST_CHANGE, _noise(old) + _noise(new))
    verdict = "same"
    if ratio > 1 + noise and new["time"]["p20"] > old["time"]["p80"]:
        verdict = "slower"
    elif 1 / ratio > 1 + noise and new["time"]["p80"] < old["time"]["p20"]:
        verdict = "faster"
    return Change(**shared, ratio=ratio, noise=noise, verdict=verdict)


def compare(old: Sequence[Record], new: Sequence[Record]) -> Comparison:
    """Compare two lists of records by key; an error if they have no measurement in common."""
    before = {record["key"]: record for record in old}
    after = {record["key"]: record for record in new}
    shared = [key for key in before if key in after]
    if not shared:
        raise value_error(
            "compare", "OLD and NEW", "of the same suite", "no measurement in common",
            "Compare two files that the same bench command wrote",
        )  # fmt: skip
    machines = {record["environment"].get("device_name", "?") for record in (*old, *new)}
    changes = [_change(before[key], after[key]) for key in shared]
    return Comparison(
        tuple(change for change in changes if change is not None),
        tuple(key for key in before if key not in after),
        tuple(key for key in after if key not in before),
        tuple(sorted(machines)),
    )


def comparison_lines(found: Comparison) -> list[str]:
    """Return regressions first, then gains, then the overall ratio."""
    lines = []
    if len(found.machines) > 1:
        lines.append(f"warning: records of several machines: {'; '.join(found.machines)}")
    for change in sorted(found.changes, key=lambda change: -change.ratio):
        name = f"{change.matrix} N={change.n} {change.dtype} {change.system}"
        word = "regression" if change.kind == "system" else "baseline slower"
        if change.verdict == "broken":
            lines.append(f"{word}: {name}: {change.reason}")
        elif change.verdict == "slower":
            lines.append(
                f"{word}: {name}: {100 * (change.ratio - 1):.1f} % slower "
                f"(noise {100 * change.noise:.1f} %)"
            )
        elif change.verdict == "faster":
            lines.append(f"faster: {name}: {100 * (1 / change.ratio - 1):.1f} %")
    timed = [change.ratio for change in found.changes if change.verdict != "broken"]
    mean = f", time ratio new/old {geomean(timed):.3f} (geomean)" if timed else ""
    lines.append(
        f"{len(found.changes)} products compared, {len(found.regressions)} regressions{mean}"
    )
    for file, keys in (("NEW", found.missing), ("OLD", found.added)):
        if keys:
            lines.append(f"not in {file}: {len(keys)} measurements, first {keys[0]}")
    return lines
