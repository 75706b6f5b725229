"""``sparsetile tune``: the timings that plans keep on disk."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sparsetile.cli.console import note, print_json, print_table, print_text
from sparsetile.cli.options import ACTIONS, Action, Json
from sparsetile.core.checks import one_of
from sparsetile.tune import kept_timings
from sparsetile.tune.kept import Timing

__all__ = ["tune"]

_COLUMNS = ("matrix", "order", "N", "type", "device", "fastest", "ms", "others timed", "date")


def _row(timing: Timing) -> list[str]:
    key, chosen = timing.key, timing.system
    others = sorted(timing.measured - {chosen}, key=timing.seconds.__getitem__)
    return [
        str(key.get("matrix", "")).rsplit("-", 1)[0].replace("-", ", ") + " entries",
        str(key.get("order", "")).split("-")[0],
        str(key.get("n", "")),
        str(key.get("dtype", "")),
        str(key.get("device", "")),
        chosen,
        f"{timing.seconds[chosen] * 1e3:.3f}",
        ", ".join(f"{name} {timing.seconds[name] * 1e3:.3f}" for name in others),
        datetime.fromtimestamp(timing.date, UTC).strftime("%Y-%m-%d %H:%M"),
    ]


def _plain(timing: Timing) -> dict[str, Any]:
    return {**asdict(timing), "measured": sorted(timing.measured)}


def tune(action: Action = "show", as_json: Json = False) -> int:
    """Show, clear or locate the timings that plans stored on this machine."""
    one_of("tune", "action", action, ACTIONS)
    kept = kept_timings()
    if action == "path":
        print_text(str(kept.folder))
        return 0
    if action == "clear":
        note(f"sparsetile: removed {kept.clear()} files from {kept.folder}")
        return 0
    entries = kept.entries()
    if as_json:
        print_json({"path": str(kept.folder), "timings": [_plain(each) for each in entries]})
    elif entries:
        print_table(_COLUMNS, [_row(each) for each in entries], right=("N", "ms"))
    else:
        print_text(f"nothing is kept in {kept.folder}")
    return 0
