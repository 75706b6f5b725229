"""What is built once may be read on any stream, from the moment it is returned.

torch orders work within a stream only. Work that builds something that is kept therefore ends with
a wait of the host (:func:`settle`): another stream, or another thread on it, needs no event then,
and a capturing stream could not wait for one. A capture cannot hold such a wait, so nothing is
built while one is under way (:func:`refuse_capture`).
"""

from __future__ import annotations

import torch

from sparsetile.core.errors import value_error

__all__ = ["capturing", "refuse_capture", "settle"]


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def settle(device: torch.device) -> None:
    """Wait until the current stream has done its work: all streams may read the results then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def refuse_capture(function: str, device: torch.device, remedy: str) -> None:
    """Raise if a CUDA graph is being captured, which cannot hold what is about to be built."""
    if capturing(device):
        raise value_error(
            function, "the call", "outside of a CUDA graph's capture when something is built",
            "a capture", remedy,
        )  # fmt: skip
