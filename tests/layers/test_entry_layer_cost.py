"""Predictions for linear layers of single weights, and why a product is not entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

from sparsetile.core.device import H200
from sparsetile.layers import entry_layer
from sparsetile.layers.entry_layer import entry_reasons
from sparsetile.layers.entry_layer_cost import ENTRY_RATES, entries_pay, predict_entries

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "rows, cols, share, tokens, measured",
    [
        (14336, 4096, 0.5, 1, 21.0), (14336, 4096, 0.5, 2, 22.2), (14336, 4096, 0.5, 4, 30.2),
        (14336, 4096, 0.3, 1, 14.1), (14336, 4096, 0.3, 4, 20.7), (14336, 4096, 0.3, 8, 35.5),
        (14336, 4096, 0.1, 1, 7.7), (14336, 4096, 0.1, 2, 8.4), (14336, 4096, 0.1, 8, 21.5),
        (4096, 14336, 0.5, 1, 21.8), (4096, 14336, 0.3, 4, 19.5), (4096, 14336, 0.1, 8, 17.8),
        (3584, 18944, 0.5, 2, 27.2), (3584, 18944, 0.1, 4, 13.4),
        (4096, 4096, 0.5, 1, 8.8), (4096, 4096, 0.3, 8, 11.7), (4096, 4096, 0.1, 2, 4.7),
    ],
)  # fmt: skip
def test_predictions_are_near_what_an_h200_took(rows, cols, share, tokens, measured):
    found = 1e6 * predict_entries(rows, cols, int(share * rows * cols), tokens, H200)
    assert abs(found / measured - 1) < 0.25


@pytest.mark.parametrize(
    "share, tokens, pays",
    [(0.5, 1, True), (0.5, 2, True), (0.5, 4, False), (0.3, 4, True), (0.3, 8, False),
     (0.1, 8, True), (0.1, 9, False), (1.0, 1, False), (0.1, 0, False)],
)  # fmt: skip
def test_it_is_chosen_where_it_was_faster(share, tokens, pays):
    kept = int(share * 14336 * 4096)
    assert entries_pay(14336, 4096, kept, tokens, H200) is pays


def test_too_many_columns_and_no_rows():
    assert not entries_pay(0, 128, 0, 1, H200)
    assert predict_entries(128, 128, 0, 1, H200) > 0
    assert predict_entries(3584, 18944, 18944, 8, H200) == math.inf


def test_a_single_block_is_as_slow_as_the_multiprocessor_that_runs_it():
    """Others of the GPU that have nothing to do make it no faster."""
    rates = ENTRY_RATES
    found = predict_entries(32, 4096, 32 * 2048, 1, H200)
    assert found > rates.fixed + 2048 * rates.entry[0]
    assert predict_entries(32 * H200.processors, 4096, 32 * 2048 * H200.processors, 1, H200) < (
        2 * found
    )


def test_reasons(monkeypatch):
    monkeypatch.setattr(entry_layer, "capability", lambda device: (9, 0))
    assert entry_reasons(8, torch.bfloat16, CUDA) == []
    assert entry_reasons(9, torch.float32, torch.device("cpu")) == [
        "takes 16 bits, not float32", "takes up to 8 tokens, not 9",
        "needs a GPU of sm_80 or newer",
    ]  # fmt: skip
    monkeypatch.setattr(entry_layer, "capability", lambda device: (7, 5))
    assert entry_reasons(1, torch.float16, CUDA) == ["needs a GPU of sm_80 or newer"]
