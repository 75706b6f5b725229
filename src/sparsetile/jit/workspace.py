"""Scratch memory of kernels that join partial sums: one growing pair of buffers per stream.

Launches on one stream run one after the other, so they may share scratch. The ``arrivals`` half
is zero between launches because each kernel resets its counters (``segment.cuh``). While a CUDA
graph is captured, new memory comes from the graph's own pool instead: a replay may run on any
stream. Outgrown buffers are kept: another thread may be about to launch with them.

Data that one launch leaves for the next must not be shared with launches of other threads. Such
memory is requested with an ``owner``: it belongs to the calling thread and ends with it. It was
allocated on the stream that uses it, so torch reuses it only for work after the last launch.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["renew_scratch", "scratch", "zeroed_flag"]

_Buffers = dict[tuple[int, int], tuple[Tensor, Tensor]]


class _Owned(threading.local):
    """Buffers and flags of one thread."""

    def __init__(self) -> None:
        self.buffers: _Buffers = {}
        self.flags: dict[tuple[int, int], Tensor] = {}


_shared: _Buffers = {}
_owned = _Owned()
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

    With an ``owner``, a thread's number, only calls of the same thread share them.
    """
    if torch.cuda.is_current_stream_capturing():
        return _allocate(device, partial_bytes, arrivals)
    buffers = _owned.buffers if owner else _shared
    key = (device, stream)
    buffer_pair = buffers.get(key)
    if buffer_pair is not None:
        if buffer_pair[0].numel() >= partial_bytes and buffer_pair[1].numel() >= arrivals:
            return buffer_pair
        if not owner:
            _outgrown.append(buffer_pair)
        # Geometric growth limits the kept memory to twice the largest request.
        partial_bytes = max(partial_bytes, 2 * buffer_pair[0].numel())
        arrivals = max(arrivals, 2 * buffer_pair[1].numel())
    made = buffers[key] = _allocate(device, partial_bytes, arrivals)
    return made


def renew_scratch() -> None:
    """Forget shared buffers: wrong input may have left counters that are not 0."""
    _outgrown.extend(_shared.values())
    _shared.clear()


def _new_flag(device: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=f"cuda:{device}")


def zeroed_flag(device: int, stream: int) -> Tensor:
    """Return one int64 [1], zeroed on the stream, for this thread's launches until its next call.

    One launch sets it and a later one reads it, with no other thread's work between. A captured
    graph gets its own, as in :func:`scratch`.
    """
    if torch.cuda.is_current_stream_capturing():
        return _new_flag(device)
    flag = _owned.flags.get((device, stream))
    if flag is None:
        with torch.inference_mode(False):  # other modes could not zero an inference tensor
            flag = _owned.flags[device, stream] = _new_flag(device)
        return flag
    return flag.zero_()
