"""The cache of graphs that were passed to layers.

A graph is found by the fingerprint of its tensors (``intake.fingerprint``). It is kept while those
tensors live. At most ``MAX_GRAPHS`` are kept.

Edges that come to a GPU for the first time become a :class:`FreshGraph` (``nn/fresh.py``), which
needs no plan; a :class:`Graph` takes its place once a plan pays.

Mini-batches bring a new graph at every step. If the last graph was freed after a few calls, the
next one is taken as short-lived. On a CPU, if the layer needs only sums and means, it becomes a
:class:`SampledGraph` (``nn/sampled.py``). Otherwise one untuned plan (``plan(tune="none")``) serves
all widths. A graph that is used longer gets its own plans.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetile.cache.kept import Kept
from sparsetile.core.errors import value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.intake import CSR, as_csr, fingerprint
from sparsetile.intake.canonical import from_coordinates
from sparsetile.intake.identity import counter_tells, edges_fingerprint, tensor_key, values_key
from sparsetile.launch.faults import forget_when_wrong, raise_faults
from sparsetile.nn.fresh import FreshGraph, make_fresh, takes_fresh
from sparsetile.nn.graph import SHORT_LIVED_CALLS, Graph, Loops, building
from sparsetile.nn.inputs import Given
from sparsetile.nn.sampled import SampledGraph, edge_names, make_sampled, takes_sampled
from sparsetile.plan.family import expects_many
from sparsetile.plan.modes import plain_call
from sparsetile.plan.plan import Plan

__all__ = [
    "MAX_GRAPHS", "clear_graph_cache", "find_fresh", "find_graph", "find_sampled", "graph_notes",
    "is_short_lived", "note_long_lived", "note_loops",
]  # fmt: skip

MAX_GRAPHS = 32


class _Regime:
    """Whether graphs are short-lived: the last one freed had been used only a few times."""

    short_lived = False
    looped = False  # whether one had self-loops, which ``SampledGraph.convolve`` does not support


class _Entry(NamedTuple):
    pattern_key: Hashable  # of the graph's content
    graph: Graph


def _learn(entry: _Entry) -> None:
    """Learn whether graphs are short-lived from one that is dropped."""
    _Regime.short_lived = entry.graph.calls <= SHORT_LIVED_CALLS


# Notes about edges: how often they were looked up while no graph was made of them, and, if they
# have no weights, request -> (fingerprint, key of the graph).
_graphs = Kept[_Entry](MAX_GRAPHS, ended=_learn)
_CALLS, _RECENT = "calls", "recent"
# Fresh graphs of edges with weights know the number of each entry's edge.
_ORDERED = "ordered"


def is_short_lived(edges: Tensor) -> bool:
    """Whether to take edges as those of a short-lived graph, and prepare nothing for them.

    Calls are counted: a tensor that is used more often is not short-lived.
    """
    if not _Regime.short_lived or expects_many():
        return False
    with _graphs.lock:
        notes = _graphs.notes(edges)
        notes[_CALLS] = notes.get(_CALLS, 0) + 1
        return notes[_CALLS] <= SHORT_LIVED_CALLS


def note_loops() -> None:
    """Note that short-lived graphs have self-loops: convolutions get no SampledGraph any more."""
    _Regime.looped = True


def graph_notes(owner: object) -> dict[Hashable, Any]:
    """Return what is kept with a caller's edges, until they end or the cache is cleared."""
    return _graphs.notes(owner)


def note_long_lived() -> None:
    """Note that the next graphs will be used often, so that they get plans at once."""
    _Regime.short_lived = False


def clear_graph_cache() -> None:
    """Free every graph and plan that the layers cache.

    Examples
    --------
    >>> from sparsetile.nn import clear_graph_cache
    >>> clear_graph_cache()
    """
    _graphs.clear()
    _Regime.short_lived = _Regime.looped = False


def find_graph(
    layer: str, given: Given, size: tuple[int, int], device: torch.device, *,
    flow: str = "source_to_target", loops: Loops = "keep", only_reduces: bool = False,
    fresh: bool = False, values: tuple[int, torch.dtype] | None = None,
) -> tuple[Graph, Hashable]:  # fmt: skip
    """Return the graph of an input, from the cache or new, and the key of its weights.

    Errors begin with ``layer``. ``size`` (sources, targets) and ``device`` are those of x. If the
    caller uses only :meth:`Graph.aggregate`, a short-lived graph may be a :class:`SampledGraph`;
    with ``fresh`` a new one on a GPU may be a :class:`FreshGraph`, which makes ``values``
    (``fresh_values``) at once.
    """
    _check_size(layer, given, size)
    if given.pattern.device != device:
        raise value_error(
            layer, "edge_index", f"on {device} like x", given.pattern.device,
            f"Move it with .to({str(device)!r})",
        )  # fmt: skip
    if given.kind == "plan":
        return Graph(given.pattern._csr, planned=given.pattern), None
    fresh = fresh and given.kind == "edges" and takes_fresh(given.pattern, loops, size)
    graph, values_key = _find(layer, given, size, flow, loops, only_reduces, fresh, values)
    if isinstance(graph, SampledGraph):
        if only_reduces and given.weight is None:
            return graph, values_key
        graph = graph.canonical
    graph.note_stream()
    return graph, values_key


def find_sampled(
    layer: str, given: Given, size: tuple[int, int], device: torch.device, *, flow: str
) -> SampledGraph | None:
    """As :func:`find_graph` for edges without weights if graphs are short-lived, else None."""
    wanted = _Regime.short_lived and not (
        _Regime.looped or torch.compiler.is_compiling() or expects_many()
    )
    plain = given.kind == "edges" and given.weight is None and given.pattern.numel()
    if not (wanted and plain and takes_sampled(device)):
        return None
    try:
        found, _ = find_graph(layer, given, size, device, flow=flow, only_reduces=True)
    except ValueError:  # making the caller's graph raises the same error
        return None
    return found if isinstance(found, SampledGraph) else None


def find_fresh(
    layer: str, given: Given, size: tuple[int, int], device: torch.device, *, flow: str,
    loops: Loops, values: tuple[int, torch.dtype] | None = None,
) -> tuple[Graph, Hashable] | None:  # fmt: skip
    """As :func:`find_graph` with ``fresh`` for eager calls with edges on a GPU, else None."""
    edges = given.pattern
    if given.kind != "edges" or edges.device != device:
        return None
    if not takes_fresh(edges, loops, size) or not plain_call() or torch.jit.is_tracing():
        return None
    _check_size(layer, given, size)
    found = _find(layer, given, size, flow, loops, False, True, values)
    found[0].note_stream()
    return found


def _find(
    layer: str, given: Given, size: tuple[int, int], flow: str, loops: Loops, only_reduces: bool,
    fresh: bool = False, values: tuple[int, torch.dtype] | None = None,
) -> tuple[Graph, Hashable]:  # fmt: skip
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # as in torch.export
        raise value_error(
            layer, "edge_index", "a Plan in torch.export and torch.jit.trace", given.kind,
            "Make it first with sparsetile.nn.gcn_plan or sparsetile.plan",
        )  # fmt: skip
    shape = (size[1], size[0])
    matrix = given.pattern
    edges = given.kind == "edges"
    as_sampled = only_reduces and edges and given.weight is None and loops == "keep" and not fresh
    ordered = fresh and given.weight is not None
    if fresh:
        raise_faults()
    # Products of a SampledGraph sort and transpose it: each thread has its own.
    own = threading.get_ident() if as_sampled else None
    asked = (shape, flow, loops, _ORDERED if ordered else own)
    notes, stamp = None, None
    if edges and (given.weight is None or ordered):
        notes = _graphs.noted(matrix)
        recent = None if notes is None else notes.get(_RECENT, {}).get(asked)
        if recent is not None:  # of a tensor whose writes are counted
            stamp = tensor_key(matrix)
            again = _find_again(recent, stamp)
            if again is not None and not _outlived(again, fresh):
                return again, None if given.weight is None else values_key(given.weight)
            if again is not None and ordered:  # what has plans takes weights in any order
                return _find(layer, given, size, flow, loops, only_reduces)
    counted = edges and counter_tells(matrix)
    if as_sampled and counted and _Regime.short_lived and notes is None:
        sampled = make_sampled(layer, matrix, flow == "source_to_target", shape)
        if sampled is not None:
            # The tensor is new, so its graph is too: no fingerprint is needed.
            own_key = ("sampled", id(matrix), asked)
            sampled.calls = 1
            _graphs.keep(own_key, _Entry(own_key, sampled), matrix)
            _expect(matrix, asked, tensor_key(matrix), own_key)
            return sampled, None
    if counted and stamp is None:
        stamp = tensor_key(matrix)
    prints = (
        edges_fingerprint(matrix, given.weight, shape, stamp if counted else None)
        if edges
        else fingerprint(matrix)
    )
    if prints is None:
        made: Graph = _make(layer, given, shape, flow, loops, as_sampled)
        made.short_lived = True  # it cannot be found again
        return made, object()
    pattern_key, of_values = prints
    key = (given.kind, pattern_key, *asked)
    with _graphs.lock:
        found = _graphs.get(key)
        if found is not None and _outlived(found.graph, fresh):
            if ordered:
                return _find(layer, given, size, flow, loops, only_reduces)
            planned = _make(layer, given, shape, flow, loops, False)
            planned.calls = found.graph.calls
            planned.replaces(found.graph)
            found = _graphs.keep(key, _Entry(pattern_key, planned), matrix)
        if found is None:
            if fresh:
                made = make_fresh(layer, matrix, flow, loops, shape, ordered, values)
            else:
                made = _make(layer, given, shape, flow, loops, as_sampled and _Regime.short_lived)
            # The tensor's content has changed: drop its old graph.
            for old, entry in _graphs.of(matrix):
                if entry.pattern_key != pattern_key:
                    _graphs.drop(old)
            made.short_lived = _Regime.short_lived
            found = _graphs.keep(key, _Entry(pattern_key, made), matrix)
        found.graph.calls += 1
        if counted and (given.weight is None or ordered):
            _expect(matrix, asked, stamp, key)
    return found.graph, of_values


def _forget_fresh() -> None:
    """Forget fresh graphs: one of them has wrong edges, which its next call finds again."""
    with _graphs.lock:
        for key, entry in _graphs.items():
            if isinstance(entry.graph, FreshGraph) and not entry.graph.captured:
                _graphs.drop(key)


forget_when_wrong(_forget_fresh)


def _outlived(graph: Graph, fresh: bool) -> bool:
    """Whether a graph with plans should take a fresh one's place, which a caller may not take."""
    return isinstance(graph, FreshGraph) and (not fresh or graph.pays)


def _expect(edges: Tensor, asked: Hashable, stamp: Hashable, key: Hashable) -> None:
    """Let ``_find_again`` find a graph without the key of its content."""
    recent = _graphs.notes(edges).setdefault(_RECENT, {})
    if len(recent) >= MAX_GRAPHS:
        recent.clear()
    recent[asked] = (stamp, key)


def _find_again(recent: tuple[Hashable, Hashable], stamp: Hashable) -> Graph | None:
    """Return the graph that was made of the same tensor, unless the tensor has changed."""
    if recent[0] != stamp or (found := _graphs.get(recent[1])) is None:
        return None
    found.graph.calls += 1
    return found.graph


# What torch.compiler.disable does, without the 1.5 s import of torch._dynamo.
_find._torchdynamo_disable = True  # type: ignore[attr-defined]
_find._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "sparsetile prepares a graph outside of what is traced. "
    "Pass a sparsetile.Plan instead of edge_index, such as sparsetile.nn.gcn_plan makes"
)


def _check_size(layer: str, given: Given, size: tuple[int, int]) -> None:
    pattern, known = given.pattern, given.size
    if given.kind == "edges":
        if known == (None, None):
            return
    else:
        # Last, because isinstance is slow with a protocol.
        shared = not isinstance(pattern, Plan) and isinstance(pattern, SharedPlan)
        shape = pattern.local_shape if shared else pattern.shape
        known = tuple(shape)[::-1]
    if any(have is not None and have != want for have, want in zip(known, size, strict=True)):
        raise value_error(
            layer, "x", f"of {known[0]} source and {known[1]} target nodes, as the graph has",
            f"{size[0]} and {size[1]}", "Give one row of x per node",
        )  # fmt: skip


def _make(
    layer: str, given: Given, shape: tuple[int, int], flow: str, loops: Loops, as_sampled: bool
) -> Graph:
    if as_sampled:
        sampled = make_sampled(layer, given.pattern, flow == "source_to_target", shape)
        if sampled is not None:
            return sampled
    with building(given.pattern.device, layer):
        by_target, base = flow == "source_to_target", None
        if given.kind == "matrix":
            base = as_csr(given.pattern, function=layer)
            if loops == "keep":
                parts = base.indptr.clone(), base.indices.clone()
                pattern = CSR(*parts, None, base.shape, checked=base.checked)
                return Graph(pattern, base=base)
            target, source = base.row_ids(), base.indices.long()
        else:
            source, target = given.pattern.long().unbind(0)[:: 1 if by_target else -1]
        kept = loop_edge = None
        if loops == "replace":
            kept, loop_edge = _split_loops(layer, source, target, min(shape))
            source, target = source[kept], target[kept]
        if loops != "keep":
            nodes = torch.arange(min(shape), device=source.device)
            source, target = torch.cat([source, nodes]), torch.cat([target, nodes])
        names = edge_names(layer, by_target)
        csr = from_coordinates(names, target.clone(), source.clone(), None, shape)
        return Graph(csr, loops, kept=kept, loop_edge=loop_edge, base=base)


def _split_loops(layer: str, source: Tensor, target: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the edges that are not self-loops, and each node's last self-loop."""
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
