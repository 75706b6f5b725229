"""One number that rises when values may have changed without torch counting it.

torch counts writes to a tensor (``_version``), but fused optimisers write without raising the
count, and so do replays of CUDA graphs. Whatever is derived from values and kept between calls is
kept for one epoch. Every optimiser step raises the epoch, through torch's hook for all optimisers;
:func:`changed` raises it by hand.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["changed", "epoch"]

_numbers = itertools.count(1)  # next() of it is atomic
_current = 0


def epoch() -> int:
    """Return the current epoch. Derived values of an earlier epoch may be stale."""
    return _current


def changed() -> None:
    """Announce that values were written in a way that torch does not count.

    torch counts writes to a tensor, and every step of a ``torch.optim`` optimiser is noticed, fused
    ones too. Call this after other writes: through ``tensor.data`` or ``tensor.numpy()``, by a
    kernel that torch does not know, or by a replay of a CUDA graph that holds such writes. Results
    that sparsetile derived from values it was not explicitly given, such as normalised edge weights
    or packed copies, are computed again at their next use. Plans keep the values that
    :func:`sparsetile.plan` and ``update_values`` gave them.

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> edges = torch.tensor([[0, 1], [1, 0]])
    >>> weight, B = torch.ones(2), torch.eye(2)
    >>> C = st.spmm((edges, weight, (2, 2)), B)
    >>> weight.data.fill_(3.0)  # not counted by torch
    tensor([3., 3.])
    >>> st.changed()
    >>> st.spmm((edges, weight, (2, 2)), B)
    tensor([[0., 3.],
            [3., 0.]])
    """
    global _current
    _current = next(_numbers)


def _after_step(*_: Any) -> None:
    changed()


register_optimizer_step_post_hook(_after_step)
