"""Makes the operands of a fuzz case: A in its container, its entries, and B.

The expected entries are read from the container with numpy and scipy, not by the package's intake,
so that an error of intake shows as a wrong product. The file is long because each container has a
function.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from sparsetile import CSR
from tools.fuzz_cases import Case


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch_dtype: name must be a torch type, got {name}. Name another.")
    return found


@dataclass
class Matrix:
    """A in its container, and its entries."""

    A: Any  # the container
    rows: np.ndarray  # places in the container's own order of entries, as cols
    cols: np.ndarray
    truth: CSR  # sorted, duplicates summed, on the host; float64 values or None
    entries: CSR  # the same with every entry for itself, as products without a plan take them
    exact: bool  # whether values must be small fractions: sums of duplicates are exact


def _places(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Distinct places row * cols + col of the entries, sorted."""
    rows, cols = case.rows, case.cols
    if rows * cols == 0 or case.structure == "no entries":
        return np.zeros(0, dtype=np.int64)
    size = rows * cols
    count = int(min(size, 30_000, max(1, size * rng.choice([0.01, 0.05, 0.2, 0.6]))))
    if case.structure == "power law":
        r = np.minimum((rows * rng.random(count) ** 3).astype(np.int64), rows - 1)
        c = np.minimum((cols * rng.random(count) ** 3).astype(np.int64), cols - 1)
        return np.unique(r * cols + c)
    if case.structure in ("fem", "diagonal"):
        reach = 0 if case.structure == "diagonal" else 2
        r = np.repeat(np.arange(rows), 2 * reach + 1)
        c = r * cols // max(rows, 1) + np.tile(np.arange(-reach, reach + 1), rows)
        inside = (c >= 0) & (c < cols)
        return np.unique(r[inside] * cols + c[inside])
    if case.structure == "blocks":
        side = min(8, rows, cols)
        starts = rng.integers(0, rows - side + 1, 3), rng.integers(0, cols - side + 1, 3)
        step = np.arange(side)
        found = [
            ((r + step)[:, None] * cols + (c + step)).ravel() for r, c in zip(*starts, strict=True)
        ]
        return np.unique(np.concatenate(found))
    if case.structure == "equal rows":
        chosen = np.unique(rng.integers(0, cols, min(cols, 30)))
        few = np.arange(min(rows, 1000))
        return np.unique((few[:, None] * cols + chosen).ravel())
    some = rng.integers(0, size, count)
    if case.structure == "full row":
        some = np.concatenate([some, rng.integers(rows) * cols + np.arange(cols)])
    if case.structure == "full column":
        some = np.concatenate([some, np.arange(rows) * cols + rng.integers(cols)])
    if case.structure == "empty rows":
        some = some[(some // cols) % 3 == rng.integers(3)]
    return np.unique(some)


def entry_values(case: Case, count: int, exact: bool, rng: np.random.Generator) -> np.ndarray:
    """Values as float64: small fractions if sums of duplicates must be exact."""
    if case.values_dtype == "int32":
        found = rng.integers(1, 9, count) * rng.choice([-1.0, 1.0], count)
    elif exact:
        found = rng.integers(1, 17, count) * rng.choice([-1.0, 1.0], count) / 8 * case.scale
    else:
        found = rng.normal(size=count)
        found = np.where(found == 0, 1.0, found) * case.scale
    return _special(found, case.special_a, rng)


def _special(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    chosen = {"nan": [np.nan], "inf": [np.inf, -np.inf], "zeros": [0.0],
              "mixed": [np.nan, np.inf, -np.inf, 0.0]}.get(kind, [])  # fmt: skip
    if len(values):
        for value in chosen:
            values[rng.integers(len(values))] = value
    return values


def make_matrix(case: Case, rng: np.random.Generator, folder: Path) -> Matrix:
    """Return A of a case in its container, with its expected entries."""
    places = _places(case, rng)
    if case.duplicates and len(places):
        places = np.concatenate([places, rng.choice(places, max(1, len(places) // 4))])
        places = np.sort(places)
    rows, cols = np.divmod(places, max(case.cols, 1))
    values = entry_values(case, len(places), case.duplicates, rng)
    if case.unsorted:
        order = rng.permutation(len(places))
        if case.container in ("torch csr", "csr tuple", "csr tuple numpy", "scipy csr"):
            order = order[np.argsort(rows[order], kind="stable")]
        if case.container in ("torch csc", "scipy csc"):
            order = order[np.argsort(cols[order], kind="stable")]
        rows, cols, values = rows[order], cols[order], values[order]
    A, source = _contain(case, rows, cols, values, folder)
    return read(case, A, source)


def read(case: Case, A: Any, source: Any) -> Matrix:
    """Return a container with its entries; ``source`` has them, if it is another object."""
    rows, cols, values = _entries(case, source)
    truth = _canonical(case, rows, cols, values)
    order = np.argsort(rows, kind="stable")
    entries = CSR(
        torch.from_numpy(_pointers(rows[order], case.rows)),
        torch.from_numpy(cols[order].astype(np.int32)),
        None if values is None else torch.from_numpy(values[order].astype(np.float64)),
        truth.shape,
    )
    return Matrix(A, rows, cols, truth, entries, case.duplicates)


def rounded_to_type(case: Case, summed: Tensor) -> Tensor:
    """Sums of duplicates rounded to A's own type: in 16 bits they may overflow."""
    if case.values_dtype not in ("float16", "bfloat16"):
        return summed
    return summed.to(torch_dtype(case.values_dtype)).double()


def _canonical(case: Case, rows: np.ndarray, cols: np.ndarray, values: np.ndarray | None) -> CSR:
    shape = (case.rows, case.cols)
    keys, inverse = np.unique(rows * max(shape[1], 1) + cols, return_inverse=True)
    if values is None and len(keys) < len(rows):
        values = np.ones(len(rows))
    summed = None
    if values is not None:
        if len(keys) == len(rows):
            summed = np.zeros(len(keys))
            summed[inverse] = values
        else:
            summed = np.zeros(len(keys))
            with np.errstate(invalid="ignore"):  # Inf - Inf
                np.add.at(summed, inverse, values)
    indptr = np.searchsorted(keys // max(shape[1], 1), np.arange(shape[0] + 1))
    return CSR(
        torch.from_numpy(indptr.astype(np.int64)),
        torch.from_numpy((keys % max(shape[1], 1)).astype(np.int32)),
        None if summed is None else rounded_to_type(case, torch.from_numpy(summed)),
        shape,
    )


def _pointers(lines: np.ndarray, count: int) -> np.ndarray:
    return np.searchsorted(lines, np.arange(count + 1)).astype(np.int64)


def _side(size: int) -> int:
    """The largest block side up to 4 that divides a dimension."""
    return next(side for side in (4, 3, 2, 1) if size % side == 0)


def _contain(
    case: Case, rows: np.ndarray, cols: np.ndarray, values: np.ndarray, folder: Path
) -> tuple[Any, Any]:
    """Return A, and the object that its entries are read from."""
    name, shape = case.container, (case.rows, case.cols)
    device, index = torch.device(case.device), torch_dtype(case.index)
    kind = torch_dtype(case.values_dtype)
    typed = torch.from_numpy(values).to(kind)
    if name == "mtx":
        path = folder / f"matrix-{case.seed}-{case.number}.mtx"
        source = (np.stack([rows, cols]), values.astype(case.values_dtype), shape)
        return str(path), _write_mtx(case, path, source)
    if name.startswith("scipy") or name == "npz":
        A = _scipy(case, rows, cols, values.astype(case.values_dtype))
        if name == "npz":
            path = folder / f"matrix-{case.seed}-{case.number}.npz"
            sp.save_npz(path, A)
            return str(path), A
        return A, A

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, index)

    given = typed.to(device) if case.weighted else None
    if name == "csr":
        A = CSR(
            torch.from_numpy(_pointers(rows, case.rows)).to(device),
            torch.from_numpy(cols).to(device, torch.int32), given, shape,
        )  # fmt: skip
    elif name == "csr tuple":
        A = (tensor(_pointers(rows, case.rows)), tensor(cols), given, shape)
    elif name == "csr tuple numpy":
        pointers = _pointers(rows, case.rows).astype(case.index)
        array = typed.numpy() if case.weighted else None
        A = (pointers, cols.astype(case.index), array, shape)
    elif name == "edge tuple":
        A = (tensor(np.stack([rows, cols])), given, shape)
    elif name == "edge tuple numpy":
        array = typed.numpy() if case.weighted else None
        A = (np.stack([rows, cols]).astype(case.index), array, shape)
    elif name == "torch csr":
        parts = tensor(_pointers(rows, case.rows)), tensor(cols), given
        A = torch.sparse_csr_tensor(*parts, shape)  # type: ignore[arg-type]
    elif name == "torch csc":
        if not case.unsorted:
            order = np.lexsort((rows, cols))
            rows, cols, given = rows[order], cols[order], typed[torch.from_numpy(order)].to(device)
        parts = tensor(_pointers(cols, case.cols)), tensor(rows), given
        A = torch.sparse_csc_tensor(*parts, shape)  # type: ignore[arg-type]
    else:
        A = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([rows, cols])), typed, shape,
            is_coalesced=name == "torch coalesced",
        )  # fmt: skip
        if name in ("torch bsr", "torch bsc"):
            block = (_side(case.rows), _side(case.cols))
            array = np.zeros(shape)
            array[rows, cols] = values
            full = torch.from_numpy(array).to(kind)
            A = full.to_sparse_bsr(block) if name == "torch bsr" else full.to_sparse_bsc(block)
        A = A.to(device)
    return A, A


def _write_mtx(case: Case, path: Path, source: Any) -> Any:
    """Write a Matrix Market file, entry by entry in the given order; return its entries."""
    (rows, cols), values, shape = source
    kind = "pattern" if not case.weighted else "integer" if values.dtype.kind == "i" else "real"
    lines = [f"%%MatrixMarket matrix coordinate {kind} general"]
    lines.append(f"{shape[0]} {shape[1]} {len(rows)}")
    for row, col, value in zip(rows, cols, values.tolist(), strict=True):
        lines.append(f"{row + 1} {col + 1}" + (f" {value!r}" if case.weighted else ""))
    path.write_text("\n".join(lines) + "\n")
    return source[0], values if case.weighted else None, shape


def _scipy(case: Case, rows: np.ndarray, cols: np.ndarray, values: np.ndarray) -> Any:
    name, shape = case.container, (case.rows, case.cols)
    if name == "scipy csr" and (case.unsorted or case.duplicates):
        order = np.argsort(rows, kind="stable")
        pointers = _pointers(rows[order], case.rows)
        A = sp.csr_array((values[order], cols[order], pointers), shape=shape)
    elif name == "scipy csc" and case.unsorted:
        A = sp.csc_array((values, rows, _pointers(cols, case.cols)), shape=shape)
    else:
        A = sp.coo_array((values, (rows, cols)), shape=shape)
        if name == "scipy bsr":
            A = A.tobsr(blocksize=(_side(case.rows), _side(case.cols))) if A.nnz else A.tobsr()
        elif name != "scipy coo":
            A = A.asformat("csr" if name == "npz" else name.removeprefix("scipy "))
    if A.format in ("csr", "csc", "bsr"):
        A.indptr, A.indices = A.indptr.astype(case.index), A.indices.astype(case.index)
    return A


def _array(part: Any) -> np.ndarray:
    if isinstance(part, Tensor):
        part = part.detach().cpu()
        part = part.double().numpy() if part.is_floating_point() else part.numpy()
    return np.asarray(part)


def _expanded(
    pointers: np.ndarray, minors: np.ndarray, blocks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of all places in blocks that are compressed by rows."""
    _, high, wide = blocks.shape
    majors = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
    r = majors[:, None, None] * high + np.arange(high)[None, :, None] + np.zeros((1, 1, wide))
    c = minors[:, None, None] * wide + np.arange(wide)[None, None, :] + np.zeros((1, high, 1))
    return r.ravel().astype(np.int64), c.ravel().astype(np.int64), blocks.ravel()


def _entries(case: Case, A: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Places and values (float64) of a container's entries, in its own order."""
    name = case.container
    rows: Any
    cols: Any
    values: Any
    if name in ("csr tuple", "csr tuple numpy", "csr"):
        pointers, cols, values = (A.indptr, A.indices, A.values) if isinstance(A, CSR) else A[:3]
        rows = np.repeat(np.arange(case.rows), np.diff(_array(pointers)))
    elif name in ("edge tuple", "edge tuple numpy", "mtx"):
        (rows, cols), values = _array(A[0]), A[1]
    elif isinstance(A, Tensor) and A.layout is torch.sparse_coo:
        (rows, cols), values = _array(A._indices()), A._values()
    elif isinstance(A, Tensor) and A.layout in (torch.sparse_csr, torch.sparse_bsr):
        blocks = _array(A.values()).reshape(-1, *(A.values().shape[1:] or (1, 1)))
        parts = _array(A.crow_indices()), _array(A.col_indices())
        rows, cols, values = _expanded(*parts, blocks)
    elif isinstance(A, Tensor):
        blocks = _array(A.values()).reshape(-1, *(A.values().shape[1:] or (1, 1)))
        high, wide = blocks.shape[1:]
        majors = np.repeat(np.arange(case.cols // wide), np.diff(_array(A.ccol_indices())))
        swapped = _expanded(
            np.arange(len(blocks) + 1), np.zeros(len(blocks), dtype=np.int64), blocks
        )
        block = swapped[0] // high
        rows = _array(A.row_indices())[block] * high + swapped[0] % high
        cols, values = majors[block] * wide + swapped[1], swapped[2]
    elif A.format == "bsr":
        rows, cols, values = _expanded(A.indptr, A.indices, A.data)
    elif A.format == "csr":
        rows = np.repeat(np.arange(case.rows), np.diff(A.indptr))
        cols, values = A.indices, A.data
    elif A.format == "csc":
        cols = np.repeat(np.arange(case.cols), np.diff(A.indptr))
        rows, values = A.indices, A.data
    elif A.format == "dia":  # diagonal by diagonal; zeros are padding
        cols = np.broadcast_to(np.arange(A.data.shape[1]), A.data.shape)
        rows = cols - A.offsets[:, None]
        inside = (rows >= 0) & (rows < case.rows) & (cols < case.cols) & (A.data != 0)
        rows, cols, values = rows[inside], cols[inside], A.data[inside]
    else:
        plain = A.tocoo()
        (rows, cols), values = plain.coords, plain.data
    found = None if values is None else _array(values).astype(np.float64)
    return _array(rows).astype(np.int64), _array(cols).astype(np.int64), found


def change(case: Case, matrix: Matrix, pick: int) -> Matrix:
    """Change A in place, as a caller does between two calls; return it with its new entries."""
    A, name = matrix.A, case.container
    pattern = pick % 3 == 0 or not case.weighted
    if name == "npz":  # a file is written again
        source = sp.load_npz(A)
        source.data *= -2
        sp.save_npz(A, source)
        return read(case, A, source)
    if name == "mtx":
        numbers = np.full(len(matrix.rows), -3.0)
        places = np.stack([matrix.rows[::-1], case.cols - 1 - matrix.cols[::-1]])
        given = (places, numbers.astype(case.values_dtype), (case.rows, case.cols))
        return read(case, A, _write_mtx(case, Path(A), given))
    if name in ("scipy lil", "scipy dok"):
        plain = A.tocoo()
        for row, col in list(zip(*plain.coords, strict=True))[:5]:
            A[row, col] = A[row, col] * -2
    elif name.startswith("scipy"):
        A.data *= A.data.dtype.type(-2)
        if name == "scipy dia" and A.data.size and pattern:
            # This format drops stored zeros: the pattern changes with the data.
            A.data.reshape(-1)[:: 1 + pick % 5] = 0
    elif isinstance(A, Tensor):
        with torch.no_grad():
            (A._values() if A.layout is torch.sparse_coo else A.values()).mul_(-2)
    elif pattern and name in ("edge tuple", "edge tuple numpy") and case.cols:
        A[0][1] = case.cols - 1 - A[0][1]
    else:
        values = A.values if isinstance(A, CSR) else A[2] if len(A) == 4 else A[1]
        if values is not None:
            with np.errstate(over="ignore"):
                values *= -2
    return read(case, A, A)


def _special_dense(B: Tensor, kind: str, rng: np.random.Generator) -> Tensor:
    if B.numel() == 0 or kind == "none":
        return B
    flat = B.view(-1, *B.shape[-2:])
    batch, row, col = (int(rng.integers(size)) for size in flat.shape)
    if kind in ("nan row", "mixed"):
        flat[batch, row] = torch.nan
    if kind in ("inf", "mixed"):
        flat[batch, int(rng.integers(flat.shape[1])), col] = torch.inf
        flat[batch, int(rng.integers(flat.shape[1])), col] = -torch.inf
        flat[batch, row, int(rng.integers(flat.shape[2]))] = torch.inf
    if kind == "all inf":
        flat[batch, int(rng.integers(flat.shape[1]))] = torch.inf
    if kind in ("uneven columns", "uneven rows"):
        # Sizes that no factor brings near each other.
        most = 1.5 if B.dtype.itemsize <= 2 else 12.0
        axis = flat.shape[1 if kind == "uneven rows" else 2]
        sizes = torch.from_numpy(10.0 ** rng.uniform(-most, most, axis)).to(B)
        B *= sizes.unsqueeze(-1) if kind == "uneven rows" else sizes
    return B


def dense(case: Case, shape: tuple[int, ...], rng: np.random.Generator, **how: str) -> Tensor:
    """Return a random operand [..., rows, cols] of the case's type and layout on its device.

    ``layout``, ``special`` and ``dtype`` may be given instead of the case's own.
    """
    dtype = torch_dtype(how.get("dtype", case.dtype))
    layout, special = how.get("layout", case.layout), how.get("special", case.special_b)
    B = torch.from_numpy(rng.normal(size=shape)).to(dtype).to(case.device)
    B = _special_dense(B, special, rng)
    return laid_out(B, layout)


def laid_out(B: Tensor, layout: str) -> Tensor:
    """Return B in a memory layout; gaps between its elements are NaN."""
    *lead, rows, cols = B.shape
    if layout == "row stride":
        wide = B.new_full((*lead, rows, cols + 5), torch.nan)
        wide[..., :cols] = B
        return wide[..., :cols]
    if layout == "misaligned":
        flat = B.new_full((B.numel() + 1,), torch.nan)
        flat[1:] = B.flatten()
        return flat[1:].view(B.shape)
    if layout == "every other column":
        wide = B.new_full((*lead, rows, 2 * cols), torch.nan)
        wide[..., ::2] = B
        return wide[..., ::2]
    if layout == "transposed":
        return B.mT.contiguous().mT
    if layout == "negative view":
        return torch._neg_view(-B)
    if layout == "expanded batch" and lead and lead[0]:
        return B[:1].expand(B.shape)
    if layout == "expanded rows" and rows:
        return B[..., :1, :].expand(B.shape)
    if layout == "expanded columns" and cols:
        return B[..., :1].expand(B.shape)
    return B
