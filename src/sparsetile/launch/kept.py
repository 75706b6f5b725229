"""What was prepared for operands of one kind, found again by shape, strides and alignment.

One cache for products, layers, dense products and gradients of epilogues. Serving meets any number
of tokens, so a cache is bounded.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = ["MOST_KINDS", "KeptLaunches", "Kind", "kind_of"]

# Kinds of which launches are kept; each takes some kilobytes.
MOST_KINDS = 256

Kind: TypeAlias = tuple[torch.Size, tuple[int, ...], int]
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


def kind_of(tensor: Tensor, pointer: int) -> Kind:
    """Return what launches depend on: shape, strides, and the address's place in 16 bytes."""
    return tensor.shape, tensor.stride(), pointer & 15  # a part of either takes longer to read


class KeptLaunches(dict[_Key, _Made]):
    """Launches, or what else was prepared, by kind."""

    def keep(self, key: _Key, made: _Made) -> _Made:
        """Keep one more; all begin anew when there are too many."""
        if len(self) >= MOST_KINDS:
            self.clear()  # in one step: another thread may be looking
        self[key] = made
        return made
