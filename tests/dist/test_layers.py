"""Graph layers on a distributed plan, and the training example, give what one process gives."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as dist

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.nn import GATConv, GCNConv, GINConv, SAGEConv
from tests.dist.test_products import whole_numbers
from tests.examples import load_example

WIDTH = 6

LAYERS = {
    "gcn narrow": lambda: GCNConv(WIDTH, 4),
    "gcn wide": lambda: GCNConv(WIDTH, 9),
    "sage mean": lambda: SAGEConv(WIDTH, 4),
    "sage max": lambda: SAGEConv(WIDTH, 9, "max", normalize=True),
    "gin": lambda: GINConv(torch.nn.Linear(WIDTH, 5), eps=0.5, train_eps=True),
}


def layer(group, name: str, relu: bool) -> None:
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, WIDTH, group)
    torch.manual_seed(3)
    conv = LAYERS[name]().double()
    x = torch.randn(90, WIDTH, dtype=torch.float64)
    more = {"relu": True} if relu else {}
    results = []
    for graph, given in ((st.plan(csr, WIDTH), x), (made, made.shard(x))):
        given = given.clone().requires_grad_()
        conv.zero_grad()
        out = conv(given, graph, **more)
        (out.sin().sum()).backward()
        results.append((out.detach(), given.grad, [p.grad.clone() for p in conv.parameters()]))
    (whole, whole_x, whole_p), (local, local_x, local_p) = results
    assert torch.allclose(local, whole[made.rows])
    assert torch.allclose(local_x, whole_x[made.columns])
    for mine, expected in zip(local_p, whole_p, strict=True):
        dist.all_reduce(mine, group=group)
        assert torch.allclose(mine, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_a_distributed_plan(workers, name):
    workers.run(layer, 3, name=name, relu=False)


def test_relu_is_fused_into_a_distributed_convolution(workers):
    workers.run(layer, 2, name="gcn narrow", relu=True)


def refused(group) -> tuple[str, str]:
    made = st_dist.plan(whole_numbers(90, 90, 0.06), WIDTH, group)
    x = torch.randn(made.local_shape[1], WIDTH, dtype=torch.float64)
    with pytest.raises(TypeError) as attention:
        GATConv(WIDTH, 4, add_self_loops=False).double()(x, made)
    with pytest.raises(ValueError) as nodes:
        GCNConv(WIDTH, 4).double()(torch.randn(90, WIDTH, dtype=torch.float64), made)
    return str(attention.value), str(nodes.value)


def test_attention_over_ranks_is_refused_and_x_holds_local_nodes(workers):
    attention, nodes = workers.run(refused, 2)[0]
    assert attention.startswith("GATConv: edge_index must be a graph of this process, got Distr")
    assert re.match(
        r"GCNConv: x must be of (\d+) source and \1 target nodes, as the graph has, got 90 and 90",
        nodes,
    )


def wrapped(group, how: str) -> None:
    """Dense weights replicated by DDP or sharded by FSDP, sparse products over the same ranks."""
    csr = whole_numbers(90, 90, 0.06).with_values(None)
    made = st_dist.plan(csr, WIDTH, group, dtype=torch.float32)
    torch.manual_seed(4)
    whole, conv = GCNConv(WIDTH, 4), GCNConv(WIDTH, 4)
    conv.load_state_dict(whole.state_dict())
    x = torch.randn(90, WIDTH)
    whole(x, st.plan(csr, WIDTH, dtype=torch.float32)).sin().sum().backward()
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(conv, process_group=group)
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(conv, mesh=DeviceMesh.from_group(group, "cpu"))
    # Both take the mean over ranks, so that a sum over nodes needs their number as a factor.
    (model(made.shard(x), made).sin().sum() * made.world_size).backward()
    for mine, expected in zip(conv.parameters(), whole.parameters(), strict=True):
        grad = mine.grad.full_tensor() if how == "fsdp" else mine.grad
        assert torch.allclose(grad, expected.grad, atol=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_dense_weights_train_under_ddp_and_fsdp(workers, how):
    workers.run(wrapped, 2, how=how)


OPTIONS = {"nodes": 600, "edges": 9000, "features": 32, "hidden": 16}


def train(group, partition: str) -> list[float]:
    """Losses of examples/gcn_distributed.py."""
    run, cpu = load_example("gcn_distributed").train, torch.device("cpu")
    return run(
        **OPTIONS, epochs=8, dtype=torch.float32, partition=partition, device=cpu, group=group
    )[0]


def test_the_example_has_the_losses_of_one_process(workers):
    one = workers.run(train, 1, partition="auto")[0]
    assert len(one) == 8 and one[-1] < one[0] - 0.05
    for ranks, partition in ((4, "auto"), (3, "rcm")):
        for losses in workers.run(train, ranks, partition=partition):
            assert max(abs(a - b) for a, b in zip(one, losses, strict=True)) < 1e-6


def test_the_example_runs_as_one_process(monkeypatch, capsys):
    words = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["gcn_distributed.py", *words, "--epochs", "3"])
    load_example("gcn_distributed").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("1 processes, ")
    assert not dist.is_initialized()
