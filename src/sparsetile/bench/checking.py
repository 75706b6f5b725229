"""Is the product right? Compared with float64 before anything is timed.

Per element |C - reference| must stay within c·u·(|A||B|): for FP32 accumulation c = 4 + 4·√(row
length), a bound that rounding errors exceed with negligible probability and that a dropped or
doubled entry always breaks; plus the rounding of the inputs to TF32 where Tensor Cores take
float32, and the rounding of C to its own type. Large products are checked on a sample of rows:
the longest, the last, and random ones; every element of C must be finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.baselines import Operands

__all__ = ["check_product"]

_UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_TF32_UNIT = 2.0**-11
# Smallest positive normal: below it rounding is absolute, not relative.
_TINY = {torch.float16: 2.0**-14}
# Gathered elements of the reference held at once (128 MiB in float64) and in all.
_CHUNK_ELEMENTS = 2**24
_CHECKED_ELEMENTS = 2**25
_SAMPLE_ROWS = 4096


def check_product(operands: Operands, result: Tensor, *, uses_tf32: bool) -> dict[str, Any]:
    """Return the record's ``error``: largest error over bound, largest error, rows checked.

    ``worst`` at most 1 means right. A result of the wrong shape or with a non-finite element gets
    ``worst`` = 1e30, which JSON can hold.
    """
    expected = (
        (operands.csr.nnz,)
        if operands.op == "sddmm"
        else (operands.csr.shape[0], operands.B.shape[1])
    )
    if tuple(result.shape) != expected:
        return _failed(f"shape {tuple(result.shape)} instead of {expected}")
    if result.numel() and not bool(torch.isfinite(result).all()):
        return _failed("elements that are not finite")
    rows = _sample(operands)
    worst = largest = 0.0
    for chunk in _chunks(operands, rows):
        ratio, absolute = _compare(operands, result, chunk, uses_tf32)
        worst, largest = max(worst, ratio), max(largest, absolute)
    return {
        "worst": worst,
        "max_abs": largest,
        "rows_checked": int(rows.numel()),
        "full": int(rows.numel()) == operands.csr.shape[0],
    }


def _failed(why: str) -> dict[str, Any]:
    return {"worst": 1e30, "max_abs": 1e30, "rows_checked": 0, "full": False, "why": why}


def _sample(operands: Operands) -> Tensor:
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
    last = torch.arange(max(0, rows - 64), rows, device=csr.device)
    chosen = torch.cat([longest, last, picked]).cpu().unique()
    work = (lengths.cpu()[chosen] + 1) * max(operands.B.shape[1], 1)
    keep = torch.zeros_like(chosen, dtype=torch.bool)
    forced = torch.isin(chosen, torch.cat([longest, last]).cpu())
    # Forced rows first, then as many random ones as the budget allows.
    order = torch.argsort(forced.to(torch.int8), descending=True, stable=True)
    running = torch.cumsum(work[order], 0)
    keep[order] = (running <= _CHECKED_ELEMENTS) | forced[order]
    return chosen[keep].to(csr.device)


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
    csr, dtype = operands.csr, operands.dtype
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
        gathered = operands.B[columns].double()
        if csr.values is not None:
            gathered *= csr.values[entries].to(dtype).double().unsqueeze(1)
        reference, size = _reduced(gathered, local, rows.numel(), operands.reduce)
        lengths = csr.row_lengths()[rows].double().unsqueeze(1)
    accumulate = _UNIT[torch.float64 if dtype is torch.float64 else torch.float32]
    bound = (4 + 4 * lengths.sqrt()) * accumulate * size
    if uses_tf32:
        bound = bound + 2 * _TF32_UNIT * size
    bound = bound + _UNIT[dtype] * reference.abs() + _UNIT[dtype] * _TINY.get(dtype, 2.0**-126)
    difference = (found.double() - reference).abs()
    if difference.numel() == 0:
        return 0.0, 0.0
    return float((difference / bound).max()), float(difference.max())


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
