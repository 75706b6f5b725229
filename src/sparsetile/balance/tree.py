"""The tree that adds up the pieces of cut units, in a fixed order.

The device side is ``kernels/cuda/rows/segment.cuh``; its comment draws the arrays. A slot is a
place for a partial sum. Pieces have the first slots, in the order of their units and entries; a
node adds neighbouring slots and puts the sum into a slot of its own, or is the root of its unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsetile.balance.base import Schedule
from sparsetile.intake.csr import owners

__all__ = [
    "FAN_IN", "TreeSchedule", "build_tree", "host_ranges", "no_tree", "ranges",
]  # fmt: skip

# Children of a tree node. 16 keeps the climb of a row of 64 Ki entries at two steps while no group
# reads more than 16 partial rows in sequence.
FAN_IN = 16


def ranges(counts: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """For counts [n]: owner of each of the sum(counts) elements, and its number in the owner.

    If that sum is passed as ``total``, the host does not wait for it.
    """
    owner = owners(counts, total)
    number = (
        torch.arange(owner.numel(), device=owner.device) - (torch.cumsum(counts, 0) - counts)[owner]
    )
    return owner, number


def host_ranges(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`ranges` returns, on the host."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]


def build_tree(children: Tensor) -> tuple[Tensor, Tensor]:
    """Join the pieces of cut units: ``children`` pieces of each, two or more.

    Returns ``parent_of_slot`` and ``nodes`` of :class:`TreeSchedule`. Runs on the host: few units
    are cut, and a level is a dozen steps on short lists.
    """
    if not children.numel():
        return no_tree(children.device)
    parents: list[np.ndarray] = []
    nodes: list[np.ndarray] = []
    first_slot = node_base = 0
    counts = children.cpu().numpy()
    while counts.size:
        groups = (counts + FAN_IN - 1) // FAN_IN
        unit, number = host_ranges(counts)
        # Even groups: 17 children become 9 + 8, not 16 + 1.
        group_in_unit = number * groups[unit] // counts[unit]
        group = (np.cumsum(groups) - groups)[unit] + group_in_unit
        parents.append(group + node_base)
        total = int(groups.sum())
        sizes = np.bincount(group, minlength=total)
        is_root = np.repeat(groups == 1, groups)
        # Nodes that are not roots take the next slots, in order, as children of the next level.
        next_slot = first_slot + unit.size
        own = np.where(is_root, -1, next_slot + np.cumsum(~is_root) - 1)
        first = first_slot + np.cumsum(sizes) - sizes
        nodes.append(np.stack([first, sizes, own, np.zeros_like(own)], 1))
        first_slot, node_base = next_slot, node_base + total
        counts = groups[groups > 1]
    both = (np.concatenate(parents), np.concatenate(nodes))
    parent_of_slot, listed = (torch.from_numpy(part.astype(np.int32)) for part in both)
    return parent_of_slot.to(children.device), listed.to(children.device)


def no_tree(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tree of no cut units, as :func:`build_tree` does."""
    empty = torch.empty(0, dtype=torch.int32, device=device)
    return empty, empty.reshape(0, 4)


@dataclass(frozen=True, eq=False)
class TreeSchedule(Schedule):
    """Items of work and the tree that adds up cut ones; all int32."""

    arrays: ClassVar[tuple[str, ...]] = ("items", "parent_of_slot", "nodes")

    items: Tensor  # [items, 4]: each kind of schedule defines the numbers
    parent_of_slot: Tensor  # [slots]: node that adds the slot's partial sum
    nodes: Tensor  # [nodes, 4]: ``first child slot, children, own slot or -1 at the root, 0``

    @property
    def slot_count(self) -> int:
        return self.parent_of_slot.shape[0]

    @property
    def node_count(self) -> int:
        return self.nodes.shape[0]
