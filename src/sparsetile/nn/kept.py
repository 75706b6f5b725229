"""What a configuration keeps of a dense weight: a mask of its blocks, or of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparsetile.core.errors import value_error
from sparsetile.nn.criteria import scores_of
from sparsetile.nn.masks import kept_cells
from sparsetile.nn.pruning import block_scores, kept_blocks, kept_count
from sparsetile.nn.sparse_config import SparseConfig

__all__ = ["kept_in_each", "kept_of", "shares_of"]

_Layer = TypeVar("_Layer", bound=nn.Module)

_SIGN_BIT = 31  # floats of 32 bits that are not negative are ordered as their bits are


def kept_of(
    config: SparseConfig, weight: Tensor, names: list[str], layer: nn.Module, number: int,
    share: float,
) -> Tensor:  # fmt: skip
    """Return what is kept of the weight of a layer, the ``number``-th of its model.

    A bool for each block with ``pattern="block"``, else for each weight.
    """
    mask = config._mask_of(names, layer)
    generator = torch.Generator().manual_seed(config.seed + number)
    given: Tensor | None = None
    if config.method in ("magnitude", "wanda") or (
        config.method == "random" and config.pattern != "block"
    ):
        given = _scores(config, weight, names, generator)
    if config.pattern == "block":
        return kept_blocks(
            "sparsify_", weight, config.block,
            sparsity=None if config.method == "mask" else share,
            method="magnitude" if config.method == "wanda" else config.method, mask=mask,
            mask_name=f"mask of layer {names[0]}", generator=generator, scores=given,
        )  # fmt: skip
    return kept_cells(
        "sparsify_", weight, config.pattern, sparsity=share, scores=given,
        by_row=config.method == "wanda" and config.scope == "layer", mask=mask,
        mask_name=f"mask of layer {names[0]}",
    )  # fmt: skip


def _scores(
    config: SparseConfig, weight: Tensor, names: list[str], generator: torch.Generator | None
) -> Tensor:
    return scores_of(
        "sparsify_", weight, config.method, config.norms_of(names), generator,
        f"norms of layer {names[0]}",
    )  # fmt: skip


@torch.no_grad()
def shares_of(
    config: SparseConfig, layers: Mapping[nn.Linear, list[str]]
) -> dict[nn.Linear, float | None]:
    """Return the share to drop of each layer; None for those that stay dense.

    With ``scope="model"``, the scores of all layers are compared with one threshold, found by 31
    counts, one for each bit of a float: scores are made again for each count, so the memory is that
    of one layer.
    """
    if config.scope == "layer":
        shares = {layer: config.share_of(names, layer) for layer, names in layers.items()}
        if all(share is None for share in shares.values()):
            raise value_error(
                "SparseConfig", "sparsity", "a share for at least one layer", "none",
                f"The layers are {', '.join(names[0] for names in [*layers.values()][:8])}",
            )  # fmt: skip
        return shares

    def units(layer: nn.Linear) -> Tensor:
        scores = _scores(config, layer.weight.detach(), layers[layer], None)
        return block_scores(scores, config.block) if config.pattern == "block" else scores

    totals = {layer: units(layer).numel() for layer in layers}
    assert isinstance(config.sparsity, (int, float))
    wanted = kept_count(sum(totals.values()), float(config.sparsity))
    kept = kept_in_each(units, layers, wanted)
    return {layer: 1.0 - max(kept[layer], 1) / total for layer, total in totals.items()}


def kept_in_each(
    units: Callable[[_Layer], Tensor], layers: Iterable[_Layer], wanted: int
) -> dict[_Layer, int]:
    """Return how many of the ``wanted`` largest scores of all layers are in each.

    Scores are not negative. Equal ones at the threshold are all kept.
    """
    layers, threshold = [*layers], 0
    for bit in reversed(range(_SIGN_BIT)):
        trial = threshold | (1 << bit)
        if sum(_above(units(layer), trial) for layer in layers) >= wanted:
            threshold = trial
    return {layer: _above(units(layer), threshold) for layer in layers}


def _above(scores: Tensor, threshold: int) -> int:
    bits = scores.contiguous().view(torch.int32)
    return int((bits >= threshold).sum())
