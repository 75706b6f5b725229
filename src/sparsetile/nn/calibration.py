"""calibrate: the norms of each linear layer's inputs over some data, which Wanda prunes by.

With a configuration, layers are taken one stage (decoder layer) after another, each with the inputs
it has once the stages before it are pruned, as in the papers of SparseGPT and Wanda. Only the
inputs of one stage and a pruned copy of its weights are held at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.kept import kept_of, shares_of
from sparsetile.nn.layer_choice import Filter, chosen_layers
from sparsetile.nn.replacement import names_of
from sparsetile.nn.sparse_config import SparseConfig

__all__ = ["calibrate"]

# Arguments of decoder layers of transformers that would remember an earlier call.
_CACHES = {"past_key_values": None, "past_key_value": None, "use_cache": False}


class _Sums:
    """Sums of squares of a layer's inputs, and over how many tokens."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1]).float()
        squares = x.square().sum(0)
        self.squares = squares if self.squares is None else self.squares + squares
        self.tokens += x.shape[0]

    def norm(self) -> Tensor:
        assert self.squares is not None
        return (self.squares / max(self.tokens, 1)).sqrt()


@contextlib.contextmanager
def _watched(layers: Mapping[nn.Module, str]) -> Iterator[dict[str, _Sums]]:
    """Sum the inputs of layers while they are called; layers never called are not in the result."""
    found: dict[str, _Sums] = {}

    def watch(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].numel():
            found.setdefault(layers[layer], _Sums()).add(arguments[0])

    handles = [layer.register_forward_pre_hook(watch) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _norms(found: dict[str, _Sums]) -> dict[str, Tensor]:
    return {name: sums.norm() for name, sums in found.items() if sums.squares is not None}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for the whole model; each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Any], config: SparseConfig | None = None,
    filter_fn: Filter | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the norms of the inputs of each linear layer: the root of their mean square.

    Pass them as ``SparseConfig(method="wanda", norms=...)``. The model runs in eval mode and stays
    unchanged.

    Parameters
    ----------
    model : torch.nn.Module
    batches : iterable
        Inputs of the model: tensors, tuples of arguments, or mappings of keyword arguments. A few
        thousand tokens of the model's own kind of text suffice.
    config : SparseConfig, optional
        How the model will be pruned. Then the norms of each decoder layer are those with the layers
        before it pruned in this way. The inputs of one decoder layer for all batches are held. When
        None, the norms are those of the dense model, and nothing is held.
    filter_fn : callable (module, name) -> bool, optional
        With ``config``: as in :func:`sparsify_`.

    Returns
    -------
    dict
        Layer name -> Tensor [in_features] of float32. Layers that no batch reached are missing.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseConfig, calibrate, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    >>> norms = calibrate(model, [torch.ones(5, 8)])
    >>> norms["0"]
    tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    >>> config = SparseConfig(0.5, pattern="unstructured", method="wanda", norms=norms)
    >>> sparsify_(model, config)
    Sequential(
      (0): MaskedLinear(in_features=8, out_features=4, bias=True, pattern=unstructured, kept=16/32)
    )
    """
    if not isinstance(model, nn.Module):
        raise type_error(
            "calibrate", "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )
    names = names_of(model)
    layers: dict[nn.Module, str] = {
        module: given[0]
        for module, given in names.items()
        if isinstance(module, (nn.Linear, KeepsDense))
    }
    with _evaluating(model):
        if config is not None:
            return _in_sequence(model, [*batches], config, filter_fn, layers)
        with _watched(layers) as found:
            count = sum(1 for batch in batches if _call(model, batch) is not found)
    _check_count(count)
    return _norms(found)


def _check_count(count: int) -> None:
    if not count:
        raise value_error(
            "calibrate", "batches", "at least one batch", "none", "Pass a list of inputs"
        )


class _StopError(Exception):
    """Ends a call of the model once the inputs of its first stage are known."""


def _stages(model: nn.Module, chosen: Mapping[nn.Linear, list[str]]) -> list[nn.Module]:
    """The children of the list of modules that has the most chosen layers: decoder layers."""
    best: tuple[int, list[nn.Module]] = (0, [])
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            count = sum(1 for part in module.modules() if part in chosen)
            if count > best[0]:
                best = (count, [*module.children()])
    if not best[1]:
        raise value_error(
            "calibrate", "model", "one with a ModuleList or Sequential of decoder layers",
            type(model).__name__, "Omit config: the norms are then those of the dense model",
        )  # fmt: skip
    return best[1]


def _inputs_of(
    stage: nn.Module, model: nn.Module, batches: list[Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the model passes to a stage for each batch."""
    found = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append((arguments, named | {key: _CACHES[key] for key in _CACHES if key in named}))
        raise _StopError

    handle = stage.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            with contextlib.suppress(_StopError):
                _call(model, batch)
    finally:
        handle.remove()
    return found


def _in_sequence(
    model: nn.Module, batches: list[Any], config: SparseConfig, filter_fn: Filter | None,
    layers: dict[nn.Module, str],
) -> dict[str, Tensor]:  # fmt: skip
    if config.scope == "model":
        raise value_error(
            "calibrate", "config", 'one with scope="layer"', 'scope="model"',
            "Omit config: comparing all layers needs the norms of all of them first",
        )  # fmt: skip
    _check_count(len(batches))
    masked = config.mask if isinstance(config.mask, Mapping) else None
    chosen = chosen_layers(model, filter_fn, masked).layers
    numbers = {layer: number for number, layer in enumerate(chosen)}
    shares = shares_of(config, chosen)
    stages = _stages(model, chosen)
    inside = {part for stage in stages for part in stage.modules()}
    norms: dict[str, Tensor] = {}
    if any(layer not in inside for layer in chosen):
        with _watched({layer: layers[layer] for layer in chosen if layer not in inside}) as found:
            for batch in batches:
                _call(model, batch)
        norms |= _norms(found)
    inputs = _inputs_of(stages[0], model, batches)
    for stage in stages:
        here = {part: layers[part] for part in stage.modules() if part in layers}
        with _watched(here) as found:
            for arguments, named in inputs:
                stage(*arguments, **named)
        norms |= _norms(found)
        known = dataclasses.replace(config, norms=norms)
        backup: list[tuple[Tensor, Tensor]] = []
        try:
            for layer in here:
                share = shares.get(layer) if isinstance(layer, nn.Linear) else None
                if isinstance(layer, nn.Linear) and share is not None and here[layer] in norms:
                    weight = layer.weight
                    keep = kept_of(
                        known, weight.detach(), chosen[layer], layer, numbers[layer], share
                    )
                    backup.append((weight, weight.data))
                    weight.data = weight.data * _cells(keep, weight, config)
            for number, (arguments, named) in enumerate(inputs):
                out = stage(*arguments, **named)
                first = out[0] if isinstance(out, (tuple, list)) else out
                inputs[number] = ((first, *arguments[1:]), named)
        finally:
            for weight, data in backup:
                weight.data = data
    return norms


def _cells(keep: Tensor, weight: Tensor, config: SparseConfig) -> Tensor:
    """A mask of blocks or weights as one of weights."""
    if config.pattern == "block":
        for dim in (0, 1):
            keep = keep.repeat_interleave(config.block, dim)
    return keep[: weight.shape[0], : weight.shape[1]].to(weight.dtype)
