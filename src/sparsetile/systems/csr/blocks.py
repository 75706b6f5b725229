"""Edges of a short-lived graph, multiplied as they come: nothing is counted, cut or listed.

A block of a mini-batch is multiplied two or three times, and takes the GPU a few microseconds: what
the host does decides. So the first product reads the edges themselves, and one read of a flag tells
the host whether they were right. A gradient sorts the columns, in one launch where they are few.
Columns of a row keep the order of the edges, and parallel edges are entries of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.intake.canonical import row_pointers
from sparsetile.intake.csr import CSR
from sparsetile.jit.loader import current_stream_handle, on_device
from sparsetile.jit.workspace import unused_flag
from sparsetile.kernels.blocks import (
    BLOCK_THREADS,
    LOOPS,
    MAX_TRANSPOSED,
    OUTSIDE,
    SPMM_BLOCK,
    TRANSPOSE_BLOCK,
    TRANSPOSE_THREADS,
    UNSORTED,
    block_config,
    block_lanes,
    transpose_config,
)
from sparsetile.kernels.csr import MAX_ACCESS_BYTES
from sparsetile.systems.shared.cuda_context import device_index, ensure_cuda_context
from sparsetile.systems.shared.geometry import MAX_SLABS

__all__ = ["MAX_WIDTH", "BlockRows"]

# Columns that a grid has slabs for where a lane has one of them.
MAX_WIDTH = 32 * MAX_SLABS
# Thread blocks for each SM. A grid of one size for all blocks is a launch that is prepared once.
_BLOCKS = 6

_Launch = Callable[..., None]
_launches: dict[tuple[Any, ...], _Launch] = {}


def _product_launch(device: int, dtype: torch.dtype, n: int, vector: int) -> _Launch:
    """Return the launch of ``spmm_block``: of the stream and of every field."""
    key = (device, dtype, n, vector)
    found = _launches.get(key)
    if found is None:
        lanes = block_lanes(n, vector)
        kernel = SPMM_BLOCK.load(block_config(dtype, vector, lanes), device)
        slabs = -(-max(n, 1) // (lanes * vector))
        grid = (processors(torch.device("cuda", device)) * _BLOCKS, slabs, 1)
        fields = [field.name for field in SPMM_BLOCK.params.fields]
        prepared = kernel.prepare(grid, BLOCK_THREADS, SPMM_BLOCK.params.zeros, fields)
        found = _launches[key] = prepared.launch
    return found


def _transpose_launch(device: int) -> _Launch:
    """The same of ``transpose_block``."""
    found = _launches.get((device,))
    if found is None:
        kernel = TRANSPOSE_BLOCK.load(transpose_config(), device)
        fields = [field.name for field in TRANSPOSE_BLOCK.params.fields]
        zeros = TRANSPOSE_BLOCK.params.zeros
        found = kernel.prepare((1, 1, 1), TRANSPOSE_THREADS, zeros, fields).launch
        _launches[(device,)] = found
    return found


class BlockRows:
    """A[row, column] on a GPU.

    Made by :meth:`of_edges`. What it holds is known by its address: a view of a tensor costs the
    host as much as half a launch.

    Parameters
    ----------
    shape : (int, int)
    edges : int
        Entries.
    memory : Tensor of int32
        Rows of the entries, ascending, then their columns, or ``order``: where the column of each
        is among ``columns``.
    columns : Tensor of int32, optional
        Of a transpose: a tensor that begins with the rows of the original.
    ends : int
        Address of the int32 that say where each row ends; 0 where nobody knows.
    origin : BlockRows, optional
        What this is the transpose of.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        edges: int,
        memory: Tensor,
        columns: Tensor | None = None,
        ends: int = 0,
        origin: BlockRows | None = None,
    ) -> None:
        self.shape, self.edges = shape, edges
        # Number of each entry's edge as it was given, int64; None where rows ascended.
        self.given_as: Tensor | None = None
        self._memory, self._others, self._ends = memory, columns, ends
        # Not held: a block's memory goes with it at once, and not when cycles are looked for.
        self._origin = None if origin is None else weakref.ref(origin)
        self._transposed: BlockRows | None = None
        self._lengths: Tensor | None = None
        self._unread: Callable[[], Tensor | None] | None = None
        self.has_loops = False  # once the edges are read: whether a row has its own column
        self.by_target = True

    @classmethod
    def of_edges(cls, edge_index: Tensor, by_target: bool, shape: tuple[int, int]) -> BlockRows:
        """Return edges as entries of rows. They are read by the first product.

        Parameters
        ----------
        edge_index : Tensor of int64 [2, E]
            At least one edge. Not held.
        by_target : bool
            Whether rows are in ``edge_index[1]``, else in ``edge_index[0]``.
        shape : (int, int)
        """
        given = edge_index.contiguous()
        memory = torch.empty(given.shape, dtype=torch.int32, device=given.device)
        made = cls(shape, given.shape[1], memory)
        made._unread = weakref.ref(given) if given is edge_index else lambda: given
        made.by_target = by_target
        return made

    @property
    def unread(self) -> Tensor | None:
        """The edges as they were given, until they have been read."""
        return None if self._unread is None else self._unread()

    def read(self) -> bool:
        """Read the edges, unless a product has, and return whether all name a row and a column."""
        if self._unread is None:
            return True
        nothing = torch.empty((self.shape[1], 0), device=self._memory.device)
        return self.multiply(nothing, "rows") is not None  # which leaves the rows' lengths

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Return the two tensors that ``memory`` begins with."""
        flat = self._memory.flatten()
        return flat[: self.edges], flat[self.edges : 2 * self.edges]

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each entry, int32."""
        rows, columns = self._halves()
        if self._others is None:
            return rows, columns
        return rows, self._others.flatten()[columns.long()]

    @property
    def csr(self) -> CSR:
        """The entries as a matrix with row pointers; columns of a row may come in any order."""
        rows, columns = self.entries()
        return CSR(row_pointers(rows, self.shape[0]), columns, None, self.shape)

    def multiply(
        self,
        x: Tensor,
        scaled: str = "",
        bias: Tensor | None = None,
        relu: bool = False,
        unread: list[Tensor] | None = None,
    ) -> Tensor | None:
        """Return relu(A·x + bias); None where an edge names no row or column.

        Parameters
        ----------
        x : Tensor [columns, n]
        scaled : {"", "rows", "columns"}
            ``rows``: each row of A is divided by its entries: means. ``columns``, of a transpose:
            each column is divided by the entries of that row of the original.
        bias : Tensor [n], optional
            In float64 for float64, else in float32.
        unread : list, optional
            Where a product that reads the edges puts its flag, for :meth:`settle`, instead of
            waiting for the GPU to write it.
        """
        n, stride, at = x.shape[1], x.stride(0), x.data_ptr()
        if (n > 1 and x.stride(1) != 1) or at % MAX_ACCESS_BYTES:
            x = x.clone(memory_format=torch.contiguous_format)
            stride, at = x.stride(0), x.data_ptr()
        size, rows, device = x.element_size(), self.shape[0], device_index(x.device)
        out = x.new_empty((rows, n))
        lengths = divisors = 0
        if scaled == "rows" and self._lengths is None:
            self._lengths = x.new_empty(rows, dtype=torch.int32)
            lengths = self._lengths.data_ptr()
        elif scaled == "columns":
            divisors = self.transposed.row_lengths().data_ptr()
        wide = MAX_ACCESS_BYTES // size
        vector = wide if n % wide == 0 and stride % wide == 0 else 1
        launch = _launches.get((device, x.dtype, n, vector))
        if launch is None:
            launch = _product_launch(device, x.dtype, n, vector)
        first, order = self._memory.data_ptr(), 0
        second = first + 4 * self.edges
        if self._others is not None:
            second, order = self._others.data_ptr(), second
        found, targets, sources = None, 0, 0
        if self._unread is not None:
            given = self._unread()
            assert given is not None, "held by the caller of the first product"
            sources = given.data_ptr()
            targets = sources + 8 * self.edges
            if not self.by_target:
                sources, targets = targets, sources
        with on_device(device):
            ensure_cuda_context(device)
            stream = current_stream_handle(device)
            if targets:
                found = unused_flag(device, stream)
            launch(
                stream, targets, sources, 0 if found is None else found.data_ptr(), first, second,
                order, self._ends, divisors, lengths, 0 if bias is None else bias.data_ptr(), at,
                out.data_ptr(), self.edges, stride * size, rows, self.shape[1], n,
                scaled == "rows", relu,
            )  # fmt: skip
        if found is None:
            return out
        if unread is not None:
            unread.append(found)
            return out
        if self.settle(found):
            return out
        return self.multiply(x, scaled, bias, relu) if self._unread is None else None

    def settle(self, found: Tensor) -> bool:
        """Wait for the flag of a product that read the edges, and return whether its result holds.

        If not, the same product again returns the right one, or None.
        """
        bits = int(found.item())
        if bits & OUTSIDE:
            self._lengths = None
            return False
        self._unread, self.has_loops = None, bool(bits & LOOPS)
        if bits & UNSORTED:
            self._sort()
            return False
        return True

    def _sort(self) -> None:
        """Put rows into ascending order, edges of a row as they came."""
        rows, columns = self._halves()
        rows, self.given_as = torch.sort(rows, stable=True)
        self._memory, self._lengths = torch.stack([rows, columns[self.given_as]]), None

    def row_lengths(self) -> Tensor:
        """Entries of each row, int32; a product of means has left them."""
        if self._lengths is None:
            self._lengths = row_pointers(self._halves()[0], self.shape[0]).diff().int()
        return self._lengths

    @property
    def transposed(self) -> BlockRows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._transposed is None:
            self._transposed = self._turn()
        return self._transposed

    def _turn(self) -> BlockRows:
        count, edges, memory = self.shape[1], self.edges, self._memory
        if self._others is not None:  # the original has gone
            memory = torch.stack(self.entries())
        if edges > MAX_TRANSPOSED[0] or count > MAX_TRANSPOSED[1]:
            rows, order = torch.sort(memory.view(-1)[edges : 2 * edges], stable=True)
            numbers = torch.arange(count, dtype=torch.int32, device=rows.device)
            ends = torch.searchsorted(rows, numbers, right=True, out_int32=True)
            turned = torch.cat([rows, order.int(), ends])
        else:
            # Rows, order, ends, and what the kernel needs beside them.
            turned = memory.new_empty(3 * edges + count)
            device, to = device_index(memory.device), turned.data_ptr()
            with on_device(device):
                ensure_cuda_context(device)
                _transpose_launch(device)(
                    current_stream_handle(device), memory.data_ptr() + 4 * edges, to,
                    to + 4 * edges, to + 8 * edges + 4 * count, to + 8 * edges, edges, count,
                )  # fmt: skip
        ends_at = turned.data_ptr() + 8 * edges
        return BlockRows((count, self.shape[0]), edges, turned, memory, ends_at, self)
