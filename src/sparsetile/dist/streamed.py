"""Products of a matrix that stays on disk or in the host's memory; B and C are on the GPU.

A is cut into panels of whole rows. A panel is one block of bytes (row pointers, columns, values),
copied ahead to one of two buffers on a stream of its own while the panel before it multiplies from
the other. So a product takes as long as the copies, if those take longer than the products, and A
takes two panels of the GPU's memory. Panels are multiplied as CSR arrays are (launch/direct.py).

    copies    | panel 0 | panel 1 | panel 2 | ...
    products            | panel 0 | panel 1 | ...
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsetile.functional as F
from sparsetile.core.checks import dimension, reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.core.settings import entry_limit
from sparsetile.core.streams import refuse_capture
from sparsetile.dist.folder import Folder, open_folder
from sparsetile.dist.manifest import MANIFEST
from sparsetile.intake import CSR, as_csr
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.intake.pieces import row_pieces
from sparsetile.jit.loader import on_device
from sparsetile.launch.direct import product_into
from sparsetile.plan.devices import usable_device

__all__ = ["PANEL_BYTES", "StreamedPlan", "stream_plan"]

# Bytes of a panel: PCIe 5 copies as many in about 1.2 ms, so that neither the first copy, which
# nothing hides, nor a launch counts.
PANEL_BYTES = 2**26
# Each array begins at a multiple of this.
_ALIGNMENT = 16
_BUFFERS = 2


@dataclass(frozen=True)
class _Layout:
    """Where the arrays of a panel are in its block."""

    first_row: int
    rows: int
    entries: int
    value_bytes: int

    @property
    def _columns(self) -> int:
        return _aligned(8 * (self.rows + 1))

    @property
    def _values(self) -> int:
        return self._columns + _aligned(4 * self.entries)

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return self._values + _aligned(self.value_bytes * self.entries)

    def arrays(self, block: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return views of a block: row pointers, columns, values or None for a pattern."""
        indptr = block[: 8 * (self.rows + 1)].view(torch.int64)
        columns = block[self._columns :][: 4 * self.entries].view(torch.int32)
        if not self.value_bytes:
            return indptr, columns, None
        return indptr, columns, block[self._values :][: self.value_bytes * self.entries].view(dtype)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class _Panels:
    """The panels of a matrix, read from disk or from memory."""

    def __init__(
        self, parts: Sequence[CSR | Callable[[], CSR]], firsts: Sequence[int],
        pointers: Sequence[Tensor] | None, dtype: torch.dtype, weighted: bool, panel_bytes: int,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self._parts = parts
        self._last: tuple[int, CSR | None] = (-1, None)
        size = dtype.itemsize if weighted else 0
        self.layouts: list[_Layout] = []
        self._places: list[tuple[int, slice, slice]] = []
        for number, first in enumerate(firsts):
            indptr = self._part(number).indptr if pointers is None else pointers[number]
            limit = min(max(panel_bytes // (4 + size), 2), entry_limit())
            for piece in row_pieces(indptr, limit):
                rows, entries = piece.end_row - piece.first_row, piece.end - piece.begin
                self.layouts.append(_Layout(first + piece.first_row, rows, entries, size))
                self._places.append((number, piece.rows, piece.entries))

    def _part(self, number: int) -> CSR:
        part = self._parts[number]
        if isinstance(part, CSR):
            return part
        if self._last[0] != number:
            self._last = (-1, None)  # the memory of one part at a time
            self._last = (number, part())
        found = self._last[1]
        assert found is not None
        return found

    def write(self, number: int, block: Tensor) -> None:
        """Write a panel's block."""
        place, rows, entries = self._places[number]
        part, layout = self._part(place), self.layouts[number]
        indptr, columns, values = layout.arrays(block, self.dtype)
        pointers = part.indptr[rows.start : rows.stop + 1]
        torch.sub(pointers, pointers[0], out=indptr)
        columns.copy_(part.indices[entries])
        if values is not None:
            assert part.values is not None
            values.copy_(part.values[entries])


class StreamedPlan:
    """A matrix on disk or in the host's memory, multiplied panel by panel of its rows.

    Made by :func:`stream_plan`.

    Attributes
    ----------
    shape : (M, K)
    nnz : int
        Entries; they may be 2^31 or more.
    dtype, device
        Of B and C.
    panels : int
        Number of panels.
    panel_bytes, bytes : int
        Of the largest panel and of all: what each product copies to the GPU.
    in_memory : bool
        Whether panels are in pinned memory, not read from disk for each product.
    """

    def __init__(
        self, shape: tuple[int, int], panels: _Panels, device: torch.device, in_memory: bool,
        order: Tensor | None = None, transpose: Callable[[], StreamedPlan] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.device, self.dtype = shape, device, panels.dtype
        self.in_memory = in_memory
        sizes = [layout.bytes for layout in panels.layouts]
        self.nnz = sum(layout.entries for layout in panels.layouts)
        self.panels, self.bytes, self.panel_bytes = len(sizes), sum(sizes), max(sizes, default=0)
        self._panels, self._make_transpose = panels, transpose
        self._order = None if order is None else order.to(device)
        self._transposed: StreamedPlan | None = None
        self._lock = threading.RLock()
        cuda = device.type == "cuda"
        self._blocks: list[Tensor] | None = None
        if in_memory:
            self._blocks = [_host_block(size, cuda) for size in sizes]
            for number, block in enumerate(self._blocks):
                panels.write(number, block)
            panels._last = (-1, None)
        self._reader = None if in_memory else ThreadPoolExecutor(1, "sparsetile-panels")
        staged = 0 if in_memory else _BUFFERS
        self._staging = [_host_block(self.panel_bytes, cuda) for _ in range(staged)]
        self._ahead: dict[int, Future[Tensor]] = {}  # panels that are being read
        if cuda:
            with torch.cuda.device(device):
                self._side = torch.cuda.Stream()
                self._buffers = [
                    torch.empty(self.panel_bytes, dtype=torch.uint8, device=device)
                    for _ in range(_BUFFERS)
                ]
                self._arrived = [torch.cuda.Event() for _ in range(_BUFFERS)]
                self._free = [torch.cuda.Event() for _ in range(_BUFFERS)]
                for buffer in self._buffers:
                    buffer.record_stream(self._side)
                torch.cuda.current_stream().synchronize()  # the buffers may be written now

    @property
    def T(self) -> StreamedPlan:
        """The transpose, which gradients multiply by; made at its first use."""
        with self._lock:
            if self._transposed is None:
                if self._make_transpose is None:
                    raise value_error(
                        "stream_plan", "transpose", "a folder of Aᵀ for gradients", None,
                        "Write the parts of Aᵀ with write_folder, and pass transpose=",
                    )  # fmt: skip
                self._transposed = self._make_transpose()
            return self._transposed

    def run(self, B: Tensor, *, reduce: str = "sum") -> Tensor:
        """Return A·B. Sums have a gradient for B, by the transpose.

        Parameters
        ----------
        B : Tensor [K, N]
            Of the plan's type, on its device.
        reduce : {"sum", "mean", "max", "min"}
            How the entries of a row are combined.
        """
        reduce = reduce_name("run", reduce)
        if not isinstance(B, Tensor) or B.dim() != 2 or B.shape[0] != self.shape[1]:
            found = tuple(B.shape) if isinstance(B, Tensor) else type(B).__name__
            raise value_error(
                "run", "B", f"a tensor of shape [{self.shape[1]}, N]", found,
                "Pass one row for each column of A",
            )  # fmt: skip
        if B.dtype is not self.dtype or B.device != self.device:
            raise value_error(
                "run", "B", f"{self.dtype} on {self.device}", f"{B.dtype} on {B.device}",
                "Move it with B.to()",
            )  # fmt: skip
        if not (B.requires_grad and torch.is_grad_enabled()):
            return self._product(B, reduce)
        if reduce != "sum":
            raise value_error(
                "run", "reduce", "'sum' if B requires a gradient", repr(reduce), "Detach B"
            )
        return _Product.apply(B, self)  # type: ignore[no-any-return]

    def __matmul__(self, B: Tensor) -> Tensor:
        return self.run(B)

    def _product(self, B: Tensor, reduce: str) -> Tensor:
        B = B.detach().resolve_neg()
        if self._order is not None:
            B = B[self._order]
        if B.shape[1] > 1 and B.stride(1) != 1:
            B = B.contiguous()
        C = B.new_empty((self.shape[0], B.shape[1]))
        if C.numel():
            with self._lock:
                (self._on_gpu if self.device.type == "cuda" else self._on_host)(B, C, reduce)
        if self._order is None:
            return C
        return torch.empty_like(C).index_copy_(0, self._order, C)

    def _on_host(self, B: Tensor, C: Tensor, reduce: str) -> None:
        blocks = self._read_ahead()
        for number, layout in enumerate(self._panels.layouts):
            arrays = layout.arrays(blocks(number), self.dtype)
            rows = slice(layout.first_row, layout.first_row + layout.rows)
            C[rows] = _host_product(arrays, B, reduce)

    def _on_gpu(self, B: Tensor, C: Tensor, reduce: str) -> None:
        refuse_capture("run", self.device, "A streamed product waits for its copies")
        blocks = self._read_ahead()
        with on_device(self.device.index):
            current = torch.cuda.current_stream(self.device)
            for number, layout in enumerate(self._panels.layouts):
                slot = number % _BUFFERS
                block, buffer = blocks(number), self._buffers[slot]
                with torch.cuda.stream(self._side):
                    # The product before last has read this buffer, and one on another stream too.
                    self._side.wait_event(self._free[slot])
                    buffer[: layout.bytes].copy_(block[: layout.bytes], non_blocking=True)
                    self._arrived[slot].record(self._side)
                current.wait_event(self._arrived[slot])
                arrays = layout.arrays(buffer, self.dtype)
                rows = slice(layout.first_row, layout.first_row + layout.rows)
                if layout.rows:
                    product_into(*arrays, B, C[rows], reduce)
                self._free[slot].record(current)

    def _read_ahead(self) -> Callable[[int], Tensor]:
        """Return what gives the block of each panel in turn; those on disk are read one ahead."""
        if self._blocks is not None:
            return self._blocks.__getitem__
        assert self._reader is not None
        reader, ahead = self._reader, self._ahead
        while ahead:  # of a product that raised
            ahead.popitem()[1].exception()

        def read(number: int) -> Tensor:
            slot = number % _BUFFERS
            if self.device.type == "cuda":
                self._arrived[slot].synchronize()  # the copy before last has read this block
            self._panels.write(number, self._staging[slot])
            return self._staging[slot]

        def block(number: int) -> Tensor:
            found = ahead.pop(number, None)
            made = read(number) if found is None else found.result()
            # The block of the panel after this one is not that of any copy that was not begun.
            if number + 1 < self.panels:
                ahead[number + 1] = reader.submit(read, number + 1)
            return made

        return block

    def __repr__(self) -> str:
        place = "in memory" if self.in_memory else "on disk"
        return (
            f"StreamedPlan({self.shape[0]}x{self.shape[1]}, {self.nnz} entries {place}, "
            f"{self.panels} panels of at most {self.panel_bytes} bytes, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device})"
        )


def _host_block(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned and size > 0)


def _host_product(
    arrays: tuple[Tensor, Tensor, Tensor | None], B: Tensor, reduce: str
) -> Tensor:  # fmt: skip
    indptr, columns, values = arrays
    if reduce in ("sum", "mean"):
        return F.spmm(indptr, columns, values, B, reduce)
    from sparsetile.cache.spmm import spmm  # plans the panel

    return spmm((indptr, columns, values, (indptr.numel() - 1, B.shape[0])), B, reduce)


class _Product(torch.autograd.Function):
    """A·B and its gradient for B."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, plan: StreamedPlan) -> Tensor:  # type: ignore[override]
        ctx.plan = plan
        return plan._product(B, "sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.plan.T.run(grad), None


def stream_plan(
    A: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    panel_bytes: int = PANEL_BYTES,
    in_memory: bool | None = None,
    transpose: Any = None,
) -> StreamedPlan:
    """Prepare products of a matrix that does not fit the GPU's memory.

    Parameters
    ----------
    A : path of a folder, or sparse matrix [M, K]
        A folder of parts (:func:`write_folder`, ``sparsetile partition``), or anything that
        :func:`sparsetile.plan` accepts, which is copied to pinned memory of the host.
    dtype : torch.dtype, optional
        Type of B and C; that of A's values (torch's default for a pattern) when None.
    device : torch.device, optional
        Where B and C are. When None: the GPU if there is one.
    panel_bytes : int
        Bytes of A that are copied at once; a longer row is a panel of its own. The GPU holds two
        panels.
    in_memory : bool, optional
        Whether a folder is read once, into pinned memory. When None, parts are read from disk in
        each product, one panel ahead.
    transpose : path or matrix, optional
        Aᵀ, for gradients, in the same order of rows. A matrix in memory has its transpose made
        from it, also in pinned memory, at the first gradient.

    Returns
    -------
    StreamedPlan

    Examples
    --------
    >>> import torch
    >>> import sparsetile.dist
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> plan = sparsetile.dist.stream_plan(A, device="cpu")
    >>> plan @ torch.ones(3, 2)
    tensor([[3., 3.],
            [3., 3.]])
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = usable_device("stream_plan", device)
    size = dimension("stream_plan", "panel_bytes", panel_bytes)
    if size < 64:
        raise value_error("stream_plan", "panel_bytes", "64 or more", size, "Omit it for 64 MiB")
    if dtype is not None and dtype not in VALUE_DTYPES:
        names = ", ".join(str(kind) for kind in VALUE_DTYPES)
        raise type_error("stream_plan", "dtype", f"one of {names}", dtype, "Choose one of those")
    if isinstance(A, (str, os.PathLike)) and (Path(A) / MANIFEST).is_file():
        return _of_folder(open_folder(A, "stream_plan"), dtype, place, size, in_memory, transpose)
    if in_memory is False:
        raise value_error(
            "stream_plan", "in_memory", "True or None for a matrix that is no folder", False,
            "Write its parts with write_folder",
        )  # fmt: skip
    csr = as_csr(A, function="stream_plan", device="cpu")
    csr = csr.with_values(None if csr.values is None else csr.values.detach())
    kind = dtype or (torch.get_default_dtype() if csr.values is None else csr.values.dtype)

    def turned() -> StreamedPlan:
        other = csr.transposed() if transpose is None else transpose
        return stream_plan(other, dtype=kind, device=place, panel_bytes=size, transpose=csr)

    panels = _Panels([csr], [0], None, kind, csr.values is not None, size)
    return StreamedPlan(csr.shape, panels, place, True, transpose=turned)


def _of_folder(
    folder: Folder, dtype: torch.dtype | None, device: torch.device, panel_bytes: int,
    in_memory: bool | None, transpose: Any,
) -> StreamedPlan:  # fmt: skip
    function, count = "stream_plan", len(folder.files)
    first = folder.read(0, 1, function)  # says whether there are values
    kind = dtype or (torch.get_default_dtype() if first.values is None else first.values.dtype)
    pointers = [folder.read(part, part + 1, function).indptr for part in range(count)]
    parts = [lambda part=part: folder.read(part, part + 1, function) for part in range(count)]
    panels = _Panels(
        parts, folder.partition.rows[:-1], pointers, kind, first.values is not None, panel_bytes
    )
    other = None
    if transpose is not None:

        def other() -> StreamedPlan:
            return stream_plan(
                transpose, dtype=kind, device=device, panel_bytes=panel_bytes,
                in_memory=in_memory, transpose=folder.path,
            )  # fmt: skip

    return StreamedPlan(
        folder.shape, panels, device, bool(in_memory), folder.partition.order, other
    )
