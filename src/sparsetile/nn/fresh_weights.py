"""Weights of edges that a GPU groups: which of them each entry takes.

``GroupedRows.order`` has the number of each entry among the edges. So values of entries are one
gather, and the normalisation of ``layers/normalise.py`` needs no canonical form. Entries of edges
that were left out come last, in no row; their values are read by nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.launch.grouping import GroupedRows
from sparsetile.layers.normalise import WeightMap

__all__ = ["FreshWeights", "last_loops", "rows_of_entries"]


def last_loops(edges: Tensor, nodes: int) -> Tensor:
    """Return the number of the last edge that is a self-loop of each node, or -1."""
    first, second = edges.long().unbind(0)
    numbers = torch.arange(edges.shape[1], device=edges.device)
    # All other edges count for a node behind the last one. Wrong nodes are reported elsewhere.
    at = torch.where(first == second, first, nodes).clamp_(0, nodes)
    found = torch.full((nodes + 1,), -1, dtype=torch.int64, device=edges.device)
    return found.scatter_reduce_(0, at, numbers, "amax")[:nodes]


def rows_of_entries(rows: GroupedRows) -> Tensor:
    """Return the row of each entry, int64; some row of those that were left out."""
    return rows.part("sorted", rows.entries).clamp(max=rows.shape[0] - 1).long()


class _Entries(CSR):
    """A matrix whose last entries may be in no row."""

    def row_sums(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """As :meth:`CSR.row_sums`; values of entries in no row are 0."""
        assert rows is not None
        made = values.new_zeros(self.shape[0])
        return made.index_put((rows,), values, accumulate=True)  # in a fixed order, unlike others


class FreshWeights(WeightMap):
    """The weight of each entry, with the launches of :class:`WeightMap`.

    Parameters
    ----------
    grouped : GroupedRows
        With the numbers of entries.
    loop_edge : Tensor, optional
        What :func:`last_loops` returned, if self-loops were replaced: nodes keep the weight of
        theirs.
    """

    def __init__(self, grouped: GroupedRows, loop_edge: Tensor | None) -> None:
        entries, pointers = grouped.entries, grouped.wide_part("indptr", grouped.shape[0] + 1)
        self.csr = _Entries(pointers, grouped.part("columns", entries), None, grouped.shape)
        self.parallel, self.of_sums = False, self
        self._grouped, self._numbers = grouped, None
        self._sources = grouped.order
        if loop_edge is not None:
            numbers = torch.arange(entries - loop_edge.numel(), device=loop_edge.device)
            self._sources = torch.cat([numbers, loop_edge]).index_select(0, grouped.order)
        self._short = self._sources.int()
        self._by_column: tuple[Tensor, Tensor] | None = None
        self._outside: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors other than the matrix."""
        return super().tensors if self._outside is None else [*super().tensors, self._outside]

    @property
    def rows(self) -> Tensor:
        """The row of each entry."""
        return rows_of_entries(self._grouped)

    def prepare_gradients(self) -> tuple[Tensor, Tensor]:
        """As of :class:`WeightMap`: by the rows of the transpose."""
        if self._by_column is None:
            turned = self._grouped.transposed
            pointers = turned.wide_part("indptr", turned.shape[0] + 1)
            self._by_column = pointers, turned.order.int()
        return self._by_column

    def inside(self, values: Tensor) -> Tensor:
        """Return values with 0 for entries in no row, whose gradient nobody computes."""
        if self._outside is None:
            grouped = self._grouped
            self._outside = grouped.part("sorted", grouped.entries) >= grouped.shape[0]
        return torch.where(self._outside, 0.0, values)

    def entries(self, weight: Tensor, fill: float) -> Tensor:
        """As of :class:`WeightMap`; 0 for entries in no row."""
        return self.inside(super().entries(weight, fill))
