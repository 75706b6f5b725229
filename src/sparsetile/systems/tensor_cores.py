"""What every system of bitmap tiles on Tensor Cores needs of a request."""

from __future__ import annotations

import torch

from sparsetile.systems.base import Request

__all__ = ["tile_reasons"]


def tile_reasons(request: Request) -> list[str]:
    """Return why tiles cannot serve: too many entries, or float32 that must not become TF32."""
    found = []
    if request.csr.nnz >= 2**31:
        found.append(f"holds under 2^31 entries, A has {request.csr.nnz}")
    on_gpu = request.device.type == "cuda"
    if on_gpu and request.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        found.append(
            "rounds float32 to TF32, which torch does not allow now: set "
            "torch.backends.cuda.matmul.allow_tf32 = True"
        )
    return found
