"""Measures training steps of two graph layers: PyG's, PyG's under the patch, ours, and captured.

    python -m tools.gnn_layers --data DIR --out DIR --time-limit 300

    python -m tools.gnn_layers --data DIR --out DIR --layers gatv2,transformer,rgcn \
        --graphs "gen:power_law?rows=100000&nnz=1000000&seed=1"

A cell is a graph, a layer, a hidden width and a type: 128 features, the hidden layer, ReLU, 40
classes, Adam; bfloat16 is autocast. Paths of a cell start from the same weights, and their losses
must agree. The record ``gnn_layers.jsonl`` in the folder of --out has the environment in its first
line, then one for each cell: milliseconds of a step, bytes that a step takes at most, seconds of
the first five steps, and ratios of PyG's better path to ours. The same command goes on with a
record that is not complete. Exit code 1 if a path failed or losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
# Seconds of one of three measurements, and its most steps.
SECONDS, MOST_STEPS = 0.03, 20
# How far losses of paths may be apart after these steps, for rounding of TF32 and bfloat16.
APART = 0.01
PATHS = ("pyg", "pyg csr", "patch", "ours", "captured", "pyg captured")
# Layer -> how a module makes it; PyG multiplies a CSR tensor in the first ones.
LAYERS: dict[str, Callable[[Any, int, int, bool], nn.Module]] = {
    "gcn": lambda M, f, h, last: M.GCNConv(f, h, cached=True),
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


@contextlib.contextmanager
def _patched(wanted: bool) -> Iterator[None]:
    with pyg.patch() if wanted else contextlib.nullcontext():
        yield


def _path(
    name: str, start: dict[str, Tensor], layer: str, hidden: int, dtype: str, edges: Tensor,
    adjacent: Tensor, x: Tensor, labels: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Measure one path of a cell."""
    import torch_geometric.nn as theirs

    device = x.device
    torch.manual_seed(2)
    net = _Net(ours if name in ("ours", "captured") else theirs, layer, hidden).to(device)
    net.load_state_dict(start)
    capturable = device.type == "cuda"
    optimiser = torch.optim.Adam(net.parameters(), fused=capturable, capturable=capturable)
    given = adjacent if name == "pyg csr" else edges.clone()

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            out = net(x, given)
        loss = cross_entropy(out.float(), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    with _patched(name == "patch"):
        run = step if "captured" not in name else ours.captured(step, optimizer=optimiser)
        return _measure(run, device)


def _cell(
    layer: str, hidden: int, dtype: str, edges: Tensor, adjacent: Tensor, paths: Sequence[str]
) -> dict[str, Any]:
    nodes, device = adjacent.shape[0], edges.device
    torch.manual_seed(1)
    x = torch.randn(nodes, FEATURES, device=device)
    labels = torch.randint(0, CLASSES, (nodes,), device=device)
    import torch_geometric.nn as theirs

    start = {name: part.clone() for name, part in _Net(theirs, layer, hidden).state_dict().items()}
    found: dict[str, Any] = {"paths": {}}
    for name in paths:
        if name == "pyg csr" and layer not in WITH_CSR:
            continue
        try:
            found["paths"][name] = _path(
                name, start, layer, hidden, dtype, edges, adjacent, x, labels
            )
        except Exception as error:
            found["paths"][name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        gc.collect()
    found["ratios"] = _ratios(found["paths"])
    losses = [each["loss"] for each in found["paths"].values() if "loss" in each]
    found["apart"] = (max(losses) - min(losses)) / max(losses) if losses else math.nan
    return found


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
    """Print cells, then geometric means and the lowest of each ratio."""
    names = ("ours", "patch", "200 steps", "captured", "captured both", "bytes")
    heads = ("graph", "edges", "layer", "hidden", "type", "ours ms", *names)
    rows = [
        [
            cell["graph"], str(cell["edges"]), cell["layer"], str(cell["hidden"]), cell["dtype"],
            f"{cell['paths'].get('ours', {}).get('ms', math.nan):.3f}",
            *(f"{cell['ratios'].get(name, math.nan):.2f}" for name in names),
        ]
        for cell in cells
    ]  # fmt: skip
    print_table(heads, rows, right=heads[5:])
    every = defaultdict(list)
    for cell in cells:
        for name, value in cell["ratios"].items():
            every[name].append(value)
    for name, values in every.items():
        note(f"{name}: {geomean(values):.2f} over {len(values)} cells, {min(values):.2f} the least")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gnn_layers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--graphs", default=",".join(GRAPHS), help="names or gen: specs")
    parser.add_argument("--layers", default=",".join(TABLE), help=", ".join(LAYERS))
    parser.add_argument("--hidden", default="64,256")
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--paths", default=",".join(PATHS), help=", ".join(PATHS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
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
    path = asked.out / "gnn_layers.jsonl"
    cells = _held(path)
    if not cells:
        first = {"schema": 1, "environment": describe_environment(asked.device) | {
            "commit": asked.commit or commit()}}  # fmt: skip
        path.write_text(json.dumps(first) + "\n")
    done = {tuple(cell[name] for name in ("graph", "layer", "hidden", "dtype")) for cell in cells}
    left, graph = 0, ""
    lists = (asked.graphs, asked.layers, asked.hidden, asked.dtype)
    for name, layer, hidden, dtype in itertools.product(*(each.split(",") for each in lists)):
        if (name, layer, int(hidden), dtype) in done:
            continue
        if time.perf_counter() > ends:
            left += 1
            continue
        if name != graph:
            (edges, adjacent), graph = _graph(name, asked.data, device), name
        found = _cell(layer, int(hidden), dtype, edges, adjacent, asked.paths.split(","))
        cell = {
            "graph": name, "nodes": adjacent.shape[0], "edges": edges.shape[1], "layer": layer,
            "hidden": int(hidden), "dtype": dtype, **found,
        }  # fmt: skip
        cells.append(cell)
        with path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
    _show(cells)
    wrong = [cell for cell in cells if not cell["apart"] <= APART]
    failed = [cell for cell in cells if _our_errors(cell)]
    for cell in (*wrong, *failed):
        note(f"gnn_layers: {cell}")
    if left:
        note(f"gnn_layers: {left} cells not begun; the same command goes on with them")
    return 1 if wrong or failed else 0


def _our_errors(cell: dict[str, Any]) -> list[str]:
    """Return why paths of ours failed; PyG refuses some of its own."""
    paths = cell["paths"].items()
    return [each["error"] for name, each in paths if "error" in each and "pyg" not in name]


def _held(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a record."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


if __name__ == "__main__":
    raise SystemExit(main())
