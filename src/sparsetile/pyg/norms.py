"""The cache of ``gcn_norm``: PyG's layers normalise at every call unless ``cached=True``.

Without it a layer would pass a new ``edge_index`` to each product, and no plan could be reused. The
edges with their self-loops are kept as long as the ``edge_index`` they were made of, and the
normalised weights until the given ones may have changed (:mod:`sparsetile.intake.identity`).
Trained weights are normalised at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsetile.cache.kept import Kept, note_read
from sparsetile.core.streams import refuse_capture, settle
from sparsetile.intake import fingerprint
from sparsetile.intake.identity import is_trained
from sparsetile.pyg.wrapping import take_place

__all__ = ["MAX_NORMS", "clear_norms", "new_gcn_norm"]

MAX_NORMS = 32

_BEFORE_CAPTURE = (
    "Call the layer once before the capture. Normalise trained weights outside of it, and use a "
    "layer with normalize=False"
)


class _Norm(NamedTuple):
    edges: Tensor | None  # None for the given ones, which must not be kept alive
    values_key: Hashable  # of the given weights
    weights: Tensor | None  # normalised; None for trained ones
    versions: tuple[int, ...]  # counters of both


_norms = Kept[_Norm](MAX_NORMS)


def clear_norms() -> None:
    """Forget every normalised graph."""
    _norms.clear()


def _versions(edges: Tensor | None, weights: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if each is None else each._version for each in (edges, weights))


def new_gcn_norm(original: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    """Return the replacement of PyG's ``gcn_norm``."""

    def gcn_norm(
        original: Callable[..., Any], edge_index: Any, edge_weight: Any = None,
        *arguments: Any, **named: Any,
    ) -> Any:  # fmt: skip
        keys = None
        if active() and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            keys = _keys(edge_index, edge_weight, arguments, named)
        if keys is None:
            return original(edge_index, edge_weight, *arguments, **named)
        key, values_key = keys
        trained = is_trained(edge_weight)
        grad = trained and torch.is_grad_enabled()
        with _norms.lock:
            norm = _norms.get(key)
            if norm is not None and norm.versions != _versions(norm.edges, norm.weights):
                norm = None  # somebody wrote to the tensors that PyG's layers got
            if norm is None or norm.values_key != values_key:
                refuse_capture("gcn_norm", edge_index.device, _BEFORE_CAPTURE)
                with torch.inference_mode(False), torch.set_grad_enabled(grad):
                    edges, weights = original(edge_index, edge_weight, *arguments, **named)
                kept = None if edges is edge_index else edges
                if norm is not None:  # the same edges, so their plans can be reused
                    kept = norm.edges
                settle(edge_index.device)
                known = None if trained else weights
                norm = _Norm(kept, values_key, known, _versions(kept, known))
                _norms.keep(key, norm, edge_index)
            else:
                weights = norm.weights
            if edge_weight is not None:
                note_read(edge_weight)  # a CUDA graph does not normalise it again
            return edge_index if norm.edges is None else norm.edges, weights

    return take_place(original, gcn_norm)


def _keys(
    edge_index: Any, edge_weight: Any, arguments: Any, named: Any
) -> tuple[Hashable, Hashable] | None:
    """Return the keys of a graph and its weights; None if nothing is to be cached."""
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        return None
    if edge_index.is_inference():  # it has no version counter
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
