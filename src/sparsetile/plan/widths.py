"""Plans for the widths that a plan made without ``n`` meets, the most recent ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsetile.core.streams import capturing

if TYPE_CHECKING:
    from sparsetile.plan.plan import Plan

__all__ = ["FIRST_WIDTH", "MAX_WIDTHS", "Widths"]

# The width that is planned for before any is known.
FIRST_WIDTH = 128
# Plans kept beside the first: as many layers of a network differ in width.
MAX_WIDTHS = 8


class Widths:
    """What a plan made without ``n`` keeps.

    Attributes
    ----------
    system, tune : str
        As they were given to :func:`sparsetile.plan`; the choice is made for each width.
    """

    def __init__(self, system: str, tune: str) -> None:
        self.system, self.tune = system, tune
        self._kept: OrderedDict[int, Plan] = OrderedDict()
        self._captured: list[Plan] = []  # CUDA graphs read their memory at every replay
        self._lock = threading.RLock()

    def plans(self) -> list[Plan]:
        """Every plan that has A's values."""
        with self._lock:
            return [*self._kept.values(), *self._captured]

    def plan_for(self, base: Plan, B: Tensor) -> Plan:
        """Return the plan for products of B's width; ``base`` where none can be made now."""
        if torch.compiler.is_dynamo_compiling() or not isinstance(B, Tensor) or B.dim() < 2:
            return base
        n = B.shape[-1]
        if type(n) is not int or n == base.n or n == 0:
            return base
        with self._lock:
            kept = self._kept.get(n)
            if kept is None:
                if capturing(base.device):  # a graph cannot hold the work of planning
                    return base
                kept = self._add(base, n)
            elif capturing(base.device) and kept not in self._captured:
                self._captured.append(kept)
            self._kept.move_to_end(n)
            kept._held.follow = base._held.follow
            return kept

    def _add(self, base: Plan, n: int) -> Plan:
        from sparsetile.plan.placement import place

        made = place(
            "run", base._csr.with_values(base._held.held), n, base.dtype, base._permutation,
            system=self.system, tune=self.tune, deterministic=base.deterministic,
            column_order=base.column_order,
        )  # fmt: skip
        self._kept[n] = made
        while len(self._kept) > MAX_WIDTHS:
            self._kept.popitem(last=False)
        return made
