"""Graphs too large to hold, made block by block: power-law degrees and communities.

The model is that of ``power_law`` (Chung-Lu in blocks), drawn row by row instead of edge by edge:
each row draws its neighbours, most from its community, with chances by their degrees. Neighbours
may repeat, the pattern is not symmetric, and nothing but one number per node is held. A block
depends on the seed and its own number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.checks import dimension, one_of
from sparsetile.data.powerlaw import _community_bounds, _expected_degrees
from sparsetile.data.sampling import fraction, positive, real

__all__ = ["STREAMED", "StreamedGraph", "streamed"]

# Rows of a block; the counts of a graph do not depend on how a reader cuts it.
_BLOCK = 8192
# Ends of edges in the table that neighbours are drawn from, at least, and ends per node. A graph
# with more edges has a sample of their ends: nodes of a low degree may be nobody's neighbour then.
_TABLE = 2**26
_TABLE_PER_NODE = 4


@dataclass(frozen=True)
class StreamedGraph:
    """A graph by its parameters.

    Attributes
    ----------
    rows, nnz : int
        Nodes, and edges to draw. ``nnz`` is met but for rounding of the degrees.
    exponent, max_degree : float, int
        Of the power law of the degrees.
    communities, mixing : int, float
        As of ``power_law``: how many, and the share of edges that leave them.
    shuffle : bool
        Number the nodes at random, as published graphs are. Otherwise communities are contiguous,
        as in the order of a partitioner.
    seed : int
    """

    name: str
    rows: int
    nnz: int
    exponent: float
    max_degree: int
    communities: int
    mixing: float
    shuffle: bool = False
    seed: int = 0

    def scaled(self, scale: float) -> StreamedGraph:
        """Return ``scale`` times the nodes, edges and communities; degrees stay."""
        rows = max(round(self.rows * scale), 2)
        return replace(
            self,
            rows=rows,
            nnz=max(round(self.nnz * scale), 1),
            communities=min(max(round(self.communities * scale), 1), rows),
            max_degree=min(self.max_degree, rows),
        )

    def made(self) -> _Made:
        """Draw degrees and numbering, which every block needs."""
        return _Made(self)


class _Made:
    """A graph's degrees and numbering, and its blocks."""

    def __init__(self, graph: StreamedGraph) -> None:
        self.graph = graph
        rows = graph.rows
        rng = np.random.default_rng([graph.seed, 0])
        degrees = _expected_degrees(rows, float(graph.nnz), graph.exponent, float(graph.max_degree))
        degrees = rng.permutation(degrees)
        self._bounds = _community_bounds(rows, graph.communities)
        lengths = np.floor(degrees + rng.random(rows)).astype(np.int32)
        # The table: nodes in proportion to their degrees, grouped by community.
        share = min(1.0, max(_TABLE, _TABLE_PER_NODE * rows) / max(graph.nnz, 1))
        copies = np.floor(degrees * share + rng.random(rows)).astype(np.int64)
        self._table = np.repeat(np.arange(rows, dtype=np.int32), copies)
        ends = np.concatenate([[0], np.cumsum(copies)])[self._bounds]
        self._first, self._width = ends[:-1], np.diff(ends)
        self._node: NDArray[np.int32] | None = None
        self._number: NDArray[np.int32] | None = None
        if graph.shuffle:
            self._number = rng.permutation(rows).astype(np.int32)
            self._node = np.empty_like(self._number)
            self._node[self._number] = np.arange(rows, dtype=np.int32)
            lengths = lengths[self._node]
        self.row_lengths = lengths

    @property
    def nnz(self) -> int:
        """Edges drawn."""
        return int(self.row_lengths.sum(dtype=np.int64))

    def blocks(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield the lengths and the columns of the next rows, in row order."""
        rows, graph = self.graph.rows, self.graph
        for number, first in enumerate(range(0, rows, _BLOCK)):
            last = min(first + _BLOCK, rows)
            rng = np.random.default_rng([graph.seed, 1 + number])
            lengths = self.row_lengths[first:last]
            nodes = np.arange(first, last) if self._node is None else self._node[first:last]
            community = np.searchsorted(self._bounds, nodes, side="right") - 1
            start = np.repeat(self._first[community], lengths)
            width = np.repeat(self._width[community], lengths)
            away = rng.random(start.size, dtype=np.float32) < graph.mixing
            away |= width == 0
            start[away], width[away] = 0, self._table.size
            place = start + (rng.random(start.size) * width).astype(np.int64)
            columns = self._table[place]
            yield lengths, columns if self._number is None else self._number[columns]


# Nodes and edges of the published graphs (both directions where they are undirected); exponents,
# communities and mixing are set here to resemble their kind.
STREAMED = {
    graph.name: graph
    for graph in (
        StreamedGraph("reddit-like", 232_965, 114_848_857, 2.4, 21_000, 50, 0.3),
        StreamedGraph("products-like", 2_449_029, 123_718_280, 2.4, 17_500, 2_000, 0.2),
        StreamedGraph("papers100m-like", 111_059_956, 1_615_685_872, 2.3, 26_000, 20_000, 0.3),
    )
}


def streamed(text: str) -> StreamedGraph:
    """Return the graph of a name such as ``reddit-like`` or ``papers100m-like?scale=0.01``.

    Parameters
    ----------
    text : str
        A name of ``STREAMED``; after ``?`` any of scale, rows, nnz, communities, mixing, shuffle
        and seed, joined by ``&``.
    """
    name, _, rest = text.partition("?")
    graph = STREAMED[one_of("streamed", "graph", name, STREAMED)]
    options = dict(part.partition("=")[::2] for part in rest.split("&") if part)
    for key in options:
        one_of(
            "streamed", "option", key,
            ("scale", "rows", "nnz", "communities", "mixing", "shuffle", "seed"),
        )  # fmt: skip
    if "scale" in options:
        graph = graph.scaled(real("streamed", "scale", _number(options["scale"]), 1e-9, 1e9))
    sizes: dict[str, Any] = {
        key: positive("streamed", key, dimension("streamed", key, _number(options[key])))
        for key in ("rows", "nnz", "communities")
        if key in options
    }
    graph = replace(graph, **sizes)
    if "mixing" in options:
        graph = replace(graph, mixing=fraction("streamed", "mixing", _number(options["mixing"])))
    if "seed" in options:
        graph = replace(graph, seed=dimension("streamed", "seed", _number(options["seed"])))
    if "shuffle" in options:
        graph = replace(
            graph,
            shuffle=one_of("streamed", "shuffle", options["shuffle"], ("true", "false")) == "true",
        )
    return graph


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # which the checks refuse by name
