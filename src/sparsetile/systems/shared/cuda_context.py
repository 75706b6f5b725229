"""A CUDA context in every thread that launches.

The launch goes straight to the driver, which wants the device's context current in the calling
thread. torch's main thread has it; a thread that has run no CUDA work yet, such as autograd's at
its first backward, has none until the CUDA runtime does something there.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["device_index", "ensure_cuda_context"]


class _Entered(threading.local):
    devices: frozenset[int] = frozenset()


_entered = _Entered()


def ensure_cuda_context(device: int) -> None:
    """Make sure that this thread has the context of CUDA device ``device``; free after the first
    call of a thread."""
    if device not in _entered.devices:
        # The runtime makes the primary context current with the first kernel it launches.
        torch.zeros(1, device=f"cuda:{device}")
        _entered.devices |= {device}


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; that of the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else int(device.index)
