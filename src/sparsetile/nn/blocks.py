"""Edges that pass by, multiplied as they come: what sampled blocks need.

The canonical form of a graph sorts its edges and joins parallel ones, and a plan chooses and lists.
A block of a mini-batch is multiplied twice or three times, so that its sums and means take its
edges by target, in the order given, and sort them by source where a gradient asks. Everything else
(weights, max, min, autocast, transforms of torch.func) goes the way of :class:`Graph`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from sparsetile.intake import CSR
from sparsetile.intake.canonical import Names, from_coordinates, row_pointers
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.nn.graph import PASSING_CALLS, Graph, Weights, lasting
from sparsetile.plan.dispatch import plain_call
from sparsetile.plan.operator_gradients import mean_gradient, relu_gradient
from sparsetile.reorder import Permutation
from sparsetile.systems import BuiltSystem, Request, runner
from sparsetile.systems.base import Epilogue
from sparsetile.systems.registry import exact_system

__all__ = ["Block", "make_block"]

# Where blocks are multiplied like this. Not measured on a GPU yet.
_DEVICES = ("cpu",)


class _Rows:
    """A[target, source] by rows: columns in any order, one several times where edges are parallel.

    Built at the first product.
    """

    def __init__(self, csr: CSR, origin: _Rows | None = None) -> None:
        self._csr = csr
        self._built: BuiltSystem | None = None
        self._transposed: _Rows | None = None
        # Not held: a block's memory goes with it at once, and not when cycles are looked for.
        self._origin = None if origin is None else weakref.ref(origin)

    def multiply(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """Return A·x, or the mean of each row's entries, with bias and ReLU."""
        if self._built is None:
            request = Request(self._csr, x.shape[1], x.dtype, Permutation("identity", None))
            self._built = exact_system(x.device.type).build(request)
        work = runner(self._built.recipe)
        out = work.new_output(x, x.dtype)
        work.spmm(self._built.tensors, None, None, x.contiguous(), out, epilogue)
        return out

    @property
    def indptr(self) -> Tensor:
        return self._csr.indptr

    @property
    def transposed(self) -> _Rows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._transposed is None:
            with lasting():
                self._transposed = _Rows(self._csr.transposed(), self)
        return self._transposed


class _Product(torch.autograd.Function):
    """relu(A·x + bias), sums or means, and its gradients for x and the bias."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, bias: Tensor | None, rows: _Rows, mean: bool, relu: bool
    ) -> Tensor:
        ctx.rows, ctx.mean, ctx.relu = rows, mean, relu
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        added = None if bias is None else bias.to(wide)
        out = rows.multiply(x, Epilogue(mean=mean, bias=added, relu=relu))
        if relu:
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.relu:
            (out,) = ctx.saved_tensors
            grad = relu_gradient(out, grad)
        for_x, for_bias, *_ = ctx.needs_input_grad
        wide = torch.float32 if grad.dtype.itemsize == 2 else None
        d_bias = grad.sum(0, dtype=wide) if for_bias else None
        d_x = None
        if for_x:
            if ctx.mean:
                grad = mean_gradient(ctx.rows.indptr, grad)
            d_x = _Product.apply(grad, None, ctx.rows.transposed, False, False)
        return d_x, d_bias, None, None, None


class Block(Graph):
    """A graph that passes by; see the module's text.

    Only for sums, means, maxima and minima over its edges: :attr:`canonical` is the graph for all
    else.

    Parameters
    ----------
    rows : CSR [targets, sources]
        Edges by target.
    order : Tensor of int64 [E] or None
        Number of each entry's edge as it was given; None where they were given by target.
    """

    def __init__(self, rows: CSR, order: Tensor | None) -> None:
        super().__init__(rows, passing=True)
        self._by_target = _Rows(rows)
        self._given_as = order
        self._canonical: Graph | None = None

    @property
    def canonical(self) -> Graph:
        """The same graph in canonical form, made when it is first asked for."""
        if self._canonical is None:
            with lasting():
                target, source = self.csr.row_ids(), self.csr.indices.long()
                if self._given_as is not None:
                    back = torch.argsort(self._given_as)
                    target, source = target[back], source[back]
                names = Names("forward", rows="targets", columns="sources")
                csr = from_coordinates(names, target, source, None, self.shape)
                self._canonical = Graph(csr, passing=True)
        self._canonical.calls = self.calls  # it gets plans of its own after as many
        return self._canonical

    def aggregate(
        self,
        x: Tensor,
        weights: Weights | None = None,
        *,
        reduce: str = "sum",
        bias: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        if weights is None and reduce in ("sum", "mean") and self._takes(x):
            mean = reduce == "mean"
            return _Product.apply(x, bias, self._by_target, mean, relu)  # type: ignore[no-any-return]
        canonical = self.canonical
        if weights is None and canonical.multiplicity is not None:
            if reduce == "sum":
                weights = Weights("multiplicity", canonical.multiplicity)
            elif reduce == "mean":
                reduce, weights = "sum", canonical.mean_weights()
        return canonical.aggregate(x, weights, reduce=reduce, bias=bias, relu=relu)

    def _takes(self, x: Tensor) -> bool:
        return (
            self.calls <= PASSING_CALLS
            and type(x) in (Tensor, torch.nn.Parameter)
            and x.dim() == 2
            and x.layout is torch.strided
            and x.dtype in VALUE_DTYPES
            and not torch.is_autocast_enabled(x.device.type)
            and plain_call()
        )


def make_block(source: Tensor, target: Tensor, shape: tuple[int, int]) -> Block | None:
    """Return the edges by target; None on other devices, and where the canonical form has to say
    what is wrong: without edges, and where an edge names no node.

    Parameters
    ----------
    source, target : Tensor of int64 [E]
    shape : (targets, sources)
    """
    if source.device.type not in _DEVICES or not source.numel():
        return None
    with lasting():
        low, high = torch.aminmax(torch.stack([source, target]), dim=1)
        ascending = (target[1:] >= target[:-1]).all()
        facts = torch.stack([low.amin(), high[0], high[1], ascending.long()]).tolist()
        least, last_source, last_target, by_target = facts
        if least < 0 or last_source >= shape[1] or last_target >= shape[0]:
            return None
        order = None
        if not by_target:
            target, order = torch.sort(target, stable=True)
            source = source[order]
        csr = CSR(row_pointers(target, shape[0]), source.to(torch.int32), None, shape)
        return Block(csr, order)
