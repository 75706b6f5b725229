"""Requirements of systems on Tensor Cores on a request and the GPU."""

from __future__ import annotations

import torch

from sparsetile.core.device import capability, capability_name, shared_bytes
from sparsetile.core.settings import entry_limit
from sparsetile.engines.request import Request

__all__ = [
    "ampere_reasons", "bulk_reasons", "entry_reasons", "hopper_reasons", "shared_reasons",
    "tf32_reasons", "tile_reasons",
]  # fmt: skip

_AMPERE, _HOPPER = (8, 0), (9, 0)


def entry_reasons(request: Request) -> list[str]:
    """Return why 32-bit entry numbers do not suffice."""
    if request.csr.nnz >= (limit := entry_limit()):
        text = "2^31" if limit == 2**31 else limit
        return [f"holds under {text} entries, A has {request.csr.nnz}"]
    return []


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
    return [*entry_reasons(request), *tf32_reasons(request)]


def ampere_reasons(request: Request) -> list[str]:
    """Return why ``mma.sync`` cannot serve: an older GPU."""
    if request.device.type != "cuda":
        return []
    if capability(request.device) >= _AMPERE:
        return []
    return [f"needs sm_80 or newer, this GPU is {capability_name(request.device)}"]


def bulk_reasons(request: Request) -> list[str]:
    """Return why bulk copies cannot serve: an older GPU than sm_90."""
    if request.device.type != "cuda" or capability(request.device) >= _HOPPER:
        return []
    return [f"needs sm_90 or newer, this GPU is {capability_name(request.device)}"]


def shared_reasons(request: Request, needed: int) -> list[str]:
    """Return why a kernel with this much shared memory per thread block cannot serve."""
    if request.device.type != "cuda":
        return []
    most = shared_bytes(capability(request.device)) - 1024
    if needed <= most:
        return []
    return [
        f"takes {needed // 1024} KB of shared memory per thread block, this GPU gives "
        f"{most // 1024}"
    ]


def hopper_reasons(request: Request) -> list[str]:
    """Return why WGMMA cannot serve: another GPU than Hopper."""
    if request.device.type != "cuda":
        return []
    if capability(request.device) == _HOPPER:
        return []
    return [f"needs a Hopper GPU (sm_90a), this GPU is {capability_name(request.device)}"]
