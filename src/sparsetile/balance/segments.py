"""Work items of the CUDA-core kernels: rows, long ones cut, their pieces joined by a tree.

The device side is ``kernels/cuda/segment.cuh``; its comment draws the arrays. Built with tensor
operations on whichever device holds the matrix. Every part of the library that walks rows on CUDA
cores (the ``csr`` system, residual rows of the hybrid ones, SDDMM) takes its items from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.errors import value_error
from sparsetile.intake.csr import CSR

__all__ = ["SegmentSchedule", "schedule_segments"]

# Children a node of the tree adds up. 16 keeps the climb of a row of 64 Ki entries at two steps
# while no single group reads more than 16 partial rows in sequence.
FAN_IN = 16


@dataclass(frozen=True, eq=False)
class SegmentSchedule:
    """Flat work lists, all int32.

    Attributes
    ----------
    items : Tensor [items, 4]
        ``row, begin, end, slot``; ``slot`` is -1 for a row that was not cut. Pieces of cut rows
        come first, because their sums finish in several steps.
    parent_of_slot : Tensor [slots]
        Node that adds the slot's partial sum.
    nodes : Tensor [nodes, 4]
        ``first child slot, children, own slot or -1 at the root, entries of the row``.
    """

    items: Tensor
    parent_of_slot: Tensor
    nodes: Tensor

    @property
    def item_count(self) -> int:
        return self.items.shape[0]

    @property
    def slot_count(self) -> int:
        return self.parent_of_slot.shape[0]

    @property
    def node_count(self) -> int:
        return self.nodes.shape[0]


def _exclusive_cumsum(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _ranges(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts [n]: owner of each of the sum(counts) elements, and its number in the owner."""
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    number = torch.arange(owner.numel(), device=counts.device) - _exclusive_cumsum(counts)[owner]
    return owner, number


def _tree(children: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Join each cut row's pieces: ``children`` pieces per cut row, ``entries`` its row lengths."""
    device = children.device
    parents: list[Tensor] = []
    nodes: list[Tensor] = []
    first_slot = node_base = 0
    counts = children
    while counts.numel():
        groups = (counts + FAN_IN - 1) // FAN_IN
        row, number = _ranges(counts)
        # Even groups: 17 children become 9 + 8, not 16 + 1.
        group_in_row = number * groups[row] // counts[row]
        group = _exclusive_cumsum(groups)[row] + group_in_row
        parents.append(group + node_base)
        total = int(groups.sum())
        sizes = torch.bincount(group, minlength=total)
        group_row, _ = _ranges(groups)
        is_root = groups[group_row] == 1
        # Nodes that are not roots take the next slots, in order, as children of the next level.
        next_slot = first_slot + row.numel()
        own = torch.where(is_root, -1, next_slot + torch.cumsum((~is_root).to(torch.int64), 0) - 1)
        nodes.append(
            torch.stack([first_slot + _exclusive_cumsum(sizes), sizes, own, entries[group_row]], 1)
        )
        first_slot, node_base = next_slot, node_base + total
        unfinished = groups > 1
        counts, entries = groups[unfinished], entries[unfinished]
    if not nodes:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.reshape(0, 4)
    return torch.cat(parents).to(torch.int32), torch.cat(nodes).to(torch.int32)


def schedule_segments(
    csr: CSR, max_length: int, *, row_order: Tensor | None = None
) -> SegmentSchedule:
    """Cut rows longer than ``max_length`` entries into even pieces and list all items.

    Parameters
    ----------
    csr : CSR
        The matrix; fewer than 2^31 entries.
    max_length : int
        Most entries an item may have.
    row_order : Tensor [M], optional
        Order in which rows are visited (a permutation of the rows); row order when None.
    """
    if max_length < 1:
        raise value_error(
            "schedule_segments", "max_length", "at least 1", max_length, "Give a positive length"
        )
    if csr.nnz >= 2**31:
        raise value_error(
            "schedule_segments", "A", "under 2^31 entries", csr.nnz, "Split A by rows"
        )
    lengths = csr.row_lengths()
    starts = csr.indptr[:-1]
    rows = torch.arange(csr.shape[0], device=csr.device) if row_order is None else row_order
    pieces = torch.clamp((lengths[rows] + max_length - 1) // max_length, min=1)
    position, number = _ranges(pieces)
    row = rows[position]
    cut = pieces[position] > 1
    begin = starts[row] + lengths[row] * number // pieces[position]
    end = starts[row] + lengths[row] * (number + 1) // pieces[position]
    slot = torch.where(cut, torch.cumsum(cut.to(torch.int64), 0) - 1, -1)
    items = torch.stack([row, begin, end, slot], 1).to(torch.int32)
    cut_rows = pieces > 1
    parent_of_slot, nodes = _tree(pieces[cut_rows], lengths[rows][cut_rows])
    items = torch.cat([items[cut], items[~cut]]).contiguous()
    return SegmentSchedule(items, parent_of_slot.contiguous(), nodes.contiguous())
