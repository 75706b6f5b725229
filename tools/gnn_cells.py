"""A file of measured cells, which a later run goes on with: of ``tools.gnn_layers``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CELL", "Cells"]

CELL = ("graph", "layer", "hidden", "dtype")


class Cells:
    """The cells of a file, to which each measurement is added at once."""

    def __init__(
        self, path: Path, first: Callable[[], dict[str, Any]],
        judge: Callable[[dict[str, Any]], object],
    ) -> None:  # fmt: skip
        self._path, self._judge = path, judge
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        self._first = lines[0] if lines else json.dumps(first())
        if not lines:
            path.write_text(self._first + "\n")
        self._cells: dict[tuple[Any, ...], dict[str, Any]] = {}
        for line in lines[1:]:
            self._merge(json.loads(line))

    @property
    def cells(self) -> list[dict[str, Any]]:
        for cell in self._cells.values():
            self._judge(cell)
        return list(self._cells.values())

    def paths(self, *cell: Any) -> set[str]:
        """Return the paths of a cell that were measured."""
        return set(self._cells.get(cell, {}).get("paths", ()))

    def _merge(self, cell: dict[str, Any]) -> None:
        held = self._cells.setdefault(tuple(cell[name] for name in CELL), cell)
        held["paths"] = held["paths"] | cell["paths"]

    def add(self, cell: dict[str, Any]) -> None:
        self._merge(cell)
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")

    def close(self) -> None:
        """Write each cell once."""
        lines = [self._first, *(json.dumps(cell) for cell in self.cells)]
        self._path.write_text("\n".join(lines) + "\n")
