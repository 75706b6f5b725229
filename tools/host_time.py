"""Host time of one product: what a call costs beside the kernel. Needs a GPU.

    python -m tools.host_time > results/h200/host_time.jsonl

The first line is of a plain product, the others of products with gradients, a system each, of a
graph whose long rows are cut.

Calls are queued without waiting, so the time per call is the host's as long as it exceeds the
kernel's, which a CUDA graph of the same product gives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

import sparsetile as st
from sparsetile.core.timer import time_product
from sparsetile.data import generators


def host_microseconds(call: Callable[[], object], calls: int = 500, rounds: int = 15) -> float:
    for _ in range(calls):
        call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begun) / calls)
        torch.cuda.synchronize()
    return best * 1e6


def on_gpu(csr: st.CSR) -> torch.Tensor:
    """Return A as torch's own CSR tensor."""
    assert csr.values is not None
    return torch.sparse_csr_tensor(
        csr.indptr.cuda(), csr.indices.cuda().long(), csr.values.cuda(), csr.shape
    )


def main() -> None:
    csr = generators.random(1000, 1000, density=0.01, weighted=True, seed=0)
    plan = st.plan(csr, 32, system="csr", device="cuda")
    B = torch.randn(1000, 32, device="cuda")
    A = on_gpu(csr)
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matrix": "random 1000x1000, density 0.01, N=32",
        "kernel_us": 1e6 * time_product(lambda: plan @ B, B.device).median,
        "plan_run_us": host_microseconds(lambda: plan.run(B)),
        "torch_empty_us": host_microseconds(lambda: B.new_empty((1000, 32))),
        "torch_add_us": host_microseconds(lambda: torch.add(B, B)),
        "torch_sparse_us": host_microseconds(lambda: A @ B),
        "spmm_us": host_microseconds(lambda: st.spmm(A, B)),
    }
    record["over_kernel_us"] = record["plan_run_us"] - record["kernel_us"]
    show(record)
    for system in ("csr", "rsh", "acc"):
        show(with_gradients(system))


def show(record: dict[str, object]) -> None:
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()}))


def with_gradients(system: str) -> dict[str, object]:
    """Microseconds of forward passes, and of forward and backward passes, where TF32 is allowed."""
    torch.backends.cuda.matmul.allow_tf32 = True
    csr = generators.power_law(10_000, 200_000, weighted=True, seed=0)
    plan = st.plan(csr, 64, system=system, device="cuda")
    A = on_gpu(csr)
    B = torch.randn(csr.shape[1], 64, device="cuda", requires_grad=True)
    bias = torch.randn(64, device="cuda", requires_grad=True)
    G = torch.randn(csr.shape[0], 64, device="cuda")

    def timed(call: Callable[[], object]) -> float:
        return host_microseconds(call, calls=200, rounds=5)

    def step(product: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> float:
        return timed(lambda: torch.autograd.grad(product(), leaves, G))

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "matrix": "power law, 10000 rows, 200000 entries, N=64",
        "system": system,
        "schedule": plan.info["choices"]["schedule"],
        "forward_us": timed(lambda: plan @ B.detach()),
        "forward_with_gradient_us": timed(lambda: plan @ B),
        "bias_relu_with_gradient_us": timed(lambda: plan.run(B, bias=bias, relu=True)),
        "forward_backward_us": step(lambda: plan @ B, B),
        "bias_relu_forward_backward_us": step(lambda: plan.run(B, bias=bias, relu=True), B, bias),
        "mean_forward_backward_us": step(lambda: plan.run(B, reduce="mean"), B),
        "torch_sparse_forward_backward_us": step(lambda: A @ B, B),
        "torch_mul_forward_backward_us": step(lambda: B[: csr.shape[0]] * 2.0, B),
    }


if __name__ == "__main__":
    main()
