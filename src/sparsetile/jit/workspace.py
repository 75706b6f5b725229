"""Scratch memory of kernels that join partial sums: one growing pair of buffers per stream.

Launches on one stream run one after the other, so they may share scratch. The ``arrivals`` half
is zero between launches because each kernel puts its counters back (``segment.cuh``). While a
CUDA graph is captured, fresh memory comes from the graph's own pool instead: a replay may run on
any stream. Buffers that were outgrown are kept: another thread may be about to launch with them.

What one launch leaves for the next must not be shared with launches that another thread puts
between the two: such memory is asked for with an ``owner``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scratch"]

_buffers: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
_outgrown: list[tuple[Tensor, Tensor]] = []


def _allocate(device: int, partial_bytes: int, arrivals: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(partial_bytes, dtype=torch.uint8, device=f"cuda:{device}"),
        torch.zeros(arrivals, dtype=torch.int32, device=f"cuda:{device}"),
    )


def scratch(
    device: int, stream: int, partial_bytes: int, arrivals: int, owner: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (bytes, zeroed int32 counters), at least as large as asked, for one launch.

    With an ``owner``, as a rule a thread's number, they are shared with calls of the same owner
    alone.
    """
    if torch.cuda.is_current_stream_capturing():
        return _allocate(device, partial_bytes, arrivals)
    key = (device, stream, owner)
    held = _buffers.get(key)
    if held is not None:
        if held[0].numel() >= partial_bytes and held[1].numel() >= arrivals:
            return held
        _outgrown.append(held)
        # Geometric growth bounds what is kept to twice the largest request.
        partial_bytes = max(partial_bytes, 2 * held[0].numel())
        arrivals = max(arrivals, 2 * held[1].numel())
    _buffers[key] = _allocate(device, partial_bytes, arrivals)
    return _buffers[key]
