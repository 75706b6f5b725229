"""Compares graph attention and sampled GraphSAGE with PyG's layers: time, peak memory, results.

    python -m tools.gnn_times > gnn_times.jsonl

Forward and backward of GATConv on a whole graph, steps of two SAGEConv layers on sampled graphs
(fan-out 15, 10) that are new at every step, of two GCNConv layers on the larger of these, and the
cost of planning such a graph. On a GPU if there is one; bytes are counted only there. Both packages
are timed in turns. PyG must be installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsetile as st
from sparsetile import nn as ours
from sparsetile.data import generators

WIDTH = 128
HEADS = 8


def sampler() -> Any:
    """Return the module of examples/graphsage_minibatch.py."""
    import importlib.util

    path = Path(__file__).resolve().parents[1] / "examples" / "graphsage_minibatch.py"
    spec = importlib.util.spec_from_file_location("graphsage_minibatch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(
    steps: Mapping[str, Callable[[], object]], count: int, device: str
) -> dict[str, tuple[float, int | None]]:
    """Return the median milliseconds of each step, synchronised, and its peak bytes on a GPU.

    Steps take turns, so that a slow phase of the machine affects all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peak: dict[str, int | None] = dict.fromkeys(steps)
    for turn in range(-2, count):
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begun)
    return {name: (1e3 * statistics.median(each), peak[name]) for name, each in seconds.items()}


def compare(what: str, steps: dict[str, Callable[[], Tensor]], count: int, device: str) -> Any:
    """Time both packages, and return the difference of their results."""
    results = {name: step().detach().float() for name, step in steps.items()}
    scale = results["pyg"].abs().max().item() or 1.0
    found: dict[str, Any] = {
        "what": what,
        "difference": (results["sparsetile"] - results["pyg"]).abs().max().item() / scale,
    }
    del results
    for name, (milliseconds, peak) in measure(steps, count, device).items():
        found[f"{name}_ms"], found[f"{name}_bytes"] = milliseconds, peak
    found["speedup"] = found["pyg_ms"] / found["sparsetile_ms"]
    return found


def attention(graph: st.CSR, device: str, count: int) -> Any:
    from torch_geometric import nn as pyg

    edge_index = torch.stack([graph.indices.long(), graph.row_ids()]).to(device)
    x = torch.randn(graph.shape[0], WIDTH, device=device)
    layers = {
        "sparsetile": ours.GATConv(WIDTH, WIDTH // HEADS, HEADS).to(device),
        "pyg": pyg.GATConv(WIDTH, WIDTH // HEADS, HEADS).to(device),
    }
    layers["pyg"].load_state_dict(layers["sparsetile"].state_dict())

    def step(layer: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            own = x.detach().requires_grad_()
            out: Tensor = layer(own, edge_index)
            out.backward(torch.ones_like(out))
            return out

        return run

    return compare("gat", {name: step(layer) for name, layer in layers.items()}, count, device)


def sampled(kind: str, graph: st.CSR, device: str, batch: int, step: Callable[..., Tensor]) -> Any:
    """Return functions that train two layers of each package on eight samples, by package name."""
    from torch_geometric import nn as pyg

    example = sampler()
    graph = graph.to(device)
    nodes = graph.shape[0]
    x = torch.randn(nodes, WIDTH, device=device)
    drawn = [
        example.sample_graphs(graph, torch.randperm(nodes, device=device)[:batch]) for _ in range(8)
    ]
    nets = {
        name: nn.ModuleList([getattr(layers, kind)(WIDTH, 256), getattr(layers, kind)(256, 64)])
        for name, layers in (("sparsetile", ours), ("pyg", pyg))
    }
    nets["pyg"].load_state_dict(nets["sparsetile"].state_dict())

    def epoch(net: nn.ModuleList) -> Tensor:
        for names, graphs in drawn:
            h = step(net, x[names], graphs)
            h.square().mean().backward()
        return h

    return {name: functools.partial(epoch, net.to(device)) for name, net in nets.items()}


def minibatches(graph: st.CSR, device: str, batch: int, count: int) -> Any:
    """Two SAGEConv layers, each on its own sampled graph."""

    def step(net: nn.ModuleList, h: Tensor, graphs: Sequence[Any]) -> Tensor:
        for layer, graph in zip(net, graphs, strict=True):
            # A new tensor, as from a loader: nothing cached can be used.
            h = layer((h, h[: graph.targets]), graph.edge_index.clone()).relu()
        return h

    steps = sampled("SAGEConv", graph, device, batch, step)
    found = compare("sage mini-batch", steps, count, device)
    return found | {"steps_an_epoch": 8, "batch": batch}


def convolutions(graph: st.CSR, device: str, batch: int, count: int) -> Any:
    """Two GCNConv layers on sampled subgraphs, whose targets are among the sources."""

    def step(net: nn.ModuleList, h: Tensor, graphs: Sequence[Any]) -> Tensor:
        edge_index = graphs[0].edge_index
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]  # a new tensor
        for layer in net:
            h = layer(h, edge_index).relu()
        return h

    steps = sampled("GCNConv", graph, device, batch, step)
    found = compare("gcn mini-batch", steps, count, device)
    return found | {"steps_an_epoch": 8, "batch": batch}


def planning(graph: st.CSR, device: str, batch: int, count: int) -> Any:
    graph = graph.to(device)
    seeds = torch.randperm(graph.shape[0], device=device)[:batch]
    drawn = sampler().sample_graphs(graph, seeds)[1][0]
    matrix = (drawn.edge_index.flip(0).contiguous(), None, (drawn.targets, drawn.sources))
    found: dict[str, Any] = {"what": "plan(tune=none) of a block", "edges": matrix[0].shape[1]}
    steps = {
        tune: functools.partial(st.plan, matrix, WIDTH, dtype=torch.float32, tune=tune)
        for tune in ("none", "model")
    }
    return found | {f"{tune}_ms": each[0] for tune, each in measure(steps, count, device).items()}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args(words)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    graph = generators.power_law(options.nodes, options.edges, seed=1)
    found = [
        attention(graph, device, options.steps),
        minibatches(graph, device, options.batch, options.steps),
        convolutions(graph, device, options.batch, options.steps),
        planning(graph, device, options.batch, options.steps),
    ]
    for entry in found:
        entry |= {"device": name, "nodes": graph.shape[0], "graph_edges": graph.nnz}
        print(json.dumps({name: _short(value) for name, value in entry.items()}))
    return found


if __name__ == "__main__":
    main()
