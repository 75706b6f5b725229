"""The canonical matrix that every later stage reads: CSR, sorted, without duplicates.

``indptr`` is int64 [M+1], ``indices`` int32 [nnz] strictly increasing inside each row, ``values``
None for a pattern (every stored entry counts as 1) or a float tensor [nnz]. All on one device.
``entry_map`` gives the position of the caller's k-th stored entry (int64 [input entries]); None
means that the input was already canonical: entry k of the caller is entry k here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.streams import capturing, settle
from sparsetile.intake.pieces import row_pieces

__all__ = [
    "COMPLEX", "CSR", "FP8", "FP8_RESULTS", "PRODUCT_DTYPES", "VALUE_DTYPES", "offsets", "owners",
    "result_dtype",
]  # fmt: skip

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Most entries that one sort by columns takes.
SORTED_AT_ONCE = 2**24
# Most entries that are counted or numbered at once: torch's buffers have 8 bytes for each.
NUMBERED_AT_ONCE = 2**28
# FP8 is for products only: A's values come in a wider type, and C has one.
FP8 = torch.float8_e4m3fn
FP8_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
PRODUCT_DTYPES = (*VALUE_DTYPES, FP8)
# Complex type -> that of its parts, in which it is multiplied.
COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the default type of C: B's own, bfloat16 for FP8."""
    return FP8_RESULTS[0] if dtype is FP8 else dtype


def offsets(counts: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Counts [n] -> first of each, and their sum: [n + 1]."""
    found = torch.zeros(counts.numel() + 1, dtype=dtype, device=counts.device)
    torch.cumsum(counts, 0, out=found[1:])
    return found


def owners(counts: Tensor, total: int | None = None, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return 0 ``counts[0]`` times, then 1, and so on; no wait if ``total`` is their sum."""
    numbers = torch.arange(counts.numel(), dtype=dtype, device=counts.device)
    return torch.repeat_interleave(numbers, counts, output_size=total)


def _plain_mode() -> bool:
    """Whether tensors made now may be used by any later call."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack()
    )


class _SumDuplicates(torch.autograd.Function):
    """Sum of the entries at each place. torch differentiates segment_reduce only once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(wide: Tensor, entry_map: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
        if not lengths.numel():  # segment_reduce rejects an empty list
            return wide.new_empty(0)
        # Lengths are right, and checking them would wait for the GPU.
        return torch.segment_reduce(wide[order], "sum", lengths=lengths, unsafe=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _Spread.apply(grad, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return _SumDuplicates.apply(tangent, *ctx.saved_tensors)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    """The gradient of ``_SumDuplicates``: each entry takes the gradient of its place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(summed: Tensor, entry_map: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
        return summed[entry_map]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _SumDuplicates.apply(grad, *ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return _Spread.apply(tangent, *ctx.saved_tensors)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix in canonical compressed-row form: sorted, without duplicates, on one device.

    Attributes
    ----------
    indptr : Tensor of int64 [M + 1]
        Start of each row in ``indices``.
    indices : Tensor of int32 [nnz]
        Columns, strictly increasing inside each row.
    values : Tensor [nnz] or None
        One value per entry; None for a pattern, whose entries all count as 1.
    shape : tuple of int
        (M, K).
    entry_map : Tensor of int64 [input entries] or None
        Position of the caller's k-th entry; None if it is always k.
    checked : bool
        Whether this is known to hold. A matrix that you made is checked at its first use.

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = st.CSR(
    ...     indptr=torch.tensor([0, 2, 3]),
    ...     indices=torch.tensor([0, 2, 2], dtype=torch.int32),
    ...     values=torch.tensor([1.0, 2.0, 3.0]),
    ...     shape=(2, 3),
    ... )
    >>> A.nnz, A.row_lengths().tolist()
    (3, [2, 1])
    >>> st.plan(A, n=1) @ torch.ones(3, 1)
    tensor([[3.],
            [3.]])
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor | None
    shape: tuple[int, int]
    entry_map: Tensor | None = None
    checked: bool = field(default=False, repr=False)

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.indptr.device

    def row_sums(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Sum one value per entry over each row, bitwise reproducibly. Differentiable.

        ``rows`` are those of :meth:`row_ids`, if they are known.
        """
        rows = self.row_ids() if rows is None else rows
        if values.device.type == "cpu" and values.dtype.itemsize > 2:  # in order, the same bits
            return values.new_zeros(self.shape[0]).index_add(0, rows, values)
        alike = torch.arange(rows.numel(), device=rows.device)
        return _SumDuplicates.apply(values, rows, alike, self.row_lengths())  # type: ignore[no-any-return]

    def row_lengths(self) -> Tensor:
        """Stored entries per row, int64 [M]."""
        return self.indptr[1:] - self.indptr[:-1]

    def row_ids(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Row of each stored entry, [nnz]."""
        if self.nnz <= NUMBERED_AT_ONCE:
            return owners(self.row_lengths(), self.nnz, dtype)
        rows = torch.empty(self.nnz, dtype=dtype, device=self.device)
        lengths = self.row_lengths()
        for piece in row_pieces(self.indptr, NUMBERED_AT_ONCE):
            found = owners(lengths[piece.rows], piece.end - piece.begin, dtype)
            rows[piece.entries] = found.add_(piece.first_row)
        return rows

    def column_lengths(self) -> Tensor:
        """Stored entries per column, int64 [K]."""
        counts = torch.zeros(self.shape[1], dtype=torch.int64, device=self.device)
        for some in self.indices.split(NUMBERED_AT_ONCE):
            counts += torch.bincount(some, minlength=self.shape[1])
        return counts

    def with_values(self, values: Tensor | None) -> CSR:
        """Return the same pattern with other values (canonical order)."""
        return replace(self, values=values)

    def to(self, device: torch.device | str) -> CSR:
        """Return the matrix on ``device``; itself when it is already there."""
        device = torch.device(device)
        if device == self.device:
            return self
        return CSR(
            self.indptr.to(device),
            self.indices.to(device),
            None if self.values is None else self.values.to(device),
            self.shape,
            None if self.entry_map is None else self.entry_map.to(device),
            self.checked,
        )

    def duplicates(self) -> tuple[Tensor, Tensor]:
        """Return the caller's entries by canonical entry, and the number of each.

        Kept after the first call, unless a capture, a tracer or a mode is active: their tensors
        cannot be reused.
        """
        kept: tuple[Tensor, Tensor] | None = self.__dict__.get("_kept_duplicates")
        if kept is not None:
            return kept
        assert self.entry_map is not None
        by_entry, order = torch.sort(self.entry_map, stable=True)
        entries = torch.arange(self.nnz, device=self.device)
        ends = torch.searchsorted(by_entry, entries, right=True)
        made = order, torch.diff(ends, prepend=ends.new_zeros(1))
        if _plain_mode() and not capturing(self.device):
            settle(self.device)
            # Another thread may have been first: keep its tensors, which may be in use.
            made = self.__dict__.setdefault("_kept_duplicates", made)
        return made

    @property
    def has_duplicates_kept(self) -> bool:
        """Whether :meth:`duplicates` has kept its result."""
        return "_kept_duplicates" in self.__dict__

    def order_tensors(self) -> list[Tensor | None]:
        """Tensors that :meth:`canonical_values` reads beside the values, if they exist."""
        return [self.entry_map, *self.__dict__.get("_kept_duplicates", ())]

    def canonical_values(self, entry_values: Tensor) -> Tensor:
        """Convert values from the caller's entry order to canonical order and sum duplicates.

        Differentiable. ``entry_values`` has one element per entry of the caller's input.
        """
        if self.entry_map is None:
            return entry_values
        if self.entry_map.numel() == self.nnz:  # a permutation: a gather is exact and cheap
            inverse = torch.empty_like(self.entry_map)
            inverse[self.entry_map] = torch.arange(self.nnz, device=self.device)
            return entry_values[inverse]
        # Duplicates are added in the caller's order, segment by segment: index_add's order changes
        # from run to run on a GPU.
        if entry_values.is_complex():  # pairs; values of a sparse tensor are a view without them
            pairs = torch.view_as_real(entry_values.clone())
            return torch.view_as_complex(self.canonical_values(pairs))
        wide = entry_values.float() if entry_values.dtype.itemsize < 4 else entry_values
        order, lengths = self.duplicates()
        summed: Tensor = _SumDuplicates.apply(wide, self.entry_map, order, lengths)
        return summed.to(entry_values.dtype)

    def select_rows(self, rows: Tensor) -> tuple[CSR, Tensor]:
        """Return a matrix of the given rows, each at most once, and each entry's index in this
        matrix.
        """
        lengths = self.row_lengths()[rows]
        indptr = offsets(lengths)
        total = int(indptr[-1])
        first = self.indptr[:-1][rows] - indptr[:-1]
        entries = torch.arange(total, device=self.device) + torch.repeat_interleave(
            first, lengths, output_size=total
        )
        values = None if self.values is None else self.values[entries]
        shape = (rows.numel(), self.shape[1])
        return CSR(indptr, self.indices[entries], values, shape, checked=self.checked), entries

    def transpose_order(self) -> Tensor:
        """Stable order of the entries by (column, row), int64 [nnz]: values of the transpose.

        More than ``SORTED_AT_ONCE`` entries are sorted in parts, which are then merged column by
        column: a sort of all of them needs about 32 bytes of buffers per entry (by count).
        """
        total = self.nnz
        if total <= SORTED_AT_ONCE:
            return torch.argsort(self.indices, stable=True)
        order = torch.empty(total, dtype=torch.int64, device=self.device)
        ends = self.column_lengths().cumsum_(0)
        place = torch.cat([ends.new_zeros(1), ends[:-1]])  # of a column's next entry
        for begin in range(0, total, SORTED_AT_ONCE):
            columns, entries = torch.sort(self.indices[begin : begin + SORTED_AT_ONCE], stable=True)
            counts = torch.bincount(columns, minlength=self.shape[1])
            shift = place - (counts.cumsum(0) - counts)
            to = torch.arange(columns.numel(), device=self.device).add_(shift[columns])
            order[to] = entries.add_(begin)
            place += counts
        return order

    def transposed(self, order: Tensor | None = None) -> CSR:
        """Return Aᵀ in canonical form; ``order`` is :meth:`transpose_order` when known."""
        order = self.transpose_order() if order is None else order
        return CSR(
            offsets(self.column_lengths()),
            self.row_ids(torch.int32)[order],
            None if self.values is None else self.values[order],
            (self.shape[1], self.shape[0]),
            checked=self.checked,
        )
