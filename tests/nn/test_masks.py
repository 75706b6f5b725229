"""Masks are whole blocks of layers that exist; anything else is refused, and nothing is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import SparseConfig, SparseLinear, sparsify_
from sparsetile.nn.pruning import kept_count


def scattered() -> Tensor:
    """Half of the weights, without any structure."""
    return torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) < 0.5


def two_of_four() -> Tensor:
    return torch.tensor([True, True, False, False]).repeat(128, 32)


@pytest.mark.parametrize("mask", [scattered(), two_of_four()], ids=["unstructured", "2:4"])
def test_rejects_masks_that_are_not_whole_blocks(mask):
    text = (
        r"SparseLinear\.from_dense: mask must be made of whole blocks of 64x64, got 4 of 4 blocks "
        r"\(100 %\) partly kept\. Keep or drop whole blocks, for example with sparsity=0\.9; for "
        r"other masks, use SparseConfig\(pattern=\"unstructured\"\) or MaskedLinear\.from_linear"
    )
    with pytest.raises(ValueError, match=text):
        SparseLinear.from_dense(torch.ones(128, 128), mask=mask)
    model = nn.Sequential(nn.Linear(128, 128))
    layer, before = model[0], copy.deepcopy(model[0].state_dict())
    with pytest.raises(ValueError, match=r"sparsify_: mask of layer 0 must be made of whole bl"):
        sparsify_(model, SparseConfig(method="mask", mask={"0": mask}))
    assert model[0] is layer and torch.equal(layer.weight, before["weight"])


def test_one_cell_makes_a_block_partial():
    mask = torch.zeros(100, 200, dtype=torch.bool)
    mask[64:, 128:192] = True  # the last rows reach past the end
    assert SparseLinear.from_dense(torch.ones(100, 200), mask=mask).weight.shape[0] == 1
    mask[0, 0] = True
    with pytest.raises(ValueError, match=r"got 1 of 8 blocks \(12 %\) partly kept"):
        SparseLinear.from_dense(torch.ones(100, 200), mask=mask)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_whole_blocks_may_be_given_weight_by_weight(block):
    keep = torch.tensor([[True, False], [False, True]])
    mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)
    weight = torch.randn(2 * block, 2 * block)
    layers = [SparseLinear.from_dense(weight, mask=given, block=block) for given in (keep, mask)]
    for layer in layers:
        assert torch.equal(layer.to_dense(), torch.where(mask, weight, 0.0))


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_masked_value_that_is_not_finite_is_dropped(wrong):
    weight = torch.ones(128, 128)
    weight[3, 70] = wrong
    mask = torch.ones(128, 128, dtype=torch.bool)
    mask[:64, 64:] = False
    dense = SparseLinear.from_dense(weight, mask=mask).to_dense()
    assert torch.equal(dense, mask.float())


def test_rejects_masks_of_layers_that_do_not_exist():
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    before = list(model)
    masks = {"0": torch.ones(2, 2), "2.weight": torch.ones(2, 2)}
    text = (
        r"mask must be masks of linear layers of the model, got '2\.weight'\. Its layers are 0, 2"
    )
    with pytest.raises(ValueError, match=text):
        sparsify_(model, SparseConfig(method="mask", mask=masks))
    assert list(model) == before


def test_rejects_two_masks_of_one_layer():
    shared = nn.Linear(128, 128)
    model = nn.ModuleDict({"a": shared, "b": shared})
    masks = {"a": torch.ones(2, 2), "b": torch.eye(2)}
    with pytest.raises(ValueError, match="mask must be one for each layer, got different ones f"):
        sparsify_(model, SparseConfig(method="mask", mask=masks))
    masks["a"] = masks["b"]
    sparsify_(model, SparseConfig(method="mask", mask=masks))
    assert model["a"] is model["b"] and model["a"].weight.shape[0] == 2


@pytest.mark.parametrize(
    "blocks, sparsity, kept",
    [(100, 0.9, 10), (10, 0.25, 8), (10, 0.96, 1), (10, 0.0, 10), (3, 0.5, 2), (0, 0.5, 0)],
)
def test_the_number_of_kept_blocks_is_rounded(blocks, sparsity, kept):
    """A share such as 0.9 is not exact: 100 · (1 - 0.9) is slightly less than 10."""
    assert kept_count(blocks, sparsity) == kept
