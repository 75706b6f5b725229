"""The jobs of ``tools.stress``: products of a plan, one-call products, layers.

Operands are small fractions, so that every sum is exact, and results have the same bits in any
order of additions. Only layers that divide or have a softmax are compared within a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsetile as st
from sparsetile import nn
from tools.fuzz_inputs import torch_dtype
from tools.stress_cases import StressCase

# Relative error of layers that divide: a few roundings of sums of positive and negative terms.
LOOSE = 64.0


def _fractions(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Numbers k/4 other than 0: sums of their products are exact in float32, in TF32 as well."""
    found = rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)
    return torch.from_numpy(np.asarray(found, dtype=np.float64)) / 4


class Operands:
    """The matrix of a case, and dense operands for each thread."""

    def __init__(self, case: StressCase) -> None:
        rng = np.random.default_rng([case.seed, case.number])
        dtype, device = torch_dtype(case.dtype), case.device
        cells = case.rows * case.cols
        places = np.sort(rng.choice(max(cells, 1), min(case.entries, cells), replace=False))
        both = np.stack(np.divmod(places, max(case.cols, 1)))
        self.case = case
        self.dtype = torch_dtype(case.moved or case.dtype)
        self.edges = torch.from_numpy(both).to(device)
        weight = _fractions((len(places),), rng)
        if case.subject == "GCNConv":
            weight = weight.abs()  # degrees are sums of them
        self.weight = weight.to(device, dtype) if case.weighted else None
        self.other = _fractions((len(places),), rng).to(device, self.dtype)
        self.shape = (case.rows, case.cols)

        def dense(*shape: int) -> Tensor:
            return _fractions(shape, rng).to(device, self.dtype)

        count = range(len(case.jobs))
        self.B = [dense(case.cols, case.width) for _ in count]
        self.G = [dense(case.rows, case.width) for _ in count]
        self.X = [dense(case.width, case.cols) for _ in count]
        self.bias = [dense(case.width) for _ in count]

    @property
    def A(self) -> tuple[Any, ...]:
        return self.edges, self.weight, self.shape


class Subject:
    """The object that threads share; runs the jobs of one thread."""

    bits = True  # whether results are equal bit for bit; else within LOOSE roundings

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        self.system = operands.case.subject

    def run(self, thread: int, job: str) -> Tensor:
        raise NotImplementedError


def made(operands: Operands) -> Subject:
    """Make what the case says, cold."""
    return _SUBJECTS.get(operands.case.subject, _Layer)(operands)


class _Plan(Subject):
    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        case = operands.case
        self.plan = st.plan(
            operands.A, case.n, dtype=torch_dtype(case.dtype), system=case.system,
            reorder=case.order, tune="none" if case.tune == "none" else "model",
            device=case.device, expected_runs=1,  # nothing is timed
        )  # fmt: skip
        if case.moved:
            self.plan.to(torch_dtype(case.moved))
        if case.updated:
            self.plan.update_values(operands.other)
        self.system = self.plan.system

    def run(self, thread: int, job: str) -> Tensor:
        own = self.operands
        B, G, X, bias = own.B[thread], own.G[thread], own.X[thread], own.bias[thread]
        return _JOBS[job](self.plan, own, B, G, X, bias)


Job = Callable[[st.Plan, Operands, Tensor, Tensor, Tensor, Tensor], Tensor]


def _gradient(plan: st.Plan, own: Operands, B: Tensor, G: Tensor, *_: Tensor) -> Tensor:
    leaf = B.clone().requires_grad_()
    (found,) = torch.autograd.grad(plan.run(leaf), leaf, G)
    return found


def _value_gradient(plan: st.Plan, own: Operands, B: Tensor, G: Tensor, *_: Tensor) -> Tensor:
    if own.weight is None:
        return plan.run(B)
    leaf = own.other.clone().requires_grad_()
    (found,) = torch.autograd.grad(plan.run(B, values=leaf), leaf, G)
    return found


def _autocast(plan: st.Plan, own: Operands, B: Tensor, *_: Tensor) -> Tensor:
    cast = torch.bfloat16 if own.case.pick % 2 else torch.float16
    with torch.autocast(own.case.device, dtype=cast):
        return plan.run(B)


def _into(plan: st.Plan, own: Operands, B: Tensor, G: Tensor, *_: Tensor) -> Tensor:
    return plan.run(B, out=G.clone(), alpha=2.0, beta=-0.5)


def _values(plan: st.Plan, own: Operands, B: Tensor, *_: Tensor) -> Tensor:
    return plan.run(B) if own.weight is None else plan.run(B, values=own.other)


_JOBS: dict[str, Job] = {
    "product": lambda plan, own, B, *_: plan.run(B),
    "transpose": lambda plan, own, B, G, *_: plan.T @ G,
    "gradient": _gradient,
    "value gradient": _value_gradient,
    "mean": lambda plan, own, B, *_: plan.run(B, reduce="mean"),
    "max": lambda plan, own, B, *_: plan.run(B, reduce="max"),
    "bias and relu": lambda plan, own, B, G, X, bias: plan.run(B, bias=bias, relu=True),
    "narrow": lambda plan, own, B, *_: plan.run(B[:, : max(1, B.shape[1] // 2)]),
    "wide": lambda plan, own, B, *_: plan.run(torch.cat([B, B, B], 1)),
    "autocast": _autocast,
    "linear": lambda plan, own, B, G, X, bias: plan.linear(X),
    "into": _into,
    "values": _values,
}


class _SpMM(Subject):
    def run(self, thread: int, job: str) -> Tensor:
        own = self.operands
        B = own.B[thread]
        if job == "gradient":
            leaf = B.clone().requires_grad_()
            (found,) = torch.autograd.grad(st.spmm(own.A, leaf), leaf, own.G[thread])
            return found
        if job == "autocast":
            with torch.autocast(own.case.device, dtype=torch.bfloat16):
                return st.spmm(own.A, B)
        return st.spmm(own.A, B, reduce=job if job in ("max", "mean") else "sum")


class _Layer(Subject):
    """A graph layer whose graph is cold."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        case, width = operands.case, operands.case.width
        out = 1 + case.pick % 40
        rng = np.random.default_rng([case.seed, case.number, 1])
        self.layer: Any = None
        if case.subject == "GCNConv":
            self.bits = case.pick % 2 == 0
            self.layer = nn.GCNConv(width, out, normalize=not self.bits)
        elif case.subject == "SAGEConv":
            self.layer = nn.SAGEConv(width, out, aggr=("sum", "max")[case.pick % 2])
        elif case.subject == "GATConv":
            self.bits = False
            self.layer = nn.GATConv(width, out, heads=1 + case.pick % 3)
        if self.layer is not None:
            self.layer.to(case.device, operands.dtype)
            with torch.no_grad():
                for parameter in self.layer.parameters():
                    parameter.copy_(_fractions(tuple(parameter.shape), rng) / 8)

    def run(self, thread: int, job: str) -> Tensor:
        own = self.operands
        x = own.B[thread]
        if job != "gradient":
            with torch.no_grad():
                return self._called(x)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(self._called(leaf).sum(), leaf)
        return found

    def _called(self, x: Tensor) -> Tensor:
        own, weighted = self.operands, self.operands.case.subject == "GCNConv"
        if self.layer is None:
            return nn.aggregate(x, own.edges, own.weight)
        graph = (own.edges, own.weight) if weighted else (own.edges,)
        found: Tensor = self.layer(x, *graph)
        return found


class _Linear(Subject):
    """SparseLinear: kept blocks of 64, a layer that is new in every case."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        case = operands.case
        rng = np.random.default_rng([case.seed, case.number, 1])
        weight, bias = _fractions((128, 192), rng), _fractions((128,), rng)
        self.layer = nn.SparseLinear.from_dense(
            weight.to(case.device, operands.dtype), bias.to(case.device, operands.dtype),
            sparsity=0.5, activation=("none", "relu")[case.pick % 2],
        ).eval()  # fmt: skip
        tokens = 1 + case.pick % 200
        self.inputs = [
            _fractions((tokens, 192), rng).to(case.device, operands.dtype) for _ in case.jobs
        ]

    def run(self, thread: int, job: str) -> Tensor:
        x = self.inputs[thread]
        if job != "gradient":
            with torch.no_grad():
                return self.layer(x)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(self.layer(leaf).sum(), leaf)
        return found


_SUBJECTS: dict[str, Callable[[Operands], Subject]] = {
    "plan": _Plan, "spmm": _SpMM, "SparseLinear": _Linear,
}  # fmt: skip
