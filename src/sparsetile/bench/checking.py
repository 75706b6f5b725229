"""Is the product right? Compared with float64 before anything is timed.

Per element |C - reference| must stay within c·u·(|A||B|): for FP32 accumulation c = 4 + 4·√(row
length), a bound that rounding errors exceed with negligible probability and that a dropped or
doubled entry always breaks; plus the rounding of the inputs to TF32 where Tensor Cores take
float32, the bits that they keep of sums of FP8, and the rounding of C to its own type. In FP8 the
reference is the product of the operands as they were rounded. Large products are checked on a
sample of rows: the longest, the last, random ones, and rows with elements that are not finite.
Those are right only where the numbers exceed C's type (a value of A beyond 65504 in float16, say).
Where B is wide too, a sample of its columns is checked: some from everywhere, so that every tile of
columns is seen, the last, and those that are not finite. All of it runs on the product's device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.operands import Operands
from sparsetile.intake.csr import FP8

__all__ = ["check_product"]

_UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_TF32_UNIT = 2.0**-11
# Of sums of FP8 products Tensor Cores keep some 14 bits; the bound of the contract tests.
_FP8_UNIT = 2.0**-10
# Smallest positive normal: below it rounding is absolute, not relative.
_TINY = {torch.float16: 2.0**-14}
# Gathered elements of the reference held at once (128 MiB in float64) and in all.
_CHUNK_ELEMENTS = 2**24
_CHECKED_ELEMENTS = 2**25
_SAMPLE_ROWS = 4096
# Rows that are checked whatever they cost, within this many gathered elements.
_FORCED_ELEMENTS = 2**27
# The host is a hundred times slower than a GPU at this.
_HOST_SHARE = 8
_FORCED_ROWS = 64
# Up to so many columns all are checked; of more, one of each of so many equal parts.
_ALL_COLUMNS = 1024
_SAMPLE_COLUMNS = 256
# Stands for an error without measure: JSON has no infinity.
_INFINITE = 1e30


def check_product(operands: Operands, result: Tensor, *, uses_tf32: bool) -> dict[str, Any]:
    """Return the record's ``error``: largest error over bound, largest error, rows checked.

    ``worst`` at most 1 means right. A result of the wrong shape, or with an element that is not
    finite and should be, gets ``worst`` = 1e30, which JSON can hold.
    """
    expected = (
        (operands.csr.nnz,)
        if operands.op == "sddmm"
        else (operands.csr.shape[0], operands.B.shape[1])
    )
    if tuple(result.shape) != expected:
        return _failed(f"shape {tuple(result.shape)} instead of {expected}")
    strange = _strange(result)
    suspects = _suspects(operands, strange)
    columns = _column_sample(operands, strange, suspects)
    if columns is not None:
        operands = replace(operands, B=_bits(operands.B)[:, columns].view(operands.dtype))
        result = result[:, columns]
    rows = _sample(operands, suspects)
    worst = largest = 0.0
    for chunk in _chunks(operands, rows):
        ratio, absolute = _compare(operands, result, chunk, uses_tf32)
        worst, largest = max(worst, ratio), max(largest, absolute)
    if worst >= _INFINITE:
        return _failed("elements that are not finite")
    return {
        "worst": worst,
        "max_abs": largest,
        "rows_checked": int(rows.numel()),
        **({} if columns is None else {"columns_checked": int(columns.numel())}),
        "full": columns is None and int(rows.numel()) == operands.csr.shape[0],
    }


def _bits(dense: Tensor) -> Tensor:
    """FP8 as bytes: indexing it is not there on every device."""
    return dense.view(torch.uint8) if dense.dtype is FP8 else dense


def _strange(result: Tensor) -> Tensor | None:
    """Where the result is not finite; None where it is everywhere."""
    if result.numel() == 0:
        return None
    # One pass that allocates nothing; NaN comes through as itself.
    low, high = torch.aminmax(result)
    if math.isfinite(float(low)) and math.isfinite(float(high)):
        return None
    return ~torch.isfinite(result)


def _column_sample(operands: Operands, strange: Tensor | None, suspects: Tensor) -> Tensor | None:
    """Columns of B and C to check; None for all of them."""
    csr, n = operands.csr, operands.B.shape[1]
    small = (csr.nnz + csr.shape[0]) * n <= _CHECKED_ELEMENTS
    if n <= _ALL_COLUMNS or small or operands.op == "sddmm":
        return None
    device = csr.device
    generator = torch.Generator(device=device).manual_seed(n)
    within = torch.rand(_SAMPLE_COLUMNS, device=device, generator=generator, dtype=torch.float64)
    part = torch.arange(_SAMPLE_COLUMNS, device=device)
    spread = ((part + within) * (n / _SAMPLE_COLUMNS)).long().clamp(max=n - 1)
    found = [spread, torch.arange(n - 8, n, device=device)]
    if strange is not None:
        found.append(strange[suspects].to(torch.uint8).argmax(1))  # one of each suspect's own
    return torch.cat(found).unique()


def _suspects(operands: Operands, strange: Tensor | None) -> Tensor:
    """Rows of A whose results are not all finite: a few of them, each to be looked at."""
    if strange is None:
        return torch.zeros(0, dtype=torch.int64, device=operands.device)
    if operands.op == "sddmm":
        entries = strange.nonzero().flatten()[:_FORCED_ROWS]
        return torch.searchsorted(operands.csr.indptr, entries, right=True) - 1
    return strange.any(1).nonzero().flatten()[:_FORCED_ROWS]


def _failed(why: str) -> dict[str, Any]:
    return {"worst": _INFINITE, "max_abs": _INFINITE, "rows_checked": 0, "full": False, "why": why}


def _sample(operands: Operands, suspects: Tensor) -> Tensor:
    """Rows to check: all where that is cheap, else the longest, the last and random ones."""
    csr = operands.csr
    rows = csr.shape[0]
    if (csr.nnz + rows) * max(operands.B.shape[1], 1) <= _CHECKED_ELEMENTS:
        return torch.arange(rows, device=csr.device)
    lengths = csr.row_lengths()
    generator = torch.Generator(device=csr.device).manual_seed(rows)
    picked = torch.randint(rows, (_SAMPLE_ROWS,), device=csr.device, generator=generator)
    # A handful of the longest rows: they are the ones that balancing cuts and joins.
    longest = torch.topk(lengths, min(8, rows)).indices
    last = torch.arange(rows - 1, max(-1, rows - 1 - _FORCED_ROWS), -1, device=csr.device)
    must = torch.cat([suspects[:1], longest[:1], last[:1], suspects, longest, last])
    share = _HOST_SHARE if csr.device.type == "cpu" else 1
    must = _within(operands, must, lengths, _FORCED_ELEMENTS // share)
    picked = _within(operands, picked, lengths, _CHECKED_ELEMENTS // share)
    return torch.cat([must, picked]).unique()


def _within(operands: Operands, rows: Tensor, lengths: Tensor, budget: int) -> Tensor:
    """Return the first of the rows, one at least, whose gathered elements stay in the budget."""
    work = (lengths[rows] + 1) * max(operands.B.shape[1], 1)
    count = int((torch.cumsum(work, 0) <= budget).sum())
    return rows[: max(count, min(3, rows.numel()))]


def _chunks(operands: Operands, rows: Tensor) -> list[Tensor]:
    """Split the rows so that a chunk's gathered elements stay within the memory bound."""
    if rows.numel() == 0:
        return []
    work = (operands.csr.row_lengths()[rows] + 1) * max(operands.B.shape[1], 1)
    part = (torch.cumsum(work, 0) - 1) // _CHUNK_ELEMENTS
    sizes = torch.bincount(part.cpu())
    return list(torch.split(rows, [int(size) for size in sizes if size]))


def _entries(operands: Operands, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the rows' entries in A, and for each the local number of its row."""
    csr = operands.csr
    lengths = csr.row_lengths()[rows]
    total = int(lengths.sum())
    local = torch.repeat_interleave(
        torch.arange(rows.numel(), device=csr.device), lengths, output_size=total
    )
    starts = csr.indptr[rows] - (torch.cumsum(lengths, 0) - lengths)
    return starts[local] + torch.arange(total, device=csr.device), local


def _compare(
    operands: Operands, result: Tensor, rows: Tensor, uses_tf32: bool
) -> tuple[float, float]:
    csr, dtype, stored = operands.csr, operands.dtype, operands.result_dtype
    entries, local = _entries(operands, rows)
    columns = csr.indices[entries].to(torch.int64)
    if operands.op == "sddmm":
        if entries.numel() == 0 or operands.G is None:
            return 0.0, 0.0
        left, right = operands.G[rows[local]].double(), operands.B[columns].double()
        reference, size = (left * right).sum(1), (left * right).abs().sum(1)
        found, lengths = result[entries], torch.full_like(reference, float(operands.B.shape[1]))
    else:
        found = result[rows]
        gathered = _bits(operands.B)[columns].view(dtype).double()
        if csr.values is not None:
            gathered *= csr.values[entries].to(dtype).double().unsqueeze(1)
        reference, size = _reduced(gathered, local, rows.numel(), operands.reduce)
        lengths = csr.row_lengths()[rows].double().unsqueeze(1)
    accumulate = _UNIT[torch.float64 if dtype is torch.float64 else torch.float32]
    bound = (4 + 4 * lengths.sqrt()) * accumulate * size
    if uses_tf32:
        bound = bound + 2 * _TF32_UNIT * size
    if dtype is FP8:
        bound = bound + _FP8_UNIT * size
    bound = bound + _UNIT[stored] * (reference.abs() + _TINY.get(stored, 2.0**-126))
    if found.numel() == 0:
        return 0.0, 0.0
    return _ratio(found.double(), reference, bound, torch.finfo(stored).max)


def _ratio(found: Tensor, reference: Tensor, bound: Tensor, most: float) -> tuple[float, float]:
    """Largest error over its bound, and largest error. ``most`` is the largest number of C's type.

    An infinity is right where the sum, give or take its bound, exceeds ``most`` on that side; a
    NaN where the reference is one, which takes infinities of both signs among the inputs.
    """
    finite = torch.isfinite(found) & torch.isfinite(reference)
    beyond = found.isinf() & (reference * found.sign() + bound >= most)
    right = beyond | (found.isnan() & reference.isnan())
    if not bool((finite | right).all()):
        return _INFINITE, _INFINITE
    difference = torch.where(finite, (found - reference).abs(), 0.0)
    ratio = torch.where(finite, difference / bound, 0.0)
    return float(ratio.max()), float(difference.max())


def _reduced(gathered: Tensor, local: Tensor, rows: int, reduce: str) -> tuple[Tensor, Tensor]:
    """Reduce the gathered rows; return the result and the same of absolute values."""
    shape = (rows, gathered.shape[1])
    size = gathered.new_zeros(shape).index_add_(0, local, gathered.abs())
    if reduce in ("max", "min"):
        index = local.unsqueeze(1).expand_as(gathered)
        out = gathered.new_zeros(shape).scatter_reduce_(
            0, index, gathered, f"a{reduce}", include_self=False
        )
        return out, size
    out = gathered.new_zeros(shape).index_add_(0, local, gathered)
    if reduce == "mean":
        count = torch.bincount(local, minlength=rows).clamp(min=1).unsqueeze(1)
        return out / count, size / count
    return out, size
