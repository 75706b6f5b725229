"""A full-graph GCN over several processes: the same losses as in one.

python examples/gcn_distributed.py                                  # one process
torchrun --nproc-per-node 2 examples/gcn_distributed.py             # two, on the CPU or on GPUs

Each process holds a share of the nodes. Layers are those of examples/gcn_train.py, the graph is a
distributed plan, and gradients of the dense weights are summed over the processes.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import sparsetile as st
import sparsetile.dist
from sparsetile.data import generators
from sparsetile.nn import GCNConv

CLASSES = 4


def normalised(csr: st.CSR) -> st.CSR:
    """Return D^-1/2 A D^-1/2 of a graph that has its self-loops."""
    scale = csr.row_lengths().clamp(min=1).double().rsqrt()
    values = scale[csr.row_ids()] * scale[csr.indices.long()]
    return csr.with_values(values)


class Net(torch.nn.Module):
    """Two graph convolutions on a plan that is normalised already."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden)
        self.second = GCNConv(hidden, CLASSES)

    def forward(self, x: torch.Tensor, graph: sparsetile.dist.DistributedPlan) -> torch.Tensor:
        return self.second(self.first(x, graph, relu=True), graph)


def start() -> torch.device:
    """Join the group that torchrun made, or make one of this process alone."""
    gpu = torch.cuda.is_available()
    backend = "nccl" if gpu else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def train(
    nodes: int, edges: int, features: int, hidden: int, epochs: int, dtype: torch.dtype,
    partition: str, device: torch.device, group: dist.ProcessGroup | None = None,
) -> tuple[list[float], float]:  # fmt: skip
    """Return the loss of each epoch, and the median seconds of one."""
    graph = normalised(generators.power_law(nodes, edges, self_loops=True, seed=0))
    plan = sparsetile.dist.plan(graph, hidden, group, partition, dtype=dtype, device=device)
    # The same numbers in every process, which then keeps its own rows.
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(nodes, features, generator=draw).to(dtype)
    labels = torch.randint(CLASSES, (nodes,), generator=draw)
    known = torch.rand(nodes, generator=draw) < 0.1
    total = int(known.sum())
    mine = known[plan.rows]
    x, labels = plan.shard(x), labels[plan.rows][mine].to(device)
    mine = mine.to(device)

    torch.manual_seed(2)  # the same weights everywhere
    net = Net(features, hidden).to(device, dtype)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    losses, times = [], []
    for _ in range(epochs):
        began = time.perf_counter()
        optimiser.zero_grad()
        loss = cross_entropy(net(x, plan)[mine], labels, reduction="sum") / total
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimiser.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    return losses, sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--edges", type=int, default=40_000)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--partition", default="auto", help="auto, even, affinity, rcm, ...")
    options = vars(parser.parse_args())
    device = start()
    losses, seconds = train(**{**options, "dtype": getattr(torch, options["dtype"])}, device=device)
    if dist.get_rank() == 0:
        for epoch, loss in enumerate(losses):
            print(f"epoch {epoch}: loss {loss:.9f}")
        print(f"{dist.get_world_size()} processes, {1e3 * seconds:.2f} ms an epoch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
