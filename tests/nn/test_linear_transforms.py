"""torch.func and forward mode of SparseLinear, against the masked dense layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional

from sparsetile.layers import block_linear
from sparsetile.nn import SparseLinear

close = torch.testing.assert_close


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layer(request) -> SparseLinear:
    torch.manual_seed(0)
    linear = nn.Linear(40, 24, bias=request.param, dtype=torch.float64)
    return SparseLinear.from_linear(linear, sparsity=0.5, block=16, method="random")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dense(layer: SparseLinear, x: Tensor) -> Tensor:
    return functional.linear(x, layer.to_dense(), layer.bias)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("gradients", [True, False])
def test_vmap_over_inputs_is_one_product(layer, x, dim, gradients, calls_of):
    calls = calls_of(block_linear, "linear_on_host")
    with torch.set_grad_enabled(gradients):
        close(vmap(layer, in_dims=dim, out_dims=dim)(x), dense(layer, x))
    assert len(calls) == 1
    close(vmap(vmap(layer))(x), dense(layer, x))
    assert vmap(layer)(x[:0]).shape == (0, 3, 24)


def test_vmap_over_weights_is_an_ensemble(layer, x):
    params = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in
              layer.named_parameters()}  # fmt: skip

    def call(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, given, (x,))

    one = dense(layer, x)
    close(vmap(call, in_dims=(0, None))(params, x), torch.stack([one, 2 * one]))
    close(vmap(call)(params, x[:2]), torch.stack([one[0], 2 * one[1]]))


def test_gradients_of_single_samples(layer, x):
    params = dict(layer.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, given, (x,)).sin().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for number, sample in enumerate(x):
        theirs = torch.autograd.grad(dense(layer, sample).sin().sum(), list(params.values()))
        for name, expected in zip(params, theirs, strict=True):
            close(each[name][number], expected)


def test_jacobians_and_hessians(layer, x):
    vector, weight = x[0, 0], layer.to_dense()
    close(jacrev(layer)(vector), weight)
    close(jacfwd(layer)(vector), weight)
    close(hessian(lambda y: layer(y).square().sum())(vector), 2 * weight.T @ weight)
    close(vjp(layer, vector)[1](torch.ones(24, dtype=x.dtype))[0], weight.sum(0))


def test_tangents_of_inputs_and_weights_are_not_lost(layer, x):
    params = {name: p.detach() for name, p in layer.named_parameters()}
    close(jvp(layer, (x,), (x.cos(),))[1], x.cos() @ layer.to_dense().T)

    def call(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, given, (x,))

    # Linear in its parameters, so that their own direction gives the result again.
    close(jvp(lambda given: call(given, x), (params,), (params,))[1], dense(layer, x))
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, x.cos()))
        close(forward_ad.unpack_dual(y).tangent, x.cos() @ layer.to_dense().T)


def test_autocast_lowers_products_in_transforms(layer, x):
    layer, x = layer.float(), x.float()
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, given, (x,)).float().square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        lowered = vmap(layer)(x)
        slopes = grad(loss)(params)
        value, tangent = jvp(loss, (params,), (params,))
    assert lowered.dtype is torch.bfloat16
    close(lowered.float(), dense(layer, x), rtol=0.02, atol=0.02)
    assert {part.dtype for part in slopes.values()} == {torch.float32}
    close(tangent, 2 * value, rtol=0.02, atol=0.02)  # of the second degree in its parameters
