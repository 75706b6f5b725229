"""Counts writes into ``out=`` as torch counts its own: caches trust the count (``_version``).

torch counts writes of its own operators, and of those made by ``torch.library.custom_op``, by a
kernel for the dispatch key ADInplaceOrView. Operators that are defined by hand have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsetile.plan import operators as operators  # defines them

__all__ = ["count_writes"]

_LIB = torch.library.Library("sparsetile", "IMPL")


def count_writes(name: str, position: int) -> None:
    """Let an operator count a write to the argument at ``position``."""
    operator = getattr(torch.ops.sparsetile, name).default

    def counted(keys: Any, *args: Any) -> Any:
        out = args[position]
        if isinstance(out, Tensor) and not out.is_inference():
            increment_version(out)
        return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args)

    _LIB.impl(name, counted, "ADInplaceOrView", with_keyset=True)


count_writes("spmm_out", 4)
