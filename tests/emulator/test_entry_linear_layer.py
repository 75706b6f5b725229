"""MaskedLinear with few tokens: which weight it multiplies by, in and after captures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import sparsetile as st
from sparsetile.layers import entry_layer
from sparsetile.nn import MaskedLinear, dense_copy, masked_product, report
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

ROWS, COLS = 40, 264


class Stream:
    """A stream that tests put into and out of a capture."""

    captures = False

    def __call__(self, device: torch.device) -> bool:
        return self.captures


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Stream:
    load_on_host(monkeypatch, folder, entry_layer, machine=h200)
    monkeypatch.setattr(masked_product, "machine", h200)
    made = Stream()
    for module in (masked_product, dense_copy):
        monkeypatch.setattr(module, "capturing", made)

    def predicted(layer: MaskedLinear, tokens: int) -> str:
        return "entries" if layer.prefer == "speed" and tokens <= 8 else "dense"

    monkeypatch.setattr(masked_product, "_predicted", predicted)
    return made


@pytest.fixture
def layer() -> MaskedLinear:
    torch.manual_seed(0)
    weight = torch.randint(-4, 5, (ROWS, COLS)).bfloat16()
    bias = torch.arange(ROWS).bfloat16() / 2
    mask = torch.rand(ROWS, COLS) < 0.5
    return MaskedLinear.from_dense(weight, bias, mask=mask).eval()


X = torch.randint(-2, 3, (3, COLS)).bfloat16()


def expected(layer: MaskedLinear, x: Tensor = X) -> Tensor:
    wide = layer.to_dense().detach().double()
    return (x.double() @ wide.T + layer.bias.detach().double()).bfloat16()


@torch.no_grad()
def product(layer: MaskedLinear, x: Tensor = X) -> Tensor:
    return layer(x)


def test_few_tokens_need_no_dense_copy(layer):
    assert torch.equal(product(layer), expected(layer)) and layer.method(3) == "entries"
    parts = layer.memory()
    assert parts["dense copy"] == 0 < parts["other copies"]
    assert report(layer, tokens=(3, 64)).layers[0].runs == {3: "entries", 64: "dense"}
    wide = X[:2].view(2, 1, COLS).expand(2, 2, COLS)
    found = product(layer, wide)
    assert found.shape == (2, 2, ROWS) and torch.equal(found[:, 1], expected(layer)[:2])
    assert product(layer, X[:0]).shape == (0, ROWS)


def test_tokens_that_are_no_neighbours(layer):
    for x in (X.T.contiguous().T, torch.cat([X, X], 1)[:, 4 : COLS + 4]):
        assert torch.equal(product(layer, x), expected(layer, x))


@pytest.mark.parametrize("change", ["in place", "data", "optimiser", "told"])
def test_a_changed_weight_is_packed_again(layer, change):
    product(layer)
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "data":
        layer.weight.data = layer.weight.data * 2
    elif change == "optimiser":
        optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer.weight.grad = -layer.weight.detach()
        optimiser.step()
    else:
        layer.weight.detach().view(torch.int16).numpy()[:] = 0x4000  # 2.0, uncounted
        st.changed()
    assert torch.equal(product(layer), expected(layer))


def test_a_capture_reads_memory_that_later_calls_rewrite(layer, stream):
    product(layer)
    stream.captures = True
    assert torch.equal(product(layer), expected(layer))
    packed = layer._packed.packed
    stream.captures = False
    with torch.no_grad():
        layer.weight.mul_(2)
    product(layer)
    assert layer._packed.packed is packed
    assert torch.equal(packed.unpack().view(torch.bfloat16), layer.to_dense())
    layer.train().eval()
    product(layer)
    layer.prune_(0.7)
    assert torch.equal(product(layer), expected(layer))
    assert layer._packed.packed is packed
    assert torch.equal(packed.unpack().view(torch.bfloat16), layer.to_dense())


def test_a_capture_after_a_change_multiplies_the_dense_copy(layer, stream):
    stream.captures = True
    assert torch.equal(product(layer), expected(layer))
    assert layer.memory()["dense copy"] > 0 and layer.memory()["other copies"] == 0


def test_more_weights_are_packed_into_other_memory(layer, stream):
    product(layer)
    stream.captures = True
    product(layer)
    packed, stream.captures = layer._packed, False
    full = MaskedLinear.from_dense(torch.ones(ROWS, COLS).bfloat16(), layer.bias.detach().clone())
    layer.load_state_dict(full.state_dict())
    assert torch.equal(product(layer), expected(layer)) and layer._packed is not packed


def test_what_nobody_captured_is_dropped_in_training(layer):
    product(layer)
    assert layer.train()._packed is None and layer.memory()["other copies"] == 0
    assert torch.equal(product(layer.eval()), expected(layer))


def test_another_type_is_packed_anew(layer, stream):
    product(layer)
    stream.captures = True
    product(layer)
    stream.captures = False
    layer.half()
    with torch.no_grad():
        found = layer(X.half())
    assert torch.equal(found.bfloat16(), expected(layer))
    assert layer._packed.dtype is torch.float16


def test_memory_keeps_nothing(layer):
    layer.prefer = "memory"
    assert torch.equal(product(layer), expected(layer))
    assert layer.memory()["other copies"] == 0
