"""Products directly on the edges of a sampled graph on a GPU, without a schedule.

A sampled graph is multiplied two or three times, a few microseconds each, so host time dominates.
The first product reads the edges themselves and sets a flag if one is invalid, which the host
reads once. A gradient sorts the columns, in one launch if they are few, and so are edges that are
not sorted by row. Columns of a row keep the order of the edges. Parallel edges stay separate.

Reading the flag later, or one autograd node for a whole layer, was not faster. Fewer allocations
and no fingerprint for new edges (nn/cache.py) reduced a layer's own host time from 105 to 80 us.
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
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.source import ConfigValue
from sparsetile.jit.workspace import unused_flag
from sparsetile.kernels import blocks as kernels
from sparsetile.kernels.blocks import MAX_TRANSPOSED
from sparsetile.kernels.csr import MAX_ACCESS_BYTES
from sparsetile.kernels.spec import KernelSpec
from sparsetile.launch.geometry import MAX_SLABS

__all__ = ["MAX_WIDTH", "EdgeRows"]

# Columns that a grid covers if a lane has one column.
MAX_WIDTH = 32 * MAX_SLABS
# Thread blocks per SM. The grid has one size for all graphs, so its launch is prepared once.
_BLOCKS = 6

_Launch = Callable[..., None]
_launches: dict[tuple[Any, ...], _Launch] = {}


def _prepared(
    spec: KernelSpec, config: dict[str, ConfigValue], threads: int, device: int,
    grid: tuple[int, int, int],
) -> _Launch:  # fmt: skip
    """Return a kernel's launch, a function of the stream and every parameter."""
    fields = [field.name for field in spec.params.fields]
    return spec.load(config, device).prepare(grid, threads, spec.params.zeros, fields).launch


def _product_launch(device: int, dtype: torch.dtype, n: int, vector: int) -> _Launch:
    """Return the launch of ``spmm_block``."""
    lanes = kernels.block_lanes(n, vector)
    slabs = -(-max(n, 1) // (lanes * vector))
    grid = (processors(torch.device("cuda", device)) * _BLOCKS, slabs, 1)
    config = kernels.block_config(dtype, vector, lanes)
    made = _prepared(kernels.SPMM_BLOCK, config, kernels.BLOCK_THREADS, device, grid)
    return _launches.setdefault((device, dtype, n, vector), made)


def _transpose_launch(device: int) -> _Launch:
    """Return the launch of ``transpose_block``."""
    found = _launches.get((device,))
    if found is None:
        spec, config = kernels.TRANSPOSE_BLOCK, kernels.transpose_config()
        found = _prepared(spec, config, kernels.TRANSPOSE_THREADS, device, (1, 1, 1))
        _launches[(device,)] = found
    return found


def _is_small(edges: int, count: int) -> bool:
    """Whether entries are few enough to be sorted in one launch."""
    return edges <= MAX_TRANSPOSED[0] and count <= MAX_TRANSPOSED[1]


def _sorted(numbers: Tensor, first: int, edges: int, count: int) -> Tensor:
    """Sort numbers below ``count`` from ``first`` on in one launch; the sort is stable.

    Returns the numbers, the old position of each, and the end of each of ``count``, int32.
    """
    made = numbers.new_empty(2 * edges + count)
    device, to = device_index(numbers.device), made.data_ptr()
    with on_device(device):
        ensure_cuda_context(device)
        _transpose_launch(device)(
            current_stream_handle(device), numbers.data_ptr() + 4 * first, to, to + 4 * edges,
            to + 8 * edges, edges, count,
        )  # fmt: skip
    return made


class EdgeRows:
    """A[row, column] on a GPU. Made by :meth:`of_edges`.

    Parts of its memory are kept as addresses: a view of a tensor costs the host as much as half a
    launch. ``memory``, int32, has the rows of the entries, ascending, then their columns, or
    ``order``: the index of each column in ``columns``. If this is not a transpose, space for the
    rows' lengths follows, which the first product of means counts. For the transpose of ``origin``,
    ``columns`` begins with the rows of the original. ``ends`` is the address of the int32 ends of
    the rows; 0 if they are unknown.
    """

    def __init__(
        self, shape: tuple[int, int], edges: int, memory: Tensor, columns: Tensor | None = None,
        ends: int = 0, origin: EdgeRows | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.edges = shape, edges
        self._memory, self._others, self._ends = memory, columns, ends
        # Weak, so that no reference cycle delays freeing the memory.
        self._origin = None if origin is None else weakref.ref(origin)
        self._transposed: EdgeRows | None = None
        # Unless this is a transpose: rows, columns in any order, and space for the lengths.
        self._pairs = memory if columns is None else None
        self._given_as: Tensor | None = None
        self._lengths: Tensor | None = None
        self._lengths_at = 0  # address of the rows' lengths; 0 until they are counted
        self.unread: Tensor | None = None  # the given edges, until they are read
        self.has_loops = False  # once the edges are read: whether a row has its own column
        self.by_target = True

    @classmethod
    def of_edges(cls, edge_index: Tensor, by_target: bool, shape: tuple[int, int]) -> EdgeRows:
        """Return edges, int64 and at least one, as entries of rows ``edge_index[by_target]``.

        The first product reads them. Until then their memory is kept, but not the tensor: caches
        keep a sampled graph for as long as the caller's tensor lives.
        """
        given = edge_index.contiguous()
        edges = given.shape[1]
        memory = torch.empty(2 * edges + shape[0], dtype=torch.int32, device=given.device)
        made = cls(shape, edges, memory)
        made.unread = given.detach() if given is edge_index else given
        made.by_target = by_target
        return made

    @property
    def given_as(self) -> Tensor | None:
        """Number of each entry's edge in the given order, int64; None if rows were sorted."""
        if self._given_as is None and self._pairs is not None and self._others is not None:
            self._given_as = self._halves()[1].long()
        return self._given_as

    def read(self) -> bool:
        """Read the edges, unless a product has, and return whether all are valid."""
        if self.unread is None:
            return True
        nothing = torch.empty((self.shape[1], 0), device=self._memory.device)
        return self.multiply(nothing, "rows") is not None  # this also counts the rows' lengths

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Return the two tensors that ``memory`` begins with."""
        flat = self._memory
        return flat[: self.edges], flat[self.edges : 2 * self.edges]

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of each entry, int32."""
        rows, columns = self._halves()
        if self._others is None:
            return rows, columns
        return rows, self._others[columns.long()]

    @property
    def csr(self) -> CSR:
        """The entries as a matrix with row pointers; columns of a row may come in any order."""
        rows, columns = self.entries()
        return CSR(row_pointers(rows, self.shape[0]), columns, None, self.shape)

    def multiply(
        self, x: Tensor, scaled: str = "", bias: Tensor | None = None, relu: bool = False
    ) -> Tensor | None:
        """Return relu(A·x + bias); None if an edge is outside the matrix.

        ``scaled="rows"``: each row of A is divided by its entries: means. ``"columns"``, of a
        transpose: each column is divided by the entries of that row of the original. The bias is in
        float64 for float64, else in float32.
        """
        n, stride, at = x.shape[1], x.stride(0), x.data_ptr()
        if (n > 1 and x.stride(1) != 1) or at % MAX_ACCESS_BYTES:
            x = x.clone(memory_format=torch.contiguous_format)
            stride, at = x.stride(0), x.data_ptr()
        size, rows, device = x.element_size(), self.shape[0], device_index(x.device)
        out = x.new_empty((rows, n))
        divisors = 0
        if scaled == "columns":
            other = self.transposed
            divisors = other._lengths_at or other.row_lengths().data_ptr()
        wide = MAX_ACCESS_BYTES // size
        vector = wide if n % wide == 0 and stride % wide == 0 else 1
        launch = _launches.get((device, x.dtype, n, vector))
        if launch is None:
            launch = _product_launch(device, x.dtype, n, vector)
        first, order = self._memory.data_ptr(), 0
        second = first + 4 * self.edges
        if self._others is not None:
            second, order = self._others.data_ptr(), second
        lengths = 0
        if scaled == "rows" and not self._lengths_at and self._pairs is not None:
            lengths = self._pairs.data_ptr() + 8 * self.edges
        found, targets, sources = None, 0, 0
        if self.unread is not None:
            sources = self.unread.data_ptr()
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
            self._lengths_at = self._lengths_at or lengths
            return out
        bits = int(found.item())
        if bits & kernels.OUTSIDE:
            return None
        self.unread, self.has_loops = None, bool(bits & kernels.LOOPS)
        if not bits & kernels.UNSORTED:
            self._lengths_at = lengths
            return out
        self._sort()
        return self.multiply(x, scaled, bias, relu)

    def _sort(self) -> None:
        """Sort the entries by row; the sort is stable."""
        edges, memory = self.edges, self._memory
        if _is_small(edges, self.shape[0]):
            self._memory = _sorted(memory, 0, edges, self.shape[0])
            self._others, self._ends = memory[edges:], self._memory.data_ptr() + 8 * edges
            return
        rows, columns = self._halves()
        rows, self._given_as = torch.sort(rows, stable=True)
        self._memory = torch.cat([rows, columns[self._given_as], memory[2 * edges :]])
        self._pairs = self._memory

    def row_lengths(self) -> Tensor:
        """Entries of each row, int32, counted by a product of means."""
        if self._lengths is None:
            if self._lengths_at and self._pairs is not None:
                self._lengths = self._pairs[2 * self.edges :]
            else:
                self._lengths = row_pointers(self._halves()[0], self.shape[0]).diff().int()
                self._lengths_at = self._lengths.data_ptr()
        return self._lengths

    @property
    def transposed(self) -> EdgeRows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._transposed is None:
            self._transposed = self._turn()
        return self._transposed

    def _turn(self) -> EdgeRows:
        count, edges, pairs = self.shape[1], self.edges, self._pairs
        if pairs is None:  # the original was freed
            pairs = torch.cat(self.entries())
        if _is_small(edges, count):
            turned = _sorted(pairs, edges, edges, count)
        else:
            rows, order = torch.sort(pairs[edges : 2 * edges], stable=True)
            numbers = torch.arange(count, dtype=torch.int32, device=rows.device)
            ends = torch.searchsorted(rows, numbers, right=True, out_int32=True)
            turned = torch.cat([rows, order.int(), ends])
        ends_at = turned.data_ptr() + 8 * edges
        return EdgeRows((count, self.shape[0]), edges, turned, pairs, ends_at, self)
