"""The age of the proofs under ``results`` of a source checkout.

``verify.json`` must match the code of every commit. The others are proofs of a release: between
releases they may be of older code; this shows their age.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.parts import changed_parts

# Proofs of a release: on a CPU, and for each GPU that has a verify.json.
RELEASE_ON_CPU = ("fuzz", "mutations_host")
RELEASE = ("fuzz", "stress", "soak", "checkers", "mutations")
# And for each capability that a GPU was treated as (SPARSETILE_CAPABILITY).
RELEASE_AS = ("verify", "fuzz", "checkers")


@dataclass(frozen=True)
class Age:
    """One proof: its name with the folder, its date, and what changed since.

    ``date`` is empty if there is no such proof, ``commits`` is None if git cannot say.
    """

    name: str
    date: str = ""
    days: int = 0
    commits: int | None = None
    changed: tuple[str, ...] = ()

    @property
    def today(self) -> bool:
        """Whether it is of the current code."""
        return bool(self.date) and not self.changed

    @property
    def text(self) -> str:
        if not self.date:
            return "no record yet"
        if not self.changed:
            return f"{self.date}, of today's code"
        commits = "" if self.commits is None else f"{_count(self.commits, 'commit')} and "
        age = f"{commits}{_count(self.days, 'day')} old"
        return f"{self.date}, {age}; changed: {', '.join(self.changed)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _commits_since(root: Path, moment: datetime) -> int | None:
    command = ["git", "rev-list", "--count", f"--since={moment.isoformat()}", "HEAD"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(found.stdout)


def _age(path: Path, root: Path) -> Age:
    name = path.relative_to(root / "results").with_suffix("").as_posix()
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        # Each checker has a date of its own.
        dates = [entry["date"] for entry in record.get("checkers", {}).values()]
        moment = datetime.fromisoformat(min(dates or [record["date"]]))
        days = (datetime.now(UTC) - moment).days
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Age(name)  # its own check reports what is wrong
    changed = tuple(changed_parts(record))
    commits = _commits_since(root, moment) if changed else 0
    return Age(name, moment.date().isoformat(), days, commits, changed)


def ages(root: Path) -> list[Age]:
    """Return the age of every proof of a checkout, with the missing ones."""
    results = root / "results"
    paths = [results / "cpu" / f"{name}.json" for name in RELEASE_ON_CPU]
    for path in sorted(results.glob("*/verify.json")):
        paths += [path, *(path.with_name(f"{name}.json") for name in RELEASE)]
        for folder in sorted(path.parent.glob("as-*")):
            paths += [folder / f"{name}.json" for name in RELEASE_AS]
    return [_age(path, root) for path in paths]
