"""What comparing all systems costs, what it may save, and from how many products on it pays.

Models of systems with tiles count distinct (window, column) pairs, which sorts all entries; their
builds take several times that of ``csr``. On an H200 both took 4 to 6 ms for matrices whose rows
share little, and 8 to 20 for those with tiles (12 matrices, TF32 and float16, N = 128 and 512,
development readings), where a product takes 10 to 300 us. So a plan that is made for few products,
or for an unknown number, compares only systems that are planned quickly (``QUICK_ON`` of their
folders). If the number is unknown, all systems are compared once as many products have come as
would have paid for it: whatever the number, little more is spent than with the best choice for it.

What comparing saves is guessed from the traffic that no system avoids, and on a GPU from what a
build of rows counts in any case: how many entries four neighbouring rows have for each row of B
that they read. Where they share much, as in finite-element matrices, tiles take half of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparsetile.engines.request import Request
from sparsetile.engines.rows.build import entries_per_read
from sparsetile.systems.registry import SYSTEMS, candidates, exact_system
from sparsetile.systems.requirements import tile_reasons
from sparsetile.tune.choose import EXPECTED_RUNS, NEARLY_DENSE, Choice, predict_systems
from sparsetile.tune.orders import HOPE, least_seconds

__all__ = ["Account", "choose_quickly", "schedule_account"]

# Seconds to compare all systems, and to build another quick system beside the exact one: fixed, and
# for an entry.
COMPARE_SECONDS, BESIDE_SECONDS = (5e-3, 2.5e-9), (0.6e-3, 0.5e-9)
# Share of the exact system's time that another quick one must save with a nearly dense A.
CLEARLY = 0.2
# Entries per row of B read by four rows from which tiles may be faster, and the share of what they
# are foreseen to save that is counted on.
SHARING, TRUST = 1.5, 0.7
# The same to build the exact system's schedule on a GPU, and what a product straight from the
# arrays takes beside one with it: seconds more, and times as long
# (docs/explanation/notes/direct.md).
SCHEDULE_SECONDS, WITHOUT_SCHEDULE = (0.5e-3, 0.5e-9), (5e-6, 1.25)


@dataclass(frozen=True)
class Account:
    """When comparing all systems pays."""

    seconds: float  # that comparing takes
    saves: float  # seconds of a product, expected; 0 if nothing can be saved

    @property
    def products(self) -> float:
        """From how many products on comparing pays; inf if never."""
        return self.seconds / self.saves if self.saves > 0 else math.inf

    def report(self, expected: int | None) -> dict[str, Any]:
        """What a plan says of it, of a choice that was made for ``expected`` products."""
        later = math.ceil(self.products) if expected is None and self.saves > 0 else None
        return {"seconds": self.seconds, "saves": self.saves, "expected": expected, "later": later}


def choose_quickly(request: Request, runs: int | None) -> tuple[Choice, Account] | None:
    """Return the best of the systems that are planned quickly, for this number of products or an
    unknown one, and the account of comparing all; None if no such system can serve the request.
    """
    device = request.device.type
    quick = SYSTEMS.quick_on(device)
    exact = exact_system(device).name
    if exact not in quick or SYSTEMS[exact].reasons(request):
        return None
    beside = BESIDE_SECONDS[0] + BESIDE_SECONDS[1] * request.csr.nnz
    expected = EXPECTED_RUNS if runs is None else runs
    predicted = predict_systems(request, [exact])
    rows, cols = request.csr.shape
    if request.csr.nnz > NEARLY_DENSE * rows * cols:  # A is written out as fast as it is scheduled
        beside = min(beside, CLEARLY * expected * predicted[exact])
    if expected * predicted[exact] > beside:  # otherwise no other can pay, however fast
        predicted = predict_systems(request, candidates(request, *quick)[0])

    def cost(name: str) -> float:
        return predicted[name] * expected + (0.0 if name == exact else beside)

    chosen = min(sorted(predicted), key=cost)
    price = COMPARE_SECONDS[0] + COMPARE_SECONDS[1] * request.csr.nnz
    most = predicted[chosen] - least_seconds(request)  # that any system can save
    saves = HOPE * max(most, 0.0)
    if runs is None or runs * most > price:
        saves = max(saves, _saved_by_tiles(request, predicted[chosen]))
    return Choice(chosen, "model", predicted), Account(price, saves)


def _saved_by_tiles(request: Request, seconds: float) -> float:
    """Return the seconds of a product that tiles are foreseen to save; 0 if that is not known."""
    if request.device.type != "cuda" or tile_reasons(request):
        return 0.0
    sharing = entries_per_read(request)
    if sharing is None or sharing < SHARING:
        return 0.0
    # Imported only for matrices that may have tiles: NumPy's part of it takes a while.
    from sparsetile.engines.tiles.hybrid_cost import foreseen_seconds

    return TRUST * (seconds - foreseen_seconds(request, sharing))


def schedule_account(request: Request, choice: Choice) -> Account | None:
    """Return what the exact system's schedule on a GPU costs, and what it saves over products
    straight from A's arrays; None if another system was chosen."""
    exact = exact_system(request.device.type).name
    if choice.system != exact:
        return None
    price = SCHEDULE_SECONDS[0] + SCHEDULE_SECONDS[1] * request.csr.nnz
    more, times = WITHOUT_SCHEDULE
    return Account(price, more + (times - 1) * choice.seconds[exact])
