"""A whole training step of a GCN (forward, loss, backward, Adam) in one CUDA graph. Needs a GPU.

Small graphs train as fast as the host can issue kernels. A captured step is issued at once. The
layers are given the plan of their matrix, so that nothing of the graph is looked up or planned
while the step is captured; the transpose is planned by the first backward pass, before that.

python examples/gcn_cuda_graph.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sparsetile as st
from sparsetile.core.errors import describe
from sparsetile.data import generators
from sparsetile.nn import GCNConv, gcn_plan

NODES = 20_000
EDGES = 400_000
WIDTH = 128
HIDDEN = 256
CLASSES = 16
WARM_STEPS = 3


class Net(nn.Module):
    """Two graph convolutions on a plan. Bias and ReLU are part of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(WIDTH, HIDDEN), GCNConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, plan: st.Plan) -> Tensor:
        return self.second(self.first(x, plan, relu=True), plan)


def make_step(device: str, nodes: int = NODES, edges: int = EDGES) -> Callable[[], Tensor]:
    """Return a training step: each call is one epoch, and returns its loss on the device."""
    torch.manual_seed(0)
    graph = generators.power_law(nodes, edges, seed=1)
    edge_index = torch.stack([graph.indices.long(), graph.row_ids()]).to(device)
    plan = gcn_plan(edge_index, nodes, HIDDEN)
    x = torch.randn(nodes, WIDTH, device=device)
    labels = torch.randint(CLASSES, (nodes,), device=device)
    net = Net().to(device)
    # capturable: Adam counts its steps on the device.
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, capturable=device == "cuda")

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = cross_entropy(net(x, plan), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def capture(step: Callable[[], Tensor]) -> tuple[Callable[[], Tensor], list[float]]:
    """Warm a step up, capture it, and return its replay and the losses of warming up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm = [step().item() for _ in range(WARM_STEPS)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay(kept: object = step) -> Tensor:  # the graph reads the step's tensors: they must live
        graph.replay()
        st.changed()  # the optimiser's writes, which torch does not count in a replay
        return loss

    return replay, warm


def milliseconds(step: Callable[[], Tensor], steps: int = 200) -> float:
    """Return the mean time of a step, the device waited for once."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / steps


def main(epochs: int = 50) -> None:
    """Train twice from the same weights, step by step and by replay, and compare."""
    if not torch.cuda.is_available():
        raise SystemExit(
            describe(
                "gcn_cuda_graph", "device", "a CUDA GPU", "none",
                "Run examples/gcn_train.py, which trains on the host too",
            )
        )  # fmt: skip
    eager = make_step("cuda")
    expected = [eager().item() for _ in range(epochs)]
    replay, losses = capture(make_step("cuda"))
    losses += [replay().item() for _ in range(epochs - WARM_STEPS)]
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    print(f"loss {expected[0]:.4f} -> {expected[-1]:.4f}, by replay {losses[-1]:.4f}")
    print(f"largest difference of an epoch: {worst:.1e}")
    print(f"step: eager {milliseconds(eager):.3f} ms, CUDA graph {milliseconds(replay):.3f} ms")
    if worst > 0.02:
        raise SystemExit("gcn_cuda_graph: the replayed step does not train as the eager one does")


if __name__ == "__main__":
    main()
