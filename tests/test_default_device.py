"""torch.set_default_device and ``with torch.device``: every tensor that we make has its device.

The device "meta" stands for a GPU: what is made there by mistake has no values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tools.llm_decoder import TINY, Decoder
from torch import Tensor, nn

import sparsetile as st
import sparsetile.nn as snn
from sparsetile.reorder import REORDERERS


def _matrix() -> Tensor:
    torch.manual_seed(1)
    full = torch.randn(200, 150) * (torch.rand(200, 150) < 0.1)
    return full.to_sparse_csr()


A, B = _matrix(), torch.randn(150, 16)
EDGES, X = torch.randint(0, 100, (2, 500)), torch.randn(100, 16)


def _gradients() -> Tensor:
    made = st.plan(A, 16)
    assert made.values is not None
    b, values = B.clone().requires_grad_(), made.values.detach().clone().requires_grad_()
    made.run(b, values=values).sum().backward()
    assert b.grad is not None and values.grad is not None
    return torch.cat([b.grad.flatten(), values.grad])


def _file() -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.plan"
        st.plan(A, 16).save(path)
        return st.load_plan(path) @ B


def _on_host(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return make()


def _layer(make: Callable[[], nn.Module]) -> Tensor:
    layer = _on_host(make)
    out: Tensor = layer(X, EDGES)
    out.sum().backward()
    return torch.cat([out.detach().flatten(), *(p.grad.flatten() for p in layer.parameters())])


def _linear() -> Tensor:
    dense = _on_host(lambda: nn.Linear(150, 64))
    layer = snn.SparseLinear.from_linear(dense, sparsity=0.5, block=32, method="random")
    return layer(B.T.contiguous())


def _decoder(method: str) -> Tensor:
    model = _on_host(lambda: Decoder(TINY, torch.device("cpu"), torch.float32))
    config = snn.SparseConfig(sparsity=0.5, block=64, method=method)
    snn.sparsify_(model, config, lambda _, name: "mlp." in name)
    with torch.no_grad():
        return model.prefill(torch.arange(5, device="cpu")[None])


CASES: dict[str, Callable[[], Tensor]] = {
    "plan": lambda: st.plan(A, 16) @ B,
    "no width": lambda: st.plan(A) @ B,
    "spmm": lambda: st.spmm(A, B),
    "means": lambda: st.spmm(A, B, reduce="mean"),
    "maxima": lambda: st.spmm(A, B, reduce="max"),
    "transpose": lambda: st.plan(A, 16).T @ torch.ones(200, 16, device="cpu"),
    "gradients": _gradients,
    "file": _file,
    **{f"order {name}": lambda name=name: st.plan(A, 16, reorder=name) @ B for name in REORDERERS},
    "GCN": lambda: _layer(lambda: snn.GCNConv(16, 8)),
    "SAGE": lambda: _layer(lambda: snn.SAGEConv(16, 8)),
    "GAT": lambda: _layer(lambda: snn.GATConv(16, 8)),
    "GIN": lambda: _layer(lambda: snn.GINConv(nn.Linear(16, 8))),
    "linear": _linear,
    "random decoder": lambda: _decoder("random"),
    "pruned decoder": lambda: _decoder("magnitude"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_default_device_changes_nothing(name: str):
    torch.manual_seed(2)
    expected = CASES[name]()
    torch.manual_seed(2)
    with torch.device("meta"):
        found = CASES[name]()
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, expected)
