"""The experiments of the RSH-SpMM paper on this machine, as one JSON record.

    python -m tools.rsh_study --data DIR --out FILE.json [--matrices a,b] [--only NAME,NAME]
                              [--order NAME] [--time-limit SECONDS] [--commit TEXT]

    thresholds  the paper's rule with tau_nnz from 0 to 10, beside the split by cost
    orders      nonzeros per tile and kernel times in each row order
    bytes       index arrays of RS-Tile, BitTCF and others, and what our kernel reads
    parts       share of rows, nonzeros and time in windows and in residual rows
    planning    seconds by stage, and after how many products they have paid against csr
    gcn         a six-layer GCN whose products are exchanged
    core        rsh, csr and acc beside cuSPARSE's three CSR algorithms in float32, with random
                values: TF32, and FP16 in, FP32 out; only when asked for

Products run through plans; times are medians of replayed CUDA graphs. Each product is compared with
csr's: ``error`` is the largest difference over the largest element. Without a GPU the record holds
what can be counted and times are null. Exit code 1 when an experiment failed or a product was
wrong, 2 for bad usage. The record is written after every matrix; at the time limit it holds what
there is and names the rest under ``not_run``.

One file although it is long: seven functions that share one class and nothing else does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.operands import Operands
from sparsetile.bench.orders import Order, find_order
from sparsetile.bench.tiles import STORAGES, count_tiles
from sparsetile.cli.console import note
from sparsetile.core.checks import one_of
from sparsetile.core.device import H200
from sparsetile.core.errors import value_error
from sparsetile.core.timer import measure, time_product
from sparsetile.data.catalog import catalog, find, load
from sparsetile.formats.bittcf import TILE_COLUMNS
from sparsetile.formats.fragments import fragment_elements
from sparsetile.formats.partition import (
    Counts,
    Partition,
    count_columns,
    split_by_cost,
    split_by_threshold,
)
from sparsetile.formats.rstile import RSTile
from sparsetile.intake.csr import CSR
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.reorder import REORDERERS, Permutation
from sparsetile.systems import SYSTEMS, BuiltSystem, Request
from sparsetile.systems.rsh.cost import HEIGHT, cheapest_split, row_costs
from sparsetile.systems.rsh.system import RSHSystem
from sparsetile.systems.rsh.system import thresholds as adaptive_thresholds
from tools.record import machine_facts, write_json

__all__ = [
    "EXPERIMENTS",
    "MATRICES",
    "Case",
    "cusparse_times",
    "gcn_adjacency",
    "main",
    "run_experiments",
    "with_random_values",
]

SCHEMA = 1
# Table 1 of the paper, then matrices of other kinds.
MATRICES = (
    "com-amazon", "ogbl-ddi", "DD", "amazon0505", "amazon0601", "Yeast", "OVCAR-8H", "YeastH",
    "web-BerkStan", "AmazonComputers", "CoauthorPhysics", "pkustk04", "gupta2", "web-NotreDame",
    "rajat16", "usroads", "cit-HepPh",
)  # fmt: skip
N, DTYPE = 128, torch.float16
TAUS, TAU_INC = range(11), 3
ORDERS = ("identity", "rcm", "rabbit", "affinity", "locality-mst", "locality-2opt", "locality")
PART_WIDTHS, PART_DTYPES = (128, 512), (torch.float16, torch.float32)
LAYERS, FEATURES, HIDDEN = 6, 128, (64, 256)
TORCH = "torch.sparse"
GCN_SYSTEMS = ("csr", "rsh", "acc", TORCH)  # csr first: others are compared with it
# The core suite: systems by width; each is tried in the same row orders.
CORE_WIDTHS = {64: ("rsh",), 128: ("rsh", "csr", "acc"), 256: ("rsh",), 512: ("rsh", "csr", "acc")}
CORE_DTYPES = (torch.float16, torch.float32)
CORE_ORDERS = ("identity", "affinity", "locality")
CUSPARSE = ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3")
# Largest error of a product that only rounds, to 16 bits or to TF32.
WRONG = 0.01
# Seconds of measured work of a product: there are hundreds of them.
BUDGET = 0.004
_SCHEDULE = ("items", "parent_of_slot", "nodes")
_NO_WINDOWS = {"items": 0, "slots": 0, "nodes": 0}
_NO_ROWS = {"residual": {"sections": [0, 0, 0, 0, 0], "slots": 0, "nodes": 0}}

Found = dict[str, Any]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(C: Tensor, expected: Tensor) -> float | None:
    """Largest difference over the largest element; None where it is not finite."""
    if not expected.numel():
        return 0.0
    largest = float(expected.abs().max())
    found = float((C.float() - expected).abs().max()) / (largest or 1.0)
    return found if math.isfinite(found) else None


class Case:
    """One matrix on the device, with what several experiments ask for: each is found once.

    Attributes
    ----------
    order : str
        Row order of the experiments that look at one alone.
    wrong : list of str
        Products that were too far from csr's.
    """

    def __init__(self, name: str, csr: CSR, device: torch.device, order: str = "identity") -> None:
        self.name, self.order, self.device = name, order, device
        self.host, self.csr = csr, csr.to(device)
        self.wrong: list[str] = []
        self._orders: dict[str, Order] = {}
        self._perms: dict[str, Tensor | None] = {}
        self._counts: dict[tuple[str, int], Counts] = {}
        self._operands: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._products: dict[tuple[Any, ...], Found] = {}

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def found_order(self, name: str) -> Order | None:
        """Find a row order on the host and time it; None for the given order."""
        if name not in self._perms:
            found = find_order(self.host, name)
            self._perms[name] = None if found is None else found.perm.to(self.device)
            if found is not None:
                self._orders[name] = found
        return self._orders.get(name)

    def perm(self, name: str) -> Tensor | None:
        self.found_order(name)
        return self._perms[name]

    def counts(self, order: str, height: int) -> Counts:
        if (order, height) not in self._counts:
            self._counts[order, height] = count_columns(self.csr, self.perm(order), height)
        return self._counts[order, height]

    def request(
        self, n: int = N, dtype: torch.dtype = DTYPE, ablation: str | None = None
    ) -> Request:
        """What ``build_plan`` would ask of rsh; without a GPU, on behalf of an H200."""
        permutation = Permutation(self.order, self.perm(self.order))
        ceilings = None if self.has_gpu else H200
        return Request(self.csr, n, dtype, permutation, ablation=ablation, ceilings=ceilings)

    def operands(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """B, and csr's product with it in float32."""
        if (n, dtype) not in self._operands:
            generator = torch.Generator(device=self.device).manual_seed(n)
            shape = (self.csr.shape[1], n)
            B = torch.randn(shape, device=self.device, generator=generator).to(dtype)
            plan = build_plan(self.csr, n, dtype=dtype, system="csr")
            self._operands[n, dtype] = B, plan.run(B, out_dtype=torch.float32)
        return self._operands[n, dtype]

    def measured(
        self,
        what: str,
        plan: Plan,
        rows: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Found:
        """Check and time a plan's product; of a part of one, its ``rows``."""
        B, expected = self.operands(plan.n, plan.dtype)

        def run() -> Tensor:
            return plan.run(B) if out_dtype is None else plan.run(B, out_dtype=out_dtype)

        C = run()
        error = _error(C, expected) if rows is None else _error(C[rows], expected[rows])
        if error is None or error > WRONG:
            self.wrong.append(f"{self.name}: {what}, N={plan.n}, {_name(plan.dtype)}: {error}")
        samples = time_product(run, self.device, budget=BUDGET)
        return {"time": samples.summary(), "error": error}

    def built_product(
        self, what: str, request: Request, built: BuiltSystem, rows: Tensor | None = None
    ) -> Found:
        """The product of a build that no ablation names."""
        if not self.has_gpu:
            return {"time": None, "error": None}
        plan = Plan(
            request.csr, request.n, request.dtype, built, request.permutation,
            deterministic=False, report={},
        )  # fmt: skip
        return self.measured(what, plan, rows)

    def product(
        self,
        system: str,
        *,
        n: int = N,
        dtype: torch.dtype = DTYPE,
        order: str = "identity",
        ablation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Found:
        """The product of a system's plan, with what rsh says of its split; once."""
        if not self.has_gpu:
            return {"time": None, "error": None, "split": None}
        key = (system, n, dtype, order, ablation, out_dtype)
        if key not in self._products:
            perm = self.perm(order)
            plan = build_plan(
                self.csr, n, dtype=dtype, system=system, ablation=ablation,
                reorder="identity" if perm is None else perm,
            )  # fmt: skip
            what = f"{system} {ablation or 'default'}, {order}"
            split = plan.info["choices"].get("split")
            found = self.measured(what, plan, out_dtype=out_dtype)
            self._products[key] = {**found, "split": split}
        return self._products[key]


def _density(counts: Counts, split: Partition | None) -> Found:
    """Rows and entries in windows, and entries of a tile; None: all rows on CUDA cores."""
    if split is None:
        split = split_by_threshold(counts, int(counts.entries.max()), 2**62)
    tiles = int(((counts.pairs[split.windows] + TILE_COLUMNS - 1) // TILE_COLUMNS).sum())
    held = int(counts.entries[split.tiled].sum())
    return {
        "windows": split.windows.numel(),
        "tiles": tiles,
        "row_share": split.tiled.numel() / max(split.rows, 1),
        "entry_share": held / max(int(counts.entries.sum()), 1),
        "nonzeros_per_tile": held / max(tiles, 1),
    }


def thresholds(case: Case) -> Found:
    """Sweep tau_nnz; windows of eight rows, the paper's, are counted beside ours of sixteen."""
    request, steps = case.request(), []
    ours, paper = case.counts(case.order, HEIGHT), case.counts(case.order, 8)
    for tau in TAUS:
        split = split_by_threshold(ours, tau, TAU_INC)
        found = _density(paper, split_by_threshold(paper, tau, TAU_INC))
        built = RSHSystem()._build(request, split)
        product = case.built_product(f"tau_nnz {tau}", request, built)
        steps.append({"tau_nnz": tau, **_density(ours, split), "eight_rows": found, **product})
    splits: dict[str, Partition | None] = {
        "mixed": split_by_cost(ours, row_costs(request)),
        "default": cheapest_split(request).partition,
    }
    named = {
        name: _density(ours, split)
        | case.product("rsh", order=case.order, ablation=None if name == "default" else name)
        for name, split in splits.items()
    }
    return {
        "n": N,
        "dtype": _name(DTYPE),
        "tau_inc": TAU_INC,
        "adaptive": list(adaptive_thresholds(request)),
        "steps": steps,
        **named,
        "csr": case.product("csr"),
    }


def orders(case: Case) -> Found:
    """Tiles of all rows, and products of rsh with all rows in windows and as it chooses."""
    found: Found = {"n": N, "dtype": _name(DTYPE)}
    for name in ORDERS:
        order = case.found_order(name)
        tiles = {
            f"{height}_rows": _density(
                case.counts(name, height), split_by_threshold(case.counts(name, height), 0, 0)
            )
            for height in (8, 16)
        }
        found[name] = {
            "seconds": 0.0 if order is None else order.seconds,
            **tiles,
            "tiles": case.product("rsh", order=name, ablation="tiles"),
            "default": case.product("rsh", order=name),
        }
    return found


def _nbytes(built: BuiltSystem, names: Sequence[str]) -> int:
    return sum(built.tensors[name].nbytes for name in names)


def index_bytes(case: Case) -> Found:
    """Bytes without values; ``kernel`` is what rsh's kernel has instead, values included."""
    request, perm = case.request(), case.perm(case.order)
    counted = count_tiles(case.host, None if perm is None else perm.cpu())
    found: Found = {name: storage.size(counted) for name, storage in STORAGES.items()}
    acc = SYSTEMS["acc"].build(request.changed(ablation="no-stack"))
    found["BitTCF and schedule"] = found["BitTCF"] + _nbytes(acc, _SCHEDULE)
    taus = adaptive_thresholds(request)
    for height in (8, 16):
        counts = case.counts(case.order, height)
        for label, limits in (("thresholds", taus), ("all tiles", (0, 0))):
            split = split_by_threshold(counts, *limits)
            packed = RSTile.pack_split(case.csr, perm, split)
            found[f"RS-Tile, {height} rows, {label}"] = packed.bytes
    cheapest = split_by_cost(case.counts(case.order, HEIGHT), row_costs(request))
    found["RS-Tile, 16 rows, cost"] = RSTile.pack_split(case.csr, perm, cheapest).bytes
    kernels = {}
    for ablation in ("threshold", "mixed"):
        built = RSHSystem().build(case.request(ablation=ablation))
        tiles = built.tensors["tile_columns"].numel() // TILE_COLUMNS
        kernels[ablation] = {
            **{name: tensor.nbytes for name, tensor in built.tensors.items()},
            "fragments": fragment_elements(tiles, DTYPE.itemsize) * DTYPE.itemsize,
        }
    return {**found, "kernel": kernels}


def _with(built: BuiltSystem, changed: Found) -> BuiltSystem:
    """The same tensors under a recipe with other sizes."""
    name, _, body = built.recipe.partition(":")
    return replace(
        built, recipe=f"{name}:{json.dumps({**json.loads(body), **changed}, sort_keys=True)}"
    )


def parts(case: Case) -> Found:
    """Windows alone, residual rows alone, and both in one launch, in the split by cost."""
    found: Found = {}
    for n in PART_WIDTHS:
        for dtype in PART_DTYPES:
            request = case.request(n, dtype, "mixed")
            built = RSHSystem().build(request)
            inside = torch.zeros(case.csr.shape[0], dtype=torch.bool, device=case.device)
            inside[built.tensors["order"].to(torch.int64)] = True
            lengths = case.csr.row_lengths()
            pieces: dict[str, tuple[Tensor, Found]] = {
                "windows": (inside, _NO_ROWS),
                "residual": (~inside, _NO_WINDOWS),
            }
            result: Found = {"whole": case.built_product("whole", request, built)}
            for name, (rows, without) in pieces.items():
                result[name] = {
                    "row_share": int(rows.sum()) / max(rows.numel(), 1),
                    "entry_share": int(lengths[rows].sum()) / max(case.csr.nnz, 1),
                    "time": None,
                    "error": None,
                }
                if bool(rows.any()):  # a grid of no blocks is none
                    alone = _with(built, without)
                    result[name] |= case.built_product(f"{name} alone", request, alone, rows)
            result["csr"] = case.product("csr", n=n, dtype=dtype)
            found[f"{n} {_name(dtype)}"] = result
    return found


def planning(case: Case) -> Found:
    """Plans of csr and rsh, stage by stage; compilation, which is cached, is left out."""
    found: Found = {"n": N, "dtype": _name(DTYPE)}
    asked = [("csr", "identity", None), ("rsh", "identity", None), ("rsh", "identity", "mixed")]
    for system, order, ablation in [*asked, ("rsh", "locality", None)]:
        product = case.product(system, order=order, ablation=ablation)  # warms the build up, too
        known, perm = case.found_order(order), case.perm(order)
        torch.cuda.synchronize(case.device)
        begun = time.perf_counter()
        plan = build_plan(
            case.csr, N, dtype=DTYPE, system=system, ablation=ablation, timed=True,
            reorder="identity" if perm is None else perm,
        )  # fmt: skip
        torch.cuda.synchronize(case.device)
        total = time.perf_counter() - begun
        stages = {**plan.info["seconds"], **plan.info["build"]}
        total -= stages.pop("compile")
        if known is not None:
            stages["reorder"] = known.seconds
            total += known.seconds
        entry = {"stages": stages, "total": total, "product": product["time"]["p50"]}
        if "csr" in found:
            gain = found["csr"]["product"] - entry["product"]
            extra = max(total - found["csr"]["total"], 0.0)
            entry["break_even"] = math.ceil(extra / gain) if gain > 0 else None
        label = " ".join(word for word in (system, ablation) if word)
        found[label if order == "identity" else f"{label}, {order}"] = entry
    return found


def gcn_adjacency(csr: CSR) -> CSR:
    """Return D^-1/2 (P + I) D^-1/2 of a square matrix's pattern P; D has the row sums."""
    rows = csr.shape[0]
    diagonal = torch.arange(rows, device=csr.device)
    keys = torch.cat([csr.row_ids() * rows + csr.indices, diagonal * (rows + 1)]).unique()
    row, column = keys // max(rows, 1), keys % max(rows, 1)
    degree = torch.bincount(row, minlength=rows)
    indptr = torch.zeros(rows + 1, dtype=torch.int64, device=csr.device)
    torch.cumsum(degree, 0, out=indptr[1:])
    scale = degree.float().rsqrt()
    return CSR(indptr, column.to(torch.int32), scale[row] * scale[column], csr.shape)


Spmm = Callable[[Tensor], Tensor]


def _torch_sparse(adjacency: CSR, dtype: torch.dtype) -> tuple[Spmm, int]:
    """torch's CSR product, which is cuSPARSE's, and the bytes of its matrix."""
    assert adjacency.values is not None
    indptr, values = adjacency.indptr.to(torch.int32), adjacency.values.to(dtype)
    A = torch.sparse_csr_tensor(
        indptr, adjacency.indices, values, adjacency.shape, check_invariants=False
    )
    return lambda B: A @ B, indptr.nbytes + adjacency.indices.nbytes + values.nbytes


def _planned(adjacency: CSR, dtype: torch.dtype, hidden: int, system: str) -> tuple[Spmm, int]:
    plan = build_plan(adjacency, hidden, dtype=dtype, system=system)
    return plan.run, int(plan.info["format_bytes"])


def _forward(
    build: Callable[[], tuple[Spmm, int]],
    inputs: Tensor,
    weights: Sequence[Tensor],
    expected: Tensor | None,
) -> tuple[Found, Tensor]:
    """Check and time one network; its own result is expected where none is given."""
    device = inputs.device
    before = torch.cuda.memory_allocated(device)
    spmm, held = build()

    def forward() -> Tensor:
        H = inputs
        for W in weights:
            H = torch.relu_(spmm(H @ W))
        return H

    torch.cuda.reset_peak_memory_stats(device)
    result = forward()
    peak = torch.cuda.max_memory_allocated(device) - before
    found = {
        "error": _error(result, result if expected is None else expected),
        "graph": time_product(forward, device, budget=BUDGET).summary(),
        "eager": measure(forward, device, repeats=5),
        "bytes": held,
        "peak_bytes": peak + inputs.nbytes + sum(W.nbytes for W in weights),
    }
    return found, result


def gcn(case: Case) -> Found:
    """Six layers of relu(A (X W)): one forward from a CUDA graph, and launched from Python.

    ``bytes`` is the format's memory, ``peak_bytes`` all that a forward had allocated at once,
    inputs and weights included. Errors are against csr's forward in float32.
    """
    if case.csr.shape[0] != case.csr.shape[1]:
        return {"skipped": "not square"}
    adjacency, device = gcn_adjacency(case.csr), case.device
    found: Found = {"layers": LAYERS, "features": FEATURES, "nnz": adjacency.nnz}
    for hidden in HIDDEN:
        generator = torch.Generator(device=device).manual_seed(hidden)
        exact = [
            torch.randn(fan, out, device=device, generator=generator) * math.sqrt(2 / fan)
            for fan, out in itertools.pairwise([FEATURES, *[hidden] * LAYERS])
        ]
        inputs = torch.randn(case.csr.shape[0], FEATURES, device=device, generator=generator)
        expected: Tensor | None = None
        for dtype in (torch.float32, torch.float16):
            X, weights = inputs.to(dtype), [W.to(dtype) for W in exact]
            for name in GCN_SYSTEMS:
                label = f"{hidden} {_name(dtype)} {name}"
                if name == TORCH:
                    build = functools.partial(_torch_sparse, adjacency, dtype)
                else:
                    build = functools.partial(_planned, adjacency, dtype, hidden, name)
                try:
                    found[label], result = _forward(build, X, weights, expected)
                except RuntimeError as error:
                    if name != TORCH:
                        raise
                    found[label] = {"skipped": " ".join(str(error).split())[:200]}
                    continue
                expected = result if expected is None else expected
    return found


def with_random_values(case: Case) -> Case:
    """The same pattern with values of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    csr = case.host.with_values(torch.randn(case.host.nnz, generator=generator))
    return Case(case.name, csr, case.device, case.order)


def cusparse_times(case: Case, n: int) -> Found:
    """Times of cuSPARSE's three CSR algorithms in float32, by name."""
    B, _ = case.operands(n, torch.float32)
    operands = Operands(case.csr, B, None, "spmm", "sum")
    return {
        name: time_product(
            BASELINES[name].prepare(operands).run, case.device, budget=BUDGET
        ).summary()
        for name in CUSPARSE
    }


def core(case: Case) -> Found:
    """Products of the core suite with random values, by width, type, system and row order."""
    weighted = with_random_values(case)
    found: Found = {"cusparse": {}, "products": []}
    for n, systems in CORE_WIDTHS.items():
        found["cusparse"][str(n)] = cusparse_times(weighted, n)
        for dtype, system in itertools.product(CORE_DTYPES, systems):
            out = torch.float32 if dtype is torch.float16 else None
            for order in CORE_ORDERS:
                product = weighted.product(system, n=n, dtype=dtype, order=order, out_dtype=out)
                labels = {"n": n, "dtype": _name(dtype), "system": system, "order": order}
                found["products"].append({**labels, **product})
    case.wrong += weighted.wrong
    return found


EXPERIMENTS: dict[str, Callable[[Case], Found]] = {
    "thresholds": thresholds,
    "orders": orders,
    "bytes": index_bytes,
    "parts": parts,
    "planning": planning,
    "gcn": gcn,
    "core": core,
}
_NEED_GPU = ("planning", "gcn", "core")


def _facts() -> Found:
    """The machine of the record."""
    if torch.cuda.is_available():
        return machine_facts()
    return {"gpu": None, "torch": torch.__version__, "python": platform.python_version()}


def _chosen(tool: str, data: Path, asked: str | None, defaults: Sequence[str]) -> list[str]:
    """Names of the matrices: those asked for, which must exist, or the defaults that do."""
    if asked is not None:
        names = list(dict.fromkeys(name for name in asked.split(",") if name))
        for name in names:
            find(name, data)  # refuses unknown names
    else:
        held = {entry.name for entry in catalog(data) if not entry.problem}
        names = [name for name in defaults if name in held]
    if not names:
        raise value_error(
            tool, "--matrices", "at least one matrix of the data folder", "none",
            "Name matrices that the folder of --data holds",
        )  # fmt: skip
    return names


def run_experiments(
    tool: str,
    asked: argparse.Namespace,
    experiments: dict[str, Callable[[Case], Found]],
    only: Sequence[str],
    need_gpu: Sequence[str],
    defaults: Sequence[str],
) -> tuple[int, Found]:
    """Run experiments on matrices, write the record after each, and return exit code and record.

    ``asked``: data, out, matrices, order, time_limit and commit, as ``main`` parses them.
    """
    if not 0 < asked.time_limit < math.inf:
        raise value_error(
            tool, "--time-limit", "seconds above 0", asked.time_limit, "Omit --time-limit"
        )
    if asked.out.is_dir():
        raise value_error(tool, "--out", "a file", f"the folder {str(asked.out)!r}", "Name a file")
    names = _chosen(tool, asked.data, asked.matrices, defaults)
    begun = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = True  # what rsh and acc need in float32
    record: Found = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": asked.commit or source_commit(),
        **_facts(),
        "order": asked.order,
        "matrices": {},
        "experiments": {name: {} for name in only},
        "failed": [],
        "wrong": [],
        "not_run": [],
    }
    for name in names:
        late = time.perf_counter() - begun > asked.time_limit
        if not late:
            case = Case(name, load(name, asked.data), device, asked.order)
            rows, columns = case.csr.shape
            record["matrices"][name] = {"rows": rows, "columns": columns, "nnz": case.csr.nnz}
        for experiment in only:
            started = time.perf_counter()
            if started - begun > asked.time_limit:
                record["not_run"].append([name, experiment, "time limit"])
                continue
            if experiment in need_gpu and device.type != "cuda":
                record["not_run"].append([name, experiment, "no GPU"])
                continue
            try:
                record["experiments"][experiment][name] = experiments[experiment](case)
            except (RuntimeError, ValueError, MemoryError) as error:
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                record["failed"].append([name, experiment, text])
                note(f"{tool}: {name}, {experiment}: {text}")
            else:
                note(f"{tool}: {name}, {experiment}: {time.perf_counter() - started:.1f} s")
        if not late:
            record["wrong"] += case.wrong
        record["seconds"] = round(time.perf_counter() - begun, 1)
        write_json(record, asked.out)
    for line in record["wrong"]:
        note(f"{tool}: wrong: {line}")
    note(f"{tool}: wrote {asked.out}, {len(record['not_run'])} experiments not run")
    return 1 if record["failed"] or record["wrong"] else 0, record


def _study(asked: argparse.Namespace) -> int:
    only = [
        one_of("rsh_study", "--only", name, EXPERIMENTS)
        for name in (asked.only or ",".join(list(EXPERIMENTS)[:-1])).split(",")
    ]
    one_of("rsh_study", "--order", asked.order, REORDERERS)
    return run_experiments("rsh_study", asked, EXPERIMENTS, only, _NEED_GPU, MATRICES)[0]


def run_study(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    study: Callable[[argparse.Namespace], int],
) -> int:
    """Parse what every study takes beside its own options, run it, and return the exit code."""
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record where git is missing")
    asked = parser.parse_args(list(arguments))
    try:
        with torch.no_grad():
            return study(asked)
    except (ValueError, OSError) as error:
        note(f"{parser.prog}: error: {error}")
        return 2


def main(arguments: Sequence[str]) -> int:
    """Run the study that the arguments ask for and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rsh_study", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--matrices", help="names, comma-separated; the paper's and ours if omitted"
    )
    parser.add_argument("--only", help=f"of {', '.join(EXPERIMENTS)}; all but core if omitted")
    parser.add_argument("--order", default="identity", help="row order, but for orders and gcn")
    return run_study(parser, arguments, _study)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
