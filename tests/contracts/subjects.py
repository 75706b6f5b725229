"""What the contract suites run: every registered system, as each of its contract ablations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.systems import SYSTEMS
from sparsetile.systems.base import System

__all__ = ["Subject", "in_pieces", "subjects"]

# Entries from which the contract's matrices count as too large for one schedule.
PIECE_ENTRIES = 200


@dataclass(frozen=True)
class Subject:
    """A system with one of its contract ablations."""

    name: str
    ablation: str | None
    pieces: bool = False  # whether matrices are multiplied as if they had 2^31 entries or more

    @property
    def system(self) -> System:
        return SYSTEMS[self.name]

    @property
    def element(self) -> torch.dtype:
        """float32, or the first type of a system that does not take it."""
        taken = self.system.dtypes
        return torch.float32 if torch.float32 in taken else taken[0]

    @property
    def repeats(self) -> bool:
        """Whether the same product has the same bits each time."""
        return self.system.repeats(self.ablation)

    def same(self, found: Tensor, expected: Tensor) -> bool:
        """Whether one product run twice gave these: equal, up to the order of additions where
        bits vary."""
        if self.repeats:
            return torch.equal(found, expected)
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-3)

    def plan(self, A: Any, n: int, **options: Any) -> Plan:
        """Plan with this system."""
        return build_plan(A, n, system=self.name, ablation=self.ablation, **options)

    def __str__(self) -> str:
        name = f"{self.name}-pieces" if self.pieces else self.name
        return name if self.ablation is None else f"{name}-{self.ablation}"


def subjects() -> list[Subject]:
    """Every subject there is, by name."""
    return [
        Subject(name, ablation)
        for name in sorted(SYSTEMS)
        for ablation in SYSTEMS[name].contract_ablations
    ]


def in_pieces() -> list[Subject]:
    """The exact systems, which also multiply matrices of 2^31 entries or more."""
    return [Subject(name, None, True) for name in sorted(SYSTEMS) if SYSTEMS[name].exact_on]
