"""Compares a product with the float64 reference, element by element, within the error bound.

A non-finite element is correct only if CSR arithmetic gives the same: NaN where the reference is
NaN, an infinity where the reference, within the bound, exceeds C's range on that side.

Small products are checked whole. In large ones a sample of rows is checked: the longest, the last,
random ones, and rows with non-finite elements. If B is wide too, a sample of columns is checked:
some from every tile of columns, the last ones, and columns with non-finite elements. All of it runs
on the product's device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsetile.check.bound import error_bound
from sparsetile.check.reference import dot_products, reference, row_chunks
from sparsetile.intake.csr import CSR

__all__ = ["CHECKED_ELEMENTS", "INFINITE", "Verdict", "check_product", "check_sddmm"]

# Gathered elements of B up to which all rows are checked.
CHECKED_ELEMENTS = 2**25
# Used as an infinite error: JSON has no infinity.
INFINITE = 1e30
_SAMPLE_ROWS = 4096
# Rows that are always checked, within this many gathered elements.
_FORCED_ROWS = 64
_FORCED_ELEMENTS = 2**27
# The sample on a CPU is smaller, because it is slower than a GPU.
_HOST_SHARE = 8
# Up to this many columns all are checked; of more, one from each of this many equal parts.
_ALL_COLUMNS = 1024
_SAMPLE_COLUMNS = 256


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check."""

    # Largest error in units of its bound: at most 1 if the product is correct, 1e30 if the shape is
    # wrong or an element is not finite and should be.
    worst: float
    max_abs: float  # largest error
    rows_checked: int
    rows: int
    columns_checked: int | None = None  # None if all columns were checked
    why: str = ""  # what is wrong if ``worst`` is 1e30

    @property
    def ok(self) -> bool:
        return self.worst <= 1.0

    @property
    def full(self) -> bool:
        """Whether every element was checked."""
        return not self.why and self.columns_checked is None and self.rows_checked == self.rows

    @property
    def coverage(self) -> str:
        """``all rows`` or how many of them, and how many columns if not all."""
        rows = f"{self.rows_checked} of {self.rows} rows"
        text = "all rows" if self.rows_checked == self.rows else rows
        return text if self.columns_checked is None else f"{text}, {self.columns_checked} columns"

    def as_record(self) -> dict[str, Any]:
        """Return the ``error`` object of a benchmark record."""
        sampled = {} if self.columns_checked is None else {"columns_checked": self.columns_checked}
        return {
            "worst": self.worst, "max_abs": self.max_abs, "rows_checked": self.rows_checked,
            **sampled, "full": self.full, **({"why": self.why} if self.why else {}),
        }  # fmt: skip


def check_product(
    csr: CSR, B: Tensor, C: Tensor, *, reduce: str = "sum", tf32: bool = False,
    out_dtype: torch.dtype | None = None, worst_case: bool = False,
    limit: int | None = CHECKED_ELEMENTS, seed: int = 0,
) -> Verdict:  # fmt: skip
    """Compare C with the product of A, its values rounded to B's type, and B in float64.

    ``tf32``: float32 operands may have been rounded to TF32. ``out_dtype``: the type to which
    results were rounded, C's own by default. ``worst_case``: use the bound that holds for every
    input. A sample, by ``seed``, is checked if (entries + rows) · N exceeds ``limit``; None checks
    everything.
    """
    csr, C = csr.to(B.device), C.detach().to(B.device)
    expected = (csr.shape[0], B.shape[1])
    if tuple(C.shape) != expected:
        return _failed(csr, f"shape {tuple(C.shape)} instead of {expected}")
    strange = _not_finite(C)
    suspects = _suspects(strange, C.device)
    columns = _column_sample(csr, strange, suspects, B.shape[1], limit, seed)
    width = B.shape[1] if columns is None else columns.numel()
    rows = _row_sample(csr, suspects, width, limit, seed)
    if columns is not None:
        C = C[:, columns]
    extremum = reduce in ("max", "min")
    lengths, worst, largest = csr.row_lengths(), 0.0, 0.0
    for part in row_chunks(csr, rows, width):
        result, magnitude = reference(csr, B, reduce, part, columns)
        bound = error_bound(
            result, magnitude, 1 if extremum else lengths[part].unsqueeze(1),
            dtype=B.dtype, out_dtype=out_dtype or C.dtype, tf32=tf32, worst_case=worst_case,
        )  # fmt: skip
        ratio, absolute = _compare(C[part], result, bound, out_dtype or C.dtype)
        worst, largest = max(worst, ratio), max(largest, absolute)
    if worst >= INFINITE:
        return _failed(csr, "elements that are not finite")
    checked = None if columns is None else width
    return Verdict(worst, largest, rows.numel(), csr.shape[0], checked)


def check_sddmm(
    csr: CSR, G: Tensor, B: Tensor, found: Tensor, *, tf32: bool = False, worst_case: bool = False,
    limit: int | None = CHECKED_ELEMENTS, seed: int = 0,
) -> Verdict:  # fmt: skip
    """Compare one number per entry of A with the dot products G[i]·B[j] in float64."""
    csr, found = csr.to(B.device), found.detach().to(B.device)
    if tuple(found.shape) != (csr.nnz,):
        return _failed(csr, f"shape {tuple(found.shape)} instead of {(csr.nnz,)}")
    strange = _not_finite(found)
    suspects = torch.zeros(0, dtype=torch.int64, device=B.device)
    if strange is not None:
        suspects = strange.nonzero().flatten()[:_FORCED_ROWS]
        suspects = torch.searchsorted(csr.indptr, suspects, right=True) - 1
    rows = _row_sample(csr, suspects, B.shape[1], limit, seed)
    entries, result, magnitude = dot_products(csr, G, B, rows)
    bound = error_bound(
        result, magnitude, B.shape[1],
        dtype=B.dtype, out_dtype=found.dtype, tf32=tf32, worst_case=worst_case,
    )  # fmt: skip
    worst, largest = _compare(found[entries], result, bound, found.dtype)
    if worst >= INFINITE:
        return _failed(csr, "elements that are not finite")
    return Verdict(worst, largest, rows.numel(), csr.shape[0])


def _failed(csr: CSR, why: str) -> Verdict:
    return Verdict(INFINITE, INFINITE, 0, csr.shape[0], why=why)


def _compare(
    found: Tensor, result: Tensor, bound: Tensor, stored: torch.dtype
) -> tuple[float, float]:
    """Largest error over its bound, and largest error; ``INFINITE`` for a wrong Inf or NaN."""
    if found.numel() == 0:
        return 0.0, 0.0
    found, most = found.double(), torch.finfo(stored).max
    finite = torch.isfinite(found) & torch.isfinite(result)
    beyond = found.isinf() & (result * found.sign() + bound >= most)
    right = beyond | (found.isnan() & result.isnan())
    if not bool((finite | right).all()):
        return INFINITE, INFINITE
    difference = torch.where(finite, (found - result).abs(), 0.0)
    ratio = torch.where(finite, difference / bound, 0.0)
    return float(ratio.max()), float(difference.max())


def _not_finite(C: Tensor) -> Tensor | None:
    """Where C is not finite; None if it is finite everywhere."""
    if C.numel() == 0:
        return None
    # One pass that allocates nothing; NaN propagates.
    low, high = torch.aminmax(C)
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return None
    return ~torch.isfinite(C)


def _suspects(strange: Tensor | None, device: torch.device) -> Tensor:
    """A few of the rows with non-finite results; each is checked."""
    if strange is None:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return strange.any(1).nonzero().flatten()[:_FORCED_ROWS]


def _column_sample(
    csr: CSR, strange: Tensor | None, suspects: Tensor, n: int, limit: int | None, seed: int
) -> Tensor | None:
    """Columns of B and C to check; None for all of them."""
    if n <= _ALL_COLUMNS or limit is None or (csr.nnz + csr.shape[0]) * n <= limit:
        return None
    generator = torch.Generator(device=csr.device).manual_seed(seed + n)
    within = torch.rand(
        _SAMPLE_COLUMNS, device=csr.device, generator=generator, dtype=torch.float64
    )
    part = torch.arange(_SAMPLE_COLUMNS, device=csr.device)
    spread = ((part + within) * (n / _SAMPLE_COLUMNS)).long().clamp(max=n - 1)
    found = [spread, torch.arange(n - 8, n, device=csr.device)]
    if strange is not None:
        found.append(strange[suspects].to(torch.uint8).argmax(1))  # one of each suspect's own
    return torch.cat(found).unique()


def _row_sample(csr: CSR, suspects: Tensor, width: int, limit: int | None, seed: int) -> Tensor:
    """Rows to check: all if that is cheap, else the longest, the last and random ones."""
    rows, device = csr.shape[0], csr.device
    if limit is None or (csr.nnz + rows) * max(width, 1) <= limit:
        return torch.arange(rows, device=device)
    lengths, suspects = csr.row_lengths(), suspects.to(device)
    generator = torch.Generator(device=device).manual_seed(seed + rows)
    picked = torch.randint(rows, (_SAMPLE_ROWS,), device=device, generator=generator)
    # A handful of the longest rows: they are the ones that schedules split and join.
    longest = torch.topk(lengths, min(8, rows)).indices
    last = torch.arange(rows - 1, max(-1, rows - 1 - _FORCED_ROWS), -1, device=device)
    must = torch.cat([suspects[:1], longest[:1], last[:1], suspects, longest, last])
    share = _HOST_SHARE if device.type == "cpu" else 1
    work = (lengths + 1) * max(width, 1)
    must = _within(must, work, _FORCED_ELEMENTS // share)
    picked = _within(picked, work, limit // share)
    return torch.cat([must, picked]).unique()


def _within(rows: Tensor, work: Tensor, budget: int) -> Tensor:
    """Return the first of the rows, three at least, whose work stays in the budget."""
    count = int((torch.cumsum(work[rows], 0) <= budget).sum())
    return rows[: max(count, min(3, rows.numel()))]
