"""Protocols of objects that later packages make and earlier ones use."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["SharedPlan"]


@runtime_checkable
class SharedPlan(Protocol):
    """A plan whose rows are spread over processes (``sparsetile.dist``), as layers use it."""

    # (int, int): rows of C that this process computes, and rows of B that it holds.
    local_shape: tuple[int, int]
    device: torch.device
    _csr: Any

    def permute(self, B: Tensor) -> Tensor:
        """Return B as :meth:`run` takes it."""
        ...

    def run(
        self, B: Tensor, *, reduce: str = ..., values: Tensor | None = ...,
        bias: Tensor | None = ..., relu: bool = ...,
    ) -> Tensor:  # fmt: skip
        """Return this process's rows of the product."""
        ...
