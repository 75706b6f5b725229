"""prune_ keeps a layer in training: its Parameter stays, and so does the optimiser's state."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import SparseLinear

OPTIMISERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def layer_of(sparsity: float = 0.0) -> SparseLinear:
    torch.manual_seed(0)
    return SparseLinear.from_linear(nn.Linear(128, 128), sparsity=sparsity, block=32)


def step(layer: nn.Module, optimiser: torch.optim.Optimizer) -> Tensor:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    optimiser.zero_grad()
    loss = layer(x).square().sum()
    loss.backward()
    optimiser.step()
    return loss


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("given", [False, True], ids=["without optimizer=", "with optimizer="])
def test_training_goes_on_with_the_state_of_kept_blocks(name, given):
    layer = layer_of()
    optimiser = OPTIMISERS[name](layer.parameters())
    weight = layer.weight
    for sparsity in (0.25, 0.5, 0.75):
        # The last graph is still alive: its gradients have the old shape.
        loss = step(layer, optimiser)
        blocks = {tuple(block.flatten().tolist()) for block in layer.weight.detach()}
        states = {
            key: {tuple(block.flatten().tolist()) for block in part}
            for key, part in optimiser.state[weight].items()
            if isinstance(part, Tensor) and part.dim() == 3
        }
        layer.prune_(sparsity, optimiser if given else None)
        assert layer.weight is weight and weight.grad is None
        assert {tuple(block.flatten().tolist()) for block in weight.detach()} <= blocks
        if sparsity == 0.5:
            layer.prune_(0.6, optimiser if given else None)  # twice between two steps
        before = weight.detach().clone()
        optimiser.zero_grad()
        optimiser.step()  # no gradient: only the state's shape changes
        for key, part in states.items():
            now = optimiser.state[weight][key]
            assert now.shape[0] == weight.shape[0]
            assert {tuple(block.flatten().tolist()) for block in now} <= part
        step(layer, optimiser)
        assert not torch.equal(weight, before) and loss.isfinite()
    assert layer.sparsity == 0.75


def test_the_state_of_a_block_stays_with_it():
    """A layer that is pruned between two steps takes the step that a masked layer takes."""
    layer = layer_of()
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
    step(layer, optimiser)
    averages = optimiser.state[layer.weight]["exp_avg"].clone()
    columns, rows = layer.block_col_idx.tolist(), layer.pattern.row_ids().tolist()
    places = {place: number for number, place in enumerate(zip(rows, columns, strict=True))}
    layer.prune_(0.5)
    optimiser.step()
    kept = zip(layer.pattern.row_ids().tolist(), layer.block_col_idx.tolist(), strict=True)
    expected = averages[[places[place] for place in kept]]
    assert torch.equal(optimiser.state[layer.weight]["exp_avg"], expected)


def test_a_gradient_of_a_product_before_pruning_is_refused():
    layer = layer_of()
    y = layer(torch.randn(3, 128, requires_grad=True))
    layer.prune_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_the_weight_stay():
    layer, seen = layer_of(), []
    layer.weight.register_hook(lambda grad: seen.append(grad.shape[0]))
    layer.prune_(0.5)
    layer(torch.randn(3, 128)).sum().backward()
    assert seen == [layer.weight.shape[0]] == [8]


def test_results_after_pruning_are_those_of_the_kept_blocks():
    layer = layer_of().eval()
    x = torch.randn(3, 128)
    with torch.no_grad():
        layer(x)
        layer.prune_(0.5)
        expected = nn.functional.linear(x, layer.to_dense(), layer.bias)
        torch.testing.assert_close(layer(x), expected)


def test_rejects_an_optimiser_of_other_weights():
    layer = layer_of()
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"SparseLinear\.prune_: optimizer must be one that has t"):
        layer.prune_(0.5, other)
    assert layer.sparsity == 0.0
    layer.requires_grad_(False)
    assert layer.prune_(0.5, other).sparsity == 0.5  # frozen: no optimiser has it


def test_pruned_weights_are_freed():
    from sparsetile.nn import pruning

    layer = layer_of().prune_(0.5)
    held = len(pruning._histories)
    del layer
    gc.collect()
    assert len(pruning._histories) == held - 1
