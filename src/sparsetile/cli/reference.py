"""Is C right? Compares a product with float64 arithmetic on the CPU, element by element.

The rule is |C - reference| ≤ bound · (|A||B|) for every element, with

    bound = 4·u + 8·u_acc

``u`` is the unit roundoff of the type (2^-11 where float32 runs as TF32) and pays for rounding
inputs and result: TF32 units that cut inputs short cost 4·u. ``u_acc`` is that of the accumulator
and pays for the sum. Terms of a random B change sign, so partial sums stay small and the error of
a sum in any order stays within a few u_acc of |A||B|, however long the row; a missing or doubled
entry is far outside. For max and min, which do not sum, |A||B| is the largest |a·b| of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["SAMPLE_LIMIT", "Verdict", "check_product", "error_bound"]

# Beyond this many products (nnz · N), a sample of the rows is checked: seconds, not minutes.
SAMPLE_LIMIT = 200_000_000
# Max and min hold every product in memory at once, the sum does not.
_SAMPLE_LIMIT_EXTREMUM = 30_000_000
_BLOCK_BYTES = 256 * 2**20
_TF32_ROUNDOFF = 2.0**-11

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check: ``worst`` is the largest error in units of its bound."""

    worst: float
    rows_checked: int
    rows: int

    @property
    def ok(self) -> bool:
        return self.worst <= 1.0

    @property
    def coverage(self) -> str:
        """``all rows`` or how many of them."""
        if self.rows_checked == self.rows:
            return "all rows"
        return f"{self.rows_checked} of {self.rows} rows"


def error_bound(dtype: torch.dtype, *, tf32: bool = False) -> float:
    """Return the bound on |error| / (|A||B|) that a product in ``dtype`` must keep."""
    roundoff = torch.finfo(dtype).eps / 2
    accumulator = min(roundoff, 2.0**-24)
    return 4 * (_TF32_ROUNDOFF if tf32 else roundoff) + 8 * accumulator


def _sample(indptr: NDArray[np.int64], budget: float, seed: int) -> NDArray[np.int64]:
    """Return sorted rows with about ``budget`` entries in all: the longest and random others."""
    lengths = np.diff(indptr)
    order = np.random.default_rng(seed).permutation(lengths.size)
    longest = int(np.argmax(lengths))
    order = np.concatenate([[longest], order[order != longest]])
    spent = np.cumsum(lengths[order] + 1)  # an empty row costs a little as well
    return np.sort(order[: max(int(np.searchsorted(spent, budget)), 1)])


def _extremum(A: Any, B: Floats, largest: bool) -> tuple[Floats, Floats]:
    """Return max (or min) over each row's products, and the largest |product|; 0 if none."""
    result, scale = (np.zeros((A.shape[0], B.shape[1])) for _ in range(2))
    filled = np.flatnonzero(np.diff(A.indptr))
    if filled.size:
        products = A.data[:, None] * B[A.indices]
        starts = A.indptr[:-1][filled]
        result[filled] = (np.maximum if largest else np.minimum).reduceat(products, starts)
        scale[filled] = np.maximum.reduceat(np.abs(products), starts)
    return result, scale


def _reference(A: Any, B: Floats, reduce: str) -> tuple[Floats, Floats]:
    if reduce in ("max", "min"):
        return _extremum(A, B, reduce == "max")
    result, scale = A @ B, abs(A) @ np.abs(B)
    if reduce == "mean":
        lengths = np.maximum(np.diff(A.indptr), 1)[:, None]
        result, scale = result / lengths, scale / lengths
    return result, scale


def _worst_ratio(
    product: Floats, reference: Floats, scale: Floats, dtype: torch.dtype, bound: float
) -> float:
    """Return the largest |product - reference| / allowed; infinite for a wrong Inf or NaN."""
    limits = torch.finfo(dtype)
    with np.errstate(all="ignore"):
        # Results under the type's smallest normal number lose bits: one such step is allowed.
        allowed = bound * scale + limits.smallest_normal * limits.eps
        ratio = np.abs(product - reference) / allowed
        same = (product == reference) | (np.isnan(product) & np.isnan(reference))
        overflow = np.isinf(product) & (np.abs(reference) + allowed >= limits.max)
        overflow &= np.sign(product) == np.sign(reference)
    ratio = np.where(same | overflow, 0.0, ratio)
    ratio[np.isnan(ratio)] = np.inf
    return float(ratio.max(initial=0.0))


def check_product(
    csr: CSR,
    B: Tensor,
    C: Tensor,
    *,
    reduce: str = "sum",
    tf32: bool = False,
    seed: int = 0,
    limit: int | None = None,
) -> Verdict:
    """Compare C with A·B in float64.

    Parameters
    ----------
    csr : CSR
        A, with the values that were multiplied (already rounded to the product's type).
    B : Tensor [K, N]
        On any device.
    C : Tensor [M, N]
        The product to judge.
    reduce : {"sum", "mean", "max", "min"}
    tf32 : bool
        Whether float32 products may have run as TF32.
    seed : int
        Of the sample of rows.
    limit : int, optional
        Check a sample of the rows when nnz · N is beyond this.

    Returns
    -------
    Verdict
    """
    from scipy.sparse import csr_array

    rows, n = csr.shape[0], B.shape[1]
    if limit is None:
        limit = _SAMPLE_LIMIT_EXTREMUM if reduce in ("max", "min") else SAMPLE_LIMIT
    bound = error_bound(B.dtype, tf32=tf32)
    values = np.ones(csr.nnz) if csr.values is None else csr.values.detach().cpu().double().numpy()
    indptr = csr.indptr.cpu().numpy()
    A = csr_array((values, csr.indices.cpu().numpy(), indptr), shape=csr.shape)
    rows_checked = rows
    if csr.nnz * n > limit:
        chosen = _sample(indptr, limit / n, seed)
        rows_checked = chosen.size
        A = csr_array(A[chosen])
        # Only the rows of B that the sample needs, so that memory follows the sample.
        used, A.indices = np.unique(A.indices, return_inverse=True)
        A = csr_array((A.data, A.indices, A.indptr), shape=(rows_checked, used.size))
        B = B.index_select(0, torch.from_numpy(used).to(B.device, torch.int64))
        C = C.index_select(0, torch.from_numpy(chosen).to(C.device))
    B, C = B.detach().cpu(), C.detach().cpu()
    tallest = max(A.shape[0], A.shape[1], A.nnz if reduce in ("max", "min") else 0, 1)
    width = max(_BLOCK_BYTES // (8 * tallest), 1)
    worst = 0.0
    for start in range(0, n, width):
        block = B[:, start : start + width].double().numpy()
        result, scale = _reference(A, block, reduce)
        got = C[:, start : start + width].double().numpy()
        worst = max(worst, _worst_ratio(got, result, scale, B.dtype, bound))
    return Verdict(worst, rows_checked, rows)
