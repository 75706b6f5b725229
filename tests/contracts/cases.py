"""The hard matrices and the reference arithmetic that all contract suites share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import scipy.sparse as sp
import torch
from tools.as_capability import runs_as
from torch import Tensor

from sparsetile import CSR
from sparsetile.check import bound
from sparsetile.check import reference as check_reference
from sparsetile.check.judge import check_product
from sparsetile.core.device import capability

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let torch allow TF32, or not, inside a block."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def runs_on_this_gpu(system: str) -> bool:
    """Whether the GPU, or that of ``SPARSETILE_CAPABILITY``, has what the system needs."""
    return runs_as(system, capability(0))


def rounds_to_tf32(B: Tensor) -> bool:
    """Whether a product with B may round its operands to TF32 here."""
    allowed = bool(torch.backends.cuda.matmul.allow_tf32)
    return B.is_cuda and B.dtype is torch.float32 and allowed


def csr_of(matrix: sp.csr_array, *, pattern: bool = False, dtype=torch.float32) -> CSR:
    """scipy -> canonical CSR on the CPU."""
    matrix = sp.csr_array(matrix)
    matrix.sum_duplicates()
    return CSR(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int32)),
        None if pattern else torch.from_numpy(matrix.data.astype(np.float64)).to(dtype),
        matrix.shape,
    )


def random_matrix(rows: int, cols: int, density: float, seed: int = 0) -> sp.csr_array:
    rng = np.random.default_rng(seed)
    return sp.csr_array(
        sp.random_array(
            (rows, cols), density=density, rng=rng, data_sampler=lambda size: rng.normal(size=size)
        )
    )


def with_dense_row(rows: int, cols: int, row: int) -> sp.csr_array:
    dense = random_matrix(rows, cols, 0.01, seed=3).tolil()
    dense[row, :] = np.linspace(-1, 1, cols) + 0.001
    return sp.csr_array(dense)


def with_dense_column(rows: int, cols: int, column: int) -> sp.csr_array:
    return sp.csr_array(with_dense_row(cols, rows, column).T)


def equal_rows(rows: int, cols: int) -> sp.csr_array:
    one = np.zeros(cols)
    one[::7] = np.arange(1, len(one[::7]) + 1)
    return sp.csr_array(np.tile(one, (rows, 1)))


MATRICES: dict[str, Callable[[], sp.csr_array]] = {
    "no rows": lambda: sp.csr_array((0, 5)),
    "no columns": lambda: sp.csr_array((5, 0)),
    "no entries": lambda: sp.csr_array((9, 6)),
    "one by one": lambda: sp.csr_array(np.array([[2.5]])),
    "one row": lambda: random_matrix(1, 300, 0.5),
    "one column": lambda: random_matrix(300, 1, 0.5),
    "odd sizes": lambda: random_matrix(131, 77, 0.08),
    "empty rows": lambda: random_matrix(200, 90, 0.01),
    "one dense row": lambda: with_dense_row(40, 5000, 17),
    "one dense column": lambda: with_dense_column(3000, 50, 20),
    "equal rows": lambda: equal_rows(67, 400),
    "long shared rows": lambda: equal_rows(30, 5000),
    "wide": lambda: random_matrix(20, 2000, 0.05),
    "tall": lambda: random_matrix(2000, 20, 0.05),
}


def reference(csr: CSR, B: Tensor) -> Tensor:
    """A·B in float64, entry by entry, on the CPU."""
    return check_reference.reference(csr, B)[0].cpu()


def error_bound(csr: CSR, B: Tensor, expected: Tensor) -> Tensor:
    """What rounding can cost a product of any input at most, in B's type."""
    _, magnitude = check_reference.reference(csr, B)
    return bound.error_bound(
        expected.cpu(),
        magnitude.cpu(),
        csr.row_lengths().cpu().unsqueeze(1),
        dtype=B.dtype,
        tf32=rounds_to_tf32(B),
        worst_case=True,
    )


def assert_close(C: Tensor, csr: CSR, B: Tensor, reduce: str = "sum") -> None:
    """C must be A·B within rounding, element by element."""
    verdict = check_product(
        csr, B, C, reduce=reduce, tf32=rounds_to_tf32(B), worst_case=True, limit=None
    )
    assert verdict.ok, verdict


def derived(base: type) -> set[type]:
    """All classes below a class."""
    return {each for below in base.__subclasses__() for each in (below, *derived(below))}
