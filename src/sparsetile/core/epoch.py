"""Numbers that rise when values may have changed without torch counting it.

torch counts writes to a tensor (``_version``), but fused optimisers write without raising the
count, and so do replays of CUDA graphs. Whatever is derived from values and kept between calls is
kept for one epoch. Every optimiser step begins one, through torch's hook for all optimisers;
:func:`changed` begins one by hand.

A step writes to its own parameters alone. :func:`written` therefore asks for one tensor: weights of
a graph that are not trained stay as they are while a layer's parameters are. Parameters are only
walked through in processes that ask.
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
_everywhere = 0  # epoch of the last write of which nobody knows where it went
_watching = False  # whether steps are told apart by what they write to
# id of a storage -> epoch of its last step. The id of a freed one may be another's, which then
# counts as written: nothing is missed.
_steps: dict[int, int] = {}


def epoch() -> int:
    """Return the current epoch. Derived values of an earlier epoch may be stale."""
    return _current


def written(tensor: Tensor) -> int:
    """Return the last epoch that may have begun with a write to the tensor's memory."""
    global _watching, _everywhere
    if not _watching:
        _watching, _everywhere = True, _current
    return max(_everywhere, _steps.get(id(tensor.untyped_storage()), 0))


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
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        changed()


register_optimizer_step_post_hook(_after_step)
