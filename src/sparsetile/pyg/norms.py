"""``gcn_norm`` remembered: PyG's layers normalise at every call unless ``cached=True``.

Without this a layer would bring a new ``edge_index`` to each product, and nothing prepared for the
last one could be used again. What is remembered goes with the ``edge_index`` it was made of.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake import fingerprint
from sparsetile.pyg.wrapping import take_place

__all__ = ["MAX_NORMS", "clear_norms", "new_gcn_norm"]

MAX_NORMS = 32

# Key -> (edges, weights, their version counters then). Edges are None where they are those given,
# which must not be kept alive.
_Kept = tuple[Tensor | None, Tensor, tuple[int, int]]
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


def _versions(edges: Tensor | None, weights: Tensor) -> tuple[int, int]:
    return 0 if edges is None else edges._version, weights._version


def new_gcn_norm(original: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Return what takes the place of PyG's ``gcn_norm``."""

    def gcn_norm(
        original: Callable[..., Any],
        edge_index: Any,
        edge_weight: Any = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        key = None
        if active() and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            key = _key(edge_index, edge_weight, arguments, named)
        if key is None:
            return original(edge_index, edge_weight, *arguments, **named)
        with _lock:
            held = _norms.get(key)
            if held is None or held[2] != _versions(held[0], held[1]):
                with torch.inference_mode(False), torch.no_grad():
                    edges, weights = original(edge_index, edge_weight, *arguments, **named)
                edges = None if edges is edge_index else edges
                _watch(edge_index, key)
                held = _norms[key] = (edges, weights, _versions(edges, weights))
                while len(_norms) > MAX_NORMS:
                    _norms.popitem(last=False)
            _norms.move_to_end(key)
            return edge_index if held[0] is None else held[0], held[1]

    return take_place(original, gcn_norm)


def _key(edge_index: Any, edge_weight: Any, arguments: Any, named: Any) -> Hashable | None:
    """Return what tells one normalised graph from others; None where it is not to be kept."""
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        return None
    if edge_index.is_inference():  # its counter does not tell of changes
        return None
    if edge_weight is not None and (
        type(edge_weight) is not Tensor or edge_weight.requires_grad or edge_weight.is_inference()
    ):
        return None
    prints = fingerprint((edge_index, edge_weight, (1, 1)))
    return None if prints is None else (prints, arguments, tuple(sorted(named.items())))
