"""Which way a layer of kept blocks takes: what was measured on an H200 must come out."""

from __future__ import annotations

import math

import pytest

from sparsetile.core.device import H200
from sparsetile.systems.bcsr.layer_cost import LayerSize, choose_way, predict_ways

GATE, DOWN, SQUARE, NARROW = (18944, 3584), (3584, 18944), (3584, 3584), (512, 3584)
SHAPES = (GATE, DOWN, SQUARE, NARROW)
WIDTHS = (1, 16, 128, 1024, 8192, 65536)
# Development readings at 90 %, BF16, blocks of 64: shape, tokens, bias, way, microseconds.
READINGS = [
    (GATE, 1, False, "few", 6.2), (GATE, 16, False, "few", 8.7), (GATE, 1, True, "few", 7.1),
    (DOWN, 1, False, "few", 7.3), (DOWN, 16, True, "few", 9.4),
    (SQUARE, 1, False, "few", 3.4), (SQUARE, 16, True, "few", 4.3),
    (GATE, 128, False, "blocks", 10.1), (GATE, 1024, False, "blocks", 36.9),
    (GATE, 8192, False, "blocks", 245.3), (GATE, 8192, True, "blocks", 297.1),
    (DOWN, 128, False, "blocks", 13.7), (DOWN, 1024, True, "blocks", 44.1),
    (DOWN, 8192, False, "blocks", 285.0), (SQUARE, 1024, False, "blocks", 12.2),
    (SQUARE, 8192, False, "blocks", 51.8), (SQUARE, 8192, True, "blocks", 58.9),
    (NARROW, 8192, False, "blocks", 11.6),
    (GATE, 1, False, "dense", 37.5), (GATE, 1024, False, "dense", 182.6),
    (GATE, 8192, False, "dense", 1386.0), (DOWN, 128, False, "dense", 44.4),
    (DOWN, 8192, False, "dense", 1346.4), (SQUARE, 16, False, "dense", 7.9),
    (SQUARE, 128, False, "dense", 8.7), (SQUARE, 1024, False, "dense", 34.6),
    (NARROW, 16, False, "dense", 6.5), (NARROW, 1024, False, "dense", 8.5),
    (NARROW, 8192, True, "dense", 40.6),
]  # fmt: skip


def size_of(shape: tuple[int, int], sparsity: float, unit: int = 64) -> LayerSize:
    grid = -(-shape[0] // unit) * -(-shape[1] // unit)
    return LayerSize(*shape, round(grid * (1 - sparsity)), unit)


def way(
    shape: tuple[int, int], sparsity: float, tokens: int, *ways: str, bias: bool = False
) -> str:
    return choose_way(size_of(shape, sparsity), tokens, 2, bias, (*ways, "dense"), H200)


@pytest.mark.parametrize("shape, tokens, bias, name, measured", READINGS)
def test_predictions_are_near_what_was_measured(shape, tokens, bias, name, measured):
    seconds = predict_ways(size_of(shape, 0.9), tokens, 2, bias, H200)[name]
    assert seconds == pytest.approx(measured * 1e-6, rel=0.15)


@pytest.mark.parametrize("tokens", WIDTHS)
def test_half_of_the_blocks_is_dense(tokens):
    for shape in SHAPES:
        assert way(shape, 0.5, tokens, "blocks") == "dense"


@pytest.mark.parametrize("tokens", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_at_ninety_percent_are_never_dense(tokens, bias):
    for shape in (GATE, DOWN):
        assert way(shape, 0.9, tokens, "blocks", bias=bias) == "blocks"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 16])
def test_few_tokens_prefer_their_kernel(tokens, bias):
    for shape in SHAPES:
        assert way(shape, 0.9, tokens, "blocks", "few", bias=bias) == "few"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.95])
def test_a_bias_does_not_make_wide_products_dense(shape, sparsity):
    for tokens in (2048, 8192, 65536):
        assert way(shape, sparsity, tokens, "blocks", bias=True) == "blocks"


def test_narrow_layers_of_some_tokens_are_dense():
    assert way(NARROW, 0.9, 128, "blocks") == "dense"
    assert way(NARROW, 0.8, 64, "blocks", bias=True) == "dense"


def test_a_bias_costs_each_item_the_same():
    def added(shape: tuple[int, int], tokens: int) -> float:
        size = size_of(shape, 0.9)
        plain, biased = (predict_ways(size, tokens, 2, b, H200)["blocks"] for b in (False, True))
        return biased - plain

    assert added(GATE, 8192) == pytest.approx(8 * added(GATE, 1024))
    assert 0 < added(NARROW, 8192) < 2e-6


def test_what_no_kernel_takes_is_not_predicted():
    assert predict_ways(size_of(GATE, 0.9, unit=32), 128, 2, False, H200)["blocks"] == math.inf
    assert predict_ways(size_of(GATE, 0.9), 17, 2, False, H200)["few"] == math.inf


@pytest.mark.parametrize("item", [1, 2, 4])
def test_every_type_and_an_empty_layer_have_a_prediction(item):
    for size in (size_of(GATE, 0.9), LayerSize(64, 64, 0, 64), LayerSize(0, 64, 0, 64)):
        for tokens in (0, 1, 16, 100):
            for seconds in predict_ways(size, tokens, item, True, H200).values():
                assert seconds > 0
