"""Products to run under a checker: every system with own kernels, on the contracts' hard matrices.

    python -m tools.checked_products REPORT --device cuda --systems acc,csr,dense [--types float32]

``sparsetile verify --checker`` runs this under compute-sanitizer, in the root of a checkout. Inputs
are fixed small fractions, so that sums are exact in float32 and TF32 and every product can be
compared with float64. Outputs are filled with NaN first, so that an element that is not written is
detected. REPORT says what ran, also if the run ends early.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile import CSR, Plan
from sparsetile.check.reference import dot_products, reference
from sparsetile.core.checks import REDUCES
from sparsetile.core.errors import UnsupportedError
from sparsetile.intake.csr import FP8, offsets
from sparsetile.kernels.grouping import MEAN, VALUE_TYPES
from sparsetile.launch.columns import epilogue_gradient, takes_epilogue_gradient
from sparsetile.launch.gather import gather_rows, gathers
from sparsetile.launch.grouping import group_edges
from sparsetile.layers.graph_attention import (
    ATTENTION_DTYPES,
    attention_layer,
    graph_attention,
)
from sparsetile.layers.grouped_rows import product
from sparsetile.nn import SparseLinear
from sparsetile.plan.planner import build_plan
from sparsetile.systems.registry import SYSTEMS, exact_system
from tools.attention import attended

# Rows of one element, odd ones, aligned ones, and those that take several slabs.
WIDTHS = (1, 7, 32, 130, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Full blocks of 64 x 64, the weight of a linear layer: rows and columns are multiples of no tile.
LAYER = "linear layer"
LAYER_SHAPE = (200, 328)
LAYER_TOKENS = (7, 136)
# Layers of blocks: the system whose kernels they share, the sides of their blocks, their weight.
BLOCK_SYSTEM = "bcsr"
BLOCK_SIDES = (16, 32, 64)
BLOCK_SHAPE = (256, 192)
# The matrices come from the tests of the checkout.
_CASES = "tests.contracts.cases"


def _fractions(count: int, steps: int, offset: float) -> Tensor:
    """Numbers k/4 + offset, in a pattern that repeats after ``steps``."""
    return (torch.arange(count, dtype=torch.float64) % steps - steps // 2) / 4 + offset


class _Matrix:
    """One matrix with its operands and the float64 results of the widest product."""

    def __init__(self, given: CSR) -> None:
        rows, cols = given.shape
        width = max(WIDTHS) + 1  # one more, so that a view may start at the second column
        self.given = given
        self.values = _fractions(given.nnz, 7, 0.125)
        self.B = _fractions(cols * width, 5, 0.0).reshape(cols, width)
        self.G = _fractions(rows * width, 3, 0.25).reshape(rows, width)

    def expected(self, weighted: bool) -> dict[str, Tensor]:
        """Return every result at full width, by the name of the product."""
        csr = self.given.with_values(self.values if weighted else None)
        reduced = {name: reference(csr, self.B, name)[0] for name in REDUCES}
        return {**reduced, "transpose": reference(csr.transposed(), self.G)[0]}

    def gradient(self, n: int) -> Tensor:
        """Return the values' gradient for G of ``n`` columns: one dot product per entry."""
        return dot_products(self.given, self.G[:, :n], self.B[:, :n])[1]


class Watched:
    """Runs products and counts them; stops at the first that is wrong."""

    def __init__(self) -> None:
        self.matrices: list[str] = []
        self.products = 0
        self.where = ""
        self.begun = time.perf_counter()

    def finished(self, name: str) -> None:
        """Report a finished matrix: a tool may be stopped at its time limit."""
        self.matrices.append(name)
        seconds = time.perf_counter() - self.begun
        print(f"checked_products: {self.where}: {self.products} products after {seconds:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip

    def product(self, what: str, C: Tensor, expected: Tensor) -> None:
        """A product whose sums are exact, rounded once."""
        unit = torch.finfo(C.dtype).eps
        self._within("exact", what, C, expected, unit * expected.abs())

    def near(self, what: str, C: Tensor, expected: Tensor, terms: Tensor | None = None) -> None:
        """A result that has exponentials in it, or sums that were rounded.

        ``terms``: summed magnitudes of each element's terms, if they cancel; without, the largest
        element is used.
        """
        if terms is None:
            terms = (expected.abs().max() if expected.numel() else 0.0) * torch.ones_like(expected)
        most = 16 * torch.finfo(C.dtype).eps * (1 + terms)
        self._within("near float64's", what, C, expected, most)

    def close(self, what: str, C: Tensor, expected: Tensor) -> None:
        """A sum of such results, whose terms may cancel."""
        largest = expected.abs().max() if expected.numel() else 1.0
        share = max(16 * torch.finfo(C.dtype).eps, 1e-3)
        most = share * (1 + largest) * torch.ones_like(expected)
        self._within("close to float64's", what, C, expected, most)

    def _within(self, how: str, what: str, C: Tensor, expected: Tensor, most: Tensor) -> None:
        self.products += 1
        wrong = ~((C.detach().cpu().double() - expected).abs() <= most)  # true of NaN as well
        if bool(wrong.any()):
            raise RuntimeError(
                f"checked_products: every product must be {how}, got {int(wrong.sum())} wrong "
                f"elements of {C.numel()} in {self.where}, {what}. See the checker's log."
            )


def _poisoned(made: Plan, n: int) -> Tensor:
    return torch.full((made.shape[0], n), torch.nan, dtype=made.dtype, device=made.device)


def _forward(made: Plan, matrix: _Matrix, n: int, other: int, seen: Watched, want: Any) -> None:
    """Sums: at the plan's width, and at another through a B that is strided and misaligned."""
    B = matrix.B.to(made.device, made.dtype)
    whole = B[:, :n].contiguous()
    seen.product(f"sum, N={n}", made @ whole, want["sum"][:, :n])
    C = made.run(B[:, 1 : other + 1], out=_poisoned(made, other), alpha=2.0)
    seen.product(f"sum into out, N={other}", C, 2 * want["sum"][:, 1 : other + 1])


def _further(made: Plan, matrix: _Matrix, n: int, seen: Watched, want: Any) -> None:
    """Batches, the transpose, and an Inf of B, which must reach only its own rows."""
    B = matrix.B[:, :n].to(made.device, made.dtype)
    G = matrix.G[:, :n].to(made.device, made.dtype)
    seen.product("batch", made @ torch.stack([B, B]), torch.stack([want["sum"][:, :n]] * 2))
    seen.product("transpose", made.T @ G, want["transpose"][:, :n])
    if B.numel():
        B = B.clone()  # float64 on the host shares the memory of all later products
        B[0] = torch.inf
        clean = torch.ones(made.shape[0], dtype=torch.bool)
        clean[matrix.given.row_ids()[matrix.given.indices == 0]] = False
        C = (made @ B).cpu()
        seen.product("Inf in B", C[clean], want["sum"][clean, :n])


def _gathered(made: Plan, matrix: _Matrix, n: int, seen: Watched) -> None:
    """Rows of B as ranks pack them, if their alignment allows it."""
    B = matrix.B[:, :n].to(made.device, made.dtype).contiguous()
    ids = matrix.given.indices.to(made.device)
    out = torch.full((ids.numel(), n), torch.nan, dtype=made.dtype, device=made.device)
    if gathers(B, out):
        gather_rows(B, ids, out)
        seen.product("gathered rows", out, matrix.B[matrix.given.indices.long(), :n])


def _epilogue_gradient(made: Plan, matrix: _Matrix, n: int, seen: Watched) -> None:
    """The gradient of ReLU and bias, of a C that is G with some rows negated."""
    G = matrix.G[:, :n]
    C = G * torch.where(torch.arange(G.shape[0]) % 3 == 0, -1.0, 1.0).unsqueeze(1)
    here = [each.to(made.device, made.dtype).contiguous() for each in (G, C)]
    if takes_epilogue_gradient(*here):
        masked, sums = epilogue_gradient(*here)
        expected = torch.where(C <= 0, 0.0, G)
        seen.product("gradient before ReLU", masked, expected)
        seen.product("gradient of a bias", sums, expected.sum(0))


def _pattern(made: Plan, matrix: _Matrix, n: int, seen: Watched, want: Any) -> None:
    """Products of the device's exact system: mean, max, min, the values' gradient."""
    B = matrix.B[:, :n].to(made.device, made.dtype)
    for reduce in ("mean", "max", "min"):
        out = _poisoned(made, n) if reduce == "mean" else None  # max and min take none
        C = made.run(B, out=out, reduce=reduce)
        seen.product(reduce, C, want[reduce][:, :n])
    if made.values is not None:
        values = made.values.detach().clone().requires_grad_()
        G = matrix.G[:, :n].to(made.device, made.dtype)
        (found,) = torch.autograd.grad(made.run(B, values=values), values, G)
        seen.product("gradient of the values", found, matrix.gradient(n))


def _new_graph(made: Plan, matrix: _Matrix, n: int, seen: Watched, want: Any) -> None:
    """The pattern as edges that were never seen, sorted by row and by column."""
    csr, edges = matrix.given.with_values(None), matrix.given.nnz
    if not edges or made.dtype not in VALUE_TYPES:
        return
    B = matrix.B[:, :n].to(made.device, made.dtype)
    G = matrix.G[:, :n].to(made.device, made.dtype)
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    turned = reference(csr.transposed(), matrix.G[:, :n] / lengths)[0]
    sizes = reference(csr.transposed(), (matrix.G[:, :n] / lengths).abs())[0]
    order = torch.argsort(csr.indices.long() * edges + torch.arange(edges))
    edge_index = torch.stack([csr.indices.long(), csr.row_ids()])
    for how, given in (("edges", edge_index), ("edges in disorder", edge_index[:, order])):
        rows = group_edges(given.to(made.device), True, csr.shape, False)
        products = (
            ("sum", product(rows, None, B), want["sum"]),
            ("mean", product(rows, None, B, mean=True), want["mean"]),
            ("transpose", product(rows.transposed, None, G), want["transpose"]),
        )
        for what, C, expected in products:
            seen.product(f"{what} of {how}", C, expected[:, :n])
        C = product(rows.transposed, rows.transposed.values(MEAN, made.dtype), G)
        seen.near(f"gradient of a mean of {how}", C, turned, sizes)


def _score_terms(
    csr: CSR, given: Sequence[Tensor], G: Tensor, slope: float, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the magnitudes of the terms of the scores' gradients, summed by source and by target.

    A term is attention times (G · message - G · output): entries cancel, and so do the two parts.
    """
    messages, of_source, of_target = (each.detach().double() for each in given)
    sizes = messages.abs().requires_grad_()
    ones = torch.ones_like(sizes[..., :1]).requires_grad_()
    out, shares = (
        attended(csr, each, of_source, of_target, slope, counts) for each in (sizes, ones)
    )
    G = G.detach().double().abs()
    through = (out.detach() * G).reshape(*shares.shape, messages.shape[-1]).sum(-1)
    (direct,) = torch.autograd.grad(out, sizes, G)
    (by_output,) = torch.autograd.grad(shares, ones, through)
    return (sizes * direct).sum(-1).detach() + by_output.squeeze(-1), 2 * through


def _attention(made: Plan, matrix: _Matrix, n: int, weighted: bool, seen: Watched) -> None:
    """Graph attention on A's pattern with gradients; ``weighted``: entries are several edges."""
    csr, (targets, sources) = matrix.given, made.shape
    heads = next(count for count in (8, 2, 1) if n % count == 0)
    counts = torch.arange(csr.nnz) % 3 + 1.0 if weighted else None
    given = (
        matrix.B[:, :n].reshape(sources, heads, n // heads).to(made.dtype),
        _fractions(sources * heads, 7, 0.0).reshape(sources, heads).float(),
        _fractions(targets * heads, 5, 0.0).reshape(targets, heads).float(),
    )
    messages, of_source, of_target = wide = [each.clone().requires_grad_() for each in given]
    want = attended(csr, messages, of_source, of_target, 0.25, counts)
    G = matrix.G[:, :n].to(made.dtype)
    right = torch.autograd.grad(want, wide, G.double(), allow_unused=True)
    messages, of_source, of_target = here = [
        each.to(made.device).requires_grad_() for each in given
    ]
    counted = None if counts is None else counts.to(made.device)
    made.flat_with_transpose()
    out = graph_attention(made.flat, messages, of_source, of_target, counted, None, None, 0.25)
    found = torch.autograd.grad(out, here, G.to(made.device))
    seen.near("attention", out, want.detach())
    sizes = (None, *_score_terms(csr, given, G, 0.25, counts))
    for name, mine, theirs, terms in zip(
        ("messages", "of_source", "of_target"), found, right, sizes, strict=True
    ):
        expected = torch.zeros_like(mine, device="cpu") if theirs is None else theirs
        seen.near(f"attention, gradient of {name}", mine, expected.double(), terms)


def _attention_step(made: Plan, matrix: _Matrix, n: int, seen: Watched) -> None:
    """A whole step of graph attention on one set of nodes: output and all gradients."""
    csr, nodes = matrix.given, made.shape[0]
    heads = next(count for count in (8, 2, 1) if n % count == 0)
    width = n // heads
    given = (
        matrix.B[:, :n].to(made.dtype),
        (_fractions(n, 7, 0.0) / width).reshape(1, heads, width).float(),
        (_fractions(n, 5, 0.125) / width).reshape(1, heads, width).float(),
        _fractions(n, 9, 0.5).float(),
    )
    wide = [each.double().requires_grad_() for each in given]
    by_head = wide[0].reshape(nodes, heads, width)
    of_source, of_target = ((by_head * vector).sum(-1) for vector in wide[1:3])
    want = attended(csr, by_head, of_source, of_target, 0.25) + wide[3]
    G = matrix.G[:, :n].to(made.dtype)
    right = torch.autograd.grad(want, wide, G.double())
    messages, first, second, bias = here = [each.to(made.device).requires_grad_() for each in given]
    made.flat_with_transpose()
    out = attention_layer(made.flat, messages, first, second, None, None, bias, 0.25)
    found = torch.autograd.grad(out, here, G.to(made.device))
    names = ("attention step", *(f"its gradient of {x}" for x in ("messages", "first", "second")))
    for name, mine, theirs in zip(
        (*names, "its gradient of bias"), (out, *found), (want, *right), strict=True
    ):
        seen.close(name, mine, theirs.detach())


def _layer_weight() -> tuple[CSR, Tensor]:
    """Return a pattern with two of three blocks full, and values that a float8 holds exactly."""
    rows, cols = LAYER_SHAPE
    block = torch.arange(rows).unsqueeze(1) // 64 + torch.arange(cols) // 64
    row, col = (block % 3 != 0).nonzero().T
    values = (torch.arange(row.numel(), dtype=torch.float64) % 5 - 2) / 2
    return CSR(offsets(torch.bincount(row, minlength=rows)), col.int(), None, LAYER_SHAPE), values


def _layers(systems: Sequence[str], types: Sequence[str], device: str, seen: Watched) -> None:
    """Run linear layers with bias and ReLU in every type of every system, float8 included."""
    weight, weights = _layer_weight()
    rows, cols = weight.shape
    dense = torch.zeros(rows, cols, dtype=torch.float64)
    dense[weight.row_ids().long(), weight.indices.long()] = weights
    bias = _fractions(rows, 9, 0.5)
    for system in systems:
        for ablation, dtype in itertools.product(
            SYSTEMS[system].contract_ablations, SYSTEMS[system].dtypes
        ):
            if _name(dtype) not in types:
                continue
            values = weights.to(torch.bfloat16 if dtype is FP8 else dtype)
            csr = weight.with_values(values).to(torch.device(device))
            for tokens in LAYER_TOKENS:
                made = plan_for(csr, tokens, dtype, system, ablation, reverse=False)
                if made is None:
                    continue
                seen.where = f"{LAYER}, weighted, {dtype}, {system}, given order"
                X = _fractions(tokens * cols, 4, 0.0).reshape(tokens, cols)
                added = bias.to(device, torch.float64 if dtype is torch.float64 else torch.float32)
                out = None if dtype is torch.float64 else torch.float32
                Y = made.linear(X.to(device, dtype), bias=added, relu=True, out_dtype=out)
                seen.product(f"linear, N={tokens}", Y, (X @ dense.T + bias).clamp(min=0))
    if BLOCK_SYSTEM in systems:
        _block_layers(types, device, seen)
    seen.finished(LAYER)


@torch.no_grad()
def _block_layers(types: Sequence[str], device: str, seen: Watched) -> None:
    """Run block-sparse layers of each side with bias: few tokens and many, ReLU and SwiGLU."""
    rows, cols = BLOCK_SHAPE
    row, col = torch.arange(rows).unsqueeze(1), torch.arange(cols)
    bias = _fractions(rows, 9, 0.5)
    for side, dtype in itertools.product(BLOCK_SIDES, DTYPES):
        if _name(dtype) not in types or dtype is torch.float64:
            continue
        weight = (((row * cols + col) % 5 - 2) / 2).double() * ((row // side + col // side) % 3 > 0)
        for activation in ("relu", "swiglu"):
            layer = SparseLinear.from_dense(
                weight.to(device, dtype), bias.to(device, dtype), block=side,
                activation=activation, prefer="memory",
            ).eval()  # fmt: skip
            seen.where = f"{LAYER}, blocks of {side}, {dtype}, {BLOCK_SYSTEM}, {activation}"
            for tokens in LAYER_TOKENS:
                X = _fractions(tokens * cols, 4, 0.0).reshape(tokens, cols)
                Y, sums = layer(X.to(device, dtype)), X @ weight.T + bias
                if activation == "relu":
                    seen.product(f"layer, N={tokens}", Y, sums.clamp(min=0))
                else:
                    gate, up = sums.chunk(2, -1)
                    seen.near(f"layer, N={tokens}", Y, torch.nn.functional.silu(gate) * up)


def plan_for(
    csr: CSR, n: int, dtype: torch.dtype, system: str, ablation: str | None, reverse: bool
) -> Plan | None:
    """Plan with the rows as given or reversed; None if the system does not support it."""
    if reverse and not SYSTEMS[system].ordered:
        return None  # it does not use a row order
    order: Any = torch.arange(csr.shape[0] - 1, -1, -1) if reverse else "identity"
    try:
        with _pooled(csr.device.type):
            made = build_plan(csr, n, dtype=dtype, system=system, reorder=order, ablation=ablation)
            both = [made] if dtype is FP8 else [made, made.T]  # float8 has no transpose
    except UnsupportedError:  # a type that the system does not support
        return None
    if csr.device.type == "cuda":
        for tensor in _tensors_of(both):
            tensor.data = tensor.data.clone()
    return made


@contextlib.contextmanager
def _pooled(device: str) -> Iterator[None]:
    """Pool the allocations of planning: hundreds of separate ones would take most of the time,
    because each waits for the GPU, which other processes use as well."""
    if device != "cuda":
        yield
        return
    torch.cuda.caching_allocator_enable(True)
    try:
        yield
    finally:
        torch.cuda.caching_allocator_enable(False)


def _tensors_of(plans: Sequence[Plan]) -> list[Tensor]:
    """Every tensor of plans that a kernel may read, once each."""
    found: dict[int, Tensor] = {}
    for plan in plans:
        for tensor in plan._variant.read_tensors():
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def type_names(system: str) -> list[str]:
    """Return the names of the types that a system multiplies."""
    return [_name(dtype) for dtype in SYSTEMS[system].dtypes]


def watch(
    matrices: Mapping[str, Callable[[], CSR]],
    systems: Sequence[str],
    types: Sequence[str],
    device: str,
    seen: Watched,
) -> None:
    """Run every product of every system and type, weighted and as a pattern, in both row orders.

    Each matrix is weighted in one order and with two of the types, and a pattern in the other order
    with the other types, alternately. Each matrix and type uses the next of a system's ablations.
    All combinations would take many times as long and run no other code. Types that are not named
    are skipped in turn, so that what runs is the same in one process or several.
    """
    widths = itertools.cycle(WIDTHS)
    places = {name: place for place, name in enumerate(matrix_names())}
    for number, (name, make) in enumerate(matrices.items()):
        place = places.get(name, number)  # the same whichever of the matrices run here
        matrix = _Matrix(make())
        turn = place + place // 4  # so that all ablations run with all types
        for weighted in (True, False):
            reverse = weighted == bool(place % 2)
            want = matrix.expected(weighted)
            dtypes = DTYPES[(place // 2 + weighted) % 2 :: 2]
            for dtype, system in itertools.product(dtypes, systems):
                n, parts = next(widths), SYSTEMS[system].contract_ablations
                turn += system == systems[0]
                ablation, other = parts[turn % len(parts)], next(widths)
                if _name(dtype) not in types:
                    continue
                values = matrix.values.to(dtype) if weighted else None
                csr = matrix.given.with_values(values).to(torch.device(device))
                made = plan_for(csr, n, dtype, system, ablation, reverse)
                if made is None:
                    continue
                kind = "weighted" if weighted else "pattern"
                order = "reversed rows" if reverse else "given order"
                seen.where = f"{name}, {kind}, {dtype}, {system}, {order}"
                _forward(made, matrix, n, other, seen, want)
                if weighted:
                    _further(made, matrix, n, seen, want)
                if system == exact_system(made.device.type).name:
                    _pattern(made, matrix, n, seen, want)
                    _gathered(made, matrix, n, seen)
                    _epilogue_gradient(made, matrix, n, seen)
                    if made.device.type == "cuda" and not weighted:
                        _new_graph(made, matrix, n, seen, want)
                    if made.device.type == "cuda" and dtype in ATTENTION_DTYPES:
                        _attention(made, matrix, n, weighted, seen)
                        if not weighted and made.shape[0] == made.shape[1]:
                            _attention_step(made, matrix, n, seen)
        seen.finished(name)


def matrix_names() -> list[str]:
    """Return the names of all matrices: those of the contracts, and the linear layer."""
    return [*importlib.import_module(_CASES).MATRICES, LAYER]


def _made(cases: Any, name: str) -> CSR:
    made: CSR = cases.csr_of(cases.MATRICES[name]())
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the products that the arguments name and write the report."""
    parser = argparse.ArgumentParser(prog="checked_products")
    parser.add_argument("report", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--systems", required=True, help="names, separated by commas")
    parser.add_argument(
        "--matrices", default="", help=f"names from the contracts or {LAYER!r}; all when empty"
    )
    parser.add_argument("--types", default="", help="such as float32,bfloat16; all when empty")
    parser.add_argument("--fill", action="store_true", help="fill fresh memory with NaN")
    asked = parser.parse_args(list(arguments))
    if asked.fill:
        torch.use_deterministic_algorithms(True, warn_only=True)
    cases = importlib.import_module(_CASES)
    names = [name for name in asked.matrices.split(",") if name] or matrix_names()
    makers = {name: functools.partial(_made, cases, name) for name in names if name != LAYER}
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True  # Tensor Cores take float32 only so
    # Else cuBLAS may add 16-bit partial sums, which are not exact.
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    if asked.device != "cpu":
        # One allocation per tensor: a pool would hide accesses past the end of one.
        torch.cuda.init()
        torch.cuda.caching_allocator_enable(False)
    seen, failure = Watched(), ""
    try:
        systems = asked.systems.split(",")
        every = dict.fromkeys(itertools.chain(*map(type_names, systems)))
        types = [name for name in asked.types.split(",") if name] or list(every)
        watch(makers, systems, types, asked.device, seen)
        if LAYER in names:
            _layers(systems, types, asked.device, seen)
        if asked.device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    body = {"matrices": seen.matrices, "products": seen.products, "failure": failure}
    asked.report.write_text(json.dumps(body))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
