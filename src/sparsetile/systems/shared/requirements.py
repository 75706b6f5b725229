"""What every system on Tensor Cores needs of a request."""

from __future__ import annotations

import torch

from sparsetile.systems.base import Request

__all__ = ["tf32_reasons", "tile_reasons"]


def tf32_reasons(request: Request) -> list[str]:
    """Return why Tensor Cores cannot serve: float32 that must not become TF32."""
    on_gpu = request.device.type == "cuda"
    if on_gpu and request.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return [
            "rounds float32 to TF32, which torch does not allow now: set "
            "torch.backends.cuda.matmul.allow_tf32 = True"
        ]
    return []


def tile_reasons(request: Request) -> list[str]:
    """Return why bitmap tiles cannot serve: too many entries, or TF32 that is not allowed."""
    found = []
    if request.csr.nnz >= 2**31:
        found.append(f"holds under 2^31 entries, A has {request.csr.nnz}")
    return [*found, *tf32_reasons(request)]
