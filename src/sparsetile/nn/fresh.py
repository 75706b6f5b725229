"""Graphs on a GPU that were never seen: products on their edges, grouped by rows there.

Nothing is planned, and the host waits for nothing. A graph that comes again is planned when that is
predicted to cost at most a share of what its products have cost so far (``cache.fresh``).

Parallel edges stay separate. What a :class:`FreshGraph` does not take (float64, batches, transforms
of torch.func) is computed by its canonical form, made at first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from sparsetile.cache.fresh import PLAN_SECONDS, PRODUCTS_OF_A_STEP, SHARE, direct_seconds
from sparsetile.core.streams import capturing, refuse_capture, settle
from sparsetile.intake.canonical import from_coordinates
from sparsetile.intake.identity import is_trained, values_key
from sparsetile.jit.loader import current_stream_handle, device_index
from sparsetile.kernels.grouping import VALUE_TYPES
from sparsetile.launch.faults import raise_faults
from sparsetile.launch.grouping import MOST_GROUPED, GroupedRows, group_edges
from sparsetile.layers.grouped_rows import flat_rows, takes_width
from sparsetile.layers.normalise import normalised_values
from sparsetile.nn.fresh_pair import FreshPair
from sparsetile.nn.fresh_weights import FreshWeights, last_loops, rows_of_entries
from sparsetile.nn.graph import MAX_VALUES, Graph, Loops, Weights, building
from sparsetile.nn.sampled import edge_names, of_canonical, unwatched
from sparsetile.plan.family import expects_many
from sparsetile.plan.modes import maybe_wrapped, plain_call
from sparsetile.plan.valued import takes_valued, valued_product

__all__ = [
    "GROUPED_ON", "FreshGraph", "fresh_values", "make_fresh", "takes_fresh",
    "takes_weighted",
]  # fmt: skip

# Calls before which no plan pays: predicting it takes as long as a launch, in each step with a new
# graph.
FEW_CALLS = 4
# Devices whose edges are grouped.
GROUPED_ON = "cuda"

_lock = threading.RLock()


class FreshGraph(Graph):
    """Edges that a GPU groups by target; see the module's docstring.

    Only for reductions of edges and for attention: use :attr:`canonical` for all else. Errors begin
    with ``layer``. With weights of edges ``rows`` are ordered; ``loop_edge`` is then that of
    :class:`FreshWeights`.
    """

    short_lived, planned, weighted, multiplicity = True, None, False, None

    def __init__(
        self, rows: GroupedRows, layer: str, flow: str, loops: Loops, device: torch.device,
        loop_edge: Tensor | None = None,
    ) -> None:  # fmt: skip
        # Only what callers read: a fresh graph is made at every step.
        self.calls, self.loops = 0, loops
        self.by_target = rows
        self._layer, self._flow, self._device = layer, flow, device
        self._canonical: Graph | None = None
        self._products: dict[tuple[int, torch.dtype], int] = {}  # how many were counted
        self._costs: dict[tuple[int, torch.dtype], float] = {}
        self._flat: dict[bool, tuple[list[Tensor], str]] = {}
        self._rows: Tensor | None = None
        self._loop_edge = loop_edge
        self._weight_map: FreshWeights | None = None
        self._weighted_values: dict[Hashable, Tensor] = {}  # values of entries
        # What is made on one stream is read there, until another one asks: then the host waits.
        self._stream = current_stream_handle(device_index(device))
        self._shared = False
        self._streams = {}

    def __del__(self) -> None:
        """Let go of its tensors."""
        if self.__dict__.get("_shared"):
            turned = self.by_target.known_transpose
            both = (self.by_target,) if turned is None else (self.by_target, turned)
            self._let_go(part for rows in both for part in rows.memories())
            parts = [self._rows, self._loop_edge, *self._weighted_values.values()]
            self._let_go(parts if self._weight_map is None else [*parts, *self._weight_map.tensors])

    @property
    def shape(self) -> tuple[int, int]:
        return self.by_target.shape

    # -- streams, and what the graph has cost ---------------------------------------------------

    def note_stream(self) -> None:
        """Make what the graph has safe to read on the current stream."""
        stream = current_stream_handle(device_index(self._device))
        if stream != self._stream and not (self._shared or self.captured):
            # Whoever captures has waited for what came before.
            self.captured = capturing(self._device)
            if not self.captured:
                torch.cuda.synchronize(self._device)
                self._shared = True
        if self._shared and stream not in self._streams:
            self._streams[stream] = torch.cuda.current_stream(self._device)

    def _made(self, make: Callable[[], Any]) -> Any:
        """Make a part, which other streams may read if the graph is shared."""
        refuse_capture(self._layer, self._device, "Call the layer once before the capture")
        with _lock, unwatched():
            made = make()
        if self._shared:
            settle(self._device)
        return made

    @property
    def transposed(self) -> GroupedRows:
        """The edges by source."""
        rows = self.by_target
        if rows.known_transpose is None:
            self._made(lambda: rows.transposed)
        return rows.transposed

    def values(self, rows: GroupedRows, rule: int, dtype: torch.dtype) -> Tensor:
        """As :meth:`GroupedRows.values`."""
        if not rows.knows(rule, dtype):
            self._made(lambda: rows.values(rule, dtype))
        return rows.values(rule, dtype)

    def spend(self, n: int, dtype: torch.dtype, differentiable: bool) -> None:
        """Count a product of ``n`` columns, with its gradient if it has one."""
        key = n, dtype
        count = PRODUCTS_OF_A_STEP - 1 if differentiable else 1
        self._products[key] = self._products.get(key, 0) + count

    def _cost(self, n: int, dtype: torch.dtype) -> float:
        cost = self._costs.get((n, dtype))
        if cost is None:
            entries = self.by_target.entries
            cost = direct_seconds(*self.shape, entries, n, dtype.itemsize, self._device)
            self._costs[n, dtype] = cost
        return cost

    @property
    def pays(self) -> bool:
        """Whether it is time to plan the graph."""
        if capturing(self._device):
            return False
        if expects_many():
            return True
        if self.calls < FEW_CALLS:
            return False
        spent = sum(count * self._cost(*kind) for kind, count in self._products.items())
        return spent * SHARE >= PLAN_SECONDS[0] + PLAN_SECONDS[1] * self.by_target.entries

    # -- products -------------------------------------------------------------------------------

    @property
    def canonical(self) -> Graph:
        """The same graph in canonical form, made at first use."""
        if self._canonical is None:
            with building(self._device, self._layer):
                rows = self.by_target
                count = int(rows.wide_part("indptr", rows.shape[0] + 1)[-1])
                raise_faults()
                names = edge_names(self._layer, self._flow == "source_to_target")
                target, source = (rows.part(name, count).long() for name in ("sorted", "columns"))
                csr = from_coordinates(names, target, source, None, self.shape)
            self._canonical = Graph(csr)
        return self._canonical

    # -- entries, and their values --------------------------------------------------------------

    @property
    def rows(self) -> Tensor:
        """Target of each entry, int64 [entries]; some target of entries that are in no row."""
        if self._rows is None:
            self._rows = self._made(lambda: rows_of_entries(self.by_target))
        return self._rows

    def to_entries(self, values: Tensor) -> Tensor:
        """Bring [edges] to [entries]; of rows that are ordered. Differentiable."""
        return values.index_select(0, self.by_target.order)

    def convolution_values(
        self, weight: Tensor, fill: float, normalize: bool, dtype: torch.dtype
    ) -> Weights:
        """Return the values of a convolution whose edges have weights, in float32 at least."""

        def compute() -> Tensor:
            mapped = self._weight_map
            if mapped is None:
                made = lambda: FreshWeights(self.by_target, self._loop_edge)  # noqa: E731
                mapped = self._weight_map = self._made(made)
            if not normalize:
                return mapped.entries(weight.to(dtype), fill)
            values = normalised_values(mapped, weight, fill, dtype)
            return mapped.inside(values) if values.requires_grad else values

        if is_trained(weight):
            return Weights(None, compute())
        return self.keep_values(("gcn", fill, normalize, dtype), values_key(weight), compute)

    def keep_values(
        self, name: Hashable, values_key: Hashable, compute: Callable[[], Tensor]
    ) -> Weights:
        """As :meth:`Graph.keep_values`."""
        key = name, values_key, current_stream_handle(device_index(self._device))
        found = self._weighted_values.get(key)
        captured = capturing(self._device)
        if found is None or captured:  # a CUDA graph computes them at each replay
            with torch.inference_mode(False), torch.no_grad():
                found = compute()
        if not captured:
            if len(self._weighted_values) >= MAX_VALUES and key not in self._weighted_values:
                self._weighted_values.clear()
            self._weighted_values[key] = found
        return Weights(key, found)

    def _weighted(
        self, x: Tensor, weights: Weights, reduce: str, bias: Tensor | None, relu: bool
    ) -> Tensor | None:
        """Return relu(reduced x + bias) with gradients of the weights; None if the canonical graph
        must compute it."""
        if torch.is_autocast_enabled(GROUPED_ON) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(GROUPED_ON))
        values = weights.values if weights.values.dtype is x.dtype else weights.values.to(x.dtype)
        if not self._takes(x) or not takes_valued(x, values, bias, reduce):
            return None
        needs = torch.is_grad_enabled() and (x.requires_grad or values.requires_grad)
        flat = self.rows_plan(x.shape[1], needs)
        return valued_product(flat, values, x, bias, reduce, 1.0, relu)

    def _takes(self, x: Tensor) -> bool:
        return (
            type(x) in (Tensor, torch.nn.Parameter)
            and x.dim() == 2
            and x.layout is torch.strided
            and x.dtype in VALUE_TYPES
            and takes_width(self.by_target, x.shape[1])
            and plain_call()
            and not maybe_wrapped(x)
        )

    def pair(
        self, width: int, dtype: torch.dtype, reduce: str, name: Hashable,
        weights: Callable[[], Weights | None], differentiable: bool,
    ) -> FreshPair | None:  # fmt: skip
        """As :meth:`Graph.pair`; a ``name`` without weights is the symmetric normalisation."""
        if torch.is_autocast_enabled(GROUPED_ON) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(GROUPED_ON)
        if dtype not in VALUE_TYPES or not takes_width(self.by_target, width):
            return None
        given = None if name is None else weights()
        if given is None:
            return FreshPair(self, reduce, dtype, name is not None, differentiable)
        if reduce != "sum" or given.key is None:
            return None
        return FreshPair(self, reduce, dtype, False, differentiable, given.values)

    def reduce_edges(
        self, x: Tensor, reduce: str, symmetric: bool, bias: Tensor | None, relu: bool
    ) -> Tensor | None:
        """Return relu(reduced x + bias); None if the canonical graph must compute it."""
        if torch.is_autocast_enabled(GROUPED_ON) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(GROUPED_ON))
        if not self._takes(x):
            return None
        needs = torch.is_grad_enabled() and x.requires_grad
        pair = FreshPair(self, reduce, x.dtype, symmetric, needs)
        if needs:
            out = pair.tracked(x)
        elif bias is None or reduce in ("max", "min") or bias.requires_grad:
            out = pair.product(x)[0]
        else:
            out, bias = pair.product(x, bias)[0], None
        out = out if bias is None else (out + bias).to(out.dtype)
        return out.relu() if relu else out

    def aggregate(
        self, x: Tensor, weights: Weights | None = None, *, reduce: str = "sum",
        bias: Tensor | None = None, relu: bool = False,
    ) -> Tensor:  # fmt: skip
        if weights is None:
            found = self.reduce_edges(x, reduce, False, bias, relu)
        else:
            found = self._weighted(x, weights, reduce, bias, relu)
        if found is not None:
            return found
        weights, reduce = self._canonical_weights(weights, reduce)
        return self.canonical.aggregate(x, weights, reduce=reduce, bias=bias, relu=relu)

    def convolve(self, dense: Tensor, symmetric: bool, transposed: bool) -> Tensor | None:
        """Return the convolution of x, or its gradient; None if there has to be a plan."""
        if not self._takes(dense):
            return None
        pair = FreshPair(self, "sum", dense.dtype, symmetric, False)
        return pair.plain_gradient(dense, None) if transposed else pair.product(dense)[0]

    def gradient(
        self, grad: Tensor, weights: Weights | None = None, *, reduce: str = "sum"
    ) -> Tensor:
        if (weights is None or reduce == "sum") and self._takes(grad):
            values = None if weights is None else weights.values
            pair = FreshPair(self, reduce, grad.dtype, False, False, values)
            return pair.plain_gradient(grad, None)
        weights, reduce = self._canonical_weights(weights, reduce)
        return self.canonical.gradient(grad, weights, reduce=reduce)

    def _canonical_weights(
        self, weights: Weights | None, reduce: str
    ) -> tuple[Weights | None, str]:
        """Return values and reduction of the canonical graph's entries, of sums and means."""
        whole = self.canonical
        if weights is None:
            return of_canonical(whole, None, reduce)
        values = weights.values[: whole.edge_count]
        if reduce == "mean" and whole.multiplicity is not None:
            reduce = "sum"
            counts = self.by_target.wide_part("indptr", self.shape[0] + 1).diff()
            values = values / counts[self.rows[: whole.edge_count]].to(values.dtype)
        return Weights(None, whole.to_entries(values)), reduce

    def rows_plan(self, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        self.spend(n, torch.float32, differentiable)
        found = self._flat.get(differentiable)
        if found is None:
            found = self._made(lambda: flat_rows(self.by_target, differentiable))
            self._flat[differentiable] = found
        return found

    def edges_of_entries(self) -> Tensor | None:
        return None


def fresh_values(rule: int, x: Tensor) -> tuple[int, torch.dtype] | None:
    """Return the values that products of ``x`` need, as :func:`group_edges` takes them."""
    dtype = x.dtype
    if torch.is_autocast_enabled(GROUPED_ON) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(GROUPED_ON)
    return (rule, dtype) if dtype in VALUE_TYPES else None


def takes_weighted(x: Tensor) -> bool:
    """Whether edges with weights may be a fresh graph: plans keep the values of other products."""
    return x.dim() == 2 and x.dtype in VALUE_TYPES


def takes_fresh(edges: Tensor, loops: Loops, shape: tuple[int, int]) -> bool:
    """Whether a GPU can group these edges, and may."""
    count = edges.shape[1]
    return (
        edges.device.type == GROUPED_ON
        and loops in ("keep", "replace")
        and count > 0
        and count + max(shape) < MOST_GROUPED
        and min(shape) > 0
        and not expects_many()
    )


def make_fresh(
    layer: str, edges: Tensor, flow: str, loops: Loops, shape: tuple[int, int], ordered: bool,
    values: tuple[int, torch.dtype] | None,
) -> FreshGraph:  # fmt: skip
    """Return edges as a fresh graph, ``ordered`` if they have weights; ``values`` are those that
    are surely needed. Errors begin with ``layer``."""
    refuse_capture(layer, edges.device, "Call the layer once before the capture")
    trains, replaces, loop_edge = torch.is_grad_enabled(), loops == "replace", None
    with unwatched():
        by_target = flow == "source_to_target"
        rows = group_edges(edges, by_target, shape, replaces, trains, ordered, values)
        if ordered and replaces:
            with torch.no_grad():
                loop_edge = last_loops(edges, min(shape))
    return FreshGraph(rows, layer, flow, loops, edges.device, loop_edge)
