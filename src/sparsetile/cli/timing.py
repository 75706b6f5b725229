"""How long one product takes: the host's clock on a CPU, events and graph replay on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.plan.plan import Plan
from sparsetile.tune import measure

__all__ = ["Timing", "compulsory_bytes", "time_product"]

# Products in one captured graph: the cost of starting the graph is shared among them.
_GRAPH_PRODUCTS = 10


@dataclass(frozen=True)
class Timing:
    """Median seconds of one product.

    Attributes
    ----------
    call : float
        A single call: on a GPU between two events, launch gaps included.
    graph : float or None
        One of many in a replayed CUDA graph: the kernel alone. None on a CPU, or where the
        system cannot be captured.
    """

    call: float
    graph: float | None

    @property
    def best(self) -> float:
        return self.call if self.graph is None else min(self.call, self.graph)

    @property
    def method(self) -> str:
        return "call" if self.graph is None or self.call < self.graph else "graph"


def _graph_seconds(plan: Plan, B: Tensor, reduce: str, repeats: int) -> float | None:
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_GRAPH_PRODUCTS):
                plan.run(B, reduce=reduce)
        return measure(graph.replay, plan.device, repeats) / _GRAPH_PRODUCTS
    except RuntimeError:  # a system that synchronises cannot be captured; its call time stands
        torch.cuda.synchronize(plan.device)
        return None


def time_product(plan: Plan, B: Tensor, *, reduce: str = "sum", repeats: int = 20) -> Timing:
    """Return the median time of ``plan.run(B)`` over ``repeats`` runs, after warm-up.

    Parameters
    ----------
    plan : Plan
    B : Tensor [K, N]
    reduce : {"sum", "mean", "max", "min"}
    repeats : int
    """
    with torch.no_grad():
        if plan.device.type != "cuda":
            return Timing(measure(lambda: plan.run(B, reduce=reduce), plan.device, repeats), None)
        with torch.cuda.device(plan.device):
            call = measure(lambda: plan.run(B, reduce=reduce), plan.device, repeats)
            return Timing(call, _graph_seconds(plan, B, reduce, repeats))


def compulsory_bytes(plan: Plan, n: int) -> int:
    """Return the bytes that any product must move: A, the used rows of B, and C, once each."""
    item = plan.dtype.itemsize
    csr = plan._csr
    used = int(torch.unique(csr.indices).numel())
    entry = 4 + (0 if plan.values is None else item)
    return entry * plan.nnz + item * n * (used + plan.shape[0])
