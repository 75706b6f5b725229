"""sparsify_ and densify_: prune the linear layers of a model, and undo it.

The signature is torchao's: ``sparsify_(model, config, filter_fn)``. Modules are replaced, nothing
is patched, so models of transformers work unchanged. All replacements are made before the first is
put in: a call that fails leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.layers.block_layer import activate
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.empty_layers import put_swiglu
from sparsetile.nn.hooks import has_hooks, has_tensor_hooks
from sparsetile.nn.kept import kept_of, shares_of
from sparsetile.nn.layer_choice import Filter, SparsifyReport, chosen_layers
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.pretrained import forget_pretrained, record_pretrained
from sparsetile.nn.replacement import Replacements, names_of, place_of, tensor_owners
from sparsetile.nn.sparse_config import SparseConfig, same_tensor
from sparsetile.nn.swiglu import GATE_UP, SparseSwiGLU, is_swiglu

__all__ = ["densify_", "sparsify_"]

_Model = TypeVar("_Model", bound=nn.Module)
Pruned: TypeAlias = SparseLinear | MaskedLinear


def _pruned(
    config: SparseConfig, names: list[str], layer: nn.Linear, number: int, share: float
) -> Pruned:
    weight = layer.weight.detach()
    keep = kept_of(config, weight, names, layer, number, share)
    made: Pruned
    if config.pattern == "block":
        made = SparseLinear.from_linear(layer, mask=keep, block=config.block, prefer=config.prefer)
    else:
        made = MaskedLinear.from_linear(
            layer, mask=keep, pattern=config.pattern, prefer=config.prefer
        )
    if layer.bias is not None:
        made.bias = layer.bias  # optimisers, hooks and other modules may have it
    return made


def sparsify_(
    model: _Model, config: SparseConfig | None = None, filter_fn: Filter | None = None
) -> _Model:
    """Replace linear layers of a model by pruned ones, in place.

    Hooks of a replaced module stay, and so do its bias, its mode and which parameters are frozen.
    A module that has several names stays one module.

    Parameters
    ----------
    model : torch.nn.Module
    config : SparseConfig, optional
        When None: 90 % sparsity, blocks of 64, by magnitude.
    filter_fn : callable (module, name) -> bool, optional
        Which ``torch.nn.Linear`` to prune. When None, all but output heads (such as ``lm_head``
        and what ``get_output_embeddings()`` returns), layers that share their weight with another
        module, and layers whose replacement would not compute the same. The last are those with
        tensor hooks on the weight, with ``weight_norm`` or another parametrization, or with a
        replaced ``forward``. If ``filter_fn`` is true for one that cannot be pruned, an error says
        why.

    Returns
    -------
    torch.nn.Module
        The model. ``model.sparsify_report`` says which layers are pruned, and why others are not.
        If the call fails, the model is unchanged: until the end it holds both weights.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseConfig, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    >>> sparsify_(model, SparseConfig(sparsity=0.75))
    Sequential(
      (0): SparseLinear(in_features=128, out_features=256, bias=True, block=64, kept=2/8)
      (1): ReLU()
    )
    >>> print(model.sparsify_report)
    pruned: 1 layer
      0: kept 2 of 8 blocks of 64
    skipped: 0 modules
    """
    config = SparseConfig() if config is None else config
    _check_model("sparsify_", model)
    if not isinstance(config, SparseConfig):
        raise type_error(
            "sparsify_", "config", "a SparseConfig", type(config).__name__,
            "Pass SparseConfig(sparsity=0.9)",
        )  # fmt: skip
    masked = config.mask if isinstance(config.mask, Mapping) else None
    choice = chosen_layers(model, filter_fn, masked)
    report = SparsifyReport({}, choice.skipped)
    change = Replacements()
    shares = shares_of(config, choice.layers)
    for number, (layer, names) in enumerate(choice.layers.items()):
        share = shares[layer]
        if share is None:
            report.skipped[names[0]] = "config.sparsity has no share for it"
            continue
        change[layer] = made = _pruned(config, names, layer, number, share)
        report.pruned[names[0]] = _what_is_kept(made, config)
    for module in _swiglus(model, change, config):
        put_swiglu(change, module, *(change[getattr(module, part)] for part in GATE_UP))
    if config.weight_dtype is not None:
        for new in change.values():
            sparse = new.gate_up_proj if isinstance(new, SparseSwiGLU) else new
            assert isinstance(sparse, SparseLinear)
            sparse.quantize_()
    change.apply(model)
    model.sparsify_report = report  # type: ignore[assignment]
    record_pretrained(model)
    return model


def _what_is_kept(made: Pruned, config: SparseConfig) -> str:
    if isinstance(made, MaskedLinear):
        kind = "weights" if made.pattern == "unstructured" else f"weights, {made.pattern}"
        return f"kept {made.weight.numel()} of {made.in_features * made.out_features} {kind}"
    blocks = made.pattern.grid[0] * made.pattern.grid[1]
    unit = BlockPattern.unit_of(config.block)
    sides = (made.in_features, made.out_features)
    padded = ", the last padded with zeros" if any(side % unit for side in sides) else ""
    return f"kept {len(made.weight)} of {blocks} blocks of {unit}{padded}"


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise type_error(
            function, "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )


def _swiglus(model: nn.Module, change: Replacements, config: SparseConfig) -> list[nn.Module]:
    """Feed-forward layers whose gate and up are both pruned and can be joined."""
    if config.join_gate_up is False or config.pattern != "block":
        return []
    classes = () if config.join_gate_up is True else config.join_gate_up
    names, owners = names_of(model), tensor_owners(model)
    found = []
    for module, given in names.items():
        if not is_swiglu(module, classes) or "" in given:
            continue
        parts = [getattr(module, part) for part in GATE_UP]
        # No other module may use a part or its bias: joining removes them.
        alone = all(
            part in change
            and len(names[part]) == len(given)
            and (part.bias is None or len(owners[place_of(part.bias)]) == 1)
            for part in parts
        )
        if alone and parts[0].out_features % BlockPattern.unit_of(config.block) == 0:
            found.append(module)
    return found


class _SwiGLU(nn.Module):
    """silu of the first half times the second half."""

    def forward(self, x: Tensor) -> Tensor:
        return activate(x, "swiglu")


_ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "swiglu": _SwiGLU}


def densify_(model: _Model) -> _Model:
    """Undo :func:`sparsify_`: dense layers with zeros where blocks were dropped, in place.

    Hooks, biases, modes and frozen parameters stay, and tied weights stay tied. A layer with an
    activation becomes a ``torch.nn.Sequential`` of both.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import densify_, sparsify_
    >>> model = sparsify_(torch.nn.Sequential(torch.nn.Linear(128, 256)))
    >>> densify_(model)
    Sequential(
      (0): Linear(in_features=128, out_features=256, bias=True)
    )
    """
    _check_model("densify_", model)
    names = names_of(model)
    joined: dict[nn.Module, SparseSwiGLU] = {
        each.gate_up_proj: each for each in names if isinstance(each, SparseSwiGLU)
    }
    _check_dense(model, names, joined)
    change = Replacements()
    weights: dict[tuple[int, ...], tuple[Pruned, nn.Parameter]] = {}
    for module in names:
        if isinstance(module, (SparseLinear, MaskedLinear)) and module not in joined:
            change[module] = _dense(module, names[module][0], weights)
    for made in joined.values():
        (origin,) = made._origin
        halves = zip(GATE_UP, made.split(), strict=True)
        parts: dict[str, nn.Module] = {part: half.to_linear() for part, half in halves}
        origin.train(made.training)
        change.parts.append((origin, {**parts, "down_proj": change[made.down_proj]}))
        change[made] = origin
    change.apply(model)
    if hasattr(model, "sparsify_report"):
        del model.sparsify_report
    forget_pretrained(model)
    return model


def _dense(
    layer: Pruned, name: str, weights: dict[tuple[int, ...], tuple[Pruned, nn.Parameter]]
) -> nn.Module:
    """A dense layer with the same results; layers with tied weights share one weight."""
    made = layer.to_linear()
    if layer.bias is not None:
        made.bias = layer.bias
    own: Any = made.weight
    first = weights.setdefault(place_of(layer.weight), (layer, own))
    if first[0] is not layer:
        if not _alike(first[0], layer):
            raise _tied(name)
        made.weight = first[1]  # type: ignore[assignment]
    activation = getattr(layer, "activation", "none")
    if activation == "none":
        return made
    both = nn.Sequential(made, _ACTIVATIONS[activation]())
    return both.train(layer.training)


def _alike(one: Pruned, other: Pruned) -> bool:
    """Whether two layers of one Parameter have the same pattern."""
    sizes = [(type(each), each.in_features, each.out_features) for each in (one, other)]
    return sizes[0] == sizes[1] and all(
        same_tensor(part, other._buffers[name]) for name, part in one._buffers.items()
    )


def _tied(name: str) -> ValueError:
    return value_error(
        "densify_", "model", "one whose tied sparse weights can stay tied",
        f"{name}, whose weight is also elsewhere", "Untie it first",
    )  # fmt: skip


def _check_dense(
    model: nn.Module, names: dict[nn.Module, list[str]], joined: dict[nn.Module, SparseSwiGLU]
) -> None:
    """Raise for a model that densify_ cannot restore."""
    owners = tensor_owners(model)
    for module, (name, *_) in names.items():
        if not isinstance(module, (KeepsDense, SparseSwiGLU)):
            continue
        if not name:
            raise value_error(
                "densify_", "model", "one that holds sparse layers", f"a {type(module).__name__}",
                "Call to_linear() on it, or split() on a SparseSwiGLU",
            )  # fmt: skip
        if isinstance(module, SparseSwiGLU):
            if not module._origin or not isinstance(module.gate_up_proj, SparseLinear):
                raise value_error(
                    "densify_", "model", "one that sparsify_ or load_sparse_ made",
                    f"{name} made by hand", "Call split() on it",
                )  # fmt: skip
            continue
        assert isinstance(module, KeepsDense)
        if has_tensor_hooks(module.weight) or (
            module in joined and (has_hooks(module) or has_tensor_hooks(module.bias))
        ):
            raise value_error(
                "densify_", "model", "one without hooks on what disappears", f"hooks of {name}",
                "Remove them first",
            )  # fmt: skip
        others = owners[place_of(module.weight)]
        free = [each for each in others if isinstance(each, KeepsDense) and each not in joined]
        if len(others) > 1 and len(free) < len(others):
            raise _tied(name)
