"""``sparsetile systems`` without importing torch, from what ``st.systems()`` returns, stored."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from importlib import resources
from typing import Any

__all__ = ["block", "quick_systems", "shown_systems"]

_WIDEST = 100  # longer lines are hard to read
_COLUMNS = {
    "system": "name", "what it is": "summary", "devices": "devices",
    "architectures": "architectures", "dtypes": "dtypes", "reduces": "reduces",
    "deterministic": "deterministic",
}  # fmt: skip


def block(columns: Sequence[str], row: Sequence[str], total: int) -> str:
    """Return one row of a table as lines of heading and cell."""
    width = max(map(len, columns))
    lines = []
    for name, cell in zip(columns, row, strict=True):
        parts = textwrap.wrap(cell, max(total - width - 2, 20)) or [""]
        lines += [
            f"{head:{width}}  {part}".rstrip()
            for head, part in zip([name, *[""] * len(parts)], parts, strict=False)
        ]
    return "\n".join(lines)


def shown_systems(table: Sequence[dict[str, Any]], as_json: bool) -> str:
    """Return what the command prints: JSON, or a block of lines for each system."""
    if as_json:
        return json.dumps(list(table), indent=2)
    total = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return "\n\n".join(
        block([*_COLUMNS], [_cell(row[key]) for key in _COLUMNS.values()], total) for row in table
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else ", ".join(value)


def quick_systems(words: Sequence[str]) -> str:
    """Return what these words print if they ask for the systems; else ""."""
    if [*words] not in (["systems"], ["systems", "--json"]):
        return ""
    stored = resources.files("sparsetile_command").joinpath("systems.json")
    return shown_systems(json.loads(stored.read_text(encoding="utf-8")), "--json" in words)
