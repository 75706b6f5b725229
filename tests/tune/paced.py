"""Systems whose products take a while and do nothing else: what choices by the clock are tested by.

Their predictions and their real pace are their own, so that the one may contradict the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.runner import Runner
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.systems.base import System
from sparsetile.systems.registry import register, unregister

__all__ = ["PacedSystem", "registered"]


class PacedRunner(Runner):
    """Lets time pass."""

    def spmm(
        self,
        tensors: Tensors,
        values: Tensor | None,
        packed: Tensors | None,
        B: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        time.sleep(self.meta["pace"])


class PacedSystem(System):
    """A product takes ``pace`` seconds or a little more, and is predicted to take ``predicted``.

    ``builds`` counts; ``before`` is called at the begin of each build.
    """

    summary = "a pause"
    devices = ("cpu",)
    dtypes = (torch.float32,)
    deterministic = True

    def __init__(
        self,
        name: str,
        predicted: float,
        pace: float = 0.0,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.predicted, self.pace, self.before, self.builds = predicted, pace, before, 0

    def predict(self, request: Request) -> float:
        return self.predicted

    def build(self, request: Request) -> BuiltSystem:
        self.builds += 1
        if self.before is not None:
            self.before()
        choices = {"format": "none", "schedule": "none"}
        return self.built(request, {}, choices, {"format": 0.0, "schedule": 0.0}, pace=self.pace)

    def make_runner(self, meta: Mapping[str, Any]) -> PacedRunner:
        return PacedRunner(meta)


@contextlib.contextmanager
def registered(*systems: System) -> Iterator[list[str]]:
    """Register systems for a block; gives their names."""
    try:
        yield [register(system).name for system in systems]
    finally:
        for system in systems:
            unregister(system.name)
