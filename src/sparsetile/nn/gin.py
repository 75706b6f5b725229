"""Graph isomorphism network: nn((1 + eps) · x + sum of the neighbours)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error
from sparsetile.intake.identity import counter_tells, tensor_key
from sparsetile.nn.arguments import features, flow_name, refuse_others, reset, sum_only
from sparsetile.nn.inputs import pair_of, read_input
from sparsetile.nn.mapped import scaled_product
from sparsetile.nn.neighbours import reduction
from sparsetile.plan.modes import plain_call

__all__ = ["GINConv"]


class GINConv(nn.Module):
    """Graph isomorphism layer with the arguments, state dict and results of PyG's ``GINConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change.

    Parameters
    ----------
    nn : torch.nn.Module
        Maps the sums to the new features. As in PyG, its weights are drawn again.
    eps : float
    train_eps : bool
        Whether eps is a trainable parameter.
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GINConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = GINConv(torch.nn.Linear(8, 4), train_eps=True)
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, nn: Callable[[Tensor], Tensor], eps: float = 0.0, train_eps: bool = False, *,
        flow: str = "source_to_target", aggr: str = "add", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others("GINConv", others)
        sum_only("GINConv", aggr)
        if not callable(nn):
            raise type_error(
                "GINConv", "nn", "a module", type(nn).__name__, "Pass a torch.nn.Module"
            )
        self.nn = nn
        self.initial_eps = float(eps)
        self._known: tuple[Hashable, Tensor] | None = None  # key of eps, 1 + eps
        self.flow = flow_name("GINConv", flow)
        start = torch.full((1,), self.initial_eps)
        if train_eps:
            self.eps: Tensor = torch.nn.Parameter(start)
        else:
            self.register_buffer("eps", start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights of ``nn``, and set eps to its first value."""
        if isinstance(self.nn, torch.nn.Module):
            reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [..., nodes, channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` or the graph gives the number of
            targets; if neither does, there are as many as sources, as in PyG.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages, as in
            PyG. Weights of ``Data`` are not used.
        size : (sources, targets), optional
        """
        given = read_input("GINConv", edge_index, None, self.flow).without_weight()
        sources, targets, sizes = pair_of("GINConv", x, size, self.flow, given)
        features("GINConv", "x", sources, -1)
        graph, _, weights = reduction("GINConv", given, sizes, sources, self.flow, "sum")
        if targets is None:
            return self.nn(graph.aggregate(sources, weights))
        factor = self._factor()
        if targets is sources and (weights is None or weights.key is not None):
            name = None if weights is None else weights.key
            out = scaled_product(graph, name, lambda: weights, sources, factor)
            if out is not None:
                return self.nn(out)
        out = graph.aggregate(sources, weights)
        if out.dtype is targets.dtype is factor.dtype:  # rounded once, as in scaled_product
            return self.nn(torch.addcmul(out, targets, factor))
        return self.nn(out + factor * targets)

    def _factor(self) -> Tensor:
        """Return 1 + eps, computed again when eps has changed."""
        eps, known = self.eps, self._known
        plain = plain_call() and not torch.jit.is_tracing() and not eps.requires_grad
        # A key that equals the last one is of memory whose writes are counted.
        if plain and known is not None and not eps.is_inference() and known[0] == tensor_key(eps):
            return known[1]
        if not plain or not counter_tells(eps):
            return 1 + eps
        with torch.inference_mode(False):
            self._known = tensor_key(eps), 1 + eps
        return self._known[1]
