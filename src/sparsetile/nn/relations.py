"""Graphs with several kinds of edges, as matrices that multiply all of a group's relations at once.

A source has one column per relation, A[target, (source, relation)], so that one product adds the
messages of all. For a maximum, a target has one row per relation, A[(target, relation), source].
Groups bound the memory of what is multiplied. They are kept with the caller's edges, like graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsetile.cache.kept import note_read
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.identity import counter_tells, tensor_key
from sparsetile.nn.cache import find_graph, graph_notes
from sparsetile.nn.fresh import FreshGraph
from sparsetile.nn.graph import Graph, Weights, building
from sparsetile.nn.inputs import Given
from sparsetile.nn.sampled import SampledGraph

__all__ = ["Group", "group_graph", "relation_groups"]

# Sets of groups that are kept with one ``edge_index``.
MAX_KEPT = 8


@dataclass(eq=False)
class Group:
    """Neighbouring relations that are multiplied at once."""

    first: int
    count: int
    edges: Tensor  # int64 [2, E]: sources, then targets; one of both is numbered by relation too
    # There may be more groups than the cache of graphs keeps.
    graph: Graph | None = None


def relation_groups(
    layer: str, given: Given, owner: object, edge_type: Tensor, relations: int,
    size: tuple[int, int], by_target: bool, count: int, of_rows: bool,
) -> tuple[Group, ...]:  # fmt: skip
    """Return the groups of ``count`` relations that have edges.

    ``size``: (sources, targets). ``by_target``: whether targets are in ``edge_index[1]``.
    ``of_rows``: targets have a row per relation, not sources a column. ``owner`` is what the caller
    passed as ``edge_index``.
    """
    edges = given.pattern
    if not isinstance(edge_type, Tensor) or edge_type.dtype not in (torch.int32, torch.int64):
        got = getattr(edge_type, "dtype", type(edge_type).__name__)
        raise type_error(layer, "edge_type", "int64 or int32", got, "Convert it with .long()")
    if edge_type.shape != edges.shape[1:] or edge_type.device != edges.device:
        raise value_error(
            layer, "edge_type", f"of shape ({edges.shape[1]},) on {edges.device}",
            f"{tuple(edge_type.shape)} on {edge_type.device}",
            "Give one relation per column of edge_index",
        )  # fmt: skip
    groups = _groups(layer, edges, owner, edge_type, relations, size, by_target, count, of_rows)
    for each in (edges, edge_type):  # a CUDA graph follows neither
        note_read(each, groups)
    return groups


def _groups(
    layer: str, edges: Tensor, owner: object, edge_type: Tensor, relations: int,
    size: tuple[int, int], by_target: bool, count: int, of_rows: bool,
) -> tuple[Group, ...]:  # fmt: skip
    """Return what is kept with the edges, or make it."""
    key, notes = None, graph_notes(owner)
    if counter_tells(edges) and counter_tells(edge_type):
        parts = (tensor_key(edges), tensor_key(edge_type))
        key = ("relations", *parts, relations, size, by_target, count, of_rows)
        if key in notes:
            return notes[key]  # type: ignore[no-any-return]
    with building(edges.device, layer):
        source, target = edges.long().unbind(0)[:: 1 if by_target else -1]
        _check(layer, source, target, edge_type, relations, size)
        made = []
        for first in range(0, relations, count):
            chosen = torch.nonzero((edge_type >= first) & (edge_type < first + count)).flatten()
            if not chosen.numel():
                continue
            some, kind = min(count, relations - first), edge_type[chosen].long() - first
            ends = torch.stack([source[chosen], target[chosen]])
            ends[int(of_rows)].mul_(some).add_(kind)
            made.append(Group(first, some, ends))
    groups = tuple(made)
    if key is not None:
        old = [each for each in notes if isinstance(each, tuple) and each[0] == "relations"]
        for each in old[: len(old) - MAX_KEPT + 1]:
            notes.pop(each, None)
        notes[key] = groups
    return groups


def _check(
    layer: str, source: Tensor, target: Tensor, edge_type: Tensor, relations: int,
    size: tuple[int, int],
) -> None:  # fmt: skip
    """Raise if an edge names no node or no relation."""
    for name, numbers, most in (
        ("edge_index", source, size[0]), ("edge_index", target, size[1]),
        ("edge_type", edge_type, relations),
    ):  # fmt: skip
        if not numbers.numel():
            continue
        low, high = (int(each) for each in torch.aminmax(numbers))
        if low < 0 or high >= most:
            what = "relations" if name == "edge_type" else "nodes"
            raise value_error(
                layer, name, f"numbers of {what} from 0 to {most - 1}", f"{low} to {high}",
                "Give one row of x per node, and num_relations of the edges",
            )  # fmt: skip


def group_graph(
    layer: str, group: Group, size: tuple[int, int], reduce: str
) -> tuple[Graph, Weights | None]:
    """Return the matrix of a group and the values with which its sum is the reduction.

    ``size``: (sources, targets) of the whole graph. For a mean, each relation has its own.
    """
    of_rows = reduce in ("max", "min")
    sources, targets = size
    if of_rows:
        targets *= group.count
    else:
        sources *= group.count
    given = Given("edges", group.edges)
    if group.graph is None:
        graph, _ = find_graph(
            layer,
            given,
            (sources, targets),
            group.edges.device,
            only_reduces=reduce != "mean",
            fresh=reduce != "mean",
        )
        # Some are of one thread, some until a plan pays.
        if not isinstance(graph, (SampledGraph, FreshGraph)):
            group.graph = graph
    else:
        graph = group.graph
        graph.calls += 1
        graph.note_stream()
    if of_rows:
        return graph, None  # parallel edges do not change a maximum
    if reduce == "sum":
        return graph, graph.own_weights(given, None)

    def compute() -> Tensor:
        relation = graph.csr.indices.long() % group.count
        pair = graph.rows * group.count + relation
        edges = graph.multiplicity
        edges = torch.ones_like(pair, dtype=torch.float64) if edges is None else edges.double()
        _, place = torch.unique(pair, return_inverse=True)
        # Sums of whole numbers are exact in any order.
        total = torch.zeros_like(edges).index_add_(0, place, edges)
        return edges / total.index_select(0, place)

    return graph, graph.keep_values("mean by relation", None, compute)
