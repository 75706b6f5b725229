"""Row order by merging: similar rows become pairs, similar pairs fours, up to groups of 64.

Each row has SIGNATURES MinHash values: the least hash of its columns, for as many hash functions.
The share of equal values of two rows estimates their Jaccard similarity; the values of a group are
the least of its rows', so a level needs only them and never looks at A again. A level:

1. Groups are sorted by pairs of values. Neighbours in a sort agree in one or two values: they are
   candidates, and so are neighbours in the order so far.
2. Each group prefers its most similar candidate. Two that prefer each other are united.
3. Groups without a partner are sorted again without the others, ROUNDS times. Those that are left
   are united side by side: in a sort if they have anything in common, else in the order so far.

After six levels groups have 64 rows, and their parts of 8, 16 and 32 rows are as similar as was
found. Groups keep the order of their first rows. Everything runs on A's device by whole-array
operations; the host waits once.

Candidates up to four places away are no better than neighbours; one round in place of three is
worse, and so is uniting all that are left in the order so far
(docs/explanation/notes/reordering.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.reorder.lsh import hashed
from sparsetile.reorder.permutation import Permutation

__all__ = ["merging"]

# Hash functions, sorts and rounds of a level; levels: 2 ** LEVELS rows are the highest window.
SIGNATURES, SORTS, ROUNDS, LEVELS = 32, 4, 3, 6
# Bits of a value. Two fit a sort key.
_BITS = 31
_NONE = (1 << _BITS) - 1  # of an empty row: above all
# Elements of the largest temporary arrays.
_CHUNK = 1 << 26


def _signatures(csr: CSR) -> Tensor:
    """Return the MinHash values of each row, int32 [M, SIGNATURES]."""
    rows, columns = csr.shape
    length = (csr.indptr[1:] - csr.indptr[:-1]).to(torch.int64)
    row_of = torch.repeat_interleave(
        torch.arange(rows, device=csr.device), length, output_size=csr.nnz
    )
    # In a wide matrix only the columns that occur are hashed.
    wide = columns > csr.nnz
    numbers = csr.indices.to(torch.int64) if wide else torch.arange(columns, device=csr.device)
    found = torch.full((rows, SIGNATURES), _NONE, dtype=torch.int32, device=csr.device)
    hashes = torch.empty((numbers.numel(), SIGNATURES), dtype=torch.int32, device=csr.device)
    seeds = torch.arange(SIGNATURES, device=csr.device)
    step = max(_CHUNK // SIGNATURES, 1)
    for begin in range(0, numbers.numel(), step):
        hashes[begin : begin + step] = hashed(numbers[begin : begin + step, None], seeds)
    for begin in range(0, csr.nnz, step):
        here = slice(begin, begin + step)
        each = hashes[here] if wide else hashes.index_select(0, csr.indices[here])
        found.scatter_reduce_(0, row_of[here, None].expand_as(each), each, "amin")
    return found


def _similarity(values: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return how many values groups a[i] and b[i] have in common; 0 for empty ones."""
    found = torch.empty_like(a)
    step = max(_CHUNK // SIGNATURES, 1)
    for begin in range(0, a.numel(), step):
        here = slice(begin, begin + step)
        left, right = values.index_select(0, a[here]), values.index_select(0, b[here])
        found[here] = ((left == right) & (left != _NONE)).sum(1)
    return found


def _unmatched_first(order: Tensor, mate: Tensor) -> Tensor:
    """Return rows of orders with the groups that have no partner first, in their order."""
    matched = (mate[order] >= 0).to(torch.uint8)
    return order.gather(-1, torch.sort(matched, dim=-1, stable=True).indices)


def _pairs(values: Tensor, level: int) -> Tensor:
    """Return each group's partner; -1 for one that is left over if their number is odd."""
    groups, device = values.shape[0], values.device
    numbers = torch.arange(groups, device=device)
    orders = [numbers]
    for sort in range(SORTS):
        first = 2 * (sort + level * SORTS) % SIGNATURES
        key = (values[:, first].to(torch.int64) << _BITS) | values[:, first + 1]
        orders.append(torch.sort(key, stable=True).indices)
    sorts = torch.stack(orders)
    mate = torch.full_like(numbers, -1)
    for turn in range(ROUNDS):
        if turn:
            sorts = _unmatched_first(sorts, mate)
        a, b = sorts[:, :-1].flatten(), sorts[:, 1:].flatten()
        common = _similarity(values, a, b)
        if turn:
            common = torch.where((mate[a] < 0) & (mate[b] < 0), common, 0)
        # The most similar wins, then one that the numbers of both decide, so that both agree.
        tie = (torch.minimum(a, b) * 40503 + torch.maximum(a, b)) & 0xFFFF
        rank = torch.where(common > 0, (common << 16 | tie) << 32, 0)
        best = torch.zeros_like(numbers)
        best.scatter_reduce_(0, a, torch.where(rank > 0, rank | b, 0), "amax")
        best.scatter_reduce_(0, b, torch.where(rank > 0, rank | a, 0), "amax")
        wanted = torch.where(best > 0, best & 0xFFFFFFFF, numbers)
        agreed = (wanted != numbers) & (wanted[wanted] == numbers)
        mate = torch.where(agreed, wanted, mate)
    # Side by side in a sort if they have anything in common, then in the order so far.
    for order, similar in ((sorts[1], True), (numbers, False)):
        rest = _unmatched_first(order, mate)
        a, b = rest[: groups // 2 * 2].view(-1, 2).unbind(1)
        free = (mate[a] < 0) & (mate[b] < 0)
        if similar:
            free &= _similarity(values, a, b) > 0
        mate[a], mate[b] = torch.where(free, b, mate[a]), torch.where(free, a, mate[b])
    return mate


def _unite(values: Tensor, mate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of the groups made of pairs, and both parts of each; -1 for none.

    Groups are in the order of their first parts; one without a partner is the last.
    """
    groups, made = mate.numel(), (mate.numel() + 1) // 2
    numbers = torch.arange(groups, device=mate.device)
    leads = numbers < mate
    place = torch.where(leads, torch.cumsum(leads, 0) - 1, made)
    place = torch.where(mate < 0, made - 1, place)
    first = numbers.new_empty(made + 1).scatter_(0, place, numbers)[:made]
    second = mate[first]
    both = torch.minimum(values[first], values[second.clamp(min=0)])
    united = torch.where(second[:, None] < 0, values[first], both)
    return united, torch.stack([first, second], 1)


def merging(csr: CSR) -> Permutation:
    """Order rows so that windows of 8 to 64 of them share many columns, on A's device.

    The order is the same on every device. Empty rows come last.
    """
    empty = (csr.indptr[1:] == csr.indptr[:-1]).to(torch.uint8)
    rows = torch.sort(empty, stable=True).indices
    used = csr.shape[0] - int(empty.sum())
    if used == 0:
        return Permutation("merging", rows)
    values = _signatures(csr).index_select(0, rows[:used])
    parts: list[Tensor] = []
    for level in range(LEVELS):
        if values.shape[0] < 2:
            break
        values, pair = _unite(values, _pairs(values, level))
        parts.append(pair)
    # Whole groups first: a smaller one would shift the windows behind it.
    order = torch.arange(values.shape[0], device=csr.device)
    size = torch.ones(used, dtype=torch.int64, device=csr.device)
    for pair in parts:
        size = size[pair[:, 0]] + torch.where(pair[:, 1] < 0, 0, size[pair[:, 1].clamp(min=0)])
    order = order[torch.sort((size < 1 << len(parts)).to(torch.uint8), stable=True).indices]
    for level in reversed(range(len(parts))):
        flat = parts[level][order].flatten()
        count = used if level == 0 else parts[level - 1].shape[0]
        order = flat[torch.sort((flat < 0).to(torch.uint8), stable=True).indices[:count]]
    return Permutation("merging", torch.cat([rows[:used][order], rows[used:]]))
