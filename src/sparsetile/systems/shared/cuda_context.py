"""A CUDA context in every thread that launches.

The launch goes straight to the driver, which wants the device's context current in the calling
thread. torch's main thread has it; a thread that has run no CUDA work yet, such as autograd's at
its first backward, has none until the CUDA runtime does something there.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["enter"]


class _Entered(threading.local):
    devices: frozenset[int] = frozenset()


_entered = _Entered()


def enter(device: int) -> None:
    """Make sure that this thread has the context of CUDA device ``device``; free but once."""
    if device not in _entered.devices:
        # The runtime makes the primary context current with the first kernel it launches.
        torch.zeros(1, device=f"cuda:{device}")
        _entered.devices |= {device}
