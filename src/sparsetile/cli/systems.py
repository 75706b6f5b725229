"""``sparsetile systems``: what each system can do."""

from __future__ import annotations

import sparsetile
from sparsetile.cli.console import print_json, print_table
from sparsetile.cli.options import Json

__all__ = ["systems"]


def systems(as_json: Json = False) -> int:
    """List the systems: where each runs, what it supports, whether it is reproducible."""
    table = sparsetile.systems()
    if as_json:
        print_json(table)
        return 0
    print_table(
        ("system", "devices", "architectures", "dtypes", "reduces", "deterministic", "what it is"),
        [
            [
                row["name"], ", ".join(row["devices"]), row["architectures"],
                ", ".join(row["dtypes"]), ", ".join(row["reduces"]),
                "yes" if row["deterministic"] else "no", row["summary"],
            ]
            for row in table
        ],
    )  # fmt: skip
    return 0
