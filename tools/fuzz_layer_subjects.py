"""The graph layers of ``tools.fuzz_layers``, each with its call and the same in float64 torch.

A reference takes tensors by name (x, weight, and the module's parameters) and is differentiable. On
absolute values it gives the magnitude that bounds rounding errors: every layer consists of sums and
products, and ReLU and maxima do not increase errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparsetile as st
from sparsetile import nn as ours
from sparsetile import pyg
from tools.fuzz_inputs import torch_dtype
from tools.fuzz_layers import WEIGHTED, LayerCase

Named = dict[str, Tensor]


class _Root(torch.autograd.Function):
    """deg^-1/2 whose derivative is taken without its sign, for magnitudes."""

    @staticmethod
    def forward(ctx: Any, degree: Tensor) -> Tensor:
        ctx.save_for_backward(degree)
        return degree.pow(-0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (degree,) = ctx.saved_tensors
        return grad * 0.5 * degree.pow(-1.5)


def linear(v: Named, name: str, x: Tensor) -> Tensor:
    """The linear map of a module's child; ``name`` is empty for the module itself."""
    dot = f"{name}." if name else ""
    out = x @ v[f"{dot}weight"].mT
    bias = v.get(f"{dot}bias")
    return out if bias is None else out + bias


def rectified(x: Tensor, absolute: bool) -> Tensor:
    return x if absolute else x.relu()


class Subject:
    """A layer with its tensors, as the case says.

    ``smooth``: gradients of float32 have a bound, because the layer has no ReLU, maximum or
    softmax, whose gradients change by more than rounding if a sum is 0 or two messages are equal.
    """

    smooth = True

    def __init__(self, case: LayerCase, rng: np.random.Generator) -> None:
        self.case, self.rng = case, rng
        self.dtype = torch_dtype(case.dtype)
        self.module: nn.Module | None = None
        self.base: Tensor | None = None  # what the weight is a view of
        self.edges = self.new_edges()
        self.weight = self.as_weight(self.new_weight(self.edges.shape[1]))
        self.make()
        if self.module is not None:
            self.module.to(case.device, self.dtype).train(case.training)
            with torch.no_grad():  # from the case's generator, for replays
                for parameter in self.module.parameters():
                    parameter.copy_(self.normal(*parameter.shape).mul_(0.5))
        self.x = self.new_x()

    # -- fresh tensors --------------------------------------------------------------------------

    def _own(self, content: Any, dtype: torch.dtype) -> Tensor:
        """A tensor in torch's own memory: version counters are not trusted for other memory."""
        return torch.from_numpy(content).to(self.case.device, dtype, copy=True)

    def normal(self, *shape: int) -> Tensor:
        return self._own(self.rng.normal(size=shape), self.dtype)

    def new_x(self) -> Tensor:
        return self.normal(self.case.nodes, self.case.width)

    def new_edges(self) -> Tensor:
        """Other edges, as many as the case says; distinct ones unless it has parallel edges."""
        case, rng = self.case, self.rng
        if case.parallel:
            found = rng.integers(0, case.nodes, (2, case.edges))
        else:
            places = rng.permutation(case.nodes**2)[: case.edges]
            found = np.stack(np.divmod(places, case.nodes))
        return self._own(found, torch_dtype(case.index))

    def new_weight(self, count: int) -> Tensor:
        """Other weights, positive: degrees are sums of them, and must not cancel."""
        return self._own(self.rng.uniform(0.2, 1.2, count), self.dtype)

    def as_weight(self, values: Tensor) -> Tensor | None:
        """Edge weights of the case's kind."""
        kind = self.case.weight
        if kind == "none":
            return None
        if kind == "parameter":
            return nn.Parameter(values)
        if kind == "grad":
            return values.requires_grad_()
        self.base = torch.stack([values, values], 1)
        return self.base[:, 0] if self.case.pick % 4 == 0 else values

    # -- what a layer adds ----------------------------------------------------------------------

    def make(self) -> None:
        """Make the module, if there is one."""

    def call(self, x: Tensor) -> Tensor:
        """The call that is tested."""
        assert self.module is not None
        weights = (self.weight,) if self.case.layer in WEIGHTED else ()
        found: Tensor = self.module(x, self.edges, *weights)
        return found

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        """The same in float64."""
        raise NotImplementedError

    def magnitude(self, v: Named) -> Tensor:
        """The magnitude that its rounding error is proportional to."""
        return self.result({name: each.abs() for name, each in v.items()}, absolute=True)

    # -- what layers share ----------------------------------------------------------------------

    def named(self) -> Named:
        """The tensors of the next call, by name."""
        found: Named = {} if self.weight is None else {"weight of edges": self.weight}
        if self.module is not None:
            found |= dict(self.module.named_parameters(remove_duplicate=False))
            floats = (each for each in self.module.named_buffers() if each[1].is_floating_point())
            found |= dict(floats)
        return found

    @property
    def terms(self) -> int:
        """Longest chain of additions and products."""
        case = self.case
        return 4 * (case.nodes + self.edges.shape[1] + case.width + case.out * case.heads + 8)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Sources and targets."""
        source, target = self.edges.long()
        return (source, target) if self.case.flow == "source_to_target" else (target, source)

    def with_loops(self, w: Tensor | None, fill: float, like: Tensor) -> tuple[Tensor, ...]:
        """Edges with their self-loops replaced by one per node, with the last one's weight."""
        source, target = self.ends()
        ones = like.new_ones(source.numel()) if w is None else w
        nodes = torch.arange(self.case.nodes, device=like.device)
        own = (source == target).nonzero().flatten()
        last = torch.full_like(nodes, -1).scatter_reduce(0, source[own], own, "amax")
        looped = like.new_full((self.case.nodes,), fill)
        if own.numel():
            looped = torch.where(last >= 0, ones[last.clamp(min=0)], looped)
        kept = (source != target).nonzero().flatten()
        return (
            torch.cat([source[kept], nodes]), torch.cat([target[kept], nodes]),
            torch.cat([ones[kept], looped]),
        )  # fmt: skip

    def gathered(self, terms: Tensor, target: Tensor, reduce: str, absolute: bool) -> Tensor:
        """Messages of edges reduced at their targets; nodes without edges get 0."""
        zero = terms.new_zeros(self.case.nodes, *terms.shape[1:])
        counts = torch.bincount(target, minlength=self.case.nodes)[:, None]
        if reduce in ("max", "min"):
            kind = "amax" if absolute or reduce == "max" else "amin"
            index = target[:, None].expand_as(terms)
            # torch gives part of the gradient to the initial value if a result equals it.
            unset = torch.full_like(zero, torch.nan)
            best = unset.scatter_reduce(0, index, terms, kind, include_self=False)
            return torch.where(counts > 0, best, zero)
        total = zero.index_add(0, target, terms)
        return total / counts.clamp(min=1) if reduce == "mean" else total

    def neighbours(self, v: Named, x: Tensor, reduce: str, absolute: bool) -> Tensor:
        source, target = self.ends()
        terms, w = x[source], v.get("weight of edges")
        terms = terms if w is None else terms * w[:, None]
        return self.gathered(terms, target, reduce, absolute)


class GCN(Subject):
    def make(self) -> None:
        case = self.case
        options: dict[str, Any] = {"normalize": case.normalize, "bias": case.bias}
        options |= {"improved": bool(case.pick % 2), "flow": case.flow}
        if case.normalize:
            options["add_self_loops"] = case.loops
        self.module = self.build()(case.width, case.out, **options)
        self.smooth = not self.relu

    def build(self) -> Callable[..., nn.Module]:
        return ours.GCNConv

    @property
    def relu(self) -> bool:
        return self.case.relu

    def call(self, x: Tensor) -> Tensor:
        assert self.module is not None
        found: Tensor = self.module(x, self.edges, self.weight, relu=self.relu)
        return found

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        case, w, x = self.case, v.get("weight of edges"), v["x"]
        source, target = self.ends()
        if case.normalize and case.loops:
            fill = 2.0 if case.pick % 2 and w is not None else 1.0
            source, target, values = self.with_loops(w, fill, x)
        else:
            values = x.new_ones(source.numel()) if w is None else w
        if case.normalize:
            degree = x.new_zeros(case.nodes).index_add(0, target, values)
            empty = degree == 0
            solid = torch.where(empty, 1.0, degree)
            root = _Root.apply(solid) if absolute else solid.pow(-0.5)
            scale = torch.where(empty, 0.0, root)
            values = scale[target] * values * scale[source]
        terms = values[:, None] * (x @ v["lin.weight"].mT)[source]
        out = self.gathered(terms, target, "sum", absolute)
        out = out + v["bias"] if "bias" in v else out
        return rectified(out, absolute) if self.relu else out


class SAGE(Subject):
    def make(self) -> None:
        case = self.case
        options = {"root_weight": case.loops, "bias": case.bias, "flow": case.flow}
        self.module = self.build()(case.width, case.out, aggr=case.reduce, **options)
        self.smooth = case.reduce in ("sum", "mean")

    def build(self) -> Callable[..., nn.Module]:
        return ours.SAGEConv

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        out = linear(v, "lin_l", self.neighbours(v, v["x"], self.case.reduce, absolute))
        return out + linear(v, "lin_r", v["x"]) if self.case.loops else out


class GIN(Subject):
    def make(self) -> None:
        case = self.case
        parts: list[nn.Module] = [nn.Linear(case.width, 4)]
        parts += [nn.ReLU()] if case.relu else []
        inner = nn.Sequential(*parts, nn.Linear(4, case.out, bias=case.bias))
        options = {"eps": 0.25, "train_eps": case.loops, "flow": case.flow}
        self.module = self.build()(inner, **options)
        self.smooth = not case.relu

    def build(self) -> Callable[..., nn.Module]:
        return ours.GINConv

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        out = self.neighbours(v, v["x"], "sum", absolute) + (1 + v["eps"]) * v["x"]
        out = linear(v, "nn.0", out)
        if not self.case.relu:
            return linear(v, "nn.1", out)
        return linear(v, "nn.2", rectified(out, absolute))


class GAT(Subject):
    smooth = False

    def make(self) -> None:
        case = self.case
        self.concat = case.pick % 2 == 0
        self.module = ours.GATConv(
            case.width, case.out, heads=case.heads, concat=self.concat, bias=case.bias,
            add_self_loops=case.loops, flow=case.flow,
        )  # fmt: skip

    def _parts(self, v: Named) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, targets and attention of the edges."""
        source, target = self.ends()
        if self.case.loops:
            source, target, _ = self.with_loops(None, 1.0, v["x"])
        scores = self._scores(v, source, target)
        scores = nn.functional.leaky_relu(scores, 0.2)
        highest = self.gathered(scores.detach(), target, "max", False)
        raised = (scores - highest[target]).exp()
        return source, target, raised / self.gathered(raised, target, "sum", False)[target]

    def _messages(self, v: Named) -> Tensor:
        return (v["x"] @ v["lin.weight"].mT).view(-1, self.case.heads, self.case.out)

    def _scores(self, v: Named, source: Tensor, target: Tensor) -> Tensor:
        messages = self._messages(v)
        first, second = ((messages * v[name]).sum(-1) for name in ("att_src", "att_dst"))
        return first[source] + second[target]

    def _joined(self, v: Named, attention: Tensor, source: Tensor, target: Tensor) -> Tensor:
        terms = attention[..., None] * self._messages(v)[source]
        out = terms.new_zeros(self.case.nodes, *terms.shape[1:]).index_add(0, target, terms)
        out = out.flatten(1) if self.concat else out.mean(1)
        return out + v["bias"] if "bias" in v else out

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        source, target, attention = self._parts(v)
        return self._joined(v, attention, source, target)

    def magnitude(self, v: Named) -> Tensor:
        source, target, attention = self._parts(v)
        sizes = {name: each.abs() for name, each in v.items()}
        scores = self._scores(sizes, source, target)
        # An error of a score is a relative error of the attention.
        largest = float(scores.max()) if scores.numel() else 0.0
        return (1 + 4 * largest) * self._joined(sizes, attention, source, target)


class Aggregate(Subject):
    def make(self) -> None:
        self.smooth = self.case.reduce in ("sum", "mean")

    def call(self, x: Tensor) -> Tensor:
        options = {"reduce": self.case.reduce, "flow": self.case.flow}
        return ours.aggregate(x, self.edges, self.weight, **options)  # type: ignore[arg-type]

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        return self.neighbours(v, v["x"], self.case.reduce, absolute)


class SpMM(Aggregate):
    def call(self, x: Tensor) -> Tensor:
        shape = (self.case.nodes, self.case.nodes)
        return st.spmm((self.edges, self.weight, shape), x, reduce=self.case.reduce)

    def ends(self) -> tuple[Tensor, Tensor]:
        target, source = self.edges.long()  # rows, columns
        return source, target


def _of_pyg(name: str) -> Any:
    """A layer of PyG; PyG is patched from the first on."""
    import torch_geometric.nn

    if not pyg.is_patched():
        pyg.patch()
    return getattr(torch_geometric.nn, name)


class PygGCN(GCN):
    relu = False

    def build(self) -> Callable[..., nn.Module]:
        return _of_pyg("GCNConv")  # type: ignore[no-any-return]

    call = Subject.call


class PygSAGE(SAGE):
    def build(self) -> Callable[..., nn.Module]:
        return _of_pyg("SAGEConv")  # type: ignore[no-any-return]


class PygGIN(GIN):
    def build(self) -> Callable[..., nn.Module]:
        return _of_pyg("GINConv")  # type: ignore[no-any-return]


class PygGraph(Subject):
    def make(self) -> None:
        case = self.case
        options = {"aggr": case.reduce, "bias": case.bias, "flow": case.flow}
        self.module = _of_pyg("GraphConv")(case.width, case.out, **options)
        self.smooth = case.reduce in ("sum", "mean")

    def result(self, v: Named, absolute: bool = False) -> Tensor:
        out = linear(v, "lin_rel", self.neighbours(v, v["x"], self.case.reduce, absolute))
        return out + linear(v, "lin_root", v["x"])


GRAPH_SUBJECTS: dict[str, type[Subject]] = {
    "GCNConv": GCN, "SAGEConv": SAGE, "GINConv": GIN, "GATConv": GAT, "aggregate": Aggregate,
    "spmm": SpMM, "pyg GCNConv": PygGCN, "pyg SAGEConv": PygSAGE, "pyg GraphConv": PygGraph,
    "pyg GINConv": PygGIN,
}  # fmt: skip
