"""PruneSchedule: prunes a model step by step while it trains.

The cubic curve is that of Zhu and Gupta (2017): sparsity rises fast while much can be spared, and
slowly at the end. ``prune_`` of the layers keeps parameters and optimiser state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsetile.core.checks import dimension, one_of
from sparsetile.core.errors import value_error
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.kept import kept_in_each
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.pruning import kept_count, sparsity_share
from sparsetile.nn.replacement import names_of

__all__ = ["PruneSchedule"]

_POWERS = {"cubic": 3, "linear": 1}


class PruneSchedule:
    """Prunes the sparse layers of a model gradually; call ``step()`` after each optimiser step.

    Start with ``sparsify_(model, SparseConfig(sparsity=0.0))`` and make the optimiser after it. 2:4
    layers stay as they are.

    Parameters
    ----------
    model : torch.nn.Module
    sparsity : float or mapping
        Share to drop in the end, of each layer or of all together; or layer name -> share, for
        those layers alone.
    steps : int
        Steps after which it is reached.
    start : float
        Share at the first pruning.
    first : int
        Steps before the first pruning.
    every : int
        Steps from one pruning to the next.
    curve : {"cubic", "linear"}
    scope : {"layer", "model"}
        ``"model"`` compares the blocks or weights of all layers, so layers end with different
        shares. They must be of one kind: blocks of one size, or single weights.
    optimizer : torch.optim.Optimizer, optional
        Passed to ``prune_``; see there.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import PruneSchedule, SparseConfig, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    >>> model = sparsify_(model, SparseConfig(0.0, pattern="unstructured"))
    >>> schedule = PruneSchedule(model, 0.8, steps=4, every=2)
    >>> [round(schedule.step(), 3) for _ in range(5)]
    [0.0, 0.7, 0.7, 0.8, 0.8]
    >>> round(model[0].sparsity, 3)
    0.8
    """

    def __init__(
        self, model: nn.Module, sparsity: float | Mapping[str, float] = 0.9, *, steps: int,
        start: float = 0.0, first: int = 0, every: int = 100, curve: str = "cubic",
        scope: str = "layer", optimizer: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        name = "PruneSchedule"
        self.steps, self.first = dimension(name, "steps", steps), dimension(name, "first", first)
        self.every, self.start = dimension(name, "every", every), sparsity_share(name, start)
        self._power = _POWERS[one_of(name, "curve", curve, _POWERS)]
        self.scope = one_of(name, "scope", scope, ("layer", "model"))
        if not self.first < self.steps or not self.every:
            raise value_error(
                name, "steps", "above first, with every at least 1",
                f"steps={steps}, first={first}, every={every}", "Pass for example steps=1000",
            )  # fmt: skip
        self._optimizer, self.done = optimizer, 0
        layers = {
            given[0]: layer
            for layer, given in names_of(model).items()
            if isinstance(layer, (SparseLinear, MaskedLinear))
            and getattr(layer, "pattern", None) != "2:4"
        }
        self._ends = self._checked(layers, sparsity)
        self._layers = {layer: layers[layer] for layer in self._ends}

    def _checked(
        self, layers: Mapping[str, nn.Module], sparsity: float | Mapping[str, float]
    ) -> dict[str, float]:
        """The final share of each layer."""
        name = "PruneSchedule"
        if not layers:
            raise value_error(
                name, "model", "one with layers that sparsify_ pruned, other than 2:4", "none",
                "Call sparsify_(model, SparseConfig(sparsity=0.0)) first",
            )  # fmt: skip
        if not isinstance(sparsity, Mapping):
            share = sparsity_share(name, sparsity)
            if self.scope == "model" and len({_unit(layer) for layer in layers.values()}) > 1:
                raise value_error(
                    name, "scope", '"layer" for layers of several kinds',
                    '"model" for blocks of several sizes or blocks and weights',
                    'Pass scope="layer"',
                )  # fmt: skip
            return dict.fromkeys(layers, share)
        unknown = [given for given in sparsity if given not in layers]
        if unknown or self.scope == "model":
            raise value_error(
                name, "sparsity", 'names of sparse layers, with scope="layer"',
                repr(unknown[0]) if unknown else 'scope="model"',
                f"The layers are {', '.join([*layers][:8])}",
            )  # fmt: skip
        return {given: sparsity_share(name, share) for given, share in sparsity.items()}

    def share_at(self, step: int, end: float) -> float:
        """Return the share that is dropped after a number of steps, if it ends at ``end``.

        Examples
        --------
        >>> import torch
        >>> from sparsetile.nn import PruneSchedule, sparsify_
        >>> model = sparsify_(torch.nn.Sequential(torch.nn.Linear(128, 128)))
        >>> PruneSchedule(model, 0.8, steps=1000).share_at(500, 0.8)
        0.7
        """
        passed = min(max(step - self.first, 0) / (self.steps - self.first), 1.0)
        share = end + (self.start - end) * (1.0 - passed) ** self._power
        return min(max(share, 0.0), max(end, self.start))

    def step(self) -> float:
        """Count a step, prune if it is time, and return the mean share of the schedule."""
        self.done += 1
        last = min(self.done, self.steps)
        due = last if last == self.steps else last - (last - self.first) % self.every
        if due < self.first or due <= 0:
            return 0.0
        shares = {name: self.share_at(due, end) for name, end in self._ends.items()}
        if due == self.done:
            self._prune(shares)
        return sum(shares.values()) / len(shares)

    @torch.no_grad()
    def _prune(self, shares: dict[str, float]) -> None:
        if self.scope == "model":
            layers = [*self._layers.values()]
            total = sum(_count(layer) for layer in layers)
            wanted = kept_count(total, next(iter(shares.values())))
            kept = kept_in_each(_scores, layers, wanted)
            shares = {
                name: max(1.0 - max(kept[layer], 1) / _count(layer), 0.0)
                for name, layer in self._layers.items()
            }
        for name, layer in self._layers.items():
            layer.prune_(shares[name], self._optimizer)  # type: ignore[operator]


def _unit(layer: nn.Module) -> int:
    """Rows of a block; 1 for single weights."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1] if isinstance(layer, SparseLinear) else 1


def _count(layer: nn.Module) -> int:
    """Blocks or weights of a layer, kept and dropped."""
    assert isinstance(layer, (SparseLinear, MaskedLinear))
    if isinstance(layer, SparseLinear):
        rows, cols = layer.pattern.grid
        return rows * cols
    return layer.in_features * layer.out_features


def _scores(layer: nn.Module) -> Tensor:
    """What each kept block or weight is worth."""
    assert isinstance(layer, KeepsDense)
    weight = layer.weight.detach().float()
    return weight.square().sum((1, 2)) if weight.dim() == 3 else weight.abs()
