"""Graphs that the layers were given before, found again.

A graph is known by the keys of the tensors it was given as (``intake.fingerprint``). It is kept
while those tensors live, and at most ``MAX_GRAPHS`` are.

Mini-batches bring a new graph at every step. Where the last graph ended after a few calls, the next
one is a block where sums and means are all that is asked of it (``nn/blocks.py``), or gets a plan
that chooses and counts nothing (``plan(tune="none")``), one for all widths: its edges are sorted,
and little more. A graph that stays after all gets its own plans then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.core.protocols import SharedPlan
from sparsetile.intake import CSR, as_csr, fingerprint
from sparsetile.intake.canonical import Names, from_coordinates
from sparsetile.intake.identity import counter_tells, edges_fingerprint, tensor_key
from sparsetile.jit.loader import current_stream_handle
from sparsetile.nn.blocks import Block, make_block, takes_blocks
from sparsetile.nn.graph import SHORT_LIVED_CALLS, Graph, Loops, building, lock
from sparsetile.nn.inputs import Given
from sparsetile.plan.plan import Plan
from sparsetile.systems.shared.cuda_context import device_index

__all__ = [
    "MAX_GRAPHS",
    "clear_graph_cache",
    "find_block",
    "find_graph",
    "is_short_lived",
    "note_loops",
]

MAX_GRAPHS = 32

# Key -> (id of the tensor it was given as, key of its content, graph).
_graphs: OrderedDict[Hashable, tuple[int, Hashable, Graph]] = OrderedDict()
# id of a tensor -> weak reference whose callback forgets the tensor's graphs.
_watched: dict[int, weakref.ref[Any]] = {}
# id of the edges of a short-lived graph for which nothing is prepared -> number of calls.
_calls: dict[int, int] = {}
# id of edges without weights -> what was asked for -> (what they looked like, key of their graph).
_recent: dict[int, dict[Hashable, tuple[Hashable, Hashable]]] = {}


class _Regime:
    """Whether graphs are short-lived: the last one that ended had been used a few times only.

    ``looped``: one of them had edges from a node to itself, which a convolution does not take.
    """

    short_lived = False
    looped = False


def is_short_lived(edges: Tensor) -> bool:
    """Whether edges are to be taken as those of a short-lived graph, and nothing is prepared.

    Calls are counted: a tensor that is asked for more often stays, whatever came before it.
    """
    if not _Regime.short_lived:
        return False
    owner = id(edges)
    with lock:
        _watch(edges)
        calls = _calls[owner] = _calls.get(owner, 0) + 1
        return calls <= SHORT_LIVED_CALLS


def note_loops() -> None:
    """Say that short-lived graphs have self-loops: no block is made for convolutions any more."""
    _Regime.looped = True


def clear_graph_cache() -> None:
    """Free every graph and plan that the layers cache.

    Examples
    --------
    >>> from sparsetile.nn import clear_graph_cache
    >>> clear_graph_cache()
    """
    with lock:
        _graphs.clear()
        _recent.clear()
        _calls.clear()
        _Regime.short_lived = _Regime.looped = False


def _end(key: Hashable) -> None:
    """Forget a graph that will not be seen again, and learn from how long it was used."""
    found = _graphs.pop(key, None)
    if found is not None:
        _Regime.short_lived = found[2].calls <= SHORT_LIVED_CALLS


def _forget(owner: int, _: object = None) -> None:
    """Forget the graphs of a tensor that has ended."""
    with lock:
        _watched.pop(owner, None)
        _recent.pop(owner, None)
        _calls.pop(owner, None)
        for key, (of, _, _) in list(_graphs.items()):
            if of == owner:
                _end(key)


def _watch(tensor: Any) -> None:
    """Forget a tensor's graphs when it ends."""
    owner = id(tensor)
    if owner not in _watched:
        _watched[owner] = weakref.ref(tensor, functools.partial(_forget, owner))


def find_graph(
    layer: str,
    given: Given,
    size: tuple[int, int],
    device: torch.device,
    *,
    flow: str = "source_to_target",
    loops: Loops = "keep",
    only_reduces: bool = False,
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
    only_reduces : bool
        Whether the caller asks for :meth:`Graph.aggregate` alone: a short-lived one may then be
        a :class:`sparsetile.nn.blocks.Block`.
    """
    _check_size(layer, given, size)
    if given.pattern.device != device:
        raise value_error(
            layer, "edge_index", f"on {device} like x", given.pattern.device,
            f"Move it with .to({str(device)!r})",
        )  # fmt: skip
    if given.kind == "plan":
        return Graph(given.pattern._csr, planned=given.pattern), None
    graph, values_key = _find(layer, given, size, flow, loops, only_reduces)
    if isinstance(graph, Block):
        if only_reduces and given.weight is None:
            return graph, values_key
        graph = graph.canonical
    graph.note_stream()
    return graph, values_key


def find_block(
    layer: str, given: Given, size: tuple[int, int], device: torch.device, *, flow: str
) -> Block | None:
    """Return edges without weights as a block where graphs are short-lived, else None.

    Parameters are those of :func:`find_graph`.
    """
    plain = given.kind == "edges" and given.weight is None and given.pattern.numel()
    if not plain or not _Regime.short_lived or _Regime.looped or torch.compiler.is_compiling():
        return None
    if not takes_blocks(device):
        return None
    try:
        found, _ = find_graph(layer, given, size, device, flow=flow, only_reduces=True)
    except ValueError:  # the caller's own graph says what is wrong
        return None
    return found if isinstance(found, Block) else None


def _find(
    layer: str,
    given: Given,
    size: tuple[int, int],
    flow: str,
    loops: Loops,
    only_reduces: bool,
) -> tuple[Graph, Hashable]:
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # as in torch.export
        raise value_error(
            layer, "edge_index", "a Plan in torch.export and torch.jit.trace", given.kind,
            "Make it first with sparsetile.nn.gcn_plan or sparsetile.plan",
        )  # fmt: skip
    shape = (size[1], size[0])
    matrix = given.pattern
    edges = given.kind == "edges"
    as_block = only_reduces and edges and given.weight is None and loops == "keep"
    # Blocks are read, sorted and transposed by their products: each thread and stream has its own.
    asked = (shape, flow, loops, _here(matrix.device) if as_block else None)
    if edges and given.weight is None:
        again = _find_again(matrix, asked)
        if again is not None:
            return again, None
    counted = edges and counter_tells(matrix)
    owner = id(matrix)
    if as_block and counted and _Regime.short_lived and owner not in _watched:
        block = make_block(layer, matrix, flow == "source_to_target", shape)
        if block is not None:
            # Never seen: no other graph has its content, and no fingerprint has to tell them apart.
            own_key = ("block", owner, asked)
            block.calls = 1
            with lock:
                _keep(matrix, own_key, own_key, block)
                _expect(matrix, asked, own_key)
            return block, None
    prints = (
        edges_fingerprint(matrix, given.weight, shape, counted=counted)
        if edges
        else fingerprint(matrix)
    )
    if prints is None:
        made = _make(layer, given, shape, flow, loops, as_block)
        made.short_lived = True  # it cannot be found again
        return made, object()
    pattern_key, values_key = prints
    key = (given.kind, pattern_key, *asked)
    with lock:
        found = _graphs.get(key)
        if found is not None:
            _graphs.move_to_end(key)
        else:
            made = _make(layer, given, shape, flow, loops, as_block and _Regime.short_lived)
            if owner in _watched:
                # The same tensor with another content: what it was before is of no use any more.
                for old, (of, pattern, _) in list(_graphs.items()):
                    if of == owner and pattern != pattern_key:
                        _end(old)
            made.short_lived = _Regime.short_lived
            found = _keep(matrix, key, pattern_key, made)
        found[2].calls += 1
        if counted and given.weight is None and owner in _watched:
            _expect(matrix, asked, key)
    return found[2], values_key


def _keep(
    matrix: Any, key: Hashable, pattern_key: Hashable, graph: Graph
) -> tuple[int, Hashable, Graph]:
    """Keep a graph while what it was given as lives, and return its entry. Needs the lock."""
    _watch(matrix)
    kept = _graphs[key] = (id(matrix), pattern_key, graph)
    while len(_graphs) > MAX_GRAPHS:
        _graphs.popitem(last=False)
    return kept


def _expect(edges: Tensor, asked: Hashable, key: Hashable) -> None:
    """Let ``_find_again`` find a graph without the key of its content. Needs the lock."""
    recent = _recent.setdefault(id(edges), {})
    if len(recent) >= MAX_GRAPHS:
        recent.clear()
    recent[asked] = (tensor_key(edges), key)


def _here(device: torch.device) -> tuple[int, int]:
    """The current thread and stream."""
    stream = current_stream_handle(device_index(device)) if device.type == "cuda" else 0
    return threading.get_ident(), stream


def _find_again(edges: Tensor, asked: Hashable) -> Graph | None:
    """Return the graph that the same tensor gave before, unless it looks otherwise now."""
    recent = _recent.get(id(edges), {}).get(asked)
    if recent is None or recent[0] != tensor_key(edges):
        return None
    with lock:
        found = _graphs.get(recent[1])
        if found is None:
            return None
        _graphs.move_to_end(recent[1])
        found[2].calls += 1
        return found[2]


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
        # Asked last: looking for all that a protocol has is slow.
        shared = not isinstance(pattern, Plan) and isinstance(pattern, SharedPlan)
        shape = pattern.local_shape if shared else pattern.shape
        known = tuple(shape)[::-1]
    if any(have is not None and have != want for have, want in zip(known, size, strict=True)):
        raise value_error(
            layer, "x", f"of {known[0]} source and {known[1]} target nodes, as the graph has",
            f"{size[0]} and {size[1]}", "Give one row of x per node",
        )  # fmt: skip


def _make(
    layer: str, given: Given, shape: tuple[int, int], flow: str, loops: Loops, as_block: bool
) -> Graph:
    if as_block:
        block = make_block(layer, given.pattern, flow == "source_to_target", shape)
        if block is not None:
            return block
    with building(given.pattern.device, layer):
        names = Names(layer, rows="edge_index[1]", columns="edge_index[0]")
        base = None
        if given.kind == "matrix":
            base = as_csr(given.pattern, function=layer)
            if loops == "keep":
                parts = base.indptr.clone(), base.indices.clone()
                pattern = CSR(*parts, None, base.shape, checked=base.checked)
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
