"""Permutation: the order in which a plan visits the rows of A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import CSR

__all__ = ["Permutation", "Reorderer", "positions"]


def positions(order: Tensor) -> Tensor:
    """Return the place of each row in an order: the inverse permutation."""
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), dtype=order.dtype, device=order.device)
    return place


@dataclass(frozen=True, eq=False)
class Permutation:
    """``perm[i]`` is the row of A at position i; None stands for the given order."""

    name: str
    perm: Tensor | None

    def checked(self, rows: int) -> Permutation:
        """Return itself, or raise when ``perm`` is not a permutation of ``rows`` rows."""
        if self.perm is None:
            return self
        order = self.perm
        seen = torch.zeros(rows, dtype=torch.bool, device=order.device)
        whole = order.shape == (rows,) and (
            rows == 0 or (int(order.min()) >= 0 and int(order.max()) < rows)
        )
        if whole:
            seen[order] = True
            whole = bool(seen.all())
        if not whole:
            raise value_error(
                "plan", "reorder", f"a permutation of the {rows} rows of A",
                f"a tensor of shape {tuple(order.shape)} that repeats or misses rows",
                "Give each row number from 0 to M-1 exactly once",
            )  # fmt: skip
        return self


Reorderer = Callable[[CSR], Permutation]
