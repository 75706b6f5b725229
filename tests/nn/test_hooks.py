"""Which linear layers may be computed without calling them."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.utils import parametrize

from sparsetile.nn.hooks import has_hooks, is_plain_linear


def test_a_linear_layer_is_plain():
    layer = nn.Linear(3, 2)
    assert is_plain_linear(layer) and not has_hooks(layer)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert is_plain_linear(layer), "its weight is what the parametrization computes"


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_layer_with_a_hook_is_not_plain(register: str):
    layer = nn.Linear(3, 2)
    handle = getattr(layer, register)(lambda *_: None)
    assert has_hooks(layer) and not is_plain_linear(layer)
    handle.remove()
    assert is_plain_linear(layer)


def test_a_module_in_its_place_is_not_plain():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert not is_plain_linear(Scaled(3, 2))
    assert not is_plain_linear(nn.Sequential(nn.Linear(3, 2)))
