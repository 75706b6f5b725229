"""TransformerConv on a GPU: results of PyG and of float64, bits, memory, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from sparsetile.nn import TransformerConv
from tests.nn import gpu_attention as checks
from tests.nn.cases import FLOWS, WIDTH, pyg, same_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines allow TF32 by their environment: what is compared here is in float32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_results_and_gradients_are_pyg_s(edge_dim, concat, flow):
    options = {"heads": 3, "edge_dim": edge_dim, "concat": concat, "flow": flow}
    pair = TransformerConv(WIDTH, 5, **options), pyg.TransformerConv(WIDTH, 5, **options)
    checks.assert_same_as_pyg(same_weights(pair), edge_dim)


@pytest.mark.parametrize("heads, width", [(8, 32), (1, 128), (3, 20), (2, 7), (16, 8), (4, 300)])
@pytest.mark.parametrize("edge_dim", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hubs_and_isolated_nodes_are_as_in_float64(dtype, edge_dim, heads, width):
    layer = TransformerConv(16, width, heads=heads, edge_dim=edge_dim)
    checks.assert_near_float64(layer, 16, edge_dim, dtype)


@pytest.mark.parametrize("edge_dim", [None, 6])
def test_every_run_has_the_same_bits(edge_dim):
    checks.assert_bits_are_the_same(
        TransformerConv(16, 8, heads=4, edge_dim=edge_dim), 16, edge_dim
    )


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_a_step_stores_nothing_of_edges_times_features(edge_dim):
    layer = TransformerConv(64, 32, heads=8, edge_dim=edge_dim)
    checks.assert_memory_of_nodes(layer, 64, 256, edge_dim)


@pytest.mark.parametrize("edge_dim", [None, 4])
def test_a_captured_layer_replays_with_new_data(edge_dim):
    checks.assert_replays(TransformerConv(16, 8, heads=4, edge_dim=edge_dim), 16, edge_dim)
