"""A whole training step of a GCN (forward, loss, backward, Adam) in one CUDA graph. Needs a GPU.

Small graphs train as fast as the host can issue kernels. A captured step is issued at once.

python examples/gcn_cuda_graph.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsetile.core.errors import describe
from sparsetile.data import generators
from sparsetile.nn import GCNConv, captured

NODES = 20_000
EDGES = 400_000
WIDTH = 128
HIDDEN = 256
CLASSES = 16


class Net(nn.Module):
    """Two graph convolutions. Bias and ReLU are part of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(WIDTH, HIDDEN), GCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, relu=True), edge_index)


def make_training(
    device: str, capture: bool, nodes: int = NODES, edges: int = EDGES
) -> Callable[[], Tensor]:
    """Return a function that trains for one epoch and returns its loss on the device."""
    torch.manual_seed(0)
    graph = generators.power_law(nodes, edges, seed=1)
    edge_index = torch.stack([graph.indices.long(), graph.row_ids()]).to(device)
    x = torch.randn(nodes, WIDTH, device=device)
    labels = torch.randint(CLASSES, (nodes,), device=device)
    net = Net().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def step(labels: Tensor) -> Tensor:  # x and the edges stay as they are: no inputs
        optimizer.zero_grad()
        loss = cross_entropy(net(x, edge_index), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = captured(step, labels, optimizer=optimizer) if capture else step
    return lambda: train(labels)


def milliseconds(epoch: Callable[[], Tensor], epochs: int = 200) -> float:
    """Return the mean time of an epoch; the host waits for the device once."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(epochs):
        epoch()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / epochs


def main(epochs: int = 50) -> None:
    """Train twice from the same weights, step by step and by replay, and compare."""
    if not torch.cuda.is_available():
        raise SystemExit(
            describe(
                "gcn_cuda_graph", "device", "a CUDA GPU", "none",
                "Run examples/gcn_train.py, which trains on the host too",
            )
        )  # fmt: skip
    eager, replay = make_training("cuda", capture=False), make_training("cuda", capture=True)
    expected = [eager().item() for _ in range(epochs)]
    losses = [replay().item() for _ in range(epochs)]
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"loss {expected[0]:.4f} -> {expected[-1]:.4f}, by replay {losses[-1]:.4f}")
    print(f"largest difference of an epoch: {worst:.1e}")
    print(f"step: eager {milliseconds(eager):.3f} ms, CUDA graph {milliseconds(replay):.3f} ms")
    if worst > 0.02:
        raise SystemExit("gcn_cuda_graph: the replayed step does not train as the eager one does")


if __name__ == "__main__":
    main()
