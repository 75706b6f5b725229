"""What systems share that leave some rows to CUDA cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.rows.build import build_rows
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.engines.runner import Runner
from sparsetile.systems.tiles import TileSystem

__all__ = ["HybridSystem"]

_Split = TypeVar("_Split")


class HybridSystem(TileSystem, Generic[_Split]):
    """Tiles for some rows and CUDA cores for the others; all rows as ``csr`` if no tile pays."""

    @abstractmethod
    def split(self, request: Request) -> _Split | None:
        """Return what goes to tiles; None: all rows go to CUDA cores."""

    @abstractmethod
    def build_split(self, request: Request, split: _Split) -> BuiltSystem | None:
        """Build the kernel of both; None if nothing goes to tiles after all."""

    def build(self, request: Request) -> BuiltSystem:
        split = self.split(request)
        built = None if split is None else self.build_split(request, split)
        if built is not None:
            return built
        made = build_rows(request)
        made.choices["split"] = "all rows on CUDA cores, as csr"
        return self.built_by(request, made, rows_alone=True)

    def make_runner(self, meta: Mapping[str, Any]) -> Runner:
        return RowRunner(meta) if meta.get("rows_alone") else self.runner(meta)
