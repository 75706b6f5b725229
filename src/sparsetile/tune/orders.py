"""Whether to search for a row order: its saving over the expected products against its price.

An order lowers the distinct (window, column) pairs, the rows of B that a product reads. Finding one
takes far longer than a product, so only an order that can pay for itself is searched for:

1. In any order a product takes at least its compulsory traffic. If a quarter of that largest
   possible saving, over the expected products, is below an order's price, the order is skipped.
2. An expensive order is tried on a sample first. Rows are sampled by the hash of their first column
   in a random order of columns (MinHash), so that similar rows are taken together or not at all.
   The order's effect on the sample's pairs is assumed for the whole matrix.
3. An order that was found is used if rows share more columns in it, and if the systems' models
   predict that it saves time. Only systems that are predicted to be nearly as fast as the fastest
   in the given order are predicted again: predicting takes longer than to find a cheap order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsetile.core.errors import UnsupportedError
from sparsetile.engines.request import Request
from sparsetile.formats.column_pairs import distinct_pairs
from sparsetile.intake.csr import CSR
from sparsetile.reorder import REORDERERS, Permutation
from sparsetile.reorder.lsh import minhash
from sparsetile.systems import SYSTEMS
from sparsetile.tune.choose import predict_systems

__all__ = ["HOPE", "ORDERS", "OrderCost", "choose_order", "least_seconds", "sample_rows"]

# Entries of a sample, and the heights of windows whose pairs models count.
SAMPLE_ENTRIES = 1 << 18
WINDOWS = (8, 16, 64)
# Height of the windows in which an order must lower the distinct columns before it is predicted.
SHARED = 16
# Expected share of the largest possible saving: `lsh` saved 0 to 13 % of a product's predicted time
# on five matrices for which the bound was 25 to 60 %.
HOPE = 0.25
# An order must be predicted to save this share of a product. ``merging`` on twelve matrices of the
# core suite (TF32, N = 512): nine products that were predicted to save 6 to 23 % took 29 % less to
# 1 % more; cage11 and ex11, predicted to save 4 %, took 4 and 6 % more.
LEAST_SAVING = 0.05
# The same if rows on CUDA cores stay the fastest. 101 products of ``csr`` in `merging`'s order that
# were predicted to save 5 to 15 % took 0.997 times as long in the mean, and up to 1.26 times; 30
# that were predicted to save more took 0.93 times as long.
LEAST_SAVING_OF_ROWS = 0.15
# Systems up to this factor over the fastest may be the fastest in another order: orders saved 36 %
# of a product at most.
RIVAL = 1.6


@dataclass(frozen=True)
class OrderCost:
    """Seconds to find an order and to predict with it: fixed, and per entry."""

    gpu: tuple[float, float]  # for A on a GPU
    host: tuple[float, float]
    sampled: bool = False  # whether it is expensive enough to be tried on a sample first
    module: str = ""  # that its first use imports and, once per machine, compiles
    first_use: float = 0.0  # seconds of that

    def seconds(self, csr: CSR) -> float:
        """Return the seconds to find it for a matrix in this process."""
        fixed, entry = self.gpu if csr.device.type == "cuda" else self.host
        first = self.first_use if self.module and self.module not in sys.modules else 0.0
        return first + fixed + entry * csr.nnz


# Cheapest first. On an H200 ``merging`` takes 1.1 to 1.8 ms up to 4 million entries, 7 for 20 and
# 21 for 100 million, and with the predictions 3 to 14 ms (12 matrices of 89 thousand to 4.2 million
# entries), 190 and 640 ms. ``lsh`` takes no less and shares fewer columns. ``affinity`` always runs
# on one core of the host, 0.1 to 0.5 us an entry (docs/explanation/notes/reordering.md).
ORDERS = {
    "merging": OrderCost(gpu=(3e-3, 5e-9), host=(20e-3, 2e-6)),
    "affinity": OrderCost(
        gpu=(10e-3, 0.4e-6), host=(10e-3, 0.4e-6), sampled=True,
        module="sparsetile.reorder.affinity_numba", first_use=10.0,
    ),
}  # fmt: skip


def least_seconds(request: Request) -> float:
    """Return the time to move A, every used row of B and C once, in any order."""
    csr, item, ceilings = request.csr, request.dtype.itemsize, request.machine
    rows, cols = csr.shape
    value_bytes = 0 if csr.values is None else item
    moved = (4 + value_bytes) * csr.nnz + item * request.n * (min(cols, csr.nnz) + rows)
    # Data that fits L2 stays there from product to product.
    rate = ceilings.dram if moved > ceilings.l2_bytes else ceilings.l2_gather
    return max(ceilings.launch, moved / rate)


def sample_rows(csr: CSR, entries: int) -> CSR:
    """Return rows of A with about this many entries, similar ones together, in the order of A.

    Returns A itself if it has fewer.
    """
    if csr.nnz <= entries:
        return csr
    distinct, group = torch.unique(minhash(csr, 0), return_inverse=True)
    length = (csr.indptr[1:] - csr.indptr[:-1]).to(torch.int64)
    entries_of = torch.zeros_like(distinct).index_add(0, group, length)
    # Groups in a random order: low hashes belong to long rows.
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(distinct.numel(), generator=generator).to(csr.device)
    enough = torch.cumsum(entries_of[shuffled], 0) <= entries
    chosen = torch.zeros(distinct.numel(), dtype=torch.bool, device=csr.device)
    chosen[shuffled[enough]] = True
    rows = torch.nonzero(chosen[group] & (length > 0)).squeeze(1)
    count = length[rows]
    indptr = torch.zeros(rows.numel() + 1, dtype=csr.indptr.dtype, device=csr.device)
    indptr[1:] = torch.cumsum(count, 0)
    begin = torch.repeat_interleave(csr.indptr[rows].to(torch.int64) - indptr[:-1], count)
    places = begin + torch.arange(int(indptr[-1]), device=csr.device)
    return CSR(indptr, csr.indices[places], None, (rows.numel(), csr.shape[1]))


def _estimate(request: Request, name: str, able: Sequence[str]) -> float:
    """Return the predicted seconds in an order, from its effect on a sample."""
    sample = sample_rows(request.csr, SAMPLE_ENTRIES)
    if sample.nnz == 0:
        return min(predict_systems(request, able).values())
    order = REORDERERS[name](sample)
    share = request.csr.nnz / sample.nnz
    asked = Request(
        request.csr, request.n, request.dtype, request.permutation, request.deterministic,
        ceilings=request.ceilings,
    )  # fmt: skip
    for window in WINDOWS:
        pairs = round(distinct_pairs(sample, window, order.perm) * share)
        asked.once(window, lambda pairs=pairs: min(pairs, request.csr.nnz))  # type: ignore[misc]
    return min(predict_systems(asked, able).values())


def choose_order(
    request: Request, able: Sequence[str], expected_runs: int
) -> tuple[Permutation, list[str]]:
    """Return the order that pays over ``expected_runs`` products, or the request's own if none
    does, and the reason in words.
    """
    best, why = request.permutation, list[str]()
    if not any(SYSTEMS[name].counts_pairs for name in able):
        return best, why  # no model of these systems depends on the order
    predicted = predict_systems(request, able)
    now, least = min(predicted.values()), least_seconds(request)
    able = [name for name in able if predicted[name] <= RIVAL * now]
    shared = request  # in the best order
    for name, cost in ORDERS.items():
        price = cost.seconds(request.csr)
        hoped = expected_runs * HOPE * (now - least)
        if hoped <= price:
            why.append(
                f"{name} not looked for: {expected_runs} products might save "
                f"{max(hoped, 0.0) * 1e3:.3f} ms, it takes about {price * 1e3:.0f} ms"
            )
            continue
        try:
            if cost.sampled:
                then = _estimate(request, name, able)
                saves = expected_runs * (now - then)
                if saves <= price or then > (1 - LEAST_SAVING) * now:
                    why.append(
                        f"{name} not taken: {expected_runs} products would save about "
                        f"{max(saves, 0.0) * 1e3:.3f} ms by a sample, it takes about "
                        f"{price * 1e3:.0f} ms"
                    )
                    continue
            found = REORDERERS[name](request.csr)
        except UnsupportedError as error:
            why.append(f"{name} not possible: {error}")
            continue
        asked = Request(
            request.csr, request.n, request.dtype, found, request.deterministic,
            ceilings=request.ceilings,
        )  # fmt: skip
        before, after = shared.pairs(SHARED), asked.pairs(SHARED)
        if after > (1 - LEAST_SAVING) * before:  # counting takes a fraction of predicting
            why.append(
                f"{name} not taken: windows of {SHARED} rows read {after} of B, {before} without"
            )
            continue
        ordered = predict_systems(asked, able)
        fastest = min(ordered, key=ordered.__getitem__)
        then = ordered[fastest]
        # Only systems with tiles count pairs.
        least_saving = LEAST_SAVING if SYSTEMS[fastest].counts_pairs else LEAST_SAVING_OF_ROWS
        if then <= (1 - least_saving) * now:
            why.append(
                f"{name} taken: predicted {then * 1e3:.3f} ms a product, {now * 1e3:.3f} before"
            )
            best, now, shared = found, then, asked
        else:
            why.append(f"{name} not taken: predicted {then * 1e3:.3f} ms, {now * 1e3:.3f} without")
    return best, why
