"""Which way a layer of kept blocks takes: what was measured on an H200 must come out."""

from __future__ import annotations

import pytest

from sparsetile.core.device import H200
from sparsetile.systems.bcsr.layer_cost import LayerSize, choose_way, predict_ways

GATE, DOWN, SQUARE, NARROW = (18944, 3584), (3584, 18944), (3584, 3584), (512, 3584)
WIDTHS = (1, 16, 128, 1024, 8192, 65536)


def size_of(shape: tuple[int, int], sparsity: float) -> LayerSize:
    grid = -(-shape[0] // 64) * -(-shape[1] // 64)
    return LayerSize(*shape, round(grid * (1 - sparsity)), 64)


def way(
    shape: tuple[int, int], sparsity: float, tokens: int, *ways: str, bias: bool = False
) -> str:
    return choose_way(size_of(shape, sparsity), tokens, 2, bias, (*ways, "dense"), H200)


@pytest.mark.parametrize("tokens", WIDTHS)
def test_half_of_the_blocks_is_dense(tokens):
    for shape in (GATE, DOWN, SQUARE, NARROW):
        assert way(shape, 0.5, tokens, "blocks") == "dense"


@pytest.mark.parametrize("tokens", WIDTHS)
def test_large_layers_at_ninety_percent_are_never_dense(tokens):
    for shape in (GATE, DOWN):
        assert way(shape, 0.9, tokens, "blocks") == "blocks"


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_small_layers_and_few_tokens_are_dense_without_the_kernel_for_few(tokens):
    assert way(SQUARE, 0.9, tokens, "blocks") == "dense"


@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("tokens", [1, 128, 1024])
def test_narrow_layers_are_dense(sparsity, tokens):
    assert way(NARROW, sparsity, tokens, "blocks") == "dense"


def test_few_tokens_prefer_their_kernel():
    for shape in (GATE, DOWN, SQUARE):
        assert way(shape, 0.9, 1, "blocks", "few") == "few"


def test_a_bias_counts():
    plain = predict_ways(size_of(GATE, 0.8), 8192, 2, False, H200)["blocks"]
    with_bias = predict_ways(size_of(GATE, 0.8), 8192, 2, True, H200)["blocks"]
    assert with_bias - plain == pytest.approx(430e-6, rel=0.02)


def test_one_token_of_gate_proj_is_predicted_as_measured():
    seconds = predict_ways(size_of(GATE, 0.9), 1, 2, False, H200)
    assert seconds["blocks"] == pytest.approx(12.8e-6, rel=0.2)
    assert seconds["dense"] == pytest.approx(37.7e-6, rel=0.2)
