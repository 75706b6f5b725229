"""Which pattern a weight has, and from which product torch's 2:4 kernels pay."""

from __future__ import annotations

import torch

from sparsetile.nn import masked_product, pattern_of


def test_a_weight_without_elements_is_dense():
    found = pattern_of(torch.empty(0, 4))
    assert (found.pattern, found.sparsity) == ("dense", 0.0)


def test_products_from_some_length_on_take_two_of_four(constants):
    constants(masked_product, _SEMI_STRUCTURED_FLOPS=2 * 64 * 128 * 10)
    pays = masked_product._semi_structured_pays
    assert pays(64, 128, 10) and pays(128, 64, 11) and not pays(64, 128, 9)
