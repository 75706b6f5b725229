"""Sampled graphs of mini-batches on a CPU: products directly on their edges, without a plan.

A sampled graph is multiplied two or three times, so canonical form and planning do not pay. Sums
and means use the edges by target, in the given order, and sort them by source only for a gradient.
So does the convolution of :class:`sparsetile.nn.GCNConv`, which scales by node. Everything else
(weights, max, min, transforms of torch.func) uses :class:`Graph`. On a GPU these are fresh graphs
(``nn/fresh.py``).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.intake import CSR
from sparsetile.intake.canonical import Names, from_coordinates, row_pointers
from sparsetile.intake.csr import VALUE_DTYPES
from sparsetile.launch.interface import Epilogue
from sparsetile.nn.graph import SHORT_LIVED_CALLS, Graph, Weights, building
from sparsetile.plan.eager import apply_of
from sparsetile.plan.modes import maybe_wrapped, plain_call
from sparsetile.plan.traced.gradients import mean_gradient, relu_gradient
from sparsetile.reorder import Permutation
from sparsetile.systems import runner
from sparsetile.systems.registry import exact_system

__all__ = [
    "SampledGraph", "edge_names", "make_sampled", "of_canonical", "takes_sampled", "unwatched",
]  # fmt: skip

# Devices that support sampled graphs.
SAMPLED_DEVICES = ("cpu",)
# Edges and nodes are counted in 32 bits.
MAX_COUNT = 2**31 - 2**10


class HostRows:
    """A[row, column]: columns are in any order and may repeat (parallel edges).

    Built at the first product.
    """

    def __init__(
        self, csr: CSR, *, origin: HostRows | None = None, given_as: Tensor | None = None
    ) -> None:
        self.csr, self.shape, self.given_as = csr, csr.shape, given_as
        self._built: BuiltSystem | None = None
        self._has_loops: bool | None = None
        self._transposed: HostRows | None = None
        # Weak, so that no reference cycle delays freeing the memory.
        self._origin = None if origin is None else weakref.ref(origin)

    @classmethod
    def of_edges(
        cls, edge_index: Tensor, by_target: bool, shape: tuple[int, int]
    ) -> HostRows | None:
        """Return edges as entries of rows; None if one names no row or column."""
        rows, columns = edge_index.unbind(0)[:: -1 if by_target else 1]
        low, high = torch.aminmax(edge_index, dim=1)
        ascending = (rows[1:] >= rows[:-1]).all()
        facts = torch.stack([low.amin(), high[0], high[1], ascending.long()]).tolist()
        least, *last, in_order = facts
        last_row, last_column = last[::-1] if by_target else last
        if least < 0 or last_row >= shape[0] or last_column >= shape[1]:
            return None
        order = None
        if not in_order:
            rows, order = torch.sort(rows, stable=True)
            columns = columns[order]
        csr = CSR(row_pointers(rows, shape[0]), columns.to(torch.int32), None, shape)
        return cls(csr, given_as=order)

    @property
    def has_loops(self) -> bool:
        """Whether a row has its own column."""
        if self._has_loops is None:
            self._has_loops = bool((self.csr.row_ids() == self.csr.indices).any())
        return self._has_loops

    def row_lengths(self) -> Tensor:
        """Entries of each row."""
        return self.csr.row_lengths()

    def multiply(
        self, x: Tensor, scaled: str = "", bias: Tensor | None = None, relu: bool = False
    ) -> Tensor:
        """Return relu(A·x + bias).

        ``scaled="rows"``: each row of A is divided by its entries: means. ``"columns"``: each
        column is divided by the entries of that row of the transpose.
        """
        if scaled == "columns":
            x = mean_gradient(self.transposed.csr.indptr, x)
        if self._built is None:
            request = Request(self.csr, x.shape[1], x.dtype, Permutation("identity", None))
            self._built = exact_system(x.device.type).build(request)
        work = runner(self._built.recipe)
        out = work.new_output(x, x.dtype)
        epilogue = Epilogue(mean=scaled == "rows", bias=bias, relu=relu)
        work.spmm(self._built.tensors, None, None, x.contiguous(), out, epilogue)
        return out

    @property
    def transposed(self) -> HostRows:
        """The transpose, made at first use."""
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return origin
        if self._transposed is None:
            with unwatched():
                self._transposed = HostRows(self.csr.transposed(), origin=self)
        return self._transposed


_Call: TypeAlias = tuple[HostRows, str, bool]  # what is scaled, and whether ReLU follows
_TRANSPOSED = {"": "", "rows": "columns", "columns": "rows"}


def _forward(x: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
    rows, scaled, relu = call
    if bias is not None:
        bias = bias.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    return rows.multiply(x.resolve_neg(), scaled, bias, relu)


class _Product(torch.autograd.Function):
    """relu(A·x + bias), with rows or columns of A scaled, and its gradients for x and the bias.

    Non-tensor arguments are one tuple, because autograd processes each argument.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, call: _Call) -> Tensor:  # type: ignore[override]
        ctx.call = call
        out = _forward(x, bias, call)
        if call[2]:
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, scaled, relu = ctx.call
        if relu:
            grad = relu_gradient(ctx.saved_tensors[0], grad)
        for_x, for_bias, *_ = ctx.needs_input_grad
        d_x = d_bias = None
        if for_bias:
            d_bias = grad.sum(0, dtype=torch.float32 if grad.dtype.itemsize == 2 else None)
        if for_x:
            opposite = rows.transposed, _TRANSPOSED[scaled], False
            if torch.is_grad_enabled():  # a gradient of the gradient may be wanted
                d_x = _Product.apply(grad, None, opposite)
            else:
                d_x = opposite[0].multiply(grad.resolve_neg(), opposite[1])
        return d_x, d_bias, None


_apply = apply_of(_Product)


def _cast(x: Tensor) -> Tensor:
    """The features in autocast's type, if it is on."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


class SampledGraph(Graph):
    """A short-lived graph of edges by target; see the module's docstring.

    Only for sums, means, maxima and minima over its edges: use :attr:`canonical` for all else.
    Errors begin with ``layer``.
    """

    has_pairs = False

    def __init__(self, rows: HostRows, layer: str) -> None:
        # Only what callers read: a sampled graph is made at every step.
        self.short_lived, self.planned, self.weighted, self.calls = True, None, False, 0
        self.multiplicity, self.loops = None, "keep"
        self._by_target = rows
        self._layer = layer
        self._scales: dict[torch.dtype, Tensor] = {}  # of convolve
        self._canonical: Graph | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self._by_target.shape

    @property
    def has_loops(self) -> bool:
        """Whether an edge leads from a node to itself."""
        return self._by_target.has_loops

    @property
    def canonical(self) -> Graph:
        """The same graph in canonical form, made at first use."""
        if self._canonical is None:
            with building(self._by_target.csr.device, self._layer):
                csr, given_as = self._by_target.csr, self._by_target.given_as
                target, source = csr.row_ids(), csr.indices.long()
                if given_as is not None:
                    back = torch.argsort(given_as)
                    target, source = target[back], source[back]
                names = Names("forward", rows="targets", columns="sources")
                csr = from_coordinates(names, target, source, None, self.shape)
            self._canonical = Graph(csr, short_lived=True)
        self._canonical.calls = self.calls  # decides when it gets its own plans
        return self._canonical

    def aggregate(
        self, x: Tensor, weights: Weights | None = None, *, reduce: str = "sum",
        bias: Tensor | None = None, relu: bool = False,
    ) -> Tensor:  # fmt: skip
        if weights is None and reduce in ("sum", "mean") and self._takes(x):
            scaled = "rows" if reduce == "mean" else ""
            return self._multiply(_cast(x), scaled, bias, relu)
        weights, reduce = of_canonical(self.canonical, weights, reduce)
        return self.canonical.aggregate(x, weights, reduce=reduce, bias=bias, relu=relu)

    def _multiply(self, x: Tensor, scaled: str, bias: Tensor | None, relu: bool) -> Tensor:
        call = self._by_target, scaled, relu
        if not x.requires_grad and bias is None:  # such as the first layer's: no autograd node
            return _forward(x, None, call)
        wraps = maybe_wrapped(x) or (bias is not None and maybe_wrapped(bias))
        apply = _Product.apply if wraps else _apply
        return apply(x, bias, call)  # type: ignore[no-any-return]

    def gradient(
        self, grad: Tensor, weights: Weights | None = None, *, reduce: str = "sum"
    ) -> Tensor:
        if weights is None and reduce in ("sum", "mean") and self._takes(grad):
            scaled = "columns" if reduce == "mean" else ""
            return self._by_target.transposed.multiply(grad.resolve_neg(), scaled)
        weights, reduce = of_canonical(self.canonical, weights, reduce)
        return self.canonical.gradient(grad, weights, reduce=reduce)

    def convolve(
        self, x: Tensor, bias: Tensor | None, relu: bool, transposed: bool = False
    ) -> Tensor | None:
        """Return relu(D^-1/2 (A + I) D^-1/2 x + bias), or with the transpose of A; None if the
        canonical graph must compute it.

        D counts the edges of a target and its added self-loop. Graphs that have self-loops are left
        to the canonical graph.
        """
        if not self._takes(x):
            return None
        with unwatched():
            if self._by_target.has_loops:
                return None
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            scale = self._scales.get(wide)
            if scale is None:
                lengths = self._by_target.row_lengths().to(wide)
                scale = self._scales[wide] = lengths.add_(1).rsqrt_().unsqueeze(-1)
        x = _cast(x)
        inner = x * scale  # in float32 at least
        if transposed:
            product = self._by_target.transposed.multiply(inner.to(x.dtype), "")
        else:
            product = self._multiply(inner.to(x.dtype), "", None, False)
        out = product + inner
        out = out * scale if bias is None else torch.addcmul(bias.to(wide), out, scale)
        out = out.to(x.dtype)
        return out.relu() if relu else out

    def _takes(self, x: Tensor) -> bool:
        return (
            self.calls <= SHORT_LIVED_CALLS
            and type(x) in (Tensor, torch.nn.Parameter)
            and x.dim() == 2
            and x.layout is torch.strided
            and x.dtype in VALUE_DTYPES
            and plain_call()
        )


def of_canonical(
    canonical: Graph, weights: Weights | None, reduce: str
) -> tuple[Weights | None, str]:
    """Return values and reduction of entries that reduce over edges."""
    if weights is None and canonical.multiplicity is not None:
        if reduce == "sum":
            weights = Weights("multiplicity", canonical.multiplicity)
        elif reduce == "mean":
            reduce, weights = "sum", canonical.mean_weights()
    return weights, reduce


def edge_names(layer: str, by_target: bool) -> Names:
    """Return what errors call rows and columns of A."""
    target = int(by_target)
    return Names(layer, rows=f"edge_index[{target}]", columns=f"edge_index[{1 - target}]")


def takes_sampled(device: torch.device) -> bool:
    """Whether a device supports sampled graphs."""
    return device.type in SAMPLED_DEVICES


def make_sampled(
    layer: str, edge_index: Tensor, by_target: bool, shape: tuple[int, int]
) -> SampledGraph | None:
    """Return a sampled graph; None on other devices, without edges, or if an edge names no node
    (the canonical form raises the error).

    Targets are in ``edge_index[by_target]``. Errors begin with ``layer``.
    """
    count = edge_index.shape[1]
    if not takes_sampled(edge_index.device) or not count or max(count, *shape) >= MAX_COUNT:
        return None
    with unwatched():
        rows = HostRows.of_edges(edge_index.long(), by_target, shape)
    return None if rows is None else SampledGraph(rows, layer)


_UNCHANGED = contextlib.nullcontext()


def unwatched() -> contextlib.AbstractContextManager[object]:
    """Leave inference mode, so that later calls may save tensors for gradients. Entering a mode
    costs as much as a launch, so none is entered unless needed."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _UNCHANGED
