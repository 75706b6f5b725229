"""The prepared graph: A[target, source] as a pattern, and its plans, made once per graph.

Layers find a graph again by the identity and the version counters of the tensors it was given as
(``intake.fingerprint``). A graph is kept while those tensors live, and at most ``MAX_GRAPHS`` are.
Weights do not belong to the pattern: new weights, in place or in a new tensor, keep its plans.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Literal

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.intake import CSR, as_csr, current_values, fingerprint
from sparsetile.intake.canonical import Names, from_coordinates
from sparsetile.nn.inputs import Given
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan

__all__ = ["MAX_GRAPHS", "Graph", "Loops", "Weights", "clear_graph_cache", "find_graph"]

MAX_GRAPHS = 32
# Value sets of one pattern that are kept: those of the layers that share it.
MAX_VALUES = 4
# Products after which values that another plan holds get a plan of their own.
PATIENCE = 8
MAX_COUNTS = 64
# Widths that share a plan: all up to this one, and above it those of one power of two.
NARROW = 32

Loops = Literal["keep", "replace", "append"]


@contextlib.contextmanager
def _lasting() -> Iterator[None]:
    """Make tensors that later calls may use, also those that differentiate."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Weights:
    """Values of A for one call, one per entry, and the key that tells them from others.

    ``key`` is None where the values belong to this call alone, as those that need gradients do.
    """

    def __init__(self, key: Hashable | None, values: Tensor) -> None:
        self.key = key
        self.values = values


class Graph:
    """A pattern A[target, source] with its plans. Layers make it; see :func:`find_graph`.

    Parameters
    ----------
    csr : CSR [targets, sources]
        ``entry_map`` leads from edges (after self-loops were added) to entries. Values, if any,
        count parallel edges.
    loops : {"keep", "replace", "append"}
        What was done to self-loops. ``replace``: those given were removed, then each node got
        one, at the end of the edges. ``append``: each node got one more.
    kept : Tensor of int64, optional
        With ``replace``: numbers of the given edges that are not self-loops.
    loop_edge : Tensor of int64 [nodes], optional
        With ``replace``: the last given edge that was a node's self-loop, or -1.
    base : CSR, optional
        The canonical form of a given matrix, to read its values again.
    planned : Plan, optional
        The plan that was given; it is the only one used then.
    """

    def __init__(
        self,
        csr: CSR,
        loops: Loops = "keep",
        *,
        kept: Tensor | None = None,
        loop_edge: Tensor | None = None,
        base: CSR | None = None,
        planned: Plan | None = None,
    ) -> None:
        self.csr = csr.with_values(None)
        self.multiplicity = csr.values  # None where no two edges are parallel
        self.loops = loops
        self.planned = planned
        self.weighted = base is not None and base.values is not None  # a matrix with values
        self._kept = kept
        self._loop_edge = loop_edge
        self._base = None if base is None else base.with_values(None)
        self._plans: dict[Hashable, OrderedDict[Hashable, Plan]] = {}
        self._uses: Counter[Hashable] = Counter()
        self._values: OrderedDict[Hashable, Tensor] = OrderedDict()

    @property
    def shape(self) -> tuple[int, int]:
        """(targets, sources)."""
        return self.csr.shape

    # -- entries and edges ----------------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> Tensor:
        """Target of each entry, int64 [entries]."""
        with _lasting():
            return self.csr.row_ids()

    @functools.cached_property
    def edges(self) -> tuple[Tensor, Tensor]:
        """(source, target) of each edge, in the order given, added self-loops last."""
        with _lasting():
            source, target, where = self.csr.indices.long(), self.rows, self.csr.entry_map
            return (source, target) if where is None else (source[where], target[where])

    @functools.cached_property
    def _order(self) -> Tensor | None:
        """Edge of each entry; None where they are numbered alike."""
        where = self.csr.entry_map
        if where is None:
            return None
        with _lasting():
            order = torch.empty_like(where)
            order[where] = torch.arange(where.numel(), device=where.device)
            return order

    def to_entries(self, values: Tensor) -> Tensor:
        """Bring one value per edge to one per entry; parallel edges are summed. Differentiable."""
        where = self.csr.entry_map
        if where is not None and where.numel() > self.csr.nnz:
            return self.csr.canonical_values(values)
        return values if self._order is None else values.index_select(0, self._order)

    def row_sums(self, values: Tensor) -> Tensor:
        """Sum one value per entry over each target's entries; same bits in every run."""
        return torch.segment_reduce(values, "sum", lengths=self.csr.row_lengths())

    # -- values ---------------------------------------------------------------------------------

    def edge_weights(self, given: Given, fill: float, dtype: torch.dtype) -> Tensor | None:
        """Return the weight of each edge in ``dtype``, self-loops included; None where all are 1.

        Self-loops that were given keep their weight (the last one's, where a node has several),
        the others have ``fill``. Differentiable in what was given.
        """
        weight = given.weight
        if given.kind == "matrix" and self._base is not None:
            weight = current_values(given.pattern, self._base, function="forward")
            if weight is None and self.loops == "append" and fill != 1.0:
                weight = torch.ones(self._base.nnz, device=self.csr.device)
        if weight is None:
            return None
        weight = weight.to(dtype)
        if self.loops == "append":
            return torch.cat([weight, weight.new_full((min(self.shape),), fill)])
        if self._kept is None or self._loop_edge is None:
            return weight
        if weight.numel():
            own = weight.index_select(0, self._loop_edge.clamp(min=0))
            own = torch.where(self._loop_edge >= 0, own, fill)
        else:
            own = weight.new_full((min(self.shape),), fill)
        return torch.cat([weight.index_select(0, self._kept), own])

    def keep_values(self, key: Hashable, compute: Callable[[], Tensor]) -> Weights:
        """Return the values of ``key``, computed where they are not kept yet."""
        with _lock:
            values = self._values.get(key)
            if values is None:
                with _lasting():
                    values = self._values[key] = compute()
                while len(self._values) > MAX_VALUES:
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
        return Weights(key, values)

    def own_weights(self, given: Given, values_key: Hashable) -> Weights | None:
        """Return a matrix's own values, or how often each edge occurs; None for a plain pattern."""
        if self.weighted:
            read = functools.partial(self._matrix_values, given)
            if given.tracked:
                return Weights(None, read())
            return self.keep_values(("own", values_key), lambda: read().detach())
        return None if self.multiplicity is None else Weights("multiplicity", self.multiplicity)

    def _matrix_values(self, given: Given) -> Tensor:
        assert self._base is not None
        values = current_values(given.pattern, self._base, function="forward")
        assert values is not None
        return values

    def mean_weights(self) -> Weights:
        """Return values that make a sum the mean over edges, parallel ones counted each."""

        def compute() -> Tensor:
            assert self.multiplicity is not None
            edges = self.multiplicity.double()  # a float32 third would spoil products in float64
            return edges / self.row_sums(edges).index_select(0, self.rows)

        return self.keep_values("mean", compute)

    # -- products -------------------------------------------------------------------------------

    def aggregate(
        self,
        x: Tensor,
        weights: Weights | None = None,
        *,
        reduce: str = "sum",
        bias: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """Return relu(A·x + bias), or A's other reductions of x, at each target.

        Parameters
        ----------
        x : Tensor [..., sources, N]
        weights : Weights, optional
            A's values; every entry counts as 1 when None. A given plan uses its own values.
        """
        if self.planned is not None:
            return self.planned.run(
                self.planned.permute(x), reduce=reduce, bias=bias, relu=relu,
                values=None if weights is None else weights.values,
            )  # fmt: skip
        made, held = self._plan(x, weights)
        values = None
        if weights is not None and (weights.key is None or weights.key != held):
            values = weights.values
        return made.run(x, values=values, reduce=reduce, bias=bias, relu=relu)

    def _plan(self, x: Tensor, weights: Weights | None) -> tuple[Plan, Hashable]:
        """Return a plan for products of x's width and type, and the key of the values it holds.

        Values that pass by are given to a plan at each product. Those that stay get a plan that
        holds them: at once where there is none yet, otherwise after ``PATIENCE`` uses.
        """
        dtype, device = x.dtype, x.device
        if torch.is_autocast_enabled(device.type) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        width = max(NARROW, 1 << (max(x.shape[-1], 1) - 1).bit_length())
        held = None if weights is None else weights.key
        # A plan that holds values cannot stand for a pattern, so those are kept apart.
        kind = (width, dtype, held is not None, torch.are_deterministic_algorithms_enabled())
        with _lock:
            plans = self._plans.setdefault(kind, OrderedDict())
            if held not in plans:
                if len(self._uses) > MAX_COUNTS:  # weights that change at every step leave counts
                    self._uses.clear()
                self._uses[kind, held] += 1
                if plans and self._uses[kind, held] <= PATIENCE:
                    held = next(reversed(plans))
                    return plans[held], held
                with _lasting():
                    values = None
                    if weights is not None and held is not None:
                        values = weights.values.to(dtype)
                    plans[held] = plan(self._pattern.with_values(values), width, dtype=dtype)
                self._uses.clear()
                while len(plans) > MAX_VALUES:
                    plans.popitem(last=False)
            plans.move_to_end(held)
            return plans[held], held

    @functools.cached_property
    def _pattern(self) -> CSR:
        """The pattern as plans take it: their values are one per entry."""
        return CSR(self.csr.indptr, self.csr.indices, None, self.csr.shape)

    def aggregate_edges(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return A·x + bias with one value per edge, in the order of :attr:`edges`."""
        if self.planned is not None:  # a plan takes values in the order of its own edges
            return self.planned.run(x, values=values, bias=bias)
        return self.aggregate(x, Weights(None, self.to_entries(values)), bias=bias)


# -- finding a graph again ------------------------------------------------------------------------

_graphs: OrderedDict[Hashable, tuple[int, Hashable, Graph]] = OrderedDict()
_lock = threading.RLock()


def clear_graph_cache() -> None:
    """Forget every graph that the layers keep.

    Examples
    --------
    >>> from sparsetile.nn import clear_graph_cache
    >>> clear_graph_cache()
    """
    with _lock:
        _graphs.clear()


def find_graph(
    layer: str,
    given: Given,
    size: tuple[int, int],
    device: torch.device,
    *,
    flow: str = "source_to_target",
    loops: Loops = "keep",
) -> tuple[Graph, Hashable]:
    """Return the prepared graph of an input, made or found again, and the key of its weights.

    Parameters
    ----------
    layer : str
        What errors begin with.
    size : (sources, targets)
        Nodes that x has.
    device : torch.device
        Where x lies. The graph must lie there too.
    """
    _check_size(layer, given, size)
    if given.pattern.device != device:
        raise value_error(
            layer, "edge_index", f"on {device} like x", given.pattern.device,
            f"Move it with .to({str(device)!r})",
        )  # fmt: skip
    if given.kind == "plan":
        return Graph(given.pattern._csr, planned=given.pattern), None
    shape = (size[1], size[0])
    matrix = given.pattern
    prints = fingerprint((matrix, given.weight, shape) if given.kind == "edges" else matrix)
    if prints is None:
        return _make(layer, given, shape, flow, loops), object()
    pattern_key, values_key = prints
    key = (given.kind, pattern_key, shape, flow, loops)
    owner = id(matrix)
    with _lock:
        found = _graphs.get(key)
        if found is None:
            made = _make(layer, given, shape, flow, loops)
            # The same tensor with another content: what it was before is of no use any more.
            for old, (of, pattern, _) in list(_graphs.items()):
                if of == owner and pattern != pattern_key:
                    del _graphs[old]
            found = _graphs[key] = (owner, pattern_key, made)
            weakref.finalize(matrix, _forget, key).atexit = False
            while len(_graphs) > MAX_GRAPHS:
                _graphs.popitem(last=False)
        _graphs.move_to_end(key)
    return found[2], values_key


def _forget(key: Hashable) -> None:
    with _lock:
        _graphs.pop(key, None)


def _check_size(layer: str, given: Given, size: tuple[int, int]) -> None:
    known = given.size if given.kind == "edges" else tuple(given.pattern.shape)[::-1]
    if any(have is not None and have != want for have, want in zip(known, size, strict=True)):
        raise value_error(
            layer, "x", f"of {known[0]} source and {known[1]} target nodes, as the graph has",
            f"{size[0]} and {size[1]}", "Give one row of x per node",
        )  # fmt: skip


def _make(layer: str, given: Given, shape: tuple[int, int], flow: str, loops: Loops) -> Graph:
    with _lasting():
        names = Names(layer, rows="edge_index[1]", columns="edge_index[0]")
        base = None
        if given.kind == "matrix":
            base = as_csr(given.pattern, function=layer)
            if loops == "keep":
                pattern = CSR(base.indptr.clone(), base.indices.clone(), None, base.shape)
                return Graph(pattern, base=base)
            target, source = base.row_ids(), base.indices.long()
        else:
            source, target = given.pattern.long().unbind(0)
            if flow == "target_to_source":
                source, target = target, source
                names = Names(layer, rows="edge_index[0]", columns="edge_index[1]")
        kept = loop_edge = None
        if loops == "replace":
            kept, loop_edge = _split_loops(layer, source, target, min(shape))
            source, target = source[kept], target[kept]
        if loops != "keep":
            nodes = torch.arange(min(shape), device=source.device)
            source, target = torch.cat([source, nodes]), torch.cat([target, nodes])
        csr = from_coordinates(names, target.clone(), source.clone(), None, shape)
        return Graph(csr, loops, kept=kept, loop_edge=loop_edge, base=base)


def _split_loops(layer: str, source: Tensor, target: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the edges that are no self-loops, and each node's last self-loop."""
    is_loop = source == target
    kept, looped = torch.nonzero(~is_loop).flatten(), torch.nonzero(is_loop).flatten()
    at = source[looped]
    if at.numel() and not bool(((at >= 0) & (at < nodes)).all()):
        raise value_error(
            layer, "edge_index", f"node numbers from 0 to {nodes - 1}",
            f"self-loops at {int(at.min())} to {int(at.max())}", "Give one row of x per node",
        )  # fmt: skip
    loop_edge = torch.full((nodes,), -1, dtype=torch.int64, device=source.device)
    return kept, loop_edge.scatter_reduce_(0, at, looped, "amax")
