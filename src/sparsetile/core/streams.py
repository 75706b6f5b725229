"""Rules for memory that several CUDA streams read.

torch orders work only within a stream. Work that builds something to keep therefore ends with a
host synchronisation (:func:`settle`): other streams and threads then need no event, and a capturing
stream could not wait for one. A capture cannot include such a wait, so nothing is built during a
capture (:func:`refuse_capture`).

torch's allocator reuses freed memory on the stream that it was allocated on. Code that launches a
kernel on another stream informs the allocator (:func:`record_stream`), once for each stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsetile.core.errors import value_error

__all__ = ["capturing", "record_stream", "refuse_capture", "settle"]


def capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def settle(device: torch.device) -> None:
    """Wait for the current stream; afterwards all streams may read the results."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def refuse_capture(function: str, device: torch.device, remedy: str) -> None:
    """Raise if a CUDA graph is being captured: it cannot include what is about to be built."""
    if capturing(device):
        raise value_error(
            function, "the call", "outside of a CUDA graph's capture when something is built",
            "a capture", remedy,
        )  # fmt: skip


def record_stream(tensors: Iterable[Tensor | None], device: torch.device | int | None) -> None:
    """Keep the tensors' memory from being reused until the current stream has read it."""
    stream = torch.cuda.current_stream(device)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)
