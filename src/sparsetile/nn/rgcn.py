"""Relational graph convolution: one linear map per relation, and the mean of each relation.

    out[t] = root · x[t] + sum over r of mean over s in N_r(t) of W_r · x[s]

The maps come before the sums, so that one product adds the messages of a group of relations, and
only x is kept for the gradient. A maximum comes before its map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsetile.core.checks import reduce_name
from sparsetile.core.errors import type_error, value_error
from sparsetile.nn import arguments
from sparsetile.nn.inputs import read_input
from sparsetile.nn.relations import group_graph, relation_groups

__all__ = ["FastRGCNConv", "RGCNConv"]

# Bytes of the mapped features of all relations that are multiplied at once.
MOST_MAPPED = 2**27


class RGCNConv(nn.Module):
    """Relational convolution with the arguments, state dict and results of PyG's ``RGCNConv``.

    Messages flow from ``edge_index[0]`` to ``edge_index[1]`` with ``flow="source_to_target"``. One
    product adds the messages of several relations, as many as fit 128 MiB of mapped features. Its
    plan is kept while ``edge_index`` and ``edge_type`` live and do not change.

    Parameters
    ----------
    in_channels : int or (int, int)
        Width of x, or the widths of sources and targets. If x is None, the number of nodes.
    out_channels, num_relations : int
    num_bases : int, optional
        Compose the relations' weights of this many bases.
    num_blocks : int, optional
        Number of blocks of the relations' weights, which are block-diagonal then.
    aggr : {"mean", "add", "sum", "max", "min"}
        Over the edges of one relation. Relations are added.
    root_weight : bool
        Whether to add a linear map of the target's features.
    is_sorted : bool
        Accepted for compatibility with PyG.
    bias : bool
    flow : {"source_to_target", "target_to_source"}

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import RGCNConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = RGCNConv(8, 4, num_relations=2)
    >>> conv(torch.randn(3, 8), edge_index, torch.tensor([0, 1, 1, 0])).shape
    torch.Size([3, 4])
    """

    comp: nn.Parameter | None
    root: nn.Parameter | None
    bias: nn.Parameter | None
    _AGGREGATIONS: tuple[str, ...] = ("mean", "add", "sum", "max", "min")

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, num_relations: int,
        num_bases: int | None = None, num_blocks: int | None = None, aggr: str = "mean",
        root_weight: bool = True, is_sorted: bool = False, bias: bool = True, *,
        flow: str = "source_to_target", **others: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._name = type(self).__name__
        arguments.refuse_others(self._name, others)
        if aggr not in self._AGGREGATIONS:
            raise value_error(
                self._name, "aggr", f"one of {', '.join(self._AGGREGATIONS)}", repr(aggr),
                f"Use torch_geometric.nn.{self._name} for other aggregations",
            )  # fmt: skip
        if num_bases is not None and num_blocks is not None:
            raise value_error(
                self._name, "num_blocks", "None with num_bases", num_blocks, "Give one of both"
            )
        self.aggr = reduce_name(self._name, aggr)
        self.in_channels = in_channels
        self._widths = width, of_targets = arguments.width_pair(self._name, in_channels, lazy=False)
        self.out_channels = arguments.channels(self._name, "out_channels", out_channels)
        self.num_relations = arguments.channels(self._name, "num_relations", num_relations)
        self.num_bases, self.num_blocks = num_bases, num_blocks
        self.is_sorted = is_sorted
        self.flow = arguments.flow_name(self._name, flow)
        shape: tuple[int, ...] = (num_relations, width, out_channels)
        if num_bases is not None:
            shape = (arguments.channels(self._name, "num_bases", num_bases), width, out_channels)
        elif num_blocks is not None:
            blocks = arguments.channels(self._name, "num_blocks", num_blocks)
            if width % blocks or out_channels % blocks:
                raise value_error(
                    self._name, "num_blocks", f"a divisor of {width} and {out_channels}", blocks,
                    "Blocks have the same size",
                )  # fmt: skip
            shape = (num_relations, blocks, width // blocks, out_channels // blocks)
        self.weight = nn.Parameter(torch.empty(shape))
        comp = nn.Parameter(torch.empty(num_relations, num_bases)) if num_bases else None
        self.register_parameter("comp", comp)
        root = nn.Parameter(torch.empty(of_targets, out_channels)) if root_weight else None
        self.register_parameter("root", root)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; the bias becomes 0."""
        for weight in (self.weight, self.comp, self.root):
            if weight is not None:
                arguments.glorot(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor | tuple[Tensor | None, Tensor] | None, edge_index: Any,
        edge_type: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the new features of the targets.

        Parameters
        ----------
        x : Tensor [nodes, in_channels], or a pair of those for sources and targets, or None
            A tensor of int64 [nodes] has the row of the weights of each node. None: all rows.
        edge_index : Tensor of int64 [2, E], EdgeIndex or Data
        edge_type : Tensor of int64 [E]
            Relation of each edge. ``Data`` has its own.

        Returns
        -------
        Tensor [targets, out_channels]
        """
        sources, targets = self._nodes(x)
        if edge_type is None and type(edge_index) is not Tensor:
            edge_type = getattr(edge_index, "edge_type", None)
        given = read_input(self._name, edge_index, None, self.flow).without_weight()
        if given.kind != "edges":
            raise type_error(
                self._name, "edge_index", "edges with their types", f"a {given.kind}",
                "Pass edge_index [2, E] and edge_type [E]",
            )  # fmt: skip
        if edge_type is None:
            raise type_error(
                self._name, "edge_type", "a tensor", "None", "Give the relation of each edge"
            )
        if given.pattern.device != targets.device:
            raise value_error(
                self._name, "edge_index", f"on {targets.device} like x", given.pattern.device,
                f"Move it with .to({str(targets.device)!r})",
            )  # fmt: skip
        size = (self._widths[0] if sources is None else sources.shape[0], targets.shape[0])
        if given.size[0] not in (None, size[0]) or given.size[1] not in (None, size[1]):
            raise value_error(
                self._name, "x", f"of {given.size[0]} source and {given.size[1]} target nodes",
                f"{size[0]} and {size[1]}", "Give one row of x per node",
            )  # fmt: skip
        weight = self._weight()
        limit = MOST_MAPPED // max(size[0] * self.out_channels * weight.element_size(), 1)
        count = min(max(limit, 1), self.num_relations)
        of_rows = self.aggr in ("max", "min")
        groups = relation_groups(
            self._name, given, edge_index, edge_type, self.num_relations, size,
            self.flow == "source_to_target", count, of_rows,
        )  # fmt: skip
        out: Tensor | None = None
        for group in groups:
            chosen = weight[group.first : group.first + group.count]
            graph, values = group_graph(self._name, group, size, self.aggr)
            if of_rows:
                if sources is None or not sources.is_floating_point():
                    raise type_error(
                        self._name, "x", f"features with aggr={self.aggr!r}", "numbers of nodes",
                        "Use aggr='mean' or 'sum'",
                    )  # fmt: skip
                reduced = graph.aggregate(sources, reduce=self.aggr)
                part = self._mapped_sums(reduced.view(size[1], group.count, -1), chosen)
            else:
                part = graph.aggregate(self._mapped(sources, chosen), values)
            out = part if out is None else out + part
        if self.root is not None:
            own = targets @ self.root if targets.is_floating_point() else self.root[targets]
            out = own if out is None else out + own
        if out is None:
            out = weight.new_zeros(size[1], self.out_channels)
        return out if self.bias is None else out + self.bias

    def _nodes(self, x: Any) -> tuple[Tensor | None, Tensor]:
        """Return the features or numbers of sources, None for all numbers, and of targets."""
        sources, targets = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, x)
        pair = isinstance(x, (tuple, list))
        if pair and self.flow != "source_to_target":
            raise value_error(
                self._name, "flow", "'source_to_target' with a pair of features", repr(self.flow),
                "Swap the rows of edge_index with .flip(0)",
            )  # fmt: skip
        for nodes, width in ((sources, self._widths[0]), (targets, self._widths[1])):
            if nodes is None:
                continue
            if not isinstance(nodes, Tensor):
                raise type_error(
                    self._name, "x", "a tensor, a pair of tensors, or None", type(nodes).__name__,
                    "Pass x, or (x_sources, x_targets)",
                )  # fmt: skip
            if nodes.dtype in (torch.int32, torch.int64) and nodes.dim() == 1:
                if self.num_blocks is not None:
                    raise value_error(
                        self._name, "x", "features with num_blocks", "numbers of nodes",
                        "Give features, or use num_bases",
                    )  # fmt: skip
                continue
            arguments.features(self._name, "x", nodes, width)
            if nodes.dim() != 2:
                raise value_error(
                    self._name, "x", f"of shape [nodes, {width}]", tuple(nodes.shape),
                    "Call the layer once for each matrix of features",
                )  # fmt: skip
        if targets is None:
            targets = torch.arange(self._widths[0], device=self.weight.device)
        if sources is None and self.num_blocks is not None:
            raise value_error(
                self._name, "x", "features with num_blocks", "None",
                "Give features, or use num_bases",
            )  # fmt: skip
        return sources, targets

    def _weight(self) -> Tensor:
        """Return the weights of all relations, composed of the bases if there are any."""
        if self.comp is None:
            return self.weight
        composed = self.comp @ self.weight.flatten(1)
        return composed.view(self.num_relations, *self.weight.shape[1:])

    def _mapped(self, x: Tensor | None, weight: Tensor) -> Tensor:
        """Return each relation's map of x, [nodes · relations, out_channels], relations inside."""
        if x is None:
            mapped = weight.transpose(0, 1)
        elif not x.is_floating_point():
            mapped = weight.index_select(1, x).transpose(0, 1)
        elif self.num_blocks is None:
            mapped = x @ weight.transpose(0, 1).flatten(1)
        else:
            by_block = weight.permute(1, 2, 0, 3).flatten(2)
            blocks = x.unflatten(-1, (self.num_blocks, -1)).transpose(0, 1)
            parts = torch.bmm(blocks, by_block).unflatten(-1, (weight.shape[0], -1))
            mapped = parts.permute(1, 2, 0, 3)
        return mapped.reshape(-1, self.out_channels)

    def _mapped_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum over relations of the maps of x [nodes, relations, in_channels]."""
        if self.num_blocks is None:
            return x.flatten(1) @ weight.flatten(0, 1)
        blocks = x.unflatten(-1, (self.num_blocks, -1)).permute(2, 0, 1, 3).flatten(2)
        parts = torch.bmm(blocks, weight.transpose(0, 1).flatten(1, 2))
        return parts.transpose(0, 1).flatten(1)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"


class FastRGCNConv(RGCNConv):
    """:class:`RGCNConv` with the arguments of PyG's ``FastRGCNConv``, which has no maximum.

    Here both run the same code.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import FastRGCNConv
    >>> edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])  # sources, targets
    >>> conv = FastRGCNConv(8, 4, num_relations=2, num_bases=1)
    >>> conv(torch.randn(3, 8), edge_index, torch.tensor([0, 1, 1, 0])).shape
    torch.Size([3, 4])
    """

    _AGGREGATIONS = ("mean", "add", "sum")
