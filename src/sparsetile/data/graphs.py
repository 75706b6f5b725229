"""Generated graphs of geometry: road grids and unions of small molecules.

Each stands for a family of graphs on which the papers of the five systems measure. All are
seeded, vectorised and return the canonical CSR; ``weighted=True`` draws standard-normal float32
values (the pattern is symmetric, the values are not).
"""

from __future__ import annotations

import math

import numpy as np

from sparsetile.core.checks import dimension
from sparsetile.data.sampling import (
    Keys,
    csr_from_keys,
    distinct_integers,
    fraction,
    positive,
    real,
    seeded,
    symmetric_keys,
)
from sparsetile.intake.csr import CSR

__all__ = ["molecules", "road_grid"]


def road_grid(
    rows: int, *, mean_degree: float = 2.6, diagonals: float = 0.02, weighted: bool = False,
    seed: int = 0,
) -> CSR:  # fmt: skip
    """Road-like graph: a square grid without some of its edges, numbered line by line.

    Edges along a line are kept more often than edges across. So most crossings have degree 2 or 3,
    as in road networks. A few diagonals give some crossings of five or more roads.

    Parameters
    ----------
    rows : int
        Number of crossings; the grid is ceil(sqrt(rows)) wide, its last line may be short.
    mean_degree : float
        Stored entries per row, met exactly as far as the grid's own edges allow; 0 to 4.
    diagonals : float
        Share of the edges that are diagonal.
    weighted, seed
        As in :func:`power_law`.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.road_grid(100, seed=1)
    >>> A.shape, A.nnz
    ((100, 100), 260)
    """
    name = "road_grid"
    rows = dimension(name, "rows", rows)
    mean_degree = real(name, "mean_degree", mean_degree, 0.0, 4.0)
    diagonals = fraction(name, "diagonals", diagonals)
    rng = seeded(name, seed)
    width = max(math.isqrt(max(rows - 1, 0)) + 1, 1)
    nodes = np.arange(rows, dtype=np.int64)
    not_last = nodes % width != width - 1
    along = nodes[not_last & (nodes + 1 < rows)]
    across = nodes[nodes + width < rows]
    slanted = nodes[not_last & (nodes + width + 1 < rows)]

    edges = min(round(mean_degree * rows / 2.0), along.size + across.size + slanted.size)
    # Lines get 70 % of the straight edges; what one direction cannot take, the others do.
    slanted_count = min(round(diagonals * edges), slanted.size)
    slanted_count = max(slanted_count, edges - along.size - across.size)
    straight = edges - slanted_count
    along_count = min(max(round(0.7 * straight), straight - across.size), along.size)
    across_count = straight - along_count

    def some(starts: Keys, count: int, step: int) -> Keys:
        chosen = starts[distinct_integers(rng, starts.size, count)]
        return chosen * rows + chosen + step

    upper = np.concatenate(
        [
            some(along, along_count, 1),
            some(across, across_count, width),
            some(slanted, slanted_count, width + 1),
        ]
    )
    return csr_from_keys(symmetric_keys(upper, rows), (rows, rows), weighted=weighted, rng=rng)


def molecules(
    count: int, *, atoms: float = 24.0, spread: float = 0.35, mean_degree: float = 2.1,
    hydrogens: float = 0.0, reach: int = 6, weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """Block-diagonal union of small molecules, as a batch of graphs for a graph network.

    A molecule is a branched chain of atoms, its rings closed by bonds to an atom 3 to ``reach``
    places back; hydrogens, listed last, hang one after another on the heavy atoms. The defaults
    resemble Yeast; ``hydrogens=0.45`` with 39 atoms resembles YeastH, ``atoms=39,
    mean_degree=3.7, reach=12`` the contact graphs of PROTEINS.

    Parameters
    ----------
    count : int
        Number of molecules.
    atoms : float
        Mean number of atoms; the total is round(count * atoms).
    spread : float
        Standard deviation of the logarithm of a molecule's size.
    mean_degree : float
        Stored entries per row over the whole union, met as nearly as connected molecules of
        these sizes and this reach can.
    hydrogens : float
        Share of atoms that hang on another by a single bond, 0 to 0.9.
    reach : int
        Longest bond that closes a ring, counted in places along the chain.
    weighted, seed
        As in :func:`power_law`.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.molecules(5, seed=1)
    >>> A.shape, A.nnz
    ((120, 120), 252)
    """
    name = "molecules"
    count = dimension(name, "count", count)
    atoms = real(name, "atoms", atoms, 1.0, math.inf)
    spread = real(name, "spread", spread, 0.0, 3.0)
    mean_degree = real(name, "mean_degree", mean_degree, 0.0, math.inf)
    hydrogens = real(name, "hydrogens", hydrogens, 0.0, 0.9)
    reach = positive(name, "reach", reach)
    rows = dimension(name, "count * atoms", round(count * atoms))
    rng = seeded(name, seed)

    # One atom each, the others shared out by log-normal weights: the total is exact.
    weight = np.cumsum(rng.lognormal(0.0, spread, size=count))
    shares = np.rint(weight * ((rows - count) / (weight[-1] if count else 1.0)))
    first = np.concatenate([[0.0], shares + np.arange(1, count + 1)]).astype(np.int64)
    sizes = np.diff(first)
    heavy = np.maximum(np.rint(sizes * (1.0 - hydrogens)).astype(np.int64), 1)

    start = np.repeat(first[:-1], sizes)
    node = np.arange(rows, dtype=np.int64)
    place = node - start
    heavy_here = np.repeat(heavy, sizes)
    is_heavy = place < heavy_here
    # Bond of each atom to an earlier one: the previous, or at a branch the one before it.
    back = 1 + (rng.random(rows) < 0.2)
    parent = node - np.minimum(back, place)
    light = np.flatnonzero(~is_heavy)
    lights_here = np.repeat(sizes - heavy, sizes)[light]
    turn = (place[light] - heavy_here[light]) * heavy_here[light] // lights_here
    parent[light] = start[light] + turn
    bonded = place > 0

    # Rings: every (atom, distance) with 3 <= distance <= reach is a cell of one long list.
    room = np.where(is_heavy, np.maximum(np.minimum(place, reach) - 2, 0), 0)
    room_ends = np.cumsum(room)
    cells = int(room_ends[-1]) if rows else 0
    wanted = round(mean_degree * rows / 2.0) - int(np.count_nonzero(bonded))
    cell = distinct_integers(rng, cells, min(max(wanted, 0), cells))
    closer = np.searchsorted(room_ends, cell, side="right")
    distance = cell - (room_ends[closer] - room[closer]) + 3
    upper = np.concatenate(
        [parent[bonded] * rows + node[bonded], (closer - distance) * rows + closer]
    )
    return csr_from_keys(symmetric_keys(upper, rows), (rows, rows), weighted=weighted, rng=rng)
