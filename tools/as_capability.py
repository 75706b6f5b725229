"""Records of a GPU that was treated as an older one (``SPARSETILE_CAPABILITY``).

They lie in a folder of their own, such as ``results/h200/as-sm80``, and lack the systems that need
instructions of a newer one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsetile.bench.analysis import geomean
from sparsetile.systems.registry import SYSTEMS

__all__ = ["CORE_NAME", "capability_of", "core_table", "proofs_as", "runs_as"]

CORE_NAME = "core.jsonl"  # of tools.core_as


def runs_as(system: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of a compute capability, sm_80 or newer, has what a system needs.

    >>> runs_as("wcsr", (8, 0)), runs_as("acc", (8, 0))
    (False, True)
    """
    needed = SYSTEMS[system].architectures
    return {"sm_90a": capability == (9, 0), "sm_90 and newer": capability >= (9, 0)}.get(
        needed, True
    )


def capability_of(record: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the capability that the GPU of a record was treated as; None if as itself.

    >>> capability_of({"gpu": {"slug": "h200/as-sm80"}})
    (8, 0)
    """
    gpu = record.get("gpu")
    slug = gpu.get("slug", "") if isinstance(gpu, dict) else ""
    found = re.search(r"/as-sm(\d+)(\d)$", slug)
    return None if found is None else (int(found[1]), int(found[2]))


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def proofs_as(folder: Path) -> str:
    """Return in words what the records of a folder prove: tests, fuzz, checkers."""
    said = []
    if counts := _json(folder / "verify.json").get("counts"):
        failed = f", {counts['failed']} failed" if counts["failed"] else ""
        said.append(f"{counts['passed']:,} GPU tests passed{failed}")
    if fuzz := _json(folder / "fuzz.json"):
        wrong = len(fuzz["failures"])
        said.append(f"{fuzz['cases']:,} random products and layers, {wrong or 'none'} wrong")
    for tool, entry in _json(folder / "checkers.json").get("checkers", {}).items():
        said.append(f"{tool} {entry['errors'] or 'no'} errors in {entry['products']:,} products")
    return "; ".join(said) or "nothing ran"


def _mean(lines: Sequence[Mapping[str, Any]], over: str, of: str) -> str:
    """Geometric mean of one time over another; a time is a number or has one."""

    def seconds(line: Mapping[str, Any], name: str) -> float | None:
        found = line.get(name)
        if isinstance(found, Mapping):
            found = found.get("time", {}).get("p50")
        return None if found is None else float(found)

    pairs = [(seconds(line, over), seconds(line, of)) for line in lines]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return f"{geomean(ratios):.2f}" if ratios else ""


def core_table(path: Path) -> list[str]:
    """Return the table of a record of ``tools.core_as``: geometric means by system and width."""
    if not path.is_file():
        return ["No record yet: `python -m tools.core_as` measures it."]
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    capability = capability_of(head) or (0, 0)
    name = f"sm_{capability[0]}{capability[1]}"
    table = [
        f"| system | N | matrices | as {name}, over cuSPARSE | as itself, over cuSPARSE "
        f"| time as itself over as {name} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for system in dict.fromkeys(line["system"] for line in lines):
        for n in sorted({line["n"] for line in lines}):
            ours = [line for line in lines if (line["system"], line["n"]) == (system, n)]
            means = [
                _mean(ours, "cusparse", "older"), _mean(ours, "cusparse", "native"),
                _mean(ours, "native", "older"),
            ]  # fmt: skip
            table.append(f"| `{system}` | {n} | {len(ours)} | {' | '.join(means)} |")
    return table
