"""Generated matrices other than graphs: FEM blocks, bands, random, dense lines, pruned weights.

All are seeded, vectorised and return the canonical CSR; ``weighted=True`` draws standard-normal
float32 values.
"""

from __future__ import annotations

import itertools

import numpy as np

from sparsetile.core.checks import dimension, one_of
from sparsetile.core.errors import value_error
from sparsetile.data.sampling import (
    Keys,
    csr_from_keys,
    distinct_integers,
    fraction,
    merge_disjoint,
    positive,
    real,
    seeded,
    symmetric_keys,
)
from sparsetile.intake.csr import CSR

__all__ = [
    "banded", "fem_blocks", "one_dense_column", "one_dense_row", "pruned_weights", "random",
]  # fmt: skip


def fem_blocks(
    nodes: int, dofs: int = 3, *, dimensions: int = 3, drop: float = 0.1, weighted: bool = False,
    seed: int = 0,
) -> CSR:  # fmt: skip
    """Stiffness-like matrix: neighbours of a mesh, each a dense block of ``dofs`` by ``dofs``.

    Parameters
    ----------
    nodes : int
        Mesh nodes; the matrix has ``nodes * dofs`` rows.
    dofs : int
        Unknowns per node (3 for solids, 6 for shells).
    dimensions : int
        2: quadrilaterals, 8 neighbours a node; 3: hexahedra, 26 neighbours.
    drop : float
        Share of mesh edges to omit, so that row lengths vary as in unstructured meshes.
    weighted, seed
        As in :func:`power_law`.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.fem_blocks(27, 3, seed=1)
    >>> A.shape, A.nnz
    ((81, 81), 2799)
    """
    name = "fem_blocks"
    nodes = dimension(name, "nodes", nodes)
    dofs = positive(name, "dofs", dofs)
    drop = fraction(name, "drop", drop)
    if dimensions not in (2, 3):
        raise value_error(name, "dimensions", "2 or 3", dimensions, "Choose a plane or solid mesh")
    rows = dimension(name, "nodes * dofs", nodes * dofs)
    rng = seeded(name, seed)

    width = max(round(nodes ** (1.0 / dimensions)), 1)
    width += width**dimensions < nodes
    node = np.arange(nodes, dtype=np.int64)
    position = [(node // width**axis) % width for axis in range(dimensions)]
    parts: list[Keys] = []
    for offset in itertools.product((-1, 0, 1), repeat=dimensions):
        step = sum(shift * width**axis for axis, shift in enumerate(offset))
        if step <= 0:  # the half above the diagonal; the transposed half is added below
            continue
        inside = node + step < nodes
        for axis, shift in enumerate(offset):
            inside &= (position[axis] + shift >= 0) & (position[axis] + shift < width)
        start = node[inside]
        start = start[distinct_integers(rng, start.size, round(start.size * (1.0 - drop)))]
        parts.append(start * nodes + start + step)
    mesh_keys = symmetric_keys(np.concatenate(parts), nodes, diagonal=True)
    mesh = csr_from_keys(mesh_keys, (nodes, nodes), weighted=False, rng=rng)

    # Expand to dofs: each mesh row becomes ``dofs`` equal rows of whole blocks.
    neighbour = mesh.indices.numpy().astype(np.int64)
    columns = (neighbour[:, None] * dofs + np.arange(dofs)).reshape(-1)
    lengths = np.repeat(mesh.row_lengths().numpy() * dofs, dofs)
    first = np.repeat(mesh.indptr.numpy()[:-1] * dofs, dofs)
    ends = np.cumsum(lengths)
    gather = np.arange(int(ends[-1]) if rows else 0, dtype=np.int64)
    gather += np.repeat(first - (ends - lengths), lengths)
    row = np.repeat(np.arange(rows, dtype=np.int64), lengths)
    return csr_from_keys(row * rows + columns[gather], (rows, rows), weighted=weighted, rng=rng)


def banded(
    rows: int, bandwidth: int, density: float = 1.0, *, weighted: bool = False, seed: int = 0
) -> CSR:
    """Square matrix with entries only where ``|row - column|`` <= ``bandwidth``.

    ``density`` is the share of the band's cells that hold an entry, met to the nearest entry;
    0 gives the empty matrix, 1 the full band.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.banded(100, 3)
    >>> A.shape, A.nnz
    ((100, 100), 688)
    """
    name = "banded"
    rows = dimension(name, "rows", rows)
    bandwidth = dimension(name, "bandwidth", bandwidth)
    density = fraction(name, "density", density)
    rng = seeded(name, seed)
    row = np.arange(rows, dtype=np.int64)
    low = np.maximum(row - bandwidth, 0)
    widths = np.minimum(row + bandwidth + 1, rows) - low
    ends = np.cumsum(widths)
    cells = int(ends[-1]) if rows else 0
    cell = distinct_integers(rng, cells, dimension(name, "nonzeros", round(density * cells)))
    owner = np.searchsorted(ends, cell, side="right")
    column = low[owner] + cell - (ends[owner] - widths[owner])
    return csr_from_keys(owner * rows + column, (rows, rows), weighted=weighted, rng=rng)


def random(
    rows: int, cols: int, *, density: float | None = None, nnz: int | None = None,
    weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """Uniformly random pattern; pass either ``density`` (0 to 1) or ``nnz``, which is exact.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.random(100, 50, nnz=400, seed=1)
    >>> A.shape, A.nnz
    ((100, 50), 400)
    """
    name = "random"
    rows = dimension(name, "rows", rows)
    cols = dimension(name, "cols", cols)
    rng = seeded(name, seed)
    if (density is None) == (nnz is None):
        got = "neither" if density is None else "both"
        raise value_error(name, "density or nnz", "given, one of the two", got, "Pass one of them")
    if density is not None:
        nnz = round(fraction(name, "density", density) * rows * cols)
    count = dimension(name, "nnz", nnz)
    if count > rows * cols:
        raise value_error(
            name, "nnz", f"at most rows * cols = {rows * cols}", count, "Ask for fewer nonzeros"
        )
    keys = distinct_integers(rng, rows * cols, count)
    return csr_from_keys(keys, (rows, cols), weighted=weighted, rng=rng)


def one_dense_row(
    rows: int, cols: int, *, dense_row: int | None = None, background: float = 4.0,
    weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """One full row among short ones: the extreme of imbalance.

    ``background`` is the mean number of entries of the other rows; ``dense_row`` is the middle
    row unless given.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.one_dense_row(100, 50, seed=1)
    >>> A.shape, A.nnz
    ((100, 50), 444)
    """
    return _dense_line("one_dense_row", rows, cols, dense_row, background, weighted, seed)


def one_dense_column(
    rows: int, cols: int, *, dense_column: int | None = None, background: float = 4.0,
    weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """One full column among sparse ones: every row reads the same row of B.

    ``background`` is the mean number of other entries of a row; ``dense_column`` is the middle
    column unless given.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.one_dense_column(100, 50, seed=1)
    >>> A.shape, A.nnz
    ((100, 50), 490)
    """
    return _dense_line("one_dense_column", rows, cols, dense_column, background, weighted, seed)


def _dense_line(
    name: str, rows: int, cols: int, given: int | None, background: float, weighted: bool, seed: int
) -> CSR:
    """A full row or column, after the name of the generator, among random entries."""
    rows, cols = dimension(name, "rows", rows), dimension(name, "cols", cols)
    mean = real(name, "background", background, 0.0, float("inf"))
    rng = seeded(name, seed)
    by_row = name == "one_dense_row"
    size = rows if by_row else cols
    line = size // 2
    if given is not None:
        argument = name.removeprefix("one_")
        line = dimension(name, argument, given)
        if line >= size:
            remedy = "Rows and columns count from 0"
            raise value_error(name, argument, f"below {size}", line, remedy)
    # Short rows may not ask for more entries than a row has cells.
    wanted = min(round(rows * min(mean, float(cols))), rows * cols)
    around = distinct_integers(rng, rows * cols, wanted)
    if by_row:
        full = np.arange(cols if rows else 0, dtype=np.int64) + line * cols
        around = around[around // max(cols, 1) != line]
    else:
        full = np.arange(rows if cols else 0, dtype=np.int64) * cols + line
        around = around[around % max(cols, 1) != line]
    keys = merge_disjoint(around, full)
    return csr_from_keys(keys, (rows, cols), weighted=weighted, rng=rng)


def pruned_weights(
    out_features: int, in_features: int, sparsity: float, *, block: int = 1, method: str = "random",
    weighted: bool = False, seed: int = 0,
) -> CSR:  # fmt: skip
    """Weights of a linear layer after pruning, as [out_features, in_features].

    Parameters
    ----------
    out_features, in_features : int
        Shape of the layer.
    sparsity : float
        Share of the weights that are pruned, 0 to 1.
    block : int
        Weights are pruned in ``block`` by ``block`` squares; must divide both sizes.
    method : {"random", "magnitude"}
        ``random`` keeps squares at random; ``magnitude`` keeps the largest of Gaussian weights
        whose scale differs by row and by column, so that some rows keep far more than others.
    weighted, seed
        As in :func:`power_law`.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.pruned_weights(256, 128, 0.75, block=64, seed=1)
    >>> A.shape, A.nnz
    ((256, 128), 8192)
    """
    name = "pruned_weights"
    out_features = dimension(name, "out_features", out_features)
    in_features = dimension(name, "in_features", in_features)
    sparsity = fraction(name, "sparsity", sparsity)
    block = positive(name, "block", block)
    one_of(name, "method", method, ("random", "magnitude"))
    rng = seeded(name, seed)
    for argument, size in (("out_features", out_features), ("in_features", in_features)):
        if size % block:
            raise value_error(
                name, argument, f"a multiple of block = {block}", size, "Change one of the two"
            )
    height, width = out_features // block, in_features // block
    kept = dimension(name, "nonzeros", round((1.0 - sparsity) * height * width))
    if method == "random":
        squares = distinct_integers(rng, height * width, kept)
    else:
        squares = _largest_weights(rng, height, width, kept)
    if block == 1:
        keys = squares
    else:
        row, column = np.divmod(squares, max(width, 1))
        inner = np.arange(block, dtype=np.int64)
        top_left = row * (block * in_features) + column * block
        square = inner[:, None] * in_features + inner
        keys = (top_left[:, None] + square.reshape(-1)).reshape(-1)
        keys.sort()
    shape = (out_features, in_features)
    return csr_from_keys(keys, shape, weighted=weighted, rng=rng)


def _largest_weights(rng: np.random.Generator, height: int, width: int, kept: int) -> Keys:
    """Flat positions, sorted, of the ``kept`` largest of height * width Gaussian weights."""
    dimension("pruned_weights", "number of blocks", height * width)  # all are drawn at once
    if kept == 0:
        return np.empty(0, dtype=np.int64)
    weight = np.abs(rng.standard_normal((height, width), dtype=np.float32))
    weight *= rng.lognormal(0.0, 0.25, size=(height, 1)).astype(np.float32)
    weight *= rng.lognormal(0.0, 0.25, size=(1, width)).astype(np.float32)
    flat = weight.reshape(-1)
    threshold = np.partition(flat, flat.size - kept)[flat.size - kept]
    above = np.flatnonzero(flat > threshold)
    # Equal weights at the threshold are rare but would make the count miss by one or two.
    ties = np.flatnonzero(flat == threshold)[: kept - above.size]
    return merge_disjoint(above, ties)
