"""NumPy's and cupy's arrays as operands: results come back as the same kind."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["array_like", "as_operand", "is_array"]


def is_array(B: Any) -> bool:
    """Whether B is an array of NumPy or cupy."""
    return isinstance(B, np.ndarray) or type(B).__module__.partition(".")[0] == "cupy"


def as_operand(B: Any, device: torch.device) -> Tensor:
    """Return an array as a tensor on a plan's device; its memory, if that is there."""
    if not isinstance(B, np.ndarray):
        return torch.from_dlpack(B)  # on another GPU than the plan's, it is refused like a tensor
    if any(stride < 0 for stride in B.strides) or not B.flags.writeable:
        B = B.copy()  # torch has no such tensors
    return torch.from_numpy(B).to(device)


def array_like(C: Tensor, B: Any) -> Any:
    """Return a result as an array of B's kind."""
    C = C.detach()
    if isinstance(B, np.ndarray):
        return C.cpu().numpy()
    return importlib.import_module("cupy").from_dlpack(C)
