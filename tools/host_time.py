"""Host time of calls, as ratios to ``torch.add`` in the same run. Needs a GPU.

    python -m tools.host_time > results/h200/host_time.jsonl

A line for each system: products with and without ``out=``, bias, ReLU and gradients, of a graph so
small that the GPU never keeps the host waiting. Then ``spmm`` of a known matrix, and linear layers
of a pruned weight. Calls are queued without waiting, so that their time is the host's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

import sparsetile as st
import sparsetile.nn as snn
from sparsetile.data import generators

NODES, EDGES, WIDTH, TOKENS = 3_000, 30_000, 64, 16
Calls = dict[str, Callable[[], object]]


def host_microseconds(calls: Calls, count: int = 300, rounds: int = 12) -> dict[str, float]:
    """Return the least time of each call over some rounds.

    Every round runs all calls in turn: what else the machine does then meets all of them.
    """
    best = dict.fromkeys(calls, float("inf"))
    wait = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    for number in range(rounds + 1):  # the first warms up
        for name, call in calls.items():
            wait()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            if number:
                best[name] = min(best[name], (time.perf_counter() - begun) / count * 1e6)
    wait()
    return best


def products(system: str, csr: st.CSR) -> Calls:
    plan = st.plan(csr, WIDTH, system=system, device="cuda")
    B, G = (torch.randn(NODES, WIDTH, device="cuda") for _ in range(2))
    out, bias = torch.empty_like(G), torch.randn(WIDTH, device="cuda")
    weight = torch.randn(WIDTH, WIDTH, device="cuda")
    tracked = B.clone().requires_grad_()

    def both(**options: Any) -> object:
        return torch.autograd.grad(plan.run(tracked, **options), tracked, G)

    return {
        "plan.run": lambda: plan.run(B),
        "plan @ B": lambda: plan @ B,
        "run(out=)": lambda: plan.run(B, out=out),
        "run(bias, relu)": lambda: plan.run(B, bias=bias, relu=True),
        "run with gradient": lambda: plan.run(tracked),
        "forward and backward": both,
        "forward and backward, bias, relu": lambda: both(bias=bias, relu=True),
        "torch.mm, forward and backward": lambda: torch.autograd.grad(tracked @ weight, tracked, G),
    }


def known_matrix(csr: st.CSR) -> Calls:
    """``spmm`` of inputs that it has seen; torch's own beside it."""
    assert csr.values is not None
    arrays = csr.indptr.cuda(), csr.indices.cuda(), csr.values.cuda(), csr.shape
    A = torch.sparse_csr_tensor(arrays[0], arrays[1].long(), arrays[2], csr.shape)
    edges = (torch.stack([csr.row_ids(), csr.indices.long()]).cuda(), None, csr.shape)
    B = torch.randn(NODES, WIDTH, device="cuda")
    return {
        "spmm(sparse tensor)": lambda: st.spmm(A, B),
        "spmm(CSR arrays)": lambda: st.spmm(arrays, B),
        "spmm(edges)": lambda: st.spmm(edges, B),
        "torch.sparse.mm": lambda: torch.sparse.mm(A, B),
    }


def linear_layers() -> Calls:
    """A weight of 1024 x 512 with three in ten blocks of 64 kept."""
    dense = torch.nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    layer = snn.SparseLinear.from_linear(dense, sparsity=0.7, block=64).eval()
    weight = layer.to_dense().detach()
    plan = st.plan(weight.to_sparse_csr(), TOKENS, dtype=torch.bfloat16, system="bcsr")
    X = torch.randn(TOKENS, 512, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1024, device="cuda")

    return {
        "plan.linear": lambda: plan.linear(X),
        "plan.linear(bias, relu)": lambda: plan.linear(X, bias=bias, relu=True),
        "plan.linear, 3-D": lambda: plan.linear(X[None]),
        "SparseLinear": lambda: layer(X),
        "nn.Linear": lambda: dense(X),
    }


def measure(title: str, calls: Calls) -> dict[str, object]:
    """Microseconds of ``torch.add``, and of each call as a multiple of it."""
    B = torch.randn(NODES, WIDTH, device="cuda")
    times = host_microseconds({"torch.add": lambda: torch.add(B, B), **calls})
    add = times.pop("torch.add")
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "what": title,
        "torch_add_us": round(add, 2),
        "times_torch_add": {name: round(each / add, 2) for name, each in times.items()},
    }  # fmt: skip


def main() -> None:
    csr = generators.random(NODES, NODES, density=EDGES / NODES**2, weighted=True, seed=0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(json.dumps(measure("csr", products("csr", csr))), flush=True)
    print(json.dumps(measure("known matrix", known_matrix(csr))), flush=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    for system in ("acc", "rsh", "half"):
        print(json.dumps(measure(system, products(system, csr))), flush=True)
    with torch.no_grad():
        print(json.dumps(measure("linear layers", linear_layers())), flush=True)


if __name__ == "__main__":
    main()
