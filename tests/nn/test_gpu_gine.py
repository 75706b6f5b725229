"""GINEConv on a GPU: results of PyG and of float64, bits, memory, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Linear

from sparsetile.nn import GINEConv
from tests.nn import gpu_attention as checks
from tests.nn.cases import FLOWS, WIDTH, gin_map, pyg, same_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines allow TF32 by their environment: what is compared here is in float32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_results_and_gradients_are_pyg_s(edge_dim, flow):
    options = {"edge_dim": edge_dim, "flow": flow}
    pair = GINEConv(gin_map(5), **options), pyg.GINEConv(gin_map(5), **options)
    checks.assert_same_as_pyg(same_weights(pair), edge_dim or WIDTH)


@pytest.mark.parametrize("width", [1, 7, 32, 130, 300])
@pytest.mark.parametrize("edge_dim", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hubs_and_isolated_nodes_are_as_in_float64(dtype, edge_dim, width):
    layer = GINEConv(Linear(width, 4), edge_dim=edge_dim)
    checks.assert_near_float64(layer, width, edge_dim or width, dtype)


@pytest.mark.parametrize("edge_dim", [None, 6])
def test_every_run_has_the_same_bits(edge_dim):
    checks.assert_bits_are_the_same(GINEConv(Linear(16, 4), edge_dim=edge_dim), 16, edge_dim or 16)


def test_a_step_stores_no_messages():
    checks.assert_memory_of_nodes(GINEConv(Linear(256, 4), edge_dim=4), 256, 256, 4)


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_a_captured_layer_replays_with_new_data(edge_dim):
    checks.assert_replays(GINEConv(Linear(16, 4), edge_dim=edge_dim), 16, edge_dim or 16)
