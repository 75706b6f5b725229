"""Numbers that rise when values may have changed without torch counting it.

torch counts writes to a tensor (``_version``), but fused optimisers write without raising the
count, and so do replays of CUDA graphs. So everything derived from values is kept for one epoch
only. Every optimiser step begins an epoch, through torch's hook for all optimisers;
:func:`changed` begins one by hand.

A step writes only to its own parameters, so :func:`written` asks for one tensor: training a layer
does not make the fixed weights of a graph stale. Parameters are walked only in processes that call
it.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = ["changed", "epoch", "written"]

_MOST_STORAGES = 2**16

_numbers = itertools.count(1)  # next() of it is atomic
_current = 0
_everywhere = 0  # epoch of the last write to an unknown tensor
_watching = False  # whether the storages that a step writes to are recorded
# id of a storage -> epoch of its last step. A new storage may reuse the id of a freed one; it then
# counts as written, so no write is missed.
_steps: dict[int, int] = {}


def epoch() -> int:
    """Return the current epoch. Derived values of an earlier epoch may be stale."""
    return _current


def written(tensor: Tensor) -> int:
    """Return the last epoch in which the tensor's memory may have been written."""
    global _watching, _everywhere
    if not _watching:
        _watching, _everywhere = True, _current
    return max(_everywhere, _steps.get(id(tensor.untyped_storage()), 0))


def changed() -> None:
    """Announce writes to values that torch does not count.

    torch counts writes to a tensor, and sparsetile sees every step of a ``torch.optim`` optimiser,
    fused ones too. Call this after other writes: through ``tensor.data`` or ``tensor.numpy()``, by
    a kernel unknown to torch, or by a replay of a CUDA graph with such writes. Results
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
    global _current, _everywhere
    _current = _everywhere = next(_numbers)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    global _current
    if not _watching or len(_steps) > _MOST_STORAGES:
        _steps.clear()
        changed()
        return
    number = next(_numbers)
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _steps[id(parameter.untyped_storage())] = number
        _current = number
    except (NotImplementedError, RuntimeError):  # a subclass without its own memory
        changed()


register_optimizer_step_post_hook(_after_step)
