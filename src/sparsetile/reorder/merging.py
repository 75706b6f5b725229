"""Row order by merging: similar rows become pairs, similar pairs fours, up to groups of 64.

Each row has SIGNATURES MinHash values: the least hash of its columns, for as many hash functions.
The share of equal values of two rows estimates their Jaccard similarity; the values of a group are
the least of its rows', so a level needs only them and never looks at A again. A level:

1. Groups are sorted by pairs of values. Neighbours in a sort agree in one or two values: they are
   candidates, and so are neighbours in the order so far.
2. Each group prefers its most similar candidate. Two that prefer each other are united.
3. Groups without a partner are compared again without the others, ROUNDS times: with the next one
   in a sort that has none either, if it is in the same block of BLOCK positions or the next block.
4. Those that are left are united side by side: in the first sort, among SIDE positions, if they
   have anything in common, else in the order so far.

After six levels groups have 64 rows, and their parts of 8, 16 and 32 rows are as similar as was
found. Groups keep the order of their first rows. The host waits once. On a GPU kernels take the
same steps (``device_merging.py``); here they are whole-array operations.

Candidates up to four places away are no better than neighbours; one round in place of three is
worse, and so is uniting all that are left in the order so far
(docs/explanation/notes/reordering.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR
from sparsetile.kernels.merge_rows import BLOCK, SIDE
from sparsetile.reorder.device_merging import (
    KEY_BITS,
    LEVELS,
    ROUNDS,
    SIGNATURES,
    SORTS,
    key_bits,
    merged_on_device,
)
from sparsetile.reorder.permutation import Permutation

__all__ = ["merging"]

_NONE = (1 << 31) - 1  # value of an empty row: above all
_WORD = (1 << 32) - 1
# Elements of the largest temporary arrays.
_CHUNK = 1 << 26


def _mixed(numbers: Tensor) -> Tensor:
    """Mix int64 numbers below 2^32 to as many bits, one to one: MurmurHash3's finaliser."""
    mixed = ((numbers ^ (numbers >> 16)) * 0x85EBCA6B) & _WORD
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _WORD
    return mixed ^ (mixed >> 16)


def _hashes(columns: Tensor) -> Tensor:
    """Return SIGNATURES hashes of each column, int32 [columns, SIGNATURES].

    A column is mixed once. Each function is one multiplication and one addition.
    """
    lanes = torch.arange(SIGNATURES, device=columns.device)
    factor, term = _mixed(2 * lanes + 1) | 1, _mixed(2 * lanes + 2)
    return (((_mixed(columns)[:, None] * factor + term) & _WORD) >> 1).to(torch.int32)


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
    step = max(_CHUNK // SIGNATURES, 1)
    for begin in range(0, numbers.numel(), step):
        hashes[begin : begin + step] = _hashes(numbers[begin : begin + step])
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


def _sorts(values: Tensor, level: int) -> Tensor:
    """Return the order so far and the groups sorted by SORTS pairs of values, one a row."""
    groups = values.shape[0]
    high, orders = key_bits(groups), [torch.arange(groups, device=values.device)]
    for sort in range(SORTS):
        first, second = values[:, 2 * (sort + level * SORTS) % SIGNATURES :][:, :2].long().unbind(1)
        key = ((first * 0x9E3779B1) & _WORD) >> (32 - high) << (KEY_BITS - high)
        key |= ((second * 0x85EBCA6B) & _WORD) >> (32 - KEY_BITS + high)
        orders.append(torch.sort(key, stable=True).indices)
    return torch.stack(orders)


def _neighbours(sorts: Tensor, mate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the candidates: neighbours in a sort among the groups without a partner."""
    free = mate[sorts] < 0
    order, place = torch.nonzero(free, as_tuple=True)
    block, group = place // BLOCK, sorts[free]
    near = (order[1:] == order[:-1]) & (block[1:] <= block[:-1] + 1)
    return group[:-1][near], group[1:][near]


def _prefer(values: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the partner of each group that one of the pairs (a[i], b[i]) gives it, or -1."""
    numbers = torch.arange(values.shape[0], device=values.device)
    common = _similarity(values, a, b)
    # The most similar wins, then one that the numbers of both decide, so that both agree.
    tie = (torch.minimum(a, b) * 40503 + torch.maximum(a, b)) & 0xFFFF
    rank = torch.where(common > 0, (common << 16 | tie) << 32, 0)
    best = torch.zeros_like(numbers)
    best.scatter_reduce_(0, a, torch.where(rank > 0, rank | b, 0), "amax")
    best.scatter_reduce_(0, b, torch.where(rank > 0, rank | a, 0), "amax")
    wanted = torch.where(best > 0, best & _WORD, numbers)
    return torch.where((wanted != numbers) & (wanted[wanted] == numbers), wanted, -1)


def _sides(values: Tensor, order: Tensor, mate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second, third and fourth, ... group of each run of similar ones."""
    place = torch.nonzero(mate[order] < 0).squeeze(1)
    group, numbers = order[place], torch.arange(place.numel(), device=mate.device)
    a, b = group[:-1], group[1:]
    near = place[1:] // SIDE == place[:-1] // SIDE
    follows = torch.zeros_like(group, dtype=torch.bool)
    follows[1:] = near & (_similarity(values, a, b) > 0)
    start = torch.cummax(torch.where(follows, 0, numbers), 0).values
    first = follows[1:] & ((numbers - start)[:-1] % 2 == 0)
    return a[first], b[first]


def _pairs(values: Tensor, level: int) -> Tensor:
    """Return each group's partner; -1 for one that is left over if their number is odd."""
    sorts = _sorts(values, level)
    mate = torch.full_like(sorts[0], -1)
    for _ in range(ROUNDS):
        mate = torch.maximum(mate, _prefer(values, *_neighbours(sorts, mate)))
    a, b = _sides(values, sorts[1], mate)
    mate[a], mate[b] = b, a
    rest = torch.nonzero(mate < 0).squeeze(1)
    a, b = rest[: rest.numel() // 2 * 2].view(-1, 2).unbind(1)
    mate[a], mate[b] = b, a
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
    found = merged_on_device(csr)
    return Permutation("merging", _merged(csr) if found is None else found)


def _merged(csr: CSR) -> Tensor:
    """Return the order by tensor operations."""
    empty = (csr.indptr[1:] == csr.indptr[:-1]).to(torch.uint8)
    rows = torch.sort(empty, stable=True).indices
    used = csr.shape[0] - int(empty.sum())
    if used == 0:
        return rows
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
    for pair in reversed(parts):
        flat = pair[order].flatten()
        order = flat[flat >= 0]
    return torch.cat([rows[:used][order], rows[used:]])
