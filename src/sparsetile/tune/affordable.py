"""Which systems are worth comparing for the number of products that a plan is made for.

Models of systems with tiles count distinct (window, column) pairs, which sorts all entries, and
their builds take several times that of ``csr``. On an H200 that was 5 to 9 ms where products take
20 us (hindsight.jsonl.gz): for a hundred products it was never worth it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsetile.engines.request import Request
from sparsetile.systems.registry import SYSTEMS
from sparsetile.tune.choose import predict_systems
from sparsetile.tune.orders import HOPE, least_seconds

__all__ = ["COMPARE_SECONDS", "affordable"]

# Seconds to count pairs, and to build a system with tiles over building `csr`: fixed, and for an
# entry (medians of hindsight.jsonl.gz).
COMPARE_SECONDS = (8e-3, 3e-9)


def affordable(
    request: Request, able: Sequence[str], expected_runs: int
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the systems to compare, and the reason for each that is left out, for a plan that must
    pay for itself over ``expected_runs`` products.
    """
    simple = [name for name in able if not SYSTEMS[name].counts_pairs]
    if request.device.type != "cuda" or not simple or len(simple) == len(able):
        return list(able), {}
    now = min(predict_systems(request, simple).values())
    hoped = expected_runs * HOPE * max(now - least_seconds(request), 0.0)
    price = COMPARE_SECONDS[0] + COMPARE_SECONDS[1] * request.csr.nnz
    if hoped > price:
        return list(able), {}
    reason = (
        f"not compared: {expected_runs} products might save {hoped * 1e3:.3f} ms, comparing and "
        f"building take about {price * 1e3:.0f} ms"
    )
    return simple, {name: [reason] for name in able if name not in simple}
