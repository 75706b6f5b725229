"""Replaces modules of a model: all at once, under every name, with their hooks."""

from __future__ import annotations

from torch import Tensor, nn

from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.hooks import take_over_hooks

__all__ = ["Replacements", "names_of", "place_of", "tensor_owners"]

# Attributes of torch's encoder that enable its fast path, and the values that disable it.
_FAST_PATHS = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_SAVED = "_fast_path_when_dense"


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of a model with all of its names."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def tensor_owners(model: nn.Module) -> dict[tuple[int, ...], list[nn.Module]]:
    """Owners of each parameter, by :func:`place_of`; several if weights are tied."""
    found: dict[tuple[int, ...], list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(place_of(parameter), []).append(module)
    return found


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """A key that tied tensors share, also if they are different views of one storage."""
    if tensor.device.type == "meta" or type(tensor) is not nn.Parameter or not tensor.numel():
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.numel())


class Replacements(dict[nn.Module, nn.Module]):
    """Modules and what replaces them; others stand for themselves. ``apply`` changes a model."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[nn.Module, dict[str, nn.Module]]] = []  # new children of modules

    def __missing__(self, module: nn.Module) -> nn.Module:
        return module

    def apply(self, model: nn.Module) -> None:
        """Replace every module, under each of its names; the new ones get the hooks."""
        for parent in [*model.modules()]:
            for name, child in parent._modules.items():
                if child is not None and child in self:
                    parent._modules[name] = self[child]
        for module, parts in self.parts:
            module._modules.update(parts)
        for old, new in self.items():
            take_over_hooks(new, old)
        _choose_fast_paths(model)


def _choose_fast_paths(model: nn.Module) -> None:
    """Disable the fast path of torch's encoder if it has sparse layers.

    In eval mode it passes ``linear1.weight`` to one fused operator instead of calling ``linear1``.
    """
    for module in model.modules():
        layers = module.layers if isinstance(module, nn.TransformerEncoder) else [module]
        for kind, (name, off) in _FAST_PATHS.items():
            if not isinstance(module, kind):
                continue
            saved = vars(module)
            sparse = any(_is_sparse(layer) for layer in layers)  # type: ignore[union-attr]
            if sparse and _SAVED not in saved:
                saved[_SAVED] = getattr(module, name)
                setattr(module, name, off)
            elif not sparse and _SAVED in saved:
                setattr(module, name, saved.pop(_SAVED))


def _is_sparse(layer: nn.Module) -> bool:
    """Whether a linear layer of an encoder layer is not what its fast path expects."""
    parts = (getattr(layer, name, None) for name in ("linear1", "linear2"))
    return any(isinstance(part, (KeepsDense, nn.Sequential)) for part in parts)
