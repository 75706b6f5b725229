"""MaskedLinear with ``prefer="memory"`` and few tokens: it multiplies by the weights it stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparsetile.layers import masked_rows
from sparsetile.nn import MaskedLinear, masked_product, report
from tests.emulator.build import host_compiler
from tests.emulator.products import load_on_host
from tests.host import h200

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="no g++ here")

X = torch.randint(-2, 3, (3, 264), generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    load_on_host(monkeypatch, folder, masked_rows, machine=h200)
    monkeypatch.setattr(masked_product, "takes_rows", lambda weight, bits: True)


@pytest.fixture
def layer() -> MaskedLinear:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-4, 5, (40, 264), generator=generator).bfloat16()
    mask = torch.rand(40, 264, generator=generator) < 0.5
    bias = torch.arange(40).bfloat16() / 2
    return MaskedLinear.from_dense(weight, bias, mask=mask, prefer="memory").eval()


def expected(layer: MaskedLinear, x: Tensor = X) -> Tensor:
    wide = layer.to_dense().detach().double()
    return (x.double() @ wide.T + layer.bias.detach().double()).bfloat16()


@torch.no_grad()
def product(layer: MaskedLinear, x: Tensor = X) -> Tensor:
    return layer(x)


def test_only_the_rows_beginnings_are_kept(layer):
    assert torch.equal(product(layer), expected(layer))
    parts = layer.memory()
    assert parts["dense copy"] == 0 and parts["other copies"] == 8 * 41
    assert report(layer, tokens=(3, 5)).layers[0].runs == {3: "kept", 5: "dense"}
    assert torch.equal(product(layer, X.view(3, 1, 264)), expected(layer).view(3, 1, 40))


def test_no_weight_and_wide_inputs_are_dense(layer):
    assert MaskedLinear(264, 40, 0, prefer="memory").bfloat16().eval().method(1) == "dense"
    assert masked_product.takes_few(layer.weight, 4096, 4)
    assert not masked_product.takes_few(layer.weight, 60000, 4)
    assert not masked_product.takes_few(layer.weight, 4096, 5)
    assert not masked_product.takes_few(layer.weight.float(), 4096, 1)


def test_changed_weights_and_masks_are_read(layer):
    product(layer)
    begin = layer._rows.kept_begin
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(product(layer), expected(layer))
    layer.prune_(0.7)
    assert torch.equal(product(layer), expected(layer))
    assert layer._rows.kept_begin is begin  # captured graphs read it
    other = MaskedLinear.from_dense(torch.ones(40, 264).bfloat16(), layer.bias, prefer="memory")
    layer.load_state_dict(other.state_dict())
    assert torch.equal(product(layer), expected(other))


def test_long_prompts_are_multiplied_by_a_weight_that_is_written_out(layer, monkeypatch):
    layer.prefer = "speed"
    monkeypatch.setattr(masked_product, "_WRITTEN_TOKENS", 3)
    assert torch.equal(product(layer), expected(layer)) and layer.memory()["dense copy"] == 0
    assert torch.equal(product(layer, X[:2]), expected(layer)[:2])
    assert layer.memory()["dense copy"] > 0  # which longer prompts read from now on
    assert torch.equal(product(layer), expected(layer))
