"""Linear maps whose width is that of their first input, for PyG's ``in_channels=-1``.

A map of unknown width has no weight yet. The layer's first call makes it and draws its numbers, in
the order in which PyG's layer calls its maps, so that a seed gives the same weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparsetile.core.errors import value_error
from sparsetile.nn.arguments import glorot, reset

__all__ = ["LazyMap", "draw", "draw_maps", "linear", "materialise"]


class LazyMap(nn.LazyLinear):
    """A linear map that becomes ``nn.Linear`` at its first call."""

    _uniform = False

    def __init__(self, out_features: int, bias: bool, uniform: bool) -> None:
        super().__init__(out_features, bias=False)
        if bias:  # in PyG's state dicts from the start
            self.bias = nn.Parameter(torch.zeros(out_features))  # type: ignore[assignment]
        self._uniform = uniform

    def initialize_parameters(self, input: Tensor) -> None:  # type: ignore[override]
        """Make the weight, unless a state dict did, and draw its numbers."""
        if not is_lazy(self.weight):
            self.in_features = self.weight.shape[1]
            return
        self.in_features = input.shape[-1]
        self.weight.materialize((self.out_features, self.in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, if there are any yet."""
        draw(self, self._uniform)


def linear(width: int, out: int, bias: bool = False, uniform: bool = False) -> nn.Linear:
    """Return a linear map; ``width`` -1: that of its first input. ``uniform``: see :func:`draw`."""
    return LazyMap(out, bias, uniform) if width == -1 else nn.Linear(width, out, bias=bias)


def draw(layer: nn.Linear, uniform: bool = False) -> None:
    """Draw a map's weights: Glorot's, or ``uniform`` within 1 / sqrt(width) as the bias is."""
    if is_lazy(layer.weight) or not layer.weight.numel():  # none, while torch makes a LazyMap
        return
    width = layer.weight.shape[1]
    if uniform:
        bound = math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * width))  # rounded as by PyG
        nn.init.uniform_(layer.weight, -bound, bound)
    else:
        glorot(layer.weight)
    if layer.bias is not None:
        bound = 1 / math.sqrt(width)
        nn.init.uniform_(layer.bias, -bound, bound)


def draw_maps(module: nn.Module, uniform: bool = False) -> None:
    """Draw the weights of a layer's maps, as PyG: one that has two names twice."""
    for layer in module._modules.values():
        if isinstance(layer, nn.Linear):
            draw(layer, uniform)
        elif layer is not None:  # what replaced a map
            reset(layer)


def materialise(name: str, *maps: tuple[nn.Module | None, Tensor | None]) -> None:
    """Give each map of unknown width that of its input, in this order; inputs may be missing."""
    for layer, x in maps:
        if x is None or not isinstance(layer, nn.Linear):
            continue
        width, known = x.shape[-1], layer.in_features
        if isinstance(layer, LazyMap):
            known = width if is_lazy(layer.weight) else layer.weight.shape[1]
        if width != known:
            raise value_error(
                name, "features", f"{known} wide, as the layer's weights are", width,
                "Make another layer for features of another width",
            )  # fmt: skip
        if isinstance(layer, LazyMap):  # which a call makes an nn.Linear
            with torch.inference_mode(False), torch.no_grad():
                layer(x.new_empty(0, width, dtype=layer.weight.dtype))
