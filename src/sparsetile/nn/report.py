"""report: what each pruned layer of a model keeps, takes and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparsetile.core.errors import type_error
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.replacement import names_of

__all__ = ["LayerReport", "ModelReport", "report"]


@dataclass(frozen=True)
class LayerReport:
    """One pruned layer: see :func:`report`."""

    name: str
    shape: tuple[int, int]  # outputs, inputs
    pattern: str  # "unstructured", "2:4", "blocks of 64"
    kept: float  # share of the weights that is kept
    bytes: int  # weights and pattern
    copies: int  # copies that are kept for speed now
    dense_bytes: int
    runs: dict[int, str]  # number of tokens -> what multiplies them


@dataclass(frozen=True)
class ModelReport:
    """The pruned layers of a model; printed as a table."""

    layers: list[LayerReport]

    def __str__(self) -> str:
        kept = sum(layer.kept * layer.dense_bytes for layer in self.layers)
        dense = max(sum(layer.dense_bytes for layer in self.layers), 1)
        lines = [
            f"{layer.name}: {layer.shape[0]}x{layer.shape[1]}, {layer.pattern}, "
            f"kept {layer.kept:.1%}, {layer.bytes / max(layer.dense_bytes, 1):.2f} of dense bytes"
            f"{f' and {layer.copies / max(layer.dense_bytes, 1):.2f} copies' * bool(layer.copies)}"
            f", runs {_ranges(layer.runs)}"
            for layer in self.layers
        ]
        held = sum(layer.bytes for layer in self.layers)
        copies = sum(layer.copies for layer in self.layers)
        total = (
            f"{len(self.layers)} pruned layer{'' if len(self.layers) == 1 else 's'}: kept "
            f"{kept / dense:.1%}, {held / 1e6:.1f} MB and {copies / 1e6:.1f} MB of copies; dense "
            f"{dense / 1e6:.1f} MB"
        )
        return "\n".join([*lines, total])


def _ranges(runs: dict[int, str]) -> str:
    """``dense`` or ``few (1, 16 tokens), blocks (128)``."""
    by: dict[str, list[str]] = {}
    for tokens, method in runs.items():
        by.setdefault(method, []).append(str(tokens))
    if len(by) == 1:
        return next(iter(by))
    return ", ".join(f"{method} ({', '.join(at)})" for method, at in by.items())


def report(model: nn.Module, tokens: Sequence[int] = (1, 16, 128, 2048)) -> ModelReport:
    """Return what each pruned layer of a model keeps, takes and runs. Print it for a table.

    Parameters
    ----------
    model : torch.nn.Module
        In eval mode, what runs is that of inference; layers in training mode keep no copies.
    tokens : sequence of int
        Numbers of tokens of a call.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseConfig, report, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    >>> model = sparsify_(model.eval(), SparseConfig(0.5, pattern="unstructured"))
    >>> print(report(model))
    0: 64x64, unstructured, kept 50.0%, 0.56 of dense bytes, runs dense
    1 pruned layer: kept 50.0%, 0.0 MB and 0.0 MB of copies; dense 0.0 MB
    """
    if not isinstance(model, nn.Module):
        raise type_error(
            "report", "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )
    found = [
        _layer(given[0], layer, tokens)
        for layer, given in names_of(model).items()
        if isinstance(layer, (SparseLinear, MaskedLinear))
    ]
    return ModelReport(found)


def _layer(name: str, layer: SparseLinear | MaskedLinear, tokens: Sequence[int]) -> LayerReport:
    memory = layer.memory()
    copies = sum(part for key, part in memory.items() if key.endswith(("copy", "copies")))
    cells = layer.in_features * layer.out_features
    blocks = isinstance(layer, SparseLinear)
    item = (layer._wide_dtype() if isinstance(layer, SparseLinear) else layer.weight.dtype).itemsize
    return LayerReport(
        name=name or type(layer).__name__,
        shape=(layer.out_features, layer.in_features),
        pattern=f"blocks of {layer.block}" if blocks else str(layer.pattern),  # type: ignore[union-attr]
        kept=1.0 - layer.sparsity,
        bytes=sum(memory.values()) - copies - memory["bias"],
        copies=copies,
        dense_bytes=cells * item,
        runs={count: layer.method(count) for count in tokens},
    )
