"""Some rows of a dense matrix by ``gather_rows``, at about the rate of a copy."""

from __future__ import annotations

from torch import Tensor

from sparsetile.jit.loader import current_stream_handle, ensure_cuda_context, on_device
from sparsetile.kernels.gather import (
    GATHER_ROWS,
    GATHER_THREADS,
    WORD,
    gather_config,
    gather_grid,
)

__all__ = ["gather_rows", "gathers"]


def gathers(B: Tensor, out: Tensor) -> bool:
    """Whether :func:`gather_rows` takes these matrices: rows of whole, aligned words."""
    size = B.element_size()
    parts = (
        B.data_ptr(), out.data_ptr(), B.stride(0) * size, out.stride(0) * size, B.shape[1] * size
    )  # fmt: skip
    unit = B.shape[1] < 2 or (B.stride(1) == 1 and out.stride(1) == 1)
    return B.is_cuda and unit and not any(each % WORD for each in parts)


def gather_rows(B: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write ``B[rows]`` into ``out``; see :func:`gathers`. ``rows`` are int32, contiguous, on B's
    device, each from 0 to K - 1.
    """
    size, device = B.element_size(), B.device.index
    words = B.shape[1] * size // WORD
    if rows.numel() == 0 or words == 0:
        return
    with on_device(device):
        ensure_cuda_context(device)
        kernel = GATHER_ROWS.load(gather_config(words), device)
        kernel.launch(
            gather_grid(rows.numel()), GATHER_THREADS, current_stream_handle(device),
            {
                "b": B.data_ptr(), "to": out.data_ptr(), "rows": rows.data_ptr(),
                "b_row_bytes": B.stride(0) * size, "to_row_bytes": out.stride(0) * size,
                "count": rows.numel(), "words": words,
            },
        )  # fmt: skip
