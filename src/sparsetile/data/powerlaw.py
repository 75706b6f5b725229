"""Generated graphs with power-law degrees and communities: social, web and co-purchase graphs.

Edge ends ("stubs") are laid out in one array per kind, grouped by community, so that an edge is
two array reads; duplicates are dropped and drawn again until the number asked for exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsetile.core.checks import dimension
from sparsetile.core.errors import value_error
from sparsetile.data.sampling import (
    Keys,
    csr_from_keys,
    distinct,
    distinct_integers,
    fraction,
    merge_disjoint,
    missing_from,
    positive,
    real,
    seeded,
    symmetric_keys,
    without,
)
from sparsetile.intake.csr import CSR

__all__ = ["power_law"]

# Draws of edges are made in pieces of this size, so that temporaries stay small.
_CHUNK = 1 << 23
# Below this share of new edges per draw the popular cells are full: the rest is filled uniformly.
_LEAST_YIELD = 0.05


def power_law(
    rows: int, nnz: int, *, exponent: float = 2.1, communities: int | None = None,
    mixing: float = 0.3, max_degree: int | None = None, symmetric: bool = True,
    self_loops: bool = False, shuffle: bool = True, weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """Graph with power-law degrees and communities (a Chung-Lu model in blocks).

    Parameters
    ----------
    rows, nnz : int
        Square size and number of stored entries. ``nnz`` is met exactly, less one if a symmetric
        pattern would need an odd number of entries off the diagonal.
    exponent : float
        P(degree = d) falls as d^-exponent; above 1.
    communities : int, optional
        Number of communities, sizes falling as 1/sqrt(rank). Default: about sqrt(rows), fewer
        if rows are long, so that a community has enough nodes for a row.
    mixing : float
        Share of a node's edges that leave its community (hubs have more).
    max_degree : int, optional
        Expected degree of the largest hub, at most. Default: a tenth of the rows, at least four
        times the mean.
    symmetric : bool
        Undirected graph. Otherwise in-degrees and out-degrees are power laws of their own.
    self_loops : bool
        Add the diagonal; it counts in ``nnz``.
    shuffle : bool
        Number the nodes at random, as most published graphs do. Otherwise communities are
        contiguous.
    weighted : bool
        Standard-normal float32 values instead of a pattern.
    seed : int
        Same seed, same matrix.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.power_law(100, 600, seed=1)
    >>> A.shape, A.nnz
    ((100, 100), 600)
    """
    name = "power_law"
    rows = dimension(name, "rows", rows)
    nnz = dimension(name, "nnz", nnz)
    mixing = fraction(name, "mixing", mixing)
    exponent = real(name, "exponent", exponent, 1.0, math.inf)
    if exponent == 1.0:
        raise value_error(name, "exponent", "above 1", exponent, "Choose 2 to 3, as in real graphs")
    rng = seeded(name, seed)
    loops = rows if self_loops else 0
    if not loops <= nnz <= rows * (rows - 1) + loops:
        raise value_error(
            name, "nnz", f"between {loops} and {max(rows * (rows - 1), 0) + loops} for {rows} rows",
            nnz, "Ask for fewer nonzeros or more rows",
        )  # fmt: skip
    mean = (nnz - loops) / max(rows, 1)
    communities = _community_count(rows, mean, communities)
    cap = _degree_cap(rows, mean, max_degree)
    target = (nnz - loops) // 2 if symmetric else nnz - loops
    if target == 0:
        diagonal = np.arange(loops, dtype=np.int64) * (rows + 1)
        return csr_from_keys(diagonal, (rows, rows), weighted=weighted, rng=rng)

    bounds = _community_bounds(rows, communities)
    degrees = _expected_degrees(rows, mean * rows, exponent, cap)
    outgoing = _Stubs.make(rng, rng.permutation(degrees), bounds, mixing)
    incoming = outgoing if symmetric else _Stubs.make(rng, rng.permutation(degrees), bounds, mixing)
    labels = np.arange(rows, dtype=np.int32)
    if shuffle:
        rng.shuffle(labels)

    def propose(count: int) -> Keys:
        source, destination = _draw_edges(rng, outgoing, incoming, count)
        low, high = labels[source], labels[destination]
        if symmetric:
            low, high = np.minimum(low, high), np.maximum(low, high)
        return (low.astype(np.int64) * rows + high)[low != high]

    keys = _collect(rng, propose, target)
    if keys.size < target:
        keys = _fill_uniformly(rng, keys, rows, target, symmetric)
    if symmetric:
        keys = symmetric_keys(keys, rows, diagonal=self_loops)
    elif self_loops:
        keys = merge_disjoint(keys, np.arange(rows, dtype=np.int64) * (rows + 1))
    return csr_from_keys(keys, (rows, rows), weighted=weighted, rng=rng)


def _community_count(rows: int, mean: float, communities: int | None) -> int:
    if communities is None:
        return max(1, min(round(math.sqrt(rows)), int(rows / (4.0 * max(mean, 1.0)))))
    count = positive("power_law", "communities", communities)
    if count > max(rows, 1):
        raise value_error(
            "power_law", "communities", f"at most {rows} (rows)", count, "Ask for fewer"
        )
    return count


def _degree_cap(rows: int, mean: float, max_degree: int | None) -> float:
    if max_degree is None:
        return min(max(rows / 10.0, 4.0 * mean, 8.0), max(rows - 1.0, 1.0))
    cap = positive("power_law", "max_degree", max_degree)
    if cap < mean:
        raise value_error(
            "power_law", "max_degree", f"at least the mean degree {mean:.1f}", cap,
            "Raise it or ask for fewer nonzeros",
        )  # fmt: skip
    return float(cap)


def _community_bounds(rows: int, communities: int) -> NDArray[np.int64]:
    """First node of each community, and ``rows`` at the end; sizes fall as 1/sqrt(rank)."""
    size = 1.0 / np.sqrt(np.arange(1, communities + 1))
    inner = np.cumsum(size) * ((rows - communities) / size.sum())
    # One node each first, then the rest in proportion: no community is empty.
    ends = np.arange(1, communities + 1) + np.rint(inner).astype(np.int64)
    return np.concatenate([[0], ends]).astype(np.int64)


def _expected_degrees(rows: int, total: float, exponent: float, cap: float) -> NDArray[np.float64]:
    """Degrees proportional to (rank + offset)^(-1/(exponent-1)) that sum to ``total``.

    The offset is what brings the largest down to ``cap`` while the tail keeps its slope; it is
    found by bisection on the integral that stands for the sum.
    """
    power = 1.0 / (exponent - 1.0)

    def largest(offset: float) -> float:
        if math.isclose(power, 1.0):
            area = math.log1p(rows / offset)
        else:
            # x^(1-p) with x = offset scaled out, so that huge offsets do not overflow.
            area = math.expm1((1.0 - power) * math.log1p(rows / offset)) / (1.0 - power)
        return total / (offset * area)

    low, high = 0.5, 1e3 * rows
    if largest(low) > cap:
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if largest(middle) > cap else (low, middle)
    weight = (np.arange(rows) / low + 1.0) ** -power
    return weight * (total / weight.sum())


@dataclass(frozen=True)
class _Stubs:
    """Edge ends, one entry per unit of expected degree, split by where the other end may lie."""

    inside: NDArray[np.int32]  # nodes, grouped by community
    inside_bounds: NDArray[np.int64]  # first entry of each community in ``inside``
    outside: NDArray[np.int32]
    community: NDArray[np.int32]  # of each node

    @staticmethod
    def make(
        rng: np.random.Generator,
        degrees: NDArray[np.float64],
        bounds: NDArray[np.int64],
        mixing: float,
    ) -> _Stubs:
        nodes = np.arange(degrees.size, dtype=np.int32)
        sizes = np.diff(bounds)
        community = np.repeat(np.arange(sizes.size, dtype=np.int32), sizes)
        if sizes.size == 1:
            inner = np.zeros_like(degrees)
        else:
            # A hub cannot find more neighbours than its community has: the rest go outside.
            inner = np.minimum((1.0 - mixing) * degrees, 0.5 * (sizes[community] - 1))
        inner_count = np.floor(inner + rng.random(degrees.size)).astype(np.int64)
        outer_count = np.floor(degrees - inner + rng.random(degrees.size)).astype(np.int64)
        inner_ends = np.concatenate([[0], np.cumsum(inner_count)])
        return _Stubs(
            np.repeat(nodes, inner_count),
            inner_ends[bounds],
            np.repeat(nodes, outer_count),
            community,
        )


def _draw_edges(
    rng: np.random.Generator, outgoing: _Stubs, incoming: _Stubs, count: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw about ``count`` edges: sources evenly over all stubs, targets at random."""
    stubs = outgoing.inside.size + outgoing.outside.size
    inside = round(count * (outgoing.inside.size / max(stubs, 1)))
    source = _spread(rng, outgoing.inside, inside)
    group = outgoing.community[source]
    first = incoming.inside_bounds[group]
    width = incoming.inside_bounds[group + 1] - first
    usable = width > 0
    source, first, width = source[usable], first[usable], width[usable]
    place = first + (rng.random(source.size) * width).astype(np.int64)
    target = incoming.inside[place]
    if incoming.outside.size == 0:
        return source, target
    far_source = _spread(rng, outgoing.outside, count - inside)
    far_target = incoming.outside[rng.integers(0, incoming.outside.size, size=far_source.size)]
    return np.concatenate([source, far_source]), np.concatenate([target, far_target])


def _spread(rng: np.random.Generator, stubs: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Draw ``count`` stubs, one from each of ``count`` equal stretches of the list."""
    if stubs.size == 0 or count == 0:
        return stubs[:0]
    place = (np.arange(count) + rng.random(count)) * (stubs.size / count)
    return stubs[np.minimum(place.astype(np.int64), stubs.size - 1)]


def _collect(rng: np.random.Generator, propose: Callable[[int], Keys], target: int) -> Keys:
    """Propose edges until ``target`` different ones exist or few proposals are new."""
    found: Keys = np.empty(0, dtype=np.int64)
    share = 0.9  # of the proposals that turn out new; measured from the first round on
    while found.size < target and share >= _LEAST_YIELD:
        draws = int((target - found.size) / share * 1.02) + 64
        drawn = np.concatenate(
            [propose(min(_CHUNK, draws - start)) for start in range(0, draws, _CHUNK)]
        )
        fresh = missing_from(found, distinct(drawn))
        share = fresh.size / draws
        found = merge_disjoint(found, fresh)
    return without(found, max(found.size - target, 0), rng)


def _fill_uniformly(
    rng: np.random.Generator, keys: Keys, rows: int, target: int, symmetric: bool
) -> Keys:
    """Add uniformly drawn edges until there are ``target``: the last resort of a dense graph."""
    if rows * rows <= 16 * target:
        row, column = np.divmod(np.arange(rows * rows, dtype=np.int64), rows)
        free = row < column if symmetric else row != column
        free[keys] = False
        candidates = np.flatnonzero(free)
        chosen = distinct_integers(rng, candidates.size, target - keys.size)
        return merge_disjoint(keys, candidates[chosen])
    while keys.size < target:
        row = rng.integers(0, rows, size=2 * (target - keys.size) + 64)
        column = rng.integers(0, rows, size=row.size)
        if symmetric:
            row, column = np.minimum(row, column), np.maximum(row, column)
        fresh = missing_from(keys, distinct((row * rows + column)[row != column]))
        fresh = without(fresh, max(fresh.size - (target - keys.size), 0), rng)
        keys = merge_disjoint(keys, fresh)
    return keys
