"""Bits of cells, there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsetile.formats.cells import checked_values, pack_bits, scatter_cells
from sparsetile.formats.cells import set_places as places_of

CPU = torch.device("cpu")


@given(st.sets(st.integers(0, 64 * 9 - 1)))
def test_each_place_sets_its_own_bit_and_comes_back(chosen):
    places = torch.tensor(sorted(chosen), dtype=torch.int64)
    words = pack_bits(places, 64 * 9)
    expected = [0] * 9
    for place in chosen:
        expected[place // 64] |= 1 << place % 64
    assert words.numpy().view(np.uint64).tolist() == expected
    assert torch.equal(places_of(words), places)


def test_a_full_word_is_all_ones_and_no_cells_give_no_words():
    assert pack_bits(torch.arange(64, 128), 192).tolist() == [0, -1, 0]
    none = torch.empty(0, dtype=torch.int64)
    assert pack_bits(none, 0).shape == (0,)
    assert places_of(pack_bits(none, 128)).shape == (0,)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float16, torch.float64], ids=str)
def test_values_reach_their_cells_with_their_bits(kind):
    values = torch.tensor([1.5, -0.0, 0.25]).to(kind)
    packed = scatter_cells(values, torch.tensor([4, 0, 2]), 6)
    assert packed.dtype is kind
    assert packed.float().tolist() == [0.0, 0.0, 0.25, 0.0, 1.5, 0.0]
    assert torch.signbit(packed.float()).tolist() == [True, *[False] * 5]


def test_gradients_flow_through_the_scatter():
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    packed = scatter_cells(values, torch.tensor([3, 1]), 4)
    (packed * torch.arange(4.0)).sum().backward()
    assert values.grad.tolist() == [3.0, 1.0]


def test_a_pattern_has_ones_of_the_type_asked_for():
    assert checked_values(None, 2, None, CPU).dtype is torch.float32
    ones = checked_values(None, 2, torch.bfloat16, CPU)
    assert ones.dtype is torch.bfloat16 and ones.tolist() == [1.0, 1.0]


def test_a_wrong_number_of_values_is_refused():
    text = (
        "pack_values: values must be a tensor of 3 values, got shape \\(2,\\). "
        "Give one value for each stored entry, in canonical order."
    )
    with pytest.raises(ValueError, match=text):
        checked_values(torch.ones(2), 3, None, CPU)
