"""A mask holds through training, whatever the optimiser; schedules drop more on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import MaskedLinear, PruneSchedule, SparseConfig, SparseLinear, sparsify_

OPTIMISERS = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.001
    ),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad, fused": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
CONFIGS = {
    "unstructured": SparseConfig(0.7, pattern="unstructured"),
    "2:4": SparseConfig(pattern="2:4"),
    "blocks": SparseConfig(0.5, block=16),
}
STEPS = 200


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int = STEPS, then=None):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
        if then is not None:
            then()
    return losses


def layers_of(model: nn.Module) -> list[MaskedLinear | SparseLinear]:
    return [each for each in model if isinstance(each, (MaskedLinear, SparseLinear))]


@pytest.mark.parametrize("pattern", CONFIGS)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_masks_are_kept_through_200_steps(name, pattern):
    model = sparsify_(model_of(), CONFIGS[pattern])
    masks = [layer.to_dense() != 0 for layer in layers_of(model)]
    before = [layer.to_dense().detach().clone() for layer in layers_of(model)]
    optimiser = OPTIMISERS[name](model.parameters())
    losses = train(model, optimiser)
    assert losses[-1] < 0.9 * losses[0]
    for layer, mask, old in zip(layers_of(model), masks, before, strict=True):
        dense = layer.to_dense()
        assert not dense[~mask].any()
        assert (dense[mask] != old[mask]).float().mean() > 0.4  # units of ReLU die
        # State of kept weights alone.
        for part in optimiser.state[layer.weight].values():
            assert not isinstance(part, Tensor) or part.numel() <= layer.weight.numel()


def test_it_trains_as_a_masked_dense_layer_does():
    model = sparsify_(model_of(), CONFIGS["unstructured"])
    dense = model_of()
    masks = {}
    for mine, theirs in zip(model, dense, strict=True):
        if isinstance(mine, MaskedLinear):
            masks[theirs] = mine.mask()
            with torch.no_grad():
                theirs.weight.mul_(masks[theirs])

    def masked() -> None:
        with torch.no_grad():
            for layer, mask in masks.items():
                layer.weight.mul_(mask)

    mine = train(model, torch.optim.Adam(model.parameters(), lr=0.01), 50)
    theirs = train(dense, torch.optim.Adam(dense.parameters(), lr=0.01), 50, masked)
    assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("given", [False, True], ids=["without optimizer=", "with optimizer="])
@pytest.mark.parametrize("name", ["AdamW, fused", "SGD, momentum"])
@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("pattern", ["unstructured", "block"])
def test_a_schedule_reaches_its_sparsity_and_keeps_the_state(name, given, scope, pattern):
    model = sparsify_(model_of(), SparseConfig(0.0, pattern=pattern, block=16))
    weights = [layer.weight for layer in layers_of(model)]
    optimiser = OPTIMISERS[name](model.parameters())
    schedule = PruneSchedule(
        model, 0.75, steps=40, first=5, every=10, scope=scope,
        optimizer=optimiser if given else None,
    )  # fmt: skip
    shares: list[float] = []
    train(model, optimiser, 60, lambda: shares.append(schedule.step()))
    assert shares[0] == 0.0 and shares[-1] == pytest.approx(0.75)
    assert shares == sorted(shares)
    assert len({*shares}) == 5  # at 5, 15, 25, 35 and 40; 5 is the start, 0
    layers = layers_of(model)
    assert [layer.weight for layer in layers] == weights
    total = sum(layer.in_features * layer.out_features for layer in layers)
    kept = sum(layer.weight.numel() for layer in layers)
    assert kept / total == pytest.approx(0.25, abs=0.05 if pattern == "block" else 0.001)
    if scope == "layer":
        assert all(layer.sparsity == pytest.approx(0.75, abs=0.05) for layer in layers)
    for layer in layers:
        for part in optimiser.state[layer.weight].values():
            assert part.dim() != layer.weight.dim() or part.shape == layer.weight.shape


def test_a_schedule_of_the_whole_model_drops_more_where_weights_are_small():
    model = model_of()
    with torch.no_grad():
        model[2].weight.mul_(0.1)
    sparsify_(model, SparseConfig(0.0, pattern="unstructured"))
    schedule = PruneSchedule(model, 0.5, steps=1, every=1, scope="model")
    schedule.step()
    assert model[0].sparsity < 0.3 < 0.7 < model[2].sparsity


def test_sparsity_of_each_layer():
    model = sparsify_(model_of(), SparseConfig(0.0, pattern="unstructured"))
    schedule = PruneSchedule(model, {"0": 0.5}, steps=2, every=1, curve="linear")
    assert [schedule.step(), schedule.step(), schedule.step()] == [0.25, 0.5, 0.5]
    assert model[0].sparsity == 0.5 and model[2].sparsity == 0.0


def test_wanda_in_gradual_pruning():
    layer = MaskedLinear.from_dense(torch.ones(4, 8))
    norms = torch.arange(8.0)
    layer.prune_(0.75, norms=norms)
    assert layer.mask().sum(0).tolist() == [0, 0, 0, 0, 0, 0, 4, 4]


def test_two_of_four_stays_in_a_schedule():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    sparsify_(model, SparseConfig(pattern="2:4"), lambda module, name: name == "0")
    sparsify_(model, SparseConfig(0.0, pattern="unstructured"), lambda module, name: name == "1")
    PruneSchedule(model, 0.9, steps=1, every=1).step()
    assert model[0].sparsity == 0.5 and model[1].sparsity == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda model: PruneSchedule(model, steps=0), "PruneSchedule: steps must be above first"),
        (lambda model: PruneSchedule(model, steps=9, curve="square"), "curve must be one of"),
        (lambda model: PruneSchedule(nn.Linear(2, 2), steps=9),
         "model must be one with layers that sparsify_ pruned, other than 2:4, got none"),
        (lambda model: PruneSchedule(model, {"7": 0.5}, steps=9),
         'sparsity must be names of sparse layers, with scope="layer", got \'7\''),
        (lambda model: PruneSchedule(model, {"0": 0.5}, steps=9, scope="model"),
         'sparsity must be names of sparse layers, with scope="layer", got scope="model"'),
        (lambda model: PruneSchedule(
            nn.Sequential(model, SparseLinear.from_linear(nn.Linear(16, 16), block=16)),
            steps=9, scope="model"),
         'scope must be "layer" for layers of several kinds'),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, text):
    with pytest.raises(ValueError, match=text):
        call(sparsify_(model_of(), SparseConfig(0.0, pattern="unstructured")))
