"""GraphSAGE: W_l · (mean, max, ... of the neighbours) + W_r · x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.core.errors import value_error
from sparsetile.nn.hooks import is_plain_linear
from sparsetile.nn.lazy import linear
from sparsetile.nn.sampled import SampledGraph
from sparsetile.nn.two_maps import Call, TwoMaps, map_both

__all__ = ["SAGEConv"]

# Largest concatenation, in bytes, for which two linear maps are computed as one.
MOST_JOINED = 2**26


class SAGEConv(TwoMaps):
    """GraphSAGE with the arguments, state dict and results of PyG's ``SAGEConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``, so
    the layer multiplies by A[target, source]. It plans the graph once and keeps the plan while
    ``edge_index`` lives and does not change.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets; -1: that of the first x.
    out_channels : int
    aggr : {"mean", "max", "min", "sum"}
        Each parallel edge counts, as in PyG.
    normalize : bool
        Scale each row of the result to length 1.
    root_weight : bool
        Whether to add W_r · x of the target.
    project : bool
        Whether to map x by a linear layer and ReLU first. Needs the width of the sources.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SAGEConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = SAGEConv(8, 4, aggr="max")
    >>> conv(torch.randn(3, 8), edge_index).shape
    torch.Size([3, 4])
    """

    _name = "SAGEConv"

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, aggr: str = "mean",
        normalize: bool = False, root_weight: bool = True, project: bool = False, bias: bool = True,
        *, flow: str = "source_to_target", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_channels, out_channels, aggr, flow, others)
        wide, of_targets = self._widths
        if project and wide == -1:
            raise value_error(
                "SAGEConv", "in_channels", "at least 1 with project", wide, "Give the width of x"
            )
        self.normalize = normalize
        self.root_weight = root_weight
        self.project = project
        if project:
            self.lin = linear(wide, wide, True, uniform=True)
        self.lin_l = linear(wide, out_channels, bias, uniform=True)
        if root_weight:
            self.lin_r = linear(of_targets, out_channels, uniform=True)
        self.reset_parameters()  # PyG draws twice, too: the same seed gives the same weights

    def forward(
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Any,
        size: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [..., nodes, in_channels], or a pair of those for sources and targets
            The second of a pair may be None. Then ``size`` or the graph gives the number of
            targets; if neither does, there are as many as sources, as in PyG.
        edge_index : Tensor of int64 [2, E], EdgeIndex, Data, sparse tensor or Plan
            A sparse tensor is PyG's ``adj_t[target, source]``; its values scale the messages, as in
            PyG. Weights of ``Data`` are not used.
        size : (sources, targets), optional

        Returns
        -------
        Tensor [..., targets, out_channels]
        """
        of_targets = self.lin_r if self.root_weight else None
        call = self._read(x, edge_index, None, size, self.lin_l, of_targets, weighted=False)
        if self.project:
            call = call._replace(sources=self.lin(call.sources).relu())
        if call.targets is not None and self._joins(call, call.targets):
            reduced = call.graph.aggregate(call.sources, reduce=call.reduce)
            out = self._joined(reduced, call.targets)
        else:
            out = map_both(call, self.lin_l, of_targets)
        if not self.normalize:
            return out
        # torch divides by at least 1e-12, which is 0 in float16: rows of zeros would be NaN.
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        return functional.normalize(wide, p=2.0, dim=-1).to(out.dtype)

    def _joins(self, call: Call, targets: Tensor) -> bool:
        """Whether both linear maps are computed as one: on short-lived graphs."""
        sources, numbers = call.sources, targets.shape[-1] + call.sources.shape[-1]
        return (
            isinstance(call.graph, SampledGraph)
            and self.aggr in ("sum", "mean")
            and self.root_weight
            and targets.dim() == sources.dim() == 2
            and targets.dtype is sources.dtype
            and targets.shape[0] * numbers * targets.element_size() <= MOST_JOINED
            and is_plain_linear(self.lin_l)
            and is_plain_linear(self.lin_r)
        )

    def _joined(self, reduced: Tensor, targets: Tensor) -> Tensor:
        """Both linear maps as one.

        The host's launches take longer than the GPU's work on a sampled graph; this needs fewer.
        Means come first, because a sampled graph has many more sources than targets.
        """
        weight = torch.cat([self.lin_l.weight, self.lin_r.weight], 1)
        return functional.linear(torch.cat([reduced, targets], 1), weight, self.lin_l.bias)
