"""Edges grouped by row on a GPU, and their transpose, with a schedule: nothing waits for the host.

What a plan of ``csr`` consists of is made by a few launches from sizes that the host knows
(``group_entries.cu``): lists have room for the worst case, and items that stand for nothing. Parts
of the memory are kept as addresses, because a view costs the host as much as half a launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from sparsetile.core.device import processors
from sparsetile.jit.loader import (
    current_stream_handle,
    device_index,
    ensure_cuda_context,
    on_device,
)
from sparsetile.kernels import grouping as kernels
from sparsetile.kernels.grouping import MOST_GROUPED, Digits, Lists
from sparsetile.launch.faults import faults_address

__all__ = ["MOST_GROUPED", "GroupedRows", "group_edges"]

# Fields that seldom change from launch to launch.
_RARE = ("wide", "rule", "value_type")
_FIELDS = [field.name for field in kernels.GROUP_ENTRIES.params.fields if field.name not in _RARE]
_launches: dict[tuple[int, int], Callable[..., None]] = {}


def _launch(device: int, stage: int) -> Callable[..., None]:
    """Return a launch of a stage: of stream, thread blocks, rare fields and all others."""
    found = _launches.get((device, stage))
    if found is None:
        spec = kernels.GROUP_ENTRIES
        kernel = spec.load(kernels.group_config(stage), device)
        made = kernel.prepare(
            (1, 1, 1), kernels.GROUP_THREADS, spec.params.zeros, _FIELDS, _RARE, overlap=True
        )
        found = _launches[device, stage] = made.launch_sized
    return found


class _Places:
    """Where the parts of a direction's memory begin, in numbers of 32 bits."""

    __slots__ = ("columns", "indptr", "items", "nodes", "order", "parents", "size", "sorted")

    def __init__(self, rows: int, entries: int, lists: Lists, ordered: bool) -> None:
        self.items = 0
        self.nodes = 4 * (lists.wide + lists.rows)
        self.parents = self.nodes + 4 * lists.wide
        self.indptr = self.parents + 2 * lists.wide
        self.order = self.indptr + 2 * (rows + 1)
        self.sorted = self.order + (2 * entries if ordered else 0)
        self.columns = self.sorted + entries
        self.size = self.columns + entries


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
    """

    def __init__(
        self, shape: tuple[int, int], entries: int, lists: Lists, places: _Places, memory: Tensor,
        origin: GroupedRows | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.entries, self.lists, self.places = shape, entries, lists, places
        self.memory, self.at = memory, memory.data_ptr()
        self._transposed: GroupedRows | None = None
        # Weak, so that no reference cycle delays freeing the memory.
        self._origin = None if origin is None else weakref.ref(origin)
        self._values: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def known_transpose(self) -> GroupedRows | None:
        """The transpose, if it was made."""
        return self._transposed if self._origin is None else self.transposed

    def knows(self, rule: int, dtype: torch.dtype) -> bool:
        """Whether these :meth:`values` were made."""
        return (rule, dtype) in self._values

    def memories(self) -> list[Tensor]:
        """Return the tensors that own its memory."""
        return [self.memory, *self._values.values()]

    @property
    def is_transpose(self) -> bool:
        """Whether this was made from the rows of another matrix."""
        return self._origin is not None

    @property
    def columns_at(self) -> int:
        """Address of the columns, int32 [entries]."""
        return self.at + 4 * self.places.columns

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

    @property
    def transposed(self) -> GroupedRows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._transposed is None:
            rows, columns = self.at + 4 * self.places.sorted, self.columns_at
            self._transposed = _group(
                (columns, rows), False, self.entries, 0, self.shape[::-1], self.memory, self
            )
        return self._transposed

    def values(self, rule: int, dtype: torch.dtype) -> Tensor:
        """Return a value for each entry, from the numbers of entries of rows.

        ``SYMMETRIC``: over the square roots of those of its row and of its column's. ``MEAN``: of a
        transpose, over those of the row that its column was. Both are kept.
        """
        found = self._values.get((rule, dtype))
        if found is not None:
            return found
        found = self.memory.new_empty(self.entries, dtype=dtype)
        origin = self if self._origin is None else self.transposed
        device = device_index(self.memory.device)
        blocks = min(-(-self.entries // kernels.GROUP_THREADS), processors(found.device) * 8)
        places, at = self.places, self.at
        with on_device(device):
            ensure_cuda_context(device)
            _launch(device, kernels.VALUES)(
                current_stream_handle(device), blocks, (0, rule, kernels.VALUE_TYPES[dtype]),
                0, 0, 0, 0, 0, 0, 0, 0, 0, 0, at + 4 * places.sorted, at + 4 * places.columns, 0,
                at + 4 * places.indptr, 0, 0, 0, found.data_ptr(), origin.indptr_at,
                0, 0, self.shape[0], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
        self._values[rule, dtype] = found
        return found


def group_edges(
    edge_index: Tensor, by_target: bool, shape: tuple[int, int], loops: bool
) -> GroupedRows:
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
    """
    given = edge_index.contiguous()
    edges, size = given.shape[1], given.element_size()
    first = given.data_ptr()
    numbers = (first, first + edges * size)
    sources = (numbers[1], numbers[0]) if by_target else numbers
    extra = min(shape) if loops else 0
    return _group(sources, size == 8, edges, extra, shape, given, None)


def _group(
    sources: tuple[int, int], wide: bool, edges: int, extra: int, shape: tuple[int, int],
    like: Tensor, origin: GroupedRows | None,
) -> GroupedRows:  # fmt: skip
    """Group entries, whose rows and columns lie at two addresses; ``extra`` loops are added."""
    (rows, columns), entries, device = shape, edges + extra, device_index(like.device)
    ordered = origin is not None
    lists = Lists.of(entries, rows)
    digits = Digits.of(entries, rows, processors(like.device))
    places = _Places(rows, entries, lists, ordered)
    memory = like.new_empty(places.size, dtype=torch.int32)
    widths, tiles = digits.widths, digits.tiles
    counted = tiles << widths[0]
    # Keys, columns and numbers between two passes; in turns, if there are more.
    room, turns = entries * (2 + ordered), min(len(widths) - 1, 2)
    between = like.new_empty(counted + turns * room, dtype=torch.int32)
    counts, at = between.data_ptr(), memory.data_ptr()
    made = GroupedRows(shape, entries, lists, places, memory, origin)
    faults = 0 if ordered else faults_address(device)
    order = at + 4 * places.order if ordered else 0
    rare = (wide, 0, 0)
    before, shift, last = (0, 0, 0), 0, len(widths) - 1
    results = (
        at + 4 * places.sorted, at + 4 * places.columns, order, at + 4 * places.indptr,
        at, at + 4 * places.parents, at + 4 * places.nodes, 0, 0, edges, entries, rows, columns,
        digits.tile, tiles,
    )  # fmt: skip
    lengths = (lists.segment, lists.wide, lists.rows)
    with on_device(device):
        ensure_cuda_context(device)
        stream = current_stream_handle(device)
        count, scatter = _launch(device, kernels.COUNT), _launch(device, kernels.SCATTER)
        for place, width in enumerate(widths):
            first = counts + 4 * (counted + place % 2 * room)
            after = (first, first + 4 * entries, first + 8 * entries)
            values = (
                *sources, faults, counts, *before, *after, *results, shift, width, place == 0,
                place == last, *lengths,
            )  # fmt: skip
            count(stream, tiles, rare, *values)
            scatter(stream, tiles, rare, *values)
            before, shift = after, shift + width
        # A row behind the last one has the end of all.
        blocks = rows // kernels.ROWS_OF_BLOCK + 1
        _launch(device, kernels.ROWS)(stream, blocks, rare, *values)
    return made
