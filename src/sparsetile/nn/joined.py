"""join_projections_: pruned projections that read the same x as one product.

Attention calls ``q_proj``, ``k_proj`` and ``v_proj`` with the same x. With a token or a few, each
of them takes a launch, and the small ones cannot fill a GPU. Their weights are stacked in one
``MaskedLinear``. The first of them multiplies by all; the others return their share of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.nn.hooks import has_hooks, has_state_hooks, has_tensor_hooks
from sparsetile.nn.masked_linear import MaskedLinear

__all__ = ["JoinedPart", "join_projections_"]

_Model = TypeVar("_Model", bound=nn.Module)
_NAMES = ("q_proj", "k_proj", "v_proj")


class _Joined(nn.Module):
    """The stacked layer, and what the first part left for the others: x and the whole result."""

    def __init__(self, layers: Sequence[MaskedLinear]) -> None:
        super().__init__()
        self.stacked = _stacked(layers)
        self.sizes = tuple(layer.out_features for layer in layers)
        self.left: tuple[Tensor, int, Tensor] | None = None
        self.training = layers[0].training

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "left": None}


class JoinedPart(nn.Module):
    """One of several projections whose weights are stacked; see :func:`join_projections_`."""

    def __init__(self, joined: _Joined, index: int) -> None:
        super().__init__()
        self.index = index
        if index == 0:
            self.joined = joined
        # In a tuple, so that only the first part registers it as a submodule.
        self._shared = (joined,)

    def forward(self, x: Tensor) -> Tensor:
        """Return x·Wᵀ + bias of this projection."""
        joined, last = self._shared[0], len(self._shared[0].sizes) - 1
        left = joined.left
        version = _version(x)
        if self.index > 0 and left is not None and left[0] is x and left[1] == version:
            whole = left[2]
            if self.index == last:
                joined.left = None
        else:
            whole = joined.stacked(x)
            if self.index == 0:
                joined.left = (x, version, whole)
        return whole.narrow(-1, sum(joined.sizes[: self.index]), joined.sizes[self.index])

    def extra_repr(self) -> str:
        return f"part {self.index} of outputs {self._shared[0].sizes}"


def _version(x: Tensor) -> int:
    """Number of writes to a tensor where torch counts them."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


@torch.no_grad()
def _stacked(layers: Sequence[MaskedLinear]) -> MaskedLinear:
    first = layers[0]
    biased = first.bias is not None
    made = MaskedLinear(
        first.in_features, sum(layer.out_features for layer in layers),
        sum(layer.weight.shape[0] for layer in layers), pattern=first.pattern, bias=biased,
        prefer=first.prefer, device=first.weight.device, dtype=first.weight.dtype,
    )  # fmt: skip
    made.weight.copy_(torch.cat([layer.weight for layer in layers]))
    made.mask_bits.copy_(torch.cat([layer.mask_bits for layer in layers]))
    made.weight.requires_grad_(first.weight.requires_grad)
    if biased:
        made.bias.copy_(torch.cat([layer.bias for layer in layers]))
        made.bias.requires_grad_(first.bias.requires_grad)
    return made.train(first.training)


def _kind(layer: MaskedLinear) -> tuple[object, ...]:
    bias = layer.bias
    return (
        layer.in_features, layer.pattern, layer.prefer, layer.training, layer.weight.dtype,
        layer.weight.device, layer.weight.requires_grad, bias is None,
        bias is not None and bias.requires_grad,
    )  # fmt: skip


def _plain(layer: object) -> bool:
    """Whether a layer is pruned to single weights and nothing watches it."""
    return (
        type(layer) is MaskedLinear
        and not has_hooks(layer)
        and not has_state_hooks(layer)
        and not has_tensor_hooks(layer.weight)
        and not has_tensor_hooks(layer.bias)
    )


def join_projections_(model: _Model, names: Sequence[str] = _NAMES) -> _Model:
    """Multiply by pruned projections that read the same x together, in place.

    For inference: with one token, ``q_proj``, ``k_proj`` and ``v_proj`` of an 8B model take as long
    as one product in place of three. Modules with children of these names are changed where all of
    them are ``MaskedLinear`` of the same kind without hooks. Their weights have other names
    afterwards, so save the model before. x must not be written in place between the calls of the
    projections.

    Parameters
    ----------
    model : torch.nn.Module
    names : sequence of str
        Names of layers that the same module calls with the same x, the first of them first.

    Returns
    -------
    torch.nn.Module
        The model.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import MaskedLinear, join_projections_
    >>> model = torch.nn.Module()
    >>> for name in ("q_proj", "k_proj", "v_proj"):
    ...     linear = torch.nn.Linear(64, 32)
    ...     model.add_module(name, MaskedLinear.from_linear(linear, sparsity=0.5))
    >>> x = torch.randn(3, 64)
    >>> expected = model.k_proj(x)
    >>> model = join_projections_(model)
    >>> found = [getattr(model, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    >>> torch.allclose(found[1], expected, atol=1e-6)
    True
    """
    function = "join_projections_"
    if not isinstance(model, nn.Module):
        raise type_error(
            function, "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )
    if len(set(names)) != len(names) or len(names) < 2:
        raise value_error(
            function, "names", "at least two different names", tuple(names),
            "Pass the names of projections of one module",
        )  # fmt: skip
    uses: dict[nn.Module, int] = {}
    for module in model.modules():
        for child in module._modules.values():
            if child is not None:
                uses[child] = uses.get(child, 0) + 1
    for module in list(model.modules()):
        found: list[Any] = [module._modules.get(name) for name in names]
        alone = all(_plain(each) and uses[each] == 1 for each in found)
        if alone and len({_kind(each) for each in found}) == 1:
            joined = _Joined(found)
            for index, name in enumerate(names):
                module._modules[name] = JoinedPart(joined, index)
    return model
