"""``cusparse``: NVIDIA's library through torch's CSR tensors. The fallback and baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.core.settings import entry_limit
from sparsetile.engines.library import without_autocast
from sparsetile.engines.request import BuildTimer, BuiltSystem, Request
from sparsetile.engines.runner import Runner
from sparsetile.launch.epilogue import apply_epilogue
from sparsetile.launch.interface import PLAIN, Epilogue, Tensors
from sparsetile.systems.base import System
from sparsetile.systems.cusparse import DEVICES
from sparsetile.systems.cusparse.cost import predict_cusparse

__all__ = ["SYSTEM", "CuSparseSystem"]


class CuSparseRunner(Runner):
    """Packed ``values``: ones for a pattern; empty if A has values."""

    packed_names = ("values",)

    def pack(self, tensors: Tensors, values: Tensor | None, dtype: torch.dtype) -> Tensors:
        count = self.nnz if values is None else 0
        return {"values": torch.ones(count, dtype=dtype, device=tensors["indptr"].device)}

    def spmm(
        self, tensors: Tensors, values: Tensor | None, packed: Tensors | None, B: Tensor,
        out: Tensor, epilogue: Epilogue = PLAIN,
    ) -> None:  # fmt: skip
        if out.numel() == 0:
            return
        if values is None:
            packed = self.pack(tensors, None, B.dtype) if packed is None else packed
            values = packed["values"]
        A = torch.sparse_csr_tensor(
            tensors["indptr32"], tensors["columns"], values, (self.rows, self.cols),
            check_invariants=False,
        )  # fmt: skip
        with without_autocast(B.device):
            if not self.nnz:
                product = torch.zeros_like(out)
            elif B.dim() == 2:
                product = A @ B
            else:
                product = torch.stack([A @ b for b in B])
        apply_epilogue(product, out, tensors["indptr"], epilogue)


class CuSparseSystem(System):
    """torch.sparse CSR on CUDA.

    16-bit types are not supported: cuSPARSE rounds their partial sums to 16 bits, which breaks the
    guarantee of FP32 accumulation (on an H200: errors of 100 times the bound).
    """

    name = "cusparse"
    summary = "cuSPARSE through torch.sparse CSR"
    devices = DEVICES
    dtypes = (torch.float32, torch.float64)
    deterministic = False
    runner = CuSparseRunner

    def further_reasons(self, request: Request) -> list[str]:
        if request.csr.nnz >= entry_limit():
            return [f"is used with 32-bit offsets, A has {request.csr.nnz} entries"]
        return []

    def predict(self, request: Request) -> float:
        return predict_cusparse(request)

    def build(self, request: Request) -> BuiltSystem:
        csr, timer = request.csr, BuildTimer(request)
        tensors = {
            "indptr32": csr.indptr.to(torch.int32),
            "columns": csr.indices,
            "indptr": csr.indptr,
        }
        timer("format")
        choices = {"format": "torch CSR, 32-bit indices", "schedule": "cuSPARSE's own"}
        return self.built(request, tensors, choices, timer.seconds)


SYSTEM = CuSparseSystem()
