"""Measures training steps of two graph layers: PyG's, PyG's under the patch, ours, and captured.

    python -m tools.gnn_layers --data DIR --out DIR --prepare 60 --time-limit 240

    python -m tools.gnn_layers --data DIR --out DIR --layers gatv2,transformer,rgcn \
        --graphs "gen:power_law?rows=100000&nnz=1000000&seed=1"

A cell is a graph, a layer, a hidden width and a type: 128 features, the hidden layer, ReLU, 40
classes, Adam; bfloat16 is autocast. Paths of a cell start from the same weights, and their losses
must agree. With --new each step has a graph that was never seen, of the same sizes, as a tensor of
its own; the record is ``gnn_fresh.jsonl`` then. Ours and PyG's own of all graphs come first, hidden
width 64 in float32 before others; then the patch and captured steps. What has not begun when the
time is over is left for the same command again. The record ``gnn_layers.jsonl`` in the folder of
--out has the environment in its first line, then one for each cell: milliseconds of a step, bytes
that a step takes at most, seconds of the first five steps, and ratios of PyG's better path to ours.
Exit code 1 if a path failed or losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from sparsetile import nn as ours
from sparsetile import pyg
from sparsetile.bench.analysis import geomean
from sparsetile.bench.environment import commit, describe_environment
from sparsetile.cli.console import note, print_table
from sparsetile.data.catalog import load
from tools.child_processes import run_within
from tools.gnn_cells import CELL, Cells

__all__ = ["main"]

# Three of 50 to 300 thousand edges, four to two million, three above.
GRAPHS = (
    "PubMed", "CoauthorCS", "deezer-europe", "AmazonComputers", "CoauthorPhysics",
    "web-NotreDame", "DD", "ogbl-ddi", "gen:power_law?rows=200000&nnz=4000000&seed=1",
    "gen:power_law?rows=1000000&nnz=10000000&seed=1",
)  # fmt: skip
FEATURES, CLASSES, HEADS, RELATIONS = 128, 40, 8, 10
STEPS = 200  # of which planning is a part, in the ratio of whole trainings
WARM = 5
UNTIL_PLANNED = 14  # steps after which a kept graph has its plans
# Seconds of one of three measurements, and its most steps.
SECONDS, MOST_STEPS = 0.02, 12
# Graphs that take turns if each step has another one; each step has a copy.
TURNS = 8
# How far losses of paths may be apart after these steps, for rounding of TF32 and bfloat16.
APART = 0.01
# In the order in which they are measured: all cells of the first group come first.
PATHS = (("pyg", "pyg csr", "ours"), ("patch", "captured", "pyg captured"))
# Layer -> how a module makes it; PyG multiplies a CSR tensor in the first ones.
LAYERS: dict[str, Callable[[Any, int, int, bool], nn.Module]] = {
    "gcn": lambda M, f, h, last: M.GCNConv(f, h),
    "sage": lambda M, f, h, last: M.SAGEConv(f, h),
    "gin": lambda M, f, h, last: M.GINConv(nn.Linear(f, h)),
    "sage max": lambda M, f, h, last: M.SAGEConv(f, h, aggr="max"),
    "gat": lambda M, f, h, last: M.GATConv(f, h if last else h // HEADS, 1 if last else HEADS),
    "gatv2": lambda M, f, h, last: M.GATv2Conv(f, h if last else h // HEADS, 1 if last else HEADS),
    "transformer": lambda M, f, h, last: M.TransformerConv(
        f, h if last else h // HEADS, 1 if last else HEADS
    ),
    "rgcn": lambda M, f, h, last: _Typed(M, f, h),
}
TABLE = ("gcn", "sage", "sage max", "gin", "gat")  # what is measured on all graphs
WITH_CSR = ("gcn", "sage", "gin")


class _Typed(nn.Module):
    """An RGCNConv; types of edges go round."""

    def __init__(self, package: Any, features: int, hidden: int) -> None:
        super().__init__()
        self.conv = package.RGCNConv(features, hidden, RELATIONS)
        self._types: Tensor | None = None

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if self._types is None:
            self._types = torch.arange(edges.shape[1], device=edges.device) % RELATIONS
        return self.conv(x, edges, self._types)  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self, package: Any, layer: str, hidden: int) -> None:
        super().__init__()
        self.first = LAYERS[layer](package, FEATURES, hidden, False)
        self.last = LAYERS[layer](package, hidden, CLASSES, True)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return self.last(relu(self.first(x, graph)), graph)  # type: ignore[no-any-return]


def _graph(name: str, data: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the edges of a graph, and the same as PyG's ``adj_t``."""
    csr = load(name, data)
    indptr, columns = csr.indptr.to(device), csr.indices.long().to(device)
    rows = torch.repeat_interleave(torch.arange(csr.shape[0], device=device), indptr.diff())
    ones = torch.ones(columns.numel(), device=device)
    adjacent = torch.sparse_csr_tensor(indptr, columns, ones, csr.shape, check_invariants=False)
    return torch.stack([columns, rows]), adjacent


def _like(edges: Tensor, adjacent: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return a graph with other names for its nodes; edges by source, as PyG sorts them."""
    generator = torch.Generator().manual_seed(seed)
    nodes, device = adjacent.shape[0], edges.device
    names = torch.randperm(nodes, generator=generator).to(device)
    renamed = names[edges]
    by_target = renamed[:, (renamed[1] * nodes + renamed[0]).argsort()]
    ends = torch.bincount(by_target[1], minlength=nodes).cumsum(0)
    other = torch.sparse_csr_tensor(
        torch.cat([ends.new_zeros(1), ends]), by_target[0], adjacent.values(), adjacent.shape,
        check_invariants=False,
    )  # fmt: skip
    return renamed[:, (renamed[0] * nodes + renamed[1]).argsort()].contiguous(), other


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clock(step: Callable[[], object], device: torch.device, count: int) -> float:
    """Return the seconds of some steps."""
    _synchronise(device)
    begun = time.perf_counter()
    for _ in range(count):
        step()
    _synchronise(device)
    return time.perf_counter() - begun


def _measure(step: Callable[[], Tensor], device: torch.device) -> dict[str, float]:
    # Bytes that tensors take, not those that the allocator keeps: nothing has to be given back.
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    first = _clock(step, device, WARM)
    loss = float(step())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    one = _clock(step, device, 1)
    count = max(1, min(MOST_STEPS, round(SECONDS / max(one, 1e-6))))
    each = statistics.median(_clock(step, device, count) / count for _ in range(3))
    peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else 0
    return {"ms": each * 1e3, "first_s": first, "mb": peak / 2**20, "loss": loss}


def _step_only(step: Callable[[], Tensor], device: torch.device) -> dict[str, float]:
    """Take as many steps as compile all that later ones launch, and measure nothing."""
    _clock(step, device, UNTIL_PLANNED)
    return {}


@contextlib.contextmanager
def _patched(wanted: bool) -> Iterator[None]:
    with pyg.patch() if wanted else contextlib.nullcontext():
        yield


def _path(
    name: str, start: dict[str, Tensor], layer: str, hidden: int, dtype: str,
    graphs: Sequence[tuple[Tensor, Tensor]], x: Tensor, labels: Tensor,
    measure: Callable[[Callable[[], Tensor], torch.device], dict[str, float]],
) -> dict[str, float]:  # fmt: skip
    """Measure one path of a cell."""
    import torch_geometric.nn as theirs

    device = x.device
    torch.manual_seed(2)
    net = _Net(ours if name in ("ours", "captured") else theirs, layer, hidden).to(device)
    net.load_state_dict(start)
    capturable = device.type == "cuda"
    optimiser = torch.optim.Adam(net.parameters(), fused=capturable, capturable=capturable)
    pool = [adjacent if name == "pyg csr" else edges.clone() for edges, adjacent in graphs]
    turns = itertools.count()

    def step() -> Tensor:
        given = pool[0]
        if len(pool) > 1:
            given = pool[next(turns) % len(pool)].clone()
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            out = net(x, given)
        loss = cross_entropy(out.float(), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    with _patched(name == "patch"):
        run = step if "captured" not in name else ours.captured(step, optimizer=optimiser)
        return measure(run, device)


def _measured(
    layer: str, hidden: int, dtype: str, graphs: Sequence[tuple[Tensor, Tensor]],
    paths: Sequence[str],
    measure: Callable[[Callable[[], Tensor], torch.device], dict[str, float]] = _measure,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Measure some paths of a cell."""
    nodes, device = graphs[0][1].shape[0], graphs[0][0].device
    torch.manual_seed(1)
    x = torch.randn(nodes, FEATURES, device=device)
    labels = torch.randint(0, CLASSES, (nodes,), device=device)
    import torch_geometric.nn as theirs

    start = {name: part.clone() for name, part in _Net(theirs, layer, hidden).state_dict().items()}
    found: dict[str, dict[str, Any]] = {}
    for name in paths:
        try:
            found[name] = _path(name, start, layer, hidden, dtype, graphs, x, labels, measure)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        gc.collect()
    return found


def _judge(cell: dict[str, Any]) -> None:
    """Add the ratios of a cell, and how far its losses are apart."""
    cell["ratios"] = _ratios(cell["paths"])
    losses = [each["loss"] for each in cell["paths"].values() if "loss" in each]
    cell["apart"] = (max(losses) - min(losses)) / max(losses) if losses else math.nan


def _ratios(paths: dict[str, dict[str, float]]) -> dict[str, float]:
    """PyG's better path over ours: a step, whole trainings, captured steps, and bytes."""

    def of(name: str, what: str) -> float:
        return paths.get(name, {}).get(what, math.nan)

    def whole(name: str) -> float:
        return of(name, "first_s") + (STEPS - WARM) * of(name, "ms") / 1e3

    theirs = [name for name in ("pyg", "pyg csr") if not math.isnan(of(name, "ms"))]
    if not theirs:
        return {}
    best = min(of(name, "ms") for name in theirs)
    found = {
        "ours": best / of("ours", "ms"),
        "patch": best / of("patch", "ms"),
        "200 steps": min(whole(name) for name in theirs) / whole("ours"),
        "captured": best / of("captured", "ms"),
        "captured both": of("pyg captured", "ms") / of("captured", "ms"),
        "bytes": of("ours", "mb") / min(of(name, "mb") or math.nan for name in theirs),
    }
    return {name: round(value, 3) for name, value in found.items() if not math.isnan(value)}


def _show(cells: Sequence[dict[str, Any]]) -> None:
    """Print a table for each width and type, then geometric means and the lowest of each ratio."""
    for hidden, dtype in dict.fromkeys((cell["hidden"], cell["dtype"]) for cell in cells):
        some = [cell for cell in cells if (cell["hidden"], cell["dtype"]) == (hidden, dtype)]
        layers = list(dict.fromkeys(cell["layer"] for cell in some))
        note(f"hidden {hidden}, {dtype}: ms of ours; PyG's over it, captured (c), bytes (b)")
        rows = []
        for graph, edges in dict.fromkeys((cell["graph"], cell["edges"]) for cell in some):
            of = {cell["layer"]: _brief(cell) for cell in some if cell["graph"] == graph}
            rows.append([graph, str(edges), *(of.get(layer, "") for layer in layers)])
        print_table(("graph", "edges", *layers), rows, right=("edges", *layers))
    every = defaultdict(list)
    for cell in cells:
        for name, value in cell["ratios"].items():
            every[name].append(value)
    for name, values in every.items():
        least, most = min(values), max(values)
        means = f"{geomean(values):.2f} over {len(values)} cells"
        note(f"{name}: {means}, {least:.2f} the least, {most:.2f} the most")


def _brief(cell: dict[str, Any]) -> str:
    """A cell in one short text."""
    ratios = cell["ratios"]
    parts = [f"{cell['paths'].get('ours', {}).get('ms', math.nan):.2f}"]
    for name, mark in (("ours", "\u00d7"), ("captured", "c"), ("bytes", "b")):
        if name in ratios:
            parts.append(f"{mark}{ratios[name]:.2f}")
    return " ".join(parts)


def _order(asked: argparse.Namespace) -> Iterator[tuple[str, str, int, str, list[str]]]:
    """Yield graph, layer, width, type and paths, the most telling first."""
    graphs, layers, hidden, dtypes = (
        each.split(",") for each in (asked.graphs, asked.layers, asked.hidden, asked.dtype)
    )
    kinds = list(itertools.product(map(int, hidden), dtypes))
    wanted = asked.paths.split(",")
    if asked.new:  # a CUDA graph reads the same edges at each replay
        wanted = [name for name in wanted if "captured" not in name]
    groups = [[name for name in group if name in wanted] for group in PATHS]
    # Every kind of the first one's groups, then the first group of the other kinds.
    turns = [(kinds[0], group) for group in groups]
    turns += [(kind, group) for group in groups for kind in kinds[1:]]
    for (width, dtype), group in turns:
        for name, layer in itertools.product(graphs, layers):
            yield name, layer, width, dtype, group


def _prepare(asked: argparse.Namespace) -> None:
    """Step through all cells of ours in processes of their own, one for each graph: kernels are
    compiled once and kept on disk, so that several processes compile sooner than one."""
    begun, names = time.perf_counter(), asked.graphs.split(",")
    same = [
        "--data", str(asked.data), "--out", str(asked.out), "--layers", asked.layers, "--hidden",
        asked.hidden, "--dtype", asked.dtype, "--device", asked.device, "--only-prepare",
        *(["--new"] if asked.new else []),
    ]  # fmt: skip
    commands = [[sys.executable, "-m", "tools.gnn_layers", *same, "--graphs", n] for n in names]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(lambda each: run_within(each, Path.cwd(), asked.prepare), commands))
    note(f"gnn_layers: prepared in {time.perf_counter() - begun:.0f} s")


def main(words: Sequence[str] | None = None) -> int:
    every = [name for group in PATHS for name in group]
    parser = argparse.ArgumentParser(
        prog="gnn_layers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--graphs", default=",".join(GRAPHS), help="names or gen: specs")
    parser.add_argument("--layers", default=",".join(TABLE), help=", ".join(LAYERS))
    parser.add_argument("--hidden", default="64,256")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--paths", default=",".join(every), help=", ".join(every))
    parser.add_argument("--new", action="store_true", help="another graph in each step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--prepare", type=float, default=0.0,
        help="first compile all kernels, a process for each graph, for at most so many seconds",
    )  # fmt: skip
    parser.add_argument("--only-prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time-limit", type=float, default=500.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    asked = parser.parse_args(words)
    ends, device = time.perf_counter() + asked.time_limit, torch.device(asked.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    # Nothing that was imported is garbage: collections between paths, which free what their
    # graphs of autograd hold, look at the rest alone.
    import torch_geometric.nn  # noqa: F401

    gc.collect()
    gc.freeze()

    graphs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def of(name: str) -> list[tuple[Tensor, Tensor]]:
        if name not in graphs:
            graphs[name] = [_graph(name, asked.data, device)]
            if asked.new:
                graphs[name] = [_like(*graphs[name][0], seed) for seed in range(TURNS)]
        return graphs[name]

    if asked.only_prepare:
        for name, layer, hidden, dtype, group in _order(asked):
            if "ours" in group:
                _measured(layer, hidden, dtype, of(name), ["ours"], _step_only)
        return 0

    def first() -> dict[str, Any]:
        about = describe_environment(asked.device) | {"commit": asked.commit or commit()}
        return {"schema": 1, "environment": about}

    if asked.prepare and not asked.only_prepare:
        _prepare(asked)
    record = Cells(asked.out / f"gnn_{'fresh' if asked.new else 'layers'}.jsonl", first, _judge)
    left = 0
    for name, layer, hidden, dtype, group in _order(asked):
        missing = [each for each in group if each not in record.paths(name, layer, hidden, dtype)]
        missing = [each for each in missing if each != "pyg csr" or layer in WITH_CSR]
        if not missing:
            continue
        if time.perf_counter() > ends:
            left += 1
            continue
        edges, adjacent = of(name)[0]
        found = _measured(layer, hidden, dtype, graphs[name], missing)
        record.add({
            "graph": name, "nodes": adjacent.shape[0], "edges": edges.shape[1], "layer": layer,
            "hidden": hidden, "dtype": dtype, "paths": found,
        })  # fmt: skip
    record.close()
    cells = record.cells
    _show(cells)
    for cell in (wrong := [cell for cell in cells if not cell["apart"] <= APART]):
        losses = {name: each.get("loss") for name, each in cell["paths"].items()}
        note(f"gnn_layers: losses of {[cell[name] for name in CELL]} differ: {losses}")
    for cell in (failed := [cell for cell in cells if _our_errors(cell)]):
        note(f"gnn_layers: {[cell[name] for name in CELL]} failed: {_our_errors(cell)}")
    if left:
        note(f"gnn_layers: {left} measurements not begun; the same command goes on with them")
    return 1 if wrong or failed else 0


def _our_errors(cell: dict[str, Any]) -> list[str]:
    """Return why paths of ours failed; PyG refuses some of its own."""
    paths = cell["paths"].items()
    return [each["error"] for name, each in paths if "error" in each and "pyg" not in name]


if __name__ == "__main__":
    raise SystemExit(main())
