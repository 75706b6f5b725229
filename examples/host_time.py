"""Host time of one product: what a call costs beside the kernel. Needs a GPU.

    python examples/host_time.py > results/h200/host_time.json

Calls are queued without waiting, so the time per call is the host's as long as it exceeds the
kernel's, which a CUDA graph of the same product gives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

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


def main() -> None:
    csr = generators.random(1000, 1000, density=0.01, weighted=True, seed=0)
    plan = st.plan(csr, 32, system="csr", device="cuda")
    B = torch.randn(1000, 32, device="cuda")
    A = torch.sparse_csr_tensor(
        csr.indptr.cuda(), csr.indices.cuda().long(), csr.values.cuda(), csr.shape
    )
    record = {
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
    print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()}))


if __name__ == "__main__":
    main()
