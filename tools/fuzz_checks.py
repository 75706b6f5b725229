"""Runs a case of ``tools.fuzz``: one function per action. ``fuzz_judge`` judges results.

The file is long because the short, independent actions share their helpers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

import sparsetile as st
from sparsetile import CSR, Plan
from sparsetile.cache.arrays import product_as_it_is
from sparsetile.cache.fresh import fresh_product
from sparsetile.check.judge import check_sddmm
from sparsetile.systems import SYSTEMS
from tools.fuzz_cases import Case
from tools.fuzz_inputs import (
    Matrix,
    change,
    dense,
    entry_values,
    make_matrix,
    rounded_to_type,
    torch_dtype,
)
from tools.fuzz_judge import Run, Wrong, compare, equal_bits

# Gradients of float64 sums of at most 40 products of numbers of size 1, whatever their order.
GRADIENT_ERROR = 1e-11


def _new_out(run: Run, B: Tensor, fill: float) -> tuple[Tensor, Tensor | None]:
    """Return ``out`` in the layout of the case and, if it has one, the memory around it."""
    case = run.case
    shape = (*B.shape[:-2], case.rows, B.shape[-1])
    if case.out == "row stride":
        wide = B.new_full((*shape[:-1], shape[-1] + 3), 7.0)
        wide[..., : shape[-1]] = fill
        return wide[..., : shape[-1]], wide[..., shape[-1] :]
    if case.out == "transposed":
        return B.new_full((*shape[:-2], shape[-1], shape[-2]), fill).mT, None
    return B.new_full(shape, fill), None


def _overlapping(B: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return B and an ``out`` that begins inside of it."""
    width, begin = B.shape[1], B.numel() // 2
    memory = B.new_ones(max(B.numel(), begin + rows * width))
    memory[: B.numel()] = B.flatten()
    return memory[: B.numel()].view(B.shape), memory[begin : begin + rows * width].view(rows, width)


def _product(run: Run) -> None:
    plan, case = run.make(), run.case
    for width in (case.n, case.other):
        whole = run.operand(width)
        B = run.permuted(whole)
        how: dict[str, Any] = {"reduce": case.reduce, "alpha": case.alpha}
        kept = B.clone()
        if case.out == "none":
            bias = dense(case, (1, width), run.rng, layout="", special="none")[0]
            extra: dict[str, Any] = {"bias": bias} if case.bias else {}
            extra |= {"relu": True} if case.relu else {}
            wide: dict[str, Any] = {"out_dtype": torch.float32} if case.wide_result else {}
            C = plan.run(B, **how, **extra, **wide)
            run.judge(whole, C, f"run, N={width}", **how, **extra, **wide)
            again = plan.run(B, **how, **extra, **wide)
            run.same_bits(C, again, "a second run", case.reduce)
        else:
            if case.out == "overlap":
                B, out, beside = *_overlapping(B, case.rows), None
            elif case.out == "alias":
                out, beside = B, None
            else:
                out, beside = _new_out(run, B, torch.nan)
            if case.out not in ("alias", "overlap") and case.beta:
                out.copy_(dense(case, tuple(out.shape), run.rng, layout="", special="none"))
            before = out.clone()
            C = plan.run(B, out=out, beta=case.beta, **how)
            if C is not out:
                raise Wrong("run did not return out")
            run.judge(whole if case.out != "alias" else kept, C, f"run into out, N={width}",
                      before=before, beta=case.beta, **how)  # fmt: skip
            if beside is not None and not bool((beside == 7.0).all()):
                raise Wrong("memory beside out was written")
        if case.out not in ("alias", "overlap") and not equal_bits(B, kept):
            raise Wrong("B was written")


def _transpose(run: Run) -> None:
    plan, case = run.make(), run.case
    G = dense(case, (*case.lead, case.rows, case.n), run.rng)
    C = plan.unpermute(plan.T.run(G, alpha=case.alpha))
    run.judge(G, C, "transpose", csr=run.matrix.truth.transposed(), alpha=case.alpha)
    run.same_bits(C, plan.unpermute(plan.T.run(G, alpha=case.alpha)), "a second transpose")


def _new_values(run: Run) -> tuple[Tensor, CSR]:
    """Other values in the container's order of entries, and the matrix with them."""
    case, matrix = run.case, run.matrix
    count = len(matrix.rows)
    kind = "float32" if case.values_dtype == "int32" else case.values_dtype
    values = torch.from_numpy(entry_values(case, count, matrix.exact, run.rng))
    values = values.to(torch_dtype(kind))
    keys = matrix.rows * max(case.cols, 1) + matrix.cols
    _, inverse = np.unique(keys, return_inverse=True)
    summed = torch.zeros(matrix.truth.nnz, dtype=torch.float64)
    if count == matrix.truth.nnz:
        summed[torch.from_numpy(inverse)] = values.double()
    else:
        summed.index_add_(0, torch.from_numpy(inverse), values.double())
    summed = rounded_to_type(case, summed)
    return values.to(case.device), matrix.truth.with_values(summed)


def _update(run: Run) -> None:
    plan, case = run.make(), run.case
    if case.pick % 2:
        plan.T  # noqa: B018 planned before the values change: it must follow
    values, truth = _new_values(run)
    if plan.update_values(values) is not plan:
        raise Wrong("update_values did not return the plan")
    B = run.operand(case.n)
    run.judge(B, plan.run(run.permuted(B), reduce=case.reduce), "run after update_values",
              csr=truth, reduce=case.reduce)  # fmt: skip
    G = dense(case, (case.rows, case.n), run.rng)
    run.judge(G, plan.unpermute(plan.T @ G), "transpose after update_values",
              csr=truth.transposed())  # fmt: skip
    values.fill_(torch.nan)  # the plan has a copy
    run.judge(B, plan.run(run.permuted(B)), "run after the caller's values changed", csr=truth)


def _values(run: Run) -> None:
    plan, case = run.make(), run.case
    values, truth = _new_values(run)
    B = run.operand(case.n)
    C = plan.run(run.permuted(B), values=values, reduce=case.reduce, alpha=case.alpha)
    run.judge(B, C, "run with values=", csr=truth, reduce=case.reduce, alpha=case.alpha)
    run.judge(B, plan @ run.permuted(B), "run after one with values=")


def _file(run: Run) -> None:
    plan, case = run.make(), run.case
    path = run.folder / f"plan-{case.seed}-{case.number}.safetensors"
    plan.save(path)
    loaded = st.load_plan(path)
    B = run.operand(case.n)
    given = run.permuted(B)
    C = loaded.run(given, reduce=case.reduce)
    run.judge(B, C, "run of the loaded plan", reduce=case.reduce)
    again = plan.run(given, reduce=case.reduce)
    run.same_bits(C, again, "the plan that was saved", case.reduce)
    values, truth = _new_values(run)
    loaded.update_values(values)
    run.judge(B, loaded @ given, "loaded plan after update_values", csr=truth)
    G = dense(case, (case.rows, case.n), run.rng)
    run.judge(G, loaded.unpermute(loaded.T @ G), "loaded plan's transpose", csr=truth.transposed())


def _tangent(run: Run) -> None:
    """A product is linear in B: its tangent is the product with B's."""
    plan, case = run.make(), run.case
    B, move = run.operand(case.n), run.operand(case.n)
    how: dict[str, Any] = {"alpha": case.alpha}
    how["reduce"] = "sum" if case.reduce in ("max", "min") else case.reduce
    with forward_ad.dual_level():
        C = plan.run(forward_ad.make_dual(run.permuted(B), run.permuted(move)), **how)
        found, tangent = forward_ad.unpack_dual(C)
    run.judge(B, found, "run of a dual tensor", **how)
    run.judge(move, tangent, "tangent", **how)


# Sums of float64 numbers about 1 that may be rounding alone.
NEAR_ZERO = 1e-9


def _sums(
    csr: CSR, values: Tensor | None, B: Tensor, reduce: str, alpha: float, bias: Tensor | None
) -> Tensor:
    """The product in differentiable float64 torch operations, entry by entry."""
    rows = csr.row_ids()
    terms = B[..., csr.indices.long(), :]
    if values is not None:
        terms = terms * values.unsqueeze(-1)
    C = B.new_zeros((*B.shape[:-2], csr.shape[0], B.shape[-1]))
    if reduce in ("max", "min"):
        index = rows.unsqueeze(-1).expand_as(terms)
        # torch gives part of the gradient to the old value of C if a result equals it.
        unset = torch.full_like(C, torch.nan)
        best = unset.scatter_reduce(-2, index, terms, f"a{reduce}", include_self=False)
        C = torch.where((csr.row_lengths() > 0).unsqueeze(-1), best, C)
    else:
        C = C.index_add(-2, rows, terms)
    if reduce == "mean":
        C = C / csr.row_lengths().clamp(min=1).unsqueeze(-1)
    C = C * alpha
    return C if bias is None else C + bias


def _tied(csr: CSR, values: Tensor | None, B: Tensor, reduce: str) -> Tensor:
    """Elements of C that several entries reach: ours gives the first all of the gradient, torch
    splits it."""
    rows = csr.row_ids()
    terms = B[..., csr.indices.long(), :] * (1.0 if values is None else values.unsqueeze(-1))
    best = _sums(csr, values, B, reduce, 1.0, None)
    reached = (terms == best[..., rows, :]).to(B.dtype)
    return torch.zeros_like(best).index_add(-2, rows, reached) > 1


def _followed_plan(run: Run) -> tuple[Plan, Tensor | None, dict[str, Any]]:
    """Return a plan, values with gradients, and the options that pass them to a product."""
    plan, case = run.make(tracked=True), run.case
    if run.leaf is not None or run.matrix.truth.values is None:
        return plan, run.leaf, {}
    values = _new_values(run)[0].to(torch_dtype(case.dtype)).requires_grad_()
    if case.followed:
        plan.update_values(values)
        return plan, values, {}
    return plan, values, {"values": values}


def _canonical(run: Run, values: Tensor) -> Tensor:
    """Bring values of entries to the truth's order, in differentiable operations."""
    keys = run.matrix.rows * max(run.case.cols, 1) + run.matrix.cols
    _, inverse = np.unique(keys, return_inverse=True)
    place = torch.from_numpy(inverse).to(values.device)
    return values.new_zeros(run.matrix.truth.nnz).index_add(0, place, values)


def _gradient(run: Run) -> None:
    plan, values, followed = _followed_plan(run)
    case, truth = run.case, run.matrix.truth
    B = run.operand(case.n).clone().requires_grad_()
    if case.dtype != "float64":
        C = plan.run(run.permuted(B), **followed)
        G = dense(case, tuple(C.shape), run.rng, layout="contiguous")
        C.backward(G)
        csr = truth if values is None else truth.with_values(_canonical(run, values.detach().cpu()))
        if B.grad is None:
            raise Wrong("B has no gradient")
        run.judge(G, B.grad, "gradient of B", csr=csr.transposed())
        if values is not None and not case.lead and len(run.matrix.rows) == truth.nnz:
            if values.grad is None:
                raise Wrong("the values have no gradient")
            place = np.argsort(run.matrix.rows * max(case.cols, 1) + run.matrix.cols)
            found = values.grad[torch.from_numpy(place).to(B.device)]
            verdict = check_sddmm(
                truth, G, B, found, tf32=B.is_cuda and case.tf32, worst_case=True, limit=None
            )
            if not verdict.ok:
                raise Wrong(f"gradient of the values: {verdict}")
        return
    bias = None
    if case.bias:
        bias = dense(case, (1, case.n), run.rng, layout="")[0].clone().requires_grad_()
    options: dict[str, Any] = {"bias": bias} if case.bias else {}
    C = plan.run(
        run.permuted(B), reduce=case.reduce, alpha=case.alpha, relu=case.relu, **followed, **options
    )
    inputs = [t for t in (B, values, bias) if t is not None]
    own = [t.detach().cpu().clone().requires_grad_() for t in inputs]  # judged on the host
    if values is not None:
        weights: Tensor | None = _canonical(run, own[1])
    else:
        weights = truth.values
    sums = _sums(truth, weights, own[0], case.reduce, case.alpha, own[-1] if case.bias else None)
    expected = torch.relu(sums) if case.relu else sums
    _near(C, expected, "product")
    G = torch.from_numpy(run.rng.normal(size=tuple(C.shape)))
    if case.relu:
        # If a sum is 0 up to rounding, the gradient of ReLU may be 0 or 1.
        G = torch.where(sums.detach().abs() < NEAR_ZERO, 0.0, G)
    if case.reduce in ("max", "min"):
        G = torch.where(_tied(truth, weights, own[0], case.reduce), 0.0, G)
    names = ["B", *(["values"] if values is not None else []), *(["bias"] if case.bias else [])]
    twice = case.action == "second gradient"
    firsts = torch.autograd.grad((C * G.to(C.device)).sum(), inputs, create_graph=twice)
    wanted = torch.autograd.grad((expected * G).sum(), own, create_graph=twice)
    for name, first, second in zip(names, firsts, wanted, strict=True):
        _near(first, second, f"gradient of {name}")
    if not twice:
        return
    H = [torch.from_numpy(run.rng.normal(size=tuple(t.shape))) for t in inputs]

    def second_of(grads: Any, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
        total = sum((first * h.to(first.device)).sum() for first, h in zip(grads, H, strict=True))
        if not isinstance(total, Tensor) or not total.requires_grad:
            return (None,) * len(leaves)
        return torch.autograd.grad(total, leaves, allow_unused=True)

    for name, a, b, leaf in zip(
        names, second_of(firsts, inputs), second_of(wanted, own), own, strict=True
    ):
        zero = torch.zeros_like(leaf)
        _near(zero if a is None else a, zero if b is None else b, f"second gradient of {name}")


def _near(found: Tensor, expected: Tensor, what: str) -> None:
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    size = 1.0 + (float(expected.abs().max()) if expected.numel() else 0.0)
    compare(found, expected, torch.full_like(expected, GRADIENT_ERROR * size), what)


def _linear(run: Run) -> None:
    plan, case = run.make(), run.case
    X = dense(case, (*case.lead, case.n, case.cols), run.rng)
    if case.reorder_columns and plan.column_order is not None:
        given = X.index_select(-1, plan.column_order)
    else:
        given = X
    bias = dense(case, (1, case.rows), run.rng, layout="", special="none")[0]
    options: dict[str, Any] = {"bias": bias} if case.bias else {}
    options |= {"relu": case.relu, "alpha": case.alpha}
    wide: dict[str, Any] = {"out_dtype": torch.float32} if case.wide_result else {}
    Y = plan.linear(given, **options, **wide)
    if not Y.is_contiguous():
        raise Wrong("linear: the result is not row-major")
    run.judge(X.mT, Y.mT, "linear", along_rows=True, **options, **wide)
    run.same_bits(Y, plan.linear(given, **options, **wide), "a second layer")


def multiplied(A: Any, B: Tensor, matrix: Matrix, reduce: str = "sum") -> CSR:
    """Return what ``st.spmm`` multiplies: A's entries one by one if it makes no plan.

    Entries of one place whose values have opposite signs then make NaN of an infinity in B, where
    a plan, which adds them first, has an infinity or 0.
    """
    ways = (product_as_it_is, fresh_product)
    unplanned = reduce == "sum" and any(way(A, B) is not None for way in ways)
    return matrix.entries if unplanned else matrix.truth


def _spmm(run: Run) -> None:
    case = run.case
    run.matrix = make_matrix(case, run.rng, run.folder)
    run.system = "auto"  # the choice is unknown
    B = run.operand(case.n)
    for step in range(3):
        A, matrix = run.matrix.A, run.matrix
        C = st.spmm(A, B, reduce=case.reduce)
        csr = multiplied(A, B, matrix, case.reduce)
        run.judge(B, C, f"spmm, call {step + 1}", reduce=case.reduce, csr=csr)
        if step == 0:  # the kept plan
            run.judge(B, st.spmm(A, B), "spmm again", csr=multiplied(A, B, matrix))
        if step == 1 and case.followed:
            leaf = B.detach().clone().requires_grad_()
            G = dense(case, tuple(C.shape), run.rng, layout="contiguous", special="none")
            st.spmm(A, leaf).backward(G)
            if leaf.grad is None:
                raise Wrong("spmm: B has no gradient")
            csr = multiplied(A, leaf, matrix).transposed()
            run.judge(G, leaf.grad, "spmm, gradient of B", csr=csr)
        if step < 2:
            run.matrix = change(case, run.matrix, case.pick + step)


def _autocast(run: Run) -> None:
    plan, case = run.make(), run.case
    cast = torch.bfloat16 if case.pick % 2 else torch.float16
    B = run.operand(case.n)
    with torch.autocast(case.device, dtype=cast):
        C = plan.run(run.permuted(B), reduce=case.reduce)
    # A system without autocast's type keeps the plan's type, or the exact system multiplies.
    system = SYSTEMS[run.system]
    lowered = B.dtype is not torch.float64 and (cast in system.dtypes or system.casts_to_exact)
    used = B.to(cast) if lowered else B
    truth = run.matrix.truth
    if truth.values is not None:  # values are rounded to the plan's type, then to autocast's
        truth = truth.with_values(truth.values.to(torch_dtype(case.dtype)).double())
    run.judge(used, C, "autocast", csr=truth, reduce=case.reduce)


def _graph(run: Run) -> None:
    """Capture, then replay with another B and with other values."""
    plan, case = run.make(), run.case
    B = run.permuted(run.operand(case.n)).clone()
    if run.system in ("dense", "cusparse"):  # README: not captured
        whole = run.operand(case.n)
        C = plan.run(run.permuted(whole), reduce=case.reduce)
        return run.judge(whole, C, "run", reduce=case.reduce)
    plan.run(B, reduce=case.reduce)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        C = plan.run(B, reduce=case.reduce)
    for step in range(3):
        fresh = run.operand(case.n)
        B.copy_(run.permuted(fresh))
        truth = run.matrix.truth
        if step == 2 and truth.values is not None:
            values, truth = _new_values(run)
            plan.update_values(values)
        graph.replay()
        torch.cuda.synchronize()
        run.judge(fresh, C, f"replay {step + 1}", csr=truth, reduce=case.reduce)
    del graph


_DO: dict[str, Callable[[Run], None]] = {
    "product": _product, "transpose": _transpose, "update": _update, "values": _values,
    "file": _file, "gradient": _gradient, "second gradient": _gradient, "linear": _linear,
    "spmm": _spmm, "autocast": _autocast, "graph": _graph,
    "tangent": _tangent,
}  # fmt: skip


def run_case(case: Case, folder: Path) -> Run:
    """Run the case; raises its errors, and :class:`Wrong` for wrong results."""
    run = Run(case, np.random.default_rng([case.seed, case.number]), folder)
    gradients = case.followed or "gradient" in case.action or case.action == "tangent"
    with settings(case.tf32), torch.inference_mode(case.inference and not gradients):
        _DO[case.action](run)
    return run


@contextlib.contextmanager
def settings(tf32: bool) -> Iterator[None]:
    """Set torch's settings for a case; restores the caller's settings."""
    matmul = torch.backends.cuda.matmul
    # README: dense sums 16-bit products as torch's settings say. The bound is that of FP32 sums.
    wanted = {
        "allow_tf32": tf32,
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
    }
    before = {name: getattr(matmul, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
