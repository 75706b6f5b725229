"""How many SMs and how much L2 cache a plan is made for."""

from __future__ import annotations

import torch

__all__ = ["l2_bytes", "processors"]

# Those of an H200, assumed where a plan is built away from its GPU.
PROCESSORS, L2_BYTES = 132, 50 * 2**20


def processors(device: torch.device) -> int:
    """SMs of ``device``."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def l2_bytes(device: torch.device) -> int:
    """Bytes of the L2 cache of ``device``."""
    if device.type != "cuda":
        return L2_BYTES
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
