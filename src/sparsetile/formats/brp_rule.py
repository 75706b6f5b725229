"""Which f and g fit a matrix: the problem that BRP-SpMM leaves open (sections V-C and VI).

A larger f puts more entries into each row of B that a tile reads, but leaves more entries to the
residual rows. A larger g writes C less often, but leaves more slices to them. All of that is known
from counts that the partition has anyway: entries of each (window, column) pair give the slices of
each window for any f, and those give its groups for any g. Nothing is packed to find out.

    cost(f, g) = groups * (group cost + g * tile cost) + residual entries * entry cost

Each f costs three passes over the pairs, each (f, g) two over the windows. The host waits once for
the number of pairs and once for the counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.formats.brp import BRP, TILE_COLUMNS, ColumnMajor, check_parameters, sort_windows
from sparsetile.intake.csr import CSR

__all__ = ["CHOICES", "BRPCosts", "adaptive_parameters", "count_groups", "pack_adaptive"]

# (f, g) that are compared. The paper's is first: it wins ties.
CHOICES = ((1, 4), *((f, g) for f in (1, 2, 4, 8, 16) for g in (1, 2, 4, 8) if (f, g) != (1, 4)))


@dataclass(frozen=True)
class BRPCosts:
    """What work costs, in any one unit of time; each finite and at least 0.

    Attributes
    ----------
    tile : float
        A tile on Tensor Cores: eight rows of B and the MMA. It does not depend on f.
    group : float
        A group beside its tiles: the start of its work and its sum written to C.
    entry : float
        A residual entry on CUDA cores.
    """

    tile: float
    group: float
    entry: float

    def __post_init__(self) -> None:
        for field in fields(self):
            cost = getattr(self, field.name)
            if not (math.isfinite(cost) and cost >= 0):
                raise value_error(
                    "BRPCosts", field.name, "finite and at least 0", cost, "Measure it again"
                )

    def of(self, fixed: int, group: int, groups: int, entries: int) -> float:
        """Return the cost of a partition of ``entries`` entries with so many groups."""
        residual = entries - groups * TILE_COLUMNS * fixed * group
        return groups * (self.group + group * self.tile) + residual * self.entry


def count_groups(found: ColumnMajor, choices: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many groups each (f, g) would have."""
    slices: dict[int, Tensor] = {}
    counts = []
    for fixed, group in choices:
        check_parameters(fixed, group)
        if fixed not in slices:
            offsets = found.window_entry if fixed == 1 else found.slices(fixed)[1]
            slices[fixed] = offsets[1:] - offsets[:-1]
        counts.append((slices[fixed] // (TILE_COLUMNS * group)).sum())
    return torch.stack(counts).tolist()


def adaptive_parameters(
    csr: CSR,
    order: Tensor | None,
    costs: BRPCosts,
    *,
    choices: Sequence[tuple[int, int]] = CHOICES,
    found: ColumnMajor | None = None,
) -> tuple[int, int]:
    """Return the (fixed, group) of least estimated cost.

    Parameters
    ----------
    csr : CSR
    order : Tensor [M] or None
        Order of the rows, as for ``BRP.pack``.
    costs : BRPCosts
    choices : sequence of (int, int)
        What is compared; the first of equals is chosen.
    found : ColumnMajor, optional
        ``sort_windows(csr, order)`` where it is known.

    Raises
    ------
    ValueError
        ``choices`` is empty, or one is out of range.
    """
    if not choices:
        raise value_error(
            "adaptive_parameters", "choices", "at least one (fixed, group)", "none",
            "Omit choices= to compare the usual ones",
        )  # fmt: skip
    groups = count_groups(sort_windows(csr, order) if found is None else found, choices)
    estimates = [costs.of(f, g, n, csr.nnz) for (f, g), n in zip(choices, groups, strict=True)]
    return choices[estimates.index(min(estimates))]


def pack_adaptive(csr: CSR, order: Tensor | None, costs: BRPCosts) -> BRP:
    """CSR -> BRP with the parameters of least estimated cost; entries are sorted once."""
    found = sort_windows(csr, order)
    fixed, group = adaptive_parameters(csr, order, costs, found=found)
    return BRP.pack_sorted(csr, order, found, fixed=fixed, group=group)
