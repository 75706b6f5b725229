"""How many SMs a plan is made for."""

from __future__ import annotations

import torch

__all__ = ["processors"]

# SMs assumed where a plan is built away from its GPU.
PROCESSORS = 132


def processors(device: torch.device) -> int:
    """SMs of ``device``; those of an H200 where it is no GPU."""
    if device.type != "cuda":
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
