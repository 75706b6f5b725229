"""Edges in torch.compile and torch.export: products that are traced as one operator.

A tracer cannot look for a graph in a cache. The operator takes the edges themselves and finds their
graph when it runs (``edge_operators.py``), in the same cache as eager layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsetile.nn.graph import Loops, Weights
from sparsetile.nn.inputs import Given

__all__ = ["How", "TracedEdges", "traces"]


class How(NamedTuple):
    """What a product makes of edges; an operator takes it as text."""

    layer: str  # that errors name
    flow: str
    reduce: str  # "sum" or "mean" over edges, or "convolve" with these:
    loops: Loops = "keep"
    fill: float = 1.0
    normalize: bool = True

    def text(self) -> str:
        """Return what :meth:`of` reads."""
        return "|".join(str(each) for each in self)

    @classmethod
    def of(cls, text: str) -> How:
        """Return what :meth:`text` wrote."""
        layer, flow, reduce, loops, fill, normalize = text.split("|")
        return cls(layer, flow, reduce, loops, float(fill), normalize == "True")  # type: ignore[arg-type]


def traces(given: Given, reduce: str) -> bool:
    """Whether a product of this input is traced as one operator: of edges whose weights need no
    gradient, for sums and means."""
    return (
        torch.compiler.is_compiling()
        and given.kind == "edges"
        and reduce not in ("max", "min")
        and (given.weight is None or not given.weight.requires_grad)
    )


class TracedEdges:
    """Stands for a :class:`~sparsetile.nn.graph.Graph` while a layer is traced."""

    multiplicity = None

    def __init__(self, given: Given, size: tuple[int, int], how: How) -> None:
        self._edges, self._weight, self._targets = given.pattern, given.weight, size[1]
        self._how = how

    def own_weights(self, given: Given, values_key: object) -> None:
        """Nothing: the operator knows how often an edge occurs."""

    def aggregate(
        self, x: Tensor, weights: Weights | None = None, *, reduce: str = "",
        bias: Tensor | None = None, relu: bool = False,
    ) -> Tensor:  # fmt: skip
        """As :meth:`sparsetile.nn.graph.Graph.aggregate`; what is reduced is known before."""
        out: Tensor = torch.ops.sparsetile.edges_product(
            x, self._edges, self._weight, self._targets, self._how.text()
        )
        if bias is not None:
            out = (out + bias).to(out.dtype)
        return out.relu() if relu else out
