"""Single kept weights as entries of a value and a gap, in the order of ``linear_entries.cu``.

Rows are sorted by their numbers of entries; 32 of them are a block, one for each lane. A block has
``parts`` warps, each of which has an equal part of every row's entries, in whole steps of eight: as
many as the block's longest row needs. A step is

    values   32 lanes x 8 values
    gaps     32 lanes x 8 gaps less one, of four bits

A gap counts columns since the entry before, 1 to 16. Between kept weights that are farther apart,
entries of value 0 with gaps of 16 come first. After a row's last kept weight, entries of value 0
and gap 1 fill its part up; parts without any begin past the last column, where X has zeros.

The gaps of a lane's entries 0, 2, 4, 6 are the lower halves of the bytes of its word, those of 1,
3, 5, 7 the upper ones. Packing is by torch's operations, on the weight's device, some rows at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.kernels.linear_entries import (
    ENTRY_PARTS,
    ENTRY_ROWS,
    ENTRY_STEP,
    LONGEST_GAP,
)

__all__ = ["EntryStreams", "choose_parts", "pack_entries", "place_rows"]

_VALUES = ENTRY_ROWS * ENTRY_STEP  # 16-bit words of a step
_STEP_WORDS = _VALUES + _VALUES // 4
# Cells that are packed at a time: each takes some ten bytes for each kept weight for a while.
_AT_ONCE = 2**24
# Blocks for each SM from which rows are cut into few parts.
_BLOCKS = 3


@dataclass(frozen=True)
class EntryStreams:
    """A packed weight [rows, columns] of 16 bits."""

    rows: int
    cols: int
    parts: int  # of a row
    steps: int  # most of a warp
    stream: Tensor  # int16 [steps, words]
    offsets: Tensor  # int32 [blocks + 1], in steps
    starts: Tensor  # int32 [blocks, parts, 32]: column before a lane's first entry
    row_ids: Tensor  # int32 [blocks, 32]; -1 for none

    @property
    def blocks(self) -> int:
        return int(self.row_ids.shape[0])

    @property
    def nbytes(self) -> int:
        parts = (self.stream, self.offsets, self.starts, self.row_ids)
        return sum(part.nbytes for part in parts)

    def rewrite(self, made: EntryStreams) -> bool:
        """Take over another packed weight in the same memory; False if it does not fit.

        Some of the kept weights always fit.
        """
        same = (self.rows, self.cols, self.parts) == (made.rows, made.cols, made.parts)
        if not same or self.stream.device != made.stream.device:
            return False
        if len(made.stream) > len(self.stream) or made.steps > self.steps:
            return False
        self.stream[: len(made.stream)] = made.stream
        for old, new in ((self.offsets, made.offsets), (self.starts, made.starts),
                         (self.row_ids, made.row_ids)):  # fmt: skip
            old.copy_(new)
        return True

    def unpack(self) -> Tensor:
        """Return the weight's bits [rows, columns], int16; dropped weights are 0."""
        dense = self.stream.new_zeros((self.rows, self.cols))
        for block in range(self.blocks):
            steps = self.stream[int(self.offsets[block]) : int(self.offsets[block + 1])]
            values = steps[:, :_VALUES].reshape(self.parts, -1, ENTRY_ROWS, ENTRY_STEP)
            words = steps[:, _VALUES:].reshape(self.parts, -1, ENTRY_ROWS, 2, 1)
            shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device)
            gaps = (words >> shifts & 15).long().view(values.shape).transpose(1, 2) + 1
            columns = self.starts[block][..., None] + gaps.flatten(2).cumsum(2)
            found = values.transpose(1, 2).flatten(2)
            rows = self.row_ids[block][None, :, None].expand(found.shape)
            kept = (found != 0) & (rows >= 0)
            dense[rows[kept].long(), columns[kept].long()] = found[kept]
        return dense


def choose_parts(rows: int, processors: int) -> int:
    """Parts of a row: the fewest that give each SM enough warps."""
    enough = -(-rows // ENTRY_ROWS) >= _BLOCKS * processors
    return ENTRY_PARTS[0] if enough else ENTRY_PARTS[-1]


@dataclass(frozen=True)
class _Placed:
    """Kept weights of some rows, by row and column."""

    rows: slice
    row: Tensor  # of these rows
    column: Tensor
    gap: Tensor  # 1 to 16, from the entry before
    between: Tensor  # entries of value 0 before it
    place: Tensor  # entries before it in its row

    @staticmethod
    def of(mask: Tensor, rows: slice) -> _Placed:
        some = mask[rows]
        row, column = (each.to(torch.int32) for each in some.nonzero(as_tuple=True))
        before = torch.full_like(column, -1)
        same = row[1:] == row[:-1]
        before[1:].copy_(torch.where(same, column[:-1], -1))
        distance = column - before
        between = (distance - 1) // LONGEST_GAP
        ends = (between + 1).cumsum(0, dtype=torch.int32)
        lengths = torch.zeros(len(some), dtype=torch.int32, device=mask.device)
        lengths.scatter_add_(0, row.long(), between + 1)
        begin = lengths.cumsum(0, dtype=torch.int32) - lengths
        place = ends - 1 - begin[row]
        return _Placed(rows, row, column, distance - LONGEST_GAP * between, between, place)

    def lengths(self) -> Tensor:
        """Entries of each of the rows."""
        found = torch.zeros(
            self.rows.stop - self.rows.start, dtype=torch.int64, device=self.row.device
        )
        return found.scatter_add_(0, self.row.long(), (self.between + 1).long())


def _pieces(rows: int, cols: int) -> list[slice]:
    count = max(_AT_ONCE // max(cols, 1), 1)
    return [slice(first, min(first + count, rows)) for first in range(0, rows, count)]


@torch.no_grad()
def place_rows(lengths: Tensor, cols: int, parts: int) -> EntryStreams:
    """Place rows of so many entries: streams and starts are still empty."""
    rows, device = len(lengths), lengths.device
    order = torch.argsort(lengths, descending=True, stable=True)
    blocks = -(-rows // ENTRY_ROWS)
    row_ids = torch.full((blocks * ENTRY_ROWS,), -1, dtype=torch.int32, device=device)
    row_ids[:rows] = order
    longest = lengths[order[::ENTRY_ROWS]]
    steps = -(-longest // (parts * ENTRY_STEP))
    offsets = torch.zeros(blocks + 1, dtype=torch.int32, device=device)
    torch.cumsum(steps * parts, 0, out=offsets[1:])
    most = steps.max() if blocks else offsets[-1]
    total, most_steps = torch.stack([offsets[-1], most]).tolist()
    return EntryStreams(
        rows, cols, parts, most_steps,
        torch.empty((total, _STEP_WORDS), dtype=torch.int16, device=device), offsets,
        torch.empty((blocks, parts, ENTRY_ROWS), dtype=torch.int32, device=device),
        row_ids.view(blocks, ENTRY_ROWS),
    )  # fmt: skip


@torch.no_grad()
def pack_entries(dense: Tensor, mask: Tensor, parts: int) -> EntryStreams:
    """Pack the kept weights of a dense weight of 16 bits [rows, columns]."""
    rows, cols = dense.shape
    device = dense.device
    bits = dense.contiguous().view(torch.int16)
    placed = [_Placed.of(mask, some) for some in _pieces(rows, cols)]
    lengths = torch.cat([torch.zeros(0, dtype=torch.int64, device=device),
                         *(each.lengths() for each in placed)])  # fmt: skip
    made = place_rows(lengths, cols, parts)
    total = len(made.stream)
    offsets = made.offsets.long()
    steps = made.offsets.diff() // parts
    order = made.row_ids.flatten()[:rows].long()
    values = torch.zeros(total * _VALUES, dtype=torch.int16, device=device)
    gaps = torch.zeros(total * _VALUES, dtype=torch.uint8, device=device)
    starts = made.starts.fill_(cols - 1).flatten()
    position = torch.empty_like(order)
    position[order] = torch.arange(rows, device=device)
    for each in placed:
        lines = _Lines.of(position[each.rows], steps, offsets, parts)
        index, lane, within = lines.place(each.row, each.place)
        values[index] = bits[each.rows].reshape(-1)[each.row.long() * cols + each.column]
        gaps[index] = (each.gap - 1).to(torch.uint8)
        starts.scatter_(0, *_first(lane, within, each.column - each.gap))
        far = each.between.nonzero().flatten()
        if len(far):
            count = each.between[far].long()
            of = torch.repeat_interleave(far, count)
            number = torch.arange(len(of), device=device)
            number -= torch.repeat_interleave(count.cumsum(0) - count, count)
            index, lane, within = lines.place(each.row[of], each.place[of] - 1 - number)
            gaps[index] = LONGEST_GAP - 1
            start = each.column[of] - each.gap[of] - LONGEST_GAP * (number + 1)
            starts.scatter_(0, *_first(lane, within, start))
    even = gaps.view(-1, 2)
    made.stream[:, :_VALUES] = values.view(total, _VALUES)
    packed = (even[:, 0] | even[:, 1] << 4).view(torch.int16)
    made.stream[:, _VALUES:] = packed.view(total, _STEP_WORDS - _VALUES)
    return made


def _first(lane: Tensor, within: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lanes whose first entries these are, and the columns before."""
    leads = within == 0
    return lane[leads], start[leads].to(torch.int32)


@dataclass(frozen=True)
class _Lines:
    """Where rows are in the stream: entries of a part, first step, block and lane."""

    each: Tensor
    first: Tensor
    block: Tensor
    lane: Tensor
    parts: int

    @staticmethod
    def of(position: Tensor, steps: Tensor, offsets: Tensor, parts: int) -> _Lines:
        block = position // ENTRY_ROWS
        each = (steps[block] * ENTRY_STEP).clamp(min=1)
        return _Lines(each, offsets[block], block, position % ENTRY_ROWS, parts)

    def place(self, row: Tensor, entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an entry's place among all values, that of its lane among all starts, and the
        number of entries before it there."""
        each, lane = self.each[row], self.lane[row]
        part, within = entry // each, entry % each
        step = self.first[row] + (part * each + within) // ENTRY_STEP
        index = (step * ENTRY_ROWS + lane) * ENTRY_STEP + within % ENTRY_STEP
        return index, (self.block[row] * self.parts + part) * ENTRY_ROWS + lane, within
