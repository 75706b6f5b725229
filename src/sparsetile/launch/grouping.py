"""Edges grouped by row on a GPU, and their transpose, with a schedule: nothing waits for the host.

What a plan of ``csr`` consists of is made by one launch from sizes that the host knows
(``group_entries.cu``): lists have room for the worst case, and items that stand for nothing. Parts
of the memory are kept as addresses, because a view costs the host as much as half a launch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.jit.workspace import scratch
from sparsetile.kernels import grouping as kernels
from sparsetile.kernels.grouping import MEAN, MOST_GROUPED, Lists, Tiles
from sparsetile.launch.faults import faults_address

__all__ = ["MOST_GROUPED", "GroupedRows", "group_edges", "transposed_arrays"]

# Scratch memory that is kept; more is allocated for the launch alone.
_MOST_KEPT = 2**25
# Addresses of one direction's results that are not wanted.
_NOTHING = (0,) * 8

_FIELDS = [field.name for field in kernels.GROUP_ENTRIES.params.fields]
_launches: dict[tuple[int, bool], Callable[..., None]] = {}


def _launch(device: int, values: bool) -> Callable[..., None]:
    """Return a launch: of stream, thread blocks, the seldom changed fields, and all others."""
    found = _launches.get((device, values))
    if found is None:
        spec = kernels.GROUP_ENTRIES
        kernel = spec.load(kernels.group_config(values), device)
        made = kernel.prepare(
            (1, 1, 1), kernels.GROUP_THREADS, spec.params.zeros, _FIELDS[:-4], _FIELDS[-4:],
            cooperative=not values,
        )  # fmt: skip
        found = _launches[device, values] = made.launch_sized
    return found


class _Places(NamedTuple):
    """Where the parts of a direction's memory begin, in numbers of 32 bits, and its size."""

    items: int
    nodes: int
    parents: int
    indptr: int
    order: int
    sorted: int
    columns: int
    size: int

    @classmethod
    def of(cls, rows: int, entries: int, lists: Lists, ordered: bool) -> _Places:
        nodes = 4 * (lists.wide + lists.rows)
        parents = nodes + 4 * lists.wide
        indptr = parents + 2 * lists.wide
        order = indptr + 2 * (rows + 1)
        first = order + (2 * entries if ordered else 0)
        return cls(
            0, nodes, parents, indptr, order, first, first + entries, first + 2 * entries
        )  # fmt: skip

    def addresses(self, at: int, values: int = 0) -> tuple[int, ...]:
        """Addresses as the kernel takes them: of a direction's memory at ``at``, and its values."""
        return (
            at + 4 * self.sorted, at + 4 * self.columns,
            at + 4 * self.order if self.sorted > self.order else 0, at + 4 * self.indptr, at,
            at + 4 * self.parents, at + 4 * self.nodes, values,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _sizes(rows: int, entries: int, ordered: bool) -> tuple[Lists, _Places]:
    lists = Lists.of(entries, rows)
    return lists, _Places.of(rows, entries, lists, ordered)


class GroupedRows:
    """A[row, column] on a GPU with a schedule, made by :func:`group_edges`; or its transpose.

    Attributes
    ----------
    shape : (int, int)
    entries : int
        Places of entries; the last ones are unused if edges were dropped.
    lists : Lists
    memory : Tensor of int32
        All parts, at ``places``.
    at : int
        Its address.

    ``ordered``: whether the number of each entry among the edges is kept.
    """

    def __init__(
        self, shape: tuple[int, int], entries: int, like: Tensor,
        origin: GroupedRows | None = None, ordered: bool = True,
    ) -> None:  # fmt: skip
        self.shape, self.entries = shape, entries
        self.lists, self.places = _sizes(shape[0], entries, ordered)
        self.memory = like.new_empty(self.places.size, dtype=torch.int32)
        self.at = self.memory.data_ptr()
        self._transposed: GroupedRows | None = None
        # Weak, so that no reference cycle delays freeing the memory.
        self._origin = None if origin is None else weakref.ref(origin)
        self._values: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def order(self) -> Tensor:
        """Number of each entry, int64 [entries]: among the edges, or A's entries."""
        return self.wide_part("order", self.entries)

    @property
    def indptr_at(self) -> int:
        """Address of the row pointers, int64 [rows + 1]."""
        return self.at + 4 * self.places.indptr

    def wide_part(self, name: str, count: int) -> Tensor:
        """Return ``count`` numbers of 64 bits from a place on."""
        first = getattr(self.places, name)
        return self.memory[first : first + 2 * count].view(torch.int64)

    def part(self, name: str, count: int) -> Tensor:
        """Return ``count`` numbers from a place on."""
        first = getattr(self.places, name)
        return self.memory[first : first + count]

    def tensors(self) -> dict[str, Tensor]:
        """Return what a plan of ``csr`` calls its tensors."""
        lists = self.lists
        return {
            "indptr": self.wide_part("indptr", self.shape[0] + 1),
            "columns": self.part("columns", self.entries),
            "items": self.part("items", 4 * (lists.wide + lists.rows)).view(-1, 4),
            "parent_of_slot": self.part("parents", 2 * lists.wide),
            "nodes": self.part("nodes", 4 * lists.wide).view(-1, 4),
        }

    def memories(self) -> list[Tensor]:
        """Return the tensors that own its memory."""
        return [self.memory, *self._values.values()]

    # -- the transpose --------------------------------------------------------------------------

    @property
    def is_transpose(self) -> bool:
        """Whether this was made from the rows of another matrix."""
        return self._origin is not None

    @property
    def known_transpose(self) -> GroupedRows | None:
        """The transpose, if it was made."""
        return self._transposed if self._origin is None else self._origin()

    @property
    def transposed(self) -> GroupedRows:
        """The transpose, made at first use."""
        found = self.known_transpose
        if found is None:
            found = self._transposed = GroupedRows(
                self.shape[::-1], self.entries, self.memory, self
            )
            _group(self, self._transposed, (0, 0, 0), (0, 0, 0, 0), 0, sorts=False)
        return found

    # -- values ---------------------------------------------------------------------------------

    def knows(self, rule: int, dtype: torch.dtype) -> bool:
        """Whether these :meth:`values` were made."""
        return (rule, dtype) in self._values

    def values(self, rule: int, dtype: torch.dtype) -> Tensor:
        """Return a value for each entry, from the numbers of entries of A's rows.

        ``SYMMETRIC``: over the square roots of those of both nodes. ``MEAN``, of a transpose: over
        those of the row that its column was. Those of both directions are made together, and kept.
        """
        if (rule, dtype) not in self._values:
            forward = self if self._origin is None else self.transposed
            forward._make_values(rule, dtype)
        return self._values[rule, dtype]

    def _place_values(self, key: tuple[int, torch.dtype]) -> tuple[int, int]:
        """Return where values of both directions go, 0 for those that are known or not wanted."""
        at = []
        for rows in (self, self._transposed):
            if rows is None or key in rows._values or (key[0] == MEAN and rows is self):
                at.append(0)
            else:
                made = rows._values[key] = rows.memory.new_empty(rows.entries, dtype=key[1])
                at.append(made.data_ptr())
        return at[0], at[1]

    def _make_values(self, rule: int, dtype: torch.dtype) -> None:
        own, other, at = self.places, self._transposed, self._place_values((rule, dtype))
        device = device_index(self.memory.device)
        blocks = min(-(-self.entries // kernels.GROUP_THREADS), 8 * processors(self.memory.device))
        turned = _NOTHING if other is None else other.places.addresses(other.at, at[1])
        with on_device(device):
            ensure_cuda_context(device)
            _launch(device, True)(
                current_stream_handle(device), blocks, (0, 0, rule, kernels.VALUE_TYPES[dtype]),
                0, 0, 0, 0, 0, 0, 0, *own.addresses(self.at, at[0]), *turned,
                0, self.entries, *self.shape, 0, 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip


def group_edges(
    edge_index: Tensor, by_target: bool, shape: tuple[int, int], loops: bool,
    transpose: bool = False, ordered: bool = False,
    values: tuple[int, torch.dtype] | None = None,
) -> GroupedRows:  # fmt: skip
    """Return edges as entries of rows ``edge_index[by_target]``, in their order in each row.

    Edges that name no row or column are left out; the next call that looks finds the first of them
    (``launch.faults``).

    Parameters
    ----------
    edge_index : Tensor of int32 or int64 [2, E]
        On a GPU.
    by_target : bool
    shape : (int, int)
        Rows and columns.
    loops : bool
        Whether to replace self-loops by one for each row, at its end; the matrix is square.
    transpose : bool
        Whether to make the transpose in the same launch.
    ordered : bool
        Whether to keep each entry's number among the edges; self-loops that were added come last.
    values : (int, torch.dtype), optional
        Values that are surely needed, as in :meth:`GroupedRows.values`: the same launch makes them.
    """
    given = edge_index.contiguous()
    edges, size = given.shape[1], given.element_size()
    first = given.data_ptr()
    numbers = (first, first + edges * size)
    made = GroupedRows(shape, edges + (min(shape) if loops else 0), given, ordered=ordered)
    if transpose:
        made._transposed = GroupedRows(shape[::-1], made.entries, given, made)
    sources = (*(numbers[::-1] if by_target else numbers), 0)
    rare = (size == 8, 0, 0, 0)
    if values is not None:
        rare = (size == 8, 0, values[0], kernels.VALUE_TYPES[values[1]])
    _group(made, made._transposed, sources, rare, edges, values=values)
    return made


def _group(
    made: GroupedRows, turned: GroupedRows | None, sources: tuple[int, int, int],
    rare: tuple[int, int, int, int], edges: int, *, sorts: bool = True,
    values: tuple[int, torch.dtype] | None = None,
) -> None:  # fmt: skip
    """Launch for both directions, or for the transpose of rows that were sorted."""
    lists, memory = made.lists, made.memory
    at, turned_at = (0, 0) if values is None else made._place_values(values)
    results = made.places.addresses(made.at, at)
    others = _NOTHING if turned is None else turned.places.addresses(turned.at, turned_at)
    rows = 0 if turned is None else turned.lists.rows
    sizes = (edges, made.entries, *made.shape)
    keys = max(made.shape) if turned is not None else made.shape[0]
    _sort(
        sources, rare, memory, results, others, sizes, keys, (*lists, rows),
        (sorts, turned is not None), sorts,
    )  # fmt: skip


def transposed_arrays(indptr: Tensor, indices: Tensor, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row pointers and columns of the transpose of CSR arrays, and its entries' places.

    Entries whose column is not below ``cols`` are left out.

    Parameters
    ----------
    indptr, indices : Tensor of int32 or int64
        Contiguous, on a GPU; at least one row and one entry, at most :data:`MOST_GROUPED`.
    cols : int
    """
    rows, entries = indptr.shape[0] - 1, indices.shape[0]
    pointers = indices.new_empty(cols + 1, dtype=torch.int64)
    order = indices.new_empty(entries, dtype=torch.int64)
    numbers = indices.new_empty(2 * entries, dtype=torch.int32)
    at = numbers.data_ptr()
    results = (at + 4 * entries, at, order.data_ptr(), pointers.data_ptr(), 0, 0, 0, 0)
    _sort(
        (indices.data_ptr(), 0, indptr.data_ptr()),
        (indices.dtype is torch.int64, indptr.dtype is torch.int64, 0, 0), indices, results,
        _NOTHING, (entries, entries, cols, rows), cols, (0, 0, 0, 0), (True, False), False,
    )  # fmt: skip
    return pointers, numbers[:entries], order


def _sort(
    sources: tuple[int, int, int], rare: tuple[int, int, int, int], like: Tensor,
    results: tuple[int, ...], others: tuple[int, ...], sizes: tuple[int, ...], keys: int,
    lists: tuple[int, ...], jobs: tuple[bool, bool], reports: bool,
) -> None:  # fmt: skip
    """Launch the kernel; ``reports``: what is wrong is not known yet."""
    device, entries = device_index(like.device), sizes[1]
    sms = processors(like.device)
    tiles = Tiles.of(entries, keys, sms)
    # Keys, columns and numbers between two passes; in turns, if there are more.
    passes = -(-max(keys.bit_length(), 1) // 10)
    size = 4 * (tiles.room + min(passes - 1, 2) * 3 * entries)
    faults = faults_address(device) if reports else 0
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        memory, counters = scratch(device, stream, size if size <= _MOST_KEPT else 0, 1)
        if size > _MOST_KEPT:
            memory = like.new_empty(size, dtype=torch.uint8)
        counts = memory.data_ptr()
        _launch(device, False)(
            stream, min(tiles.tiles, kernels.BLOCKS_PER_SM * sms), rare, *sources, faults,
            counters.data_ptr(), counts, counts + 4 * tiles.room, *results, *others, *sizes,
            tiles.tile, tiles.tiles, *lists, *jobs,
        )  # fmt: skip
