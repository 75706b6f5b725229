"""calibrate: norms of inputs, of the dense model or layer after layer of the pruned one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from sparsetile.nn import MaskedLinear, SparseConfig, SparseLinear, calibrate, report, sparsify_


class Layer(nn.Module):
    """A layer of a decoder that returns a tuple and takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, *, scale: Tensor, use_cache: bool = True) -> tuple[Tensor]:
        assert not use_cache or not self.training
        return (x + scale * self.down(torch.relu(self.up(x))),)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.unused = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        for layer in self.layers:
            (x,) = layer(x, scale=torch.tensor(0.5))
        return x


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


BATCHES = [torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
CONFIGS = [
    SparseConfig(0.6, pattern="unstructured", method="wanda"),
    SparseConfig(pattern="2:4", method="wanda"),
    SparseConfig(0.5, block=16, method="wanda"),
    SparseConfig(0.6, pattern="unstructured"),
]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in model.state_dict().items()}


def test_norms_are_roots_of_mean_squares_of_the_inputs():
    model = model_of()
    norms = calibrate(model, iter(BATCHES))
    x = torch.cat(BATCHES).flatten(0, 1)
    torch.testing.assert_close(norms["first"], x.square().mean(0).sqrt())
    assert "unused" not in norms and len(norms) == 7
    assert model.training and model.layers[0].training


@pytest.mark.parametrize("batch", [(BATCHES[0],), {"x": BATCHES[0]}], ids=["tuple", "mapping"])
def test_batches_are_tensors_tuples_or_mappings(batch):
    expected = calibrate(model_of(), BATCHES[:1])
    assert all(torch.equal(expected[key], norm)
               for key, norm in calibrate(model_of(), [batch]).items())  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: f"{each.pattern}, {each.method}")
def test_in_sequence_each_layer_sees_the_pruned_layers_before_it(config):
    model = model_of().eval()

    def chosen(module: nn.Module, name: str) -> bool:
        return name.startswith("layers.")

    before = state_of(model)
    norms = calibrate(model, BATCHES, config, chosen)
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    dense = calibrate(model, BATCHES)
    # Prune layer after layer, as the definition has it.
    for number in range(3):
        prefix = f"layers.{number}."
        now = calibrate(model, BATCHES)
        for part in ("up", "down"):
            torch.testing.assert_close(norms[prefix + part], now[prefix + part])
            if number:
                assert not torch.allclose(norms[prefix + part], dense[prefix + part])
        known = dataclasses.replace(config, norms=now)
        sparsify_(model, known, lambda _, name, prefix=prefix: name.startswith(prefix))


def test_sparsify_keeps_the_same_weights_with_norms_of_the_sequence():
    config = dataclasses.replace(CONFIGS[0])
    model = model_of().eval()
    norms = calibrate(model, BATCHES, config, lambda _, name: name.startswith("layers."))
    sparsify_(model, dataclasses.replace(config, norms=norms),
              lambda _, name: name.startswith("layers."))  # fmt: skip
    again = calibrate(model, BATCHES)
    torch.testing.assert_close(again["layers.2.up"], norms["layers.2.up"])


def test_wanda_needs_norms_of_each_layer():
    config = SparseConfig(0.5, pattern="unstructured", method="wanda", norms={})
    with pytest.raises(ValueError, match="norms of layer first must be given"):
        sparsify_(model_of(), config)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: calibrate(nn.ReLU, BATCHES), r"calibrate: model must be a torch\.nn\.Module"),
        (lambda: calibrate(model_of(), []), "batches must be at least one batch, got none"),
        (lambda: calibrate(model_of(), [], CONFIGS[0]), "batches must be at least one batch"),
        (lambda: calibrate(model_of(), BATCHES, SparseConfig(
            0.5, pattern="unstructured", method="wanda", scope="model")),
         'config must be one with scope="layer", got scope="model"'),
        (lambda: calibrate(Flat(), [torch.randn(2, 16)], CONFIGS[0]),
         "model must be one with a ModuleList or Sequential of decoder layers, got Flat"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, text):
    with pytest.raises((ValueError, TypeError), match=text):
        call()


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


# -- what SparseConfig does with it -----------------------------------------------------------


@pytest.mark.parametrize("pattern, block", [("unstructured", 64), ("block", 16)])
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_one_sparsity_for_the_whole_model(pattern, block, method):
    model = model_of().eval()
    with torch.no_grad():
        model.layers[1].up.weight.mul_(0.01)
    norms = {**calibrate(model, BATCHES), "unused": torch.ones(8)}
    config = SparseConfig(0.5, pattern=pattern, block=block, method=method, norms=norms,
                          scope="model")  # fmt: skip
    sparsify_(model, config, lambda _, name: name.startswith("layers."))
    layers = [m for m in model.modules() if isinstance(m, (MaskedLinear, SparseLinear))]
    kept = sum(layer.weight.numel() for layer in layers)
    total = sum(layer.in_features * layer.out_features for layer in layers)
    assert kept / total == pytest.approx(0.5, abs=0.05 if pattern == "block" else 0.001)
    assert model.layers[1].up.sparsity > 0.85
    assert model.layers[0].up.sparsity < 0.5


def test_sparsity_of_each_layer_by_name_or_function():
    for given in ({"first": 0.25, "layers.0.up": 0.75},
                  lambda name, _: {"first": 0.25, "layers.0.up": 0.75}.get(name)):  # fmt: skip
        model = sparsify_(model_of(), SparseConfig(given, pattern="unstructured"))
        assert (model.first.sparsity, model.layers[0].up.sparsity) == (0.25, 0.75)
        assert type(model.layers[0].down) is nn.Linear
        skipped = model.sparsify_report.skipped
        assert skipped["layers.0.down"] == "config.sparsity has no share for it"


def test_report_says_what_layers_keep_take_and_run():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    sparsify_(model, SparseConfig(0.75, pattern="unstructured"), lambda _, name: name == "0")
    sparsify_(model, SparseConfig(pattern="2:4"), lambda _, name: name == "1")
    sparsify_(model, SparseConfig(0.75, block=32), lambda _, name: name == "2")
    found = report(model.eval(), tokens=(1, 8))
    assert [(layer.pattern, layer.kept) for layer in found.layers] == [
        ("unstructured", 0.25), ("2:4", 0.5), ("blocks of 32", 0.25)
    ]  # fmt: skip
    dense = 64 * 64 * 2
    assert [layer.bytes for layer in found.layers[:2]] == [
        int((0.25 + 1 / 16) * dense), int((0.5 + 1 / 16) * dense)
    ]  # fmt: skip
    assert found.layers[2].runs == {1: "dense", 8: "blocks"}
    with torch.no_grad():
        model(torch.randn(2, 64).bfloat16())
    assert report(model).layers[0].copies == dense
    text = str(report(model))
    assert "0: 64x64, unstructured, kept 25.0%, 0.31 of dense bytes and 1.00 copies" in text
    assert text.splitlines()[-1].startswith("3 pruned layers: kept 33.3%")
    with pytest.raises(TypeError, match=r"report: model must be a torch\.nn\.Module"):
        report(3)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"pattern": "4:8"}, "SparseConfig: pattern must be one of"),
        ({"scope": "row"}, "SparseConfig: scope must be one of"),
        ({"scope": "model", "pattern": "2:4"}, 'scope must be "layer", got "model"'),
        ({"scope": "model", "method": "random"}, 'scope must be "layer", got "model"'),
        ({"sparsity": {"a": 2.0}}, "sparsity must be at least 0 and below 1, got 2.0"),
        ({"weight_dtype": torch.float8_e4m3fn, "pattern": "2:4"},
         "weight_dtype must be None with pattern='2:4'"),
    ],
)  # fmt: skip
def test_configurations_are_checked(options, text):
    with pytest.raises(ValueError, match=text):
        SparseConfig(**options)


def test_a_sparsity_without_layers_is_refused():
    with pytest.raises(ValueError, match="sparsity must be a share for at least one layer, got"):
        sparsify_(model_of(), SparseConfig({}))
