"""Parts of tools.fresh_times without a matrix file: changing patterns, host time, mini-batches."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding_bag, relu

import sparsetile as st
from sparsetile import functional
from sparsetile import nn as ours
from sparsetile.core.timer import one_product
from sparsetile.data import generators
from tools import gnn_times, host_time
from tools.fresh_cases import Case, Context, Figure, tf32

__all__ = ["batches", "change", "host"]


@dataclass(frozen=True)
class Codes:
    """A top-k autoencoder's decoder: tokens x features, k a token, times features x width."""

    tokens: int
    features: int
    width: int
    k: int
    dtype: torch.dtype

    @property
    def group(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens} x {self.features} x {self.width}, {self.k}, {kind}"


CODES = (
    Codes(4096, 65536, 4096, 64, torch.bfloat16),
    Codes(4096, 16384, 768, 32, torch.float32),
    Codes(1024, 131072, 2048, 128, torch.bfloat16),
)
SMALL_CODES = (Codes(32, 64, 16, 4, torch.float32),)
OURS = ("functional.spmm", "st.spmm")
# Calls in a row, and how often all ways take turns.
CALLS, ROUNDS = {"forward": 10, "both": 4}, 5
SAMPLED_TOKENS, SAMPLED_FEATURES = 8, 8
# Largest error of sparsetile's results and gradients, over their largest element.
MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
# Steps of training before a loss is compared, and the largest relative difference from PyG's.
STEPS, MOST_LOSS_ERROR = 6, 0.02
# Host time: calls of a fresh matrix, a round each.
HOST_CALLS, HOST_ROUNDS = 40, 6


def _ways(codes: Codes, W: Tensor, values: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The decoder as people write it: indices [tokens, k] -> [tokens, width]."""
    shape = (codes.tokens, codes.features)
    indptr = torch.arange(0, codes.tokens * codes.k + 1, codes.k, device=W.device)

    def dense(i: Tensor) -> Tensor:
        zeros = torch.zeros(shape, device=W.device, dtype=W.dtype)
        return zeros.scatter(1, i, values) @ W

    return {
        "gather": lambda i: (W[i] * values[..., None]).sum(1),
        "embedding_bag": lambda i: embedding_bag(i, W, per_sample_weights=values, mode="sum"),
        "dense": dense,
        "torch CSR": lambda i: (
            torch.sparse_csr_tensor(
                indptr, i.reshape(-1), values.reshape(-1), shape, check_invariants=False
            )
            @ W
        ),
        "functional.spmm": lambda i: functional.spmm(indptr, i.reshape(-1), values.reshape(-1), W),
        "st.spmm": lambda i: st.spmm((indptr, i.reshape(-1), values.reshape(-1), shape), W),
    }


def _code_errors(
    i: Tensor, values: Tensor, W: Tensor, G: Tensor, got: Sequence[Tensor]
) -> dict[str, float]:
    """Errors of C, of W's and of the values' gradient in sampled rows, over their largest."""
    tokens = torch.arange(0, i.shape[0], max(1, i.shape[0] // SAMPLED_TOKENS), device=i.device)
    used = i[tokens, 0][:SAMPLED_FEATURES]
    with torch.no_grad():
        rows = W[i[tokens]].double()
        C = (rows * values[tokens].double()[..., None]).sum(1)
        of_values = (rows * G[tokens].double()[:, None]).sum(-1)
        of_W = torch.stack([
            ((i == feature) * values.double()).sum(1) @ G.double() for feature in used
        ])  # fmt: skip
    expected = {"C": C, "W": of_W, "values": of_values}
    found = {"C": got[0][tokens], "W": got[1][used], "values": got[2][tokens]}
    return {
        name: float((found[name].double() - each).abs().max() / each.abs().max())
        for name, each in expected.items()
    }


def change(context: Context) -> None:
    """A pattern that is new at each call: forward, and forward with both gradients."""
    for codes in SMALL_CODES if context.small else CODES:
        context.attempt(
            "change", codes.group, "setting", functools.partial(_change, context, codes)
        )
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def _change(context: Context, codes: Codes) -> Figure:
    device = context.device
    W = torch.randn(codes.features, codes.width, device=device, dtype=codes.dtype)
    values = torch.rand(codes.tokens, codes.k, device=device, dtype=codes.dtype)
    G = torch.randn(codes.tokens, codes.width, device=device, dtype=codes.dtype)
    W.requires_grad_()
    values.requires_grad_()

    def pattern() -> Tensor:
        drawn = torch.rand(codes.tokens, codes.features, device=device)
        return drawn.topk(codes.k, dim=1).indices.sort(dim=1).values

    ways = _ways(codes, W, values)
    sources = [pattern() for _ in range(3)]

    def forward(way: str, i: Tensor) -> Tensor:
        with torch.no_grad():
            return ways[way](i)

    def both(way: str, i: Tensor) -> tuple[Tensor, ...]:
        C = ways[way](i)
        return C.detach(), *torch.autograd.grad(C, (W, values), G)

    errors: dict[str, Any] = {}
    times: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, int]] = {}
    failed: dict[str, str] = {}
    for what, call in (("forward", forward), ("both", both)):
        able = []
        for way in ways:
            try:
                _peak(device, functools.partial(call, way, sources[0].clone()))  # warms up
                one = functools.partial(call, way, sources[1].clone())
                memory.setdefault(what, {})[way] = _peak(device, one)
                if what == "both":
                    i = sources[2].clone()
                    errors[way] = _code_errors(i, values, W, G, both(way, i))
                able.append(way)
            except Exception as error:
                failed[f"{way}, {what}"] = f"{type(error).__name__}: {str(error)[:200]}"
        times[what] = _turns(context, able, call, sources, CALLS[what])
    found: Figure = {"ms": times, "peak_bytes": memory, "errors": errors, "failures": failed}
    mine = [error for way in OURS for error in errors.get(way, {}).values()]
    if mine and not max(mine) <= MOST_ERROR[codes.dtype]:
        found |= {"error": max(mine), "wrong": True}
    if any(name.startswith(OURS) for name in failed):
        found["failed"] = "; ".join(f"{name}: {text}" for name, text in failed.items())
    ratios: dict[str, float] = {}
    medians: dict[str, float] = {}
    for what, each in times.items():
        others = [seconds for way, seconds in each.items() if way not in OURS]
        for way in OURS:
            if way in each and others:
                ratios[f"{what}: {way}"] = min(others) / each[way]
        medians |= {f"{what}: {way}, ms": seconds for way, seconds in each.items()}
        medians |= {
            f"{what}: {way}, peak MB": size / 2**20 for way, size in memory.get(what, {}).items()
        }
    return found | {"ratios": ratios, "medians": medians}


def _peak(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that a call allocates at most, beside what there was."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _turns(
    context: Context,
    names: Sequence[str],
    call: Callable[[str, Tensor], object],
    sources: Sequence[Tensor],
    calls: int,
) -> dict[str, float]:
    """Median milliseconds of a call by each way; ways take turns, and no pattern comes twice."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(2 if context.small else ROUNDS):
        for name in names:
            patterns = [sources[place % len(sources)].clone() for place in range(calls)]

            def work(name: str = name, patterns: Sequence[Tensor] = patterns) -> None:
                for pattern in patterns:
                    call(name, pattern)

            seconds[name].append(one_product(work, context.device) / calls)
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def host(context: Context) -> None:
    """Host time of calls over torch.add in the same run, of a graph that keeps no GPU busy."""
    nodes, edges, width = (60, 300, 8) if context.small else (3_000, 30_000, 64)
    count, rounds = (2, 1) if context.small else (HOST_CALLS, HOST_ROUNDS)
    csr = generators.random(nodes, nodes, density=edges / nodes**2, weighted=True, seed=0)
    case = Case("random", csr, context.device, torch.int64)
    B, G = case.dense(width), case.dense(width)
    tracked = B.clone().requires_grad_()
    A, arrays = case.fresh(), case.arrays()
    indptr, indices, values = arrays
    trained = values.clone().requires_grad_()

    def new(make: Callable[[], Any]) -> Iterator[Any]:
        return iter([make() for _ in range(count * (rounds + 1))])

    def both(values: Tensor) -> object:
        C = functional.spmm(indptr, indices, values, tracked)
        inputs = (values, tracked) if values.requires_grad else (tracked,)
        return torch.autograd.grad(C, inputs, G)

    def new_pattern(arrays: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return functional.spmm(*arrays, B)

    def measure() -> Figure:
        tensors, tuples = new(case.fresh), new(lambda: (*case.arrays(), case.csr.shape))
        patterns = new(case.arrays)
        calls = {
            "torch.add": lambda: torch.add(B, B),
            "spmm(fresh tensor)": lambda: st.spmm(next(tensors), B),
            "spmm(fresh arrays)": lambda: st.spmm(next(tuples), B),
            "spmm(known tensor)": lambda: st.spmm(A, B),
            "spmm(known arrays)": lambda: st.spmm((*arrays, case.csr.shape), B),
            "functional.spmm": lambda: functional.spmm(indptr, indices, values, B),
            "functional.spmm, fresh arrays": lambda: new_pattern(next(patterns)),
            "functional.spmm with gradient": lambda: functional.spmm(
                indptr, indices, values, tracked
            ),
            "functional forward and backward": lambda: both(values),
            "functional forward and both gradients": lambda: both(trained),
            "torch.sparse.mm": lambda: torch.sparse.mm(A, B),
        }
        times = host_time.host_microseconds(calls, count, rounds)
        add = times.pop("torch.add")
        medians = {f"{name} / add": each / add for name, each in times.items()}
        return {"torch_add_us": add, "us": times, "medians": medians}

    for allowed in (False, True):
        group = "TF32" if allowed else "float32"
        with tf32(allowed):
            context.attempt("host", group, "call", measure)
    st.clear_plan_cache()


def batches(context: Context) -> None:
    """Sampled mini-batches over PyG, then steps from edge_index, eager and compiled."""
    nodes, edges, batch, steps = (300, 3000, 32, 1) if context.small else (
        100_000, 2_000_000, 1024, 9
    )  # fmt: skip
    graph = generators.power_law(nodes, edges, seed=1)
    name = context.device.type

    def sampled(measure: Callable[..., Any]) -> Figure:
        found = measure(graph, name, batch, steps)
        return found | {"ratios": {"over PyG eager": found["speedup"]}}

    for title, measure in (("SAGE", gnn_times.minibatches), ("GCN", gnn_times.convolutions)):
        context.attempt("batches", "sampled (15, 10)", title, functools.partial(sampled, measure))
    for mode in ("default",) if context.small else ("default", "reduce-overhead"):
        for kind in ("GCNConv", "SAGEConv"):
            with tf32(True):
                step = functools.partial(_steps, context, kind, mode)
                context.attempt("batches", f"step, {mode}", kind, step)


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _steps(context: Context, kind: str, mode: str) -> Figure:
    """Training steps of two layers from edge_index: both packages, eager and compiled."""
    from torch_geometric import nn as pyg

    small, device = context.small, context.device
    nodes, edges, width, classes = (60, 300, 8, 4) if small else (20_000, 200_000, 128, 40)
    edge_index = torch.randint(0, nodes, (2, edges), device=device)
    x = torch.randn(nodes, width, device=device)
    labels = torch.randint(0, classes, (nodes,), device=device)

    def net_of(package: Any) -> nn.ModuleList:
        layer = getattr(package, kind)
        return nn.ModuleList([layer(width, width), layer(width, classes)]).to(device)

    weights = {name: each.clone() for name, each in net_of(pyg).state_dict().items()}
    ways = {"PyG": (pyg, False), "ours": (ours, False)}
    if not small:
        ways |= {"PyG compiled": (pyg, True), "ours compiled": (ours, True)}

    def made(package: Any, compiled: bool) -> Callable[[], Tensor]:
        net = net_of(package)
        net.load_state_dict(weights)
        on_gpu = device.type == "cuda"
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01, fused=on_gpu, capturable=on_gpu)

        def loss_of(x: Tensor) -> Tensor:
            return cross_entropy(net[1](relu(net[0](x, edge_index)), edge_index), labels)

        forward = torch.compile(loss_of, mode=mode, dynamic=False) if compiled else loss_of

        def step() -> Tensor:
            optimiser.zero_grad(set_to_none=True)
            loss = forward(x)
            loss.backward()
            optimiser.step()
            return loss

        return step

    repeats = 1 if small else 30
    times: dict[str, float] = {}
    losses: dict[str, float] = {}
    failures: dict[str, str] = {}
    skipped: list[str] = []
    for name, (package, compiled) in ways.items():
        if context.late:
            skipped.append(name)
            continue
        try:
            torch._dynamo.reset()
            step = made(package, compiled)
            for _ in range(STEPS):
                losses[name] = float(step().detach())
            work = functools.partial(_repeat, step, repeats)
            seconds = [one_product(work, device) for _ in range(3)]
            times[name] = 1e3 * statistics.median(seconds) / repeats
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    torch._dynamo.reset()
    ratios = {}
    theirs = [each for name, each in times.items() if name.startswith("PyG")]
    for name, each in times.items():
        if name.startswith("ours") and theirs:
            ratios[f"{name} over PyG's best"] = min(theirs) / each
    if "ours compiled" in times and "ours" in times:
        ratios["ours compiled over ours"] = times["ours"] / times["ours compiled"]
    found: Figure = {"ms": times, "losses": losses, "failures": failures, "ratios": ratios}
    found["medians"] = {f"{name}, ms": each for name, each in times.items()}
    if skipped:
        found |= {"skipped": [f"{kind}, {name}" for name in skipped], "reason": "time limit"}
    mine = [each for name, each in losses.items() if name.startswith("ours")]
    if "PyG" in losses and mine:
        apart = max(abs(each / losses["PyG"] - 1) for each in mine)
        found |= {"error": apart} | ({} if apart <= MOST_LOSS_ERROR else {"wrong": True})
    if any(name.startswith("ours") for name in failures):
        found["failed"] = "; ".join(f"{name}: {text}" for name, text in failures.items())
    return found
