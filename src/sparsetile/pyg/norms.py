"""``gcn_norm`` remembered: PyG's layers normalise at every call unless ``cached=True``.

Without this a layer would bring a new ``edge_index`` to each product, and nothing prepared for the
last one could be used again. So the edges with their self-loops are kept as long as the
``edge_index`` they were made of, and the normalised weights until the given ones may have changed
(:mod:`sparsetile.intake.identity`); those of trained weights are computed at each call.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetile.core.streams import settle
from sparsetile.intake import fingerprint
from sparsetile.intake.identity import is_trained
from sparsetile.pyg.wrapping import take_place

__all__ = ["MAX_NORMS", "clear_norms", "new_gcn_norm"]

MAX_NORMS = 32


class _Kept(NamedTuple):
    """Edges (None if they are those given, which must not be kept alive), the key of the given
    weights, the normalised ones (None of trained weights), and the version counters of both."""

    edges: Tensor | None
    values_key: Hashable
    weights: Tensor | None
    versions: tuple[int, ...]


_norms: OrderedDict[Hashable, _Kept] = OrderedDict()
_watched: dict[int, list[Hashable]] = {}
_lock = threading.RLock()


def clear_norms() -> None:
    """Forget every normalised graph."""
    with _lock:
        _norms.clear()


def _forget(owner: int) -> None:
    with _lock:
        for key in _watched.pop(owner, ()):
            _norms.pop(key, None)


def _watch(edge_index: Tensor, key: Hashable) -> None:
    """Drop what belongs to ``key`` when its tensor ends, and what the tensor was before now."""
    owner = id(edge_index)
    if owner not in _watched:
        weakref.finalize(edge_index, _forget, owner).atexit = False
    kept = [old for old in _watched.get(owner, ()) if old in _norms]
    _watched[owner] = [*kept, key]


def _versions(edges: Tensor | None, weights: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if each is None else each._version for each in (edges, weights))


def new_gcn_norm(original: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Return what takes the place of PyG's ``gcn_norm``."""

    def gcn_norm(
        original: Callable[..., Any],
        edge_index: Any,
        edge_weight: Any = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        keys = None
        if active() and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            keys = _keys(edge_index, edge_weight, arguments, named)
        if keys is None:
            return original(edge_index, edge_weight, *arguments, **named)
        key, values_key = keys
        trained = is_trained(edge_weight)
        grad = trained and torch.is_grad_enabled()
        with _lock:
            held = _norms.get(key)
            if held is not None and held.versions != _versions(held.edges, held.weights):
                held = None  # somebody wrote to what PyG's layers were given
            if held is None or held.values_key != values_key:
                with torch.inference_mode(False), torch.set_grad_enabled(grad):
                    edges, weights = original(edge_index, edge_weight, *arguments, **named)
                if held is None:
                    _watch(edge_index, key)
                    kept = None if edges is edge_index else edges
                else:
                    kept = held.edges  # the same edges: what was prepared for them serves again
                settle(edge_index.device)
                known = None if trained else weights
                held = _norms[key] = _Kept(kept, values_key, known, _versions(kept, known))
                while len(_norms) > MAX_NORMS:
                    _norms.popitem(last=False)
            else:
                weights = held.weights
            _norms.move_to_end(key)
            return edge_index if held.edges is None else held.edges, weights

    return take_place(original, gcn_norm)


def _keys(
    edge_index: Any, edge_weight: Any, arguments: Any, named: Any
) -> tuple[Hashable, Hashable] | None:
    """Return what tells a graph and its weights from others; None if nothing is to be kept."""
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        return None
    if edge_index.is_inference():  # its counter does not tell of changes
        return None
    if edge_weight is not None and (
        type(edge_weight) not in (Tensor, torch.nn.Parameter)
        or edge_weight.is_inference()
        or edge_weight.dim() != 1
    ):
        return None
    prints = fingerprint((edge_index, edge_weight, (1, 1)))
    if prints is None:
        return None
    form = None if edge_weight is None else edge_weight.dtype
    return (prints[0], form, arguments, tuple(sorted(named.items()))), prints[1]
