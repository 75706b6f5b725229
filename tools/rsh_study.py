"""The experiments of the RSH-SpMM paper on this machine, as one JSON record.

    python -m tools.rsh_study --data DIR --out FILE.json [--matrices a,b] [--only NAME,NAME]
                              [--order NAME] [--time-limit SECONDS] [--commit TEXT]

    thresholds  the paper's rule with tau_nnz from 0 to 10, beside the split by cost
    orders      nonzeros per tile and kernel times in each row order
    bytes       index arrays of RS-Tile, BitTCF and others, and what our kernel reads
    parts       share of rows, nonzeros and time in windows and in residual rows
    planning    seconds by stage, and the number of products after which they pay off against csr
    gcn         a six-layer GCN whose products are exchanged
    core        rsh, csr and acc beside cuSPARSE's three CSR algorithms in float32, with random
                values: TF32, and FP16 in, FP32 out; only when asked for

``tools.study`` says what a record is. Without a GPU it has only counts, and times are null.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsetile.core.timer import time_product
from sparsetile.engines.request import BuiltSystem
from sparsetile.engines.tiles.hybrid_cost import HEIGHT, cheapest_split, row_costs
from sparsetile.formats.bittcf import TILE_COLUMNS
from sparsetile.formats.fragments import fragment_elements
from sparsetile.formats.rstile import RSTile
from sparsetile.formats.window_split import Counts, Partition, split_by_cost, split_by_threshold
from sparsetile.intake.csr import CSR
from sparsetile.nn.gcn import gcn_matrix
from sparsetile.plan.planner import build_plan
from sparsetile.systems import SYSTEMS
from sparsetile.systems.rsh.system import RSHSystem
from sparsetile.systems.rsh.system import thresholds as adaptive_thresholds
from tools.study import (
    BUDGET,
    DTYPE,
    Case,
    Found,
    N,
    cusparse_times,
    dtype_name,
    error_of,
    run_study,
    with_random_values,
)
from tools.tile_counts import STORAGES, count_tiles

# Table 1 of the paper, then matrices of other kinds.
MATRICES = (
    "com-amazon", "ogbl-ddi", "DD", "amazon0505", "amazon0601", "Yeast", "OVCAR-8H", "YeastH",
    "web-BerkStan", "AmazonComputers", "CoauthorPhysics", "pkustk04", "gupta2", "web-NotreDame",
    "rajat16", "usroads", "cit-HepPh",
)  # fmt: skip
TAUS, TAU_INC = range(11), 3
ORDERS = ("identity", "rcm", "rabbit", "affinity", "locality-mst", "locality-2opt", "locality")
LAYERS, FEATURES, HIDDEN = 6, 128, (64, 256)
TORCH = "torch.sparse"
GCN_SYSTEMS = ("csr", "rsh", "acc", TORCH)  # csr first: others are compared with it
# The core suite: systems by width; each is tried in the same row orders.
CORE_WIDTHS = {64: ("rsh",), 128: ("rsh", "csr", "acc"), 256: ("rsh",), 512: ("rsh", "csr", "acc")}
CORE_DTYPES = (torch.float16, torch.float32)
CORE_ORDERS = ("identity", "affinity", "locality")
_SCHEDULE = ("items", "parent_of_slot", "nodes")
_NO_WINDOWS = {"items": 0, "slots": 0, "nodes": 0}
_NO_ROWS = {"residual": {"sections": [0, 0, 0, 0, 0], "slots": 0, "nodes": 0}}


def _density(counts: Counts, split: Partition | None) -> Found:
    """Rows and entries in windows, and entries of a tile; None: all rows on CUDA cores."""
    if split is None:
        split = split_by_threshold(counts, int(counts.entries.max()), 2**62)
    tiles = int(((counts.pairs[split.windows] + TILE_COLUMNS - 1) // TILE_COLUMNS).sum())
    entries = int(counts.entries[split.tiled].sum())
    return {
        "windows": split.windows.numel(),
        "tiles": tiles,
        "row_share": split.tiled.numel() / max(split.rows, 1),
        "entry_share": entries / max(int(counts.entries.sum()), 1),
        "nonzeros_per_tile": entries / max(tiles, 1),
    }


def thresholds(case: Case) -> Found:
    """Sweep tau_nnz in windows of sixteen rows."""
    request, steps = case.request(), []
    ours = case.counts(case.order, HEIGHT)
    for tau in TAUS:
        split = split_by_threshold(ours, tau, TAU_INC)
        built = RSHSystem().build_split(request, split)
        product = case.built_product(f"tau_nnz {tau}", request, built)
        steps.append({"tau_nnz": tau, **_density(ours, split), **product})
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
        "dtype": dtype_name(DTYPE),
        "tau_inc": TAU_INC,
        "adaptive": list(adaptive_thresholds(request)),
        "steps": steps,
        **named,
        "csr": case.product("csr"),
    }


def orders(case: Case) -> Found:
    """Tiles with all rows in windows, and products of rsh with its own split."""
    found: Found = {"n": N, "dtype": dtype_name(DTYPE)}
    for name in ORDERS:
        order, counts = case.found_order(name), case.counts(name, HEIGHT)
        found[name] = {
            "seconds": 0.0 if order is None else order.seconds,
            "16_rows": _density(counts, split_by_threshold(counts, 0, 0)),
            "default": case.product("rsh", order=name),
        }
    return found


def index_bytes(case: Case) -> Found:
    """Bytes without values; ``fragments`` is what rsh's kernel has instead, values included."""
    request, perm = case.request(), case.perm(case.order)
    counted = count_tiles(case.host, None if perm is None else perm.cpu())
    found: Found = {name: STORAGES[name](counted) for name in ("CSR", "BitTCF")}
    acc = SYSTEMS["acc"].build(request.changed(ablation="no-stack"))
    schedule = sum(acc.tensors[name].nbytes for name in _SCHEDULE)
    found["BitTCF and schedule"] = found["BitTCF"] + schedule
    splits = {
        "8 rows, thresholds": split_by_threshold(
            case.counts(case.order, 8), *adaptive_thresholds(request)
        ),
        "16 rows, cost": split_by_cost(case.counts(case.order, HEIGHT), row_costs(request)),
    }
    for label, split in splits.items():
        packed = RSTile.pack(case.csr, perm, split)
        # The paper's arrays: each window's first row, row and column of each residual entry.
        lists = split.windows.numel() + 2 * (packed.nnz - packed.tiles.entries.numel())
        found[f"RS-Tile, {label}"] = packed.tiles.bytes + 4 * lists
    built = RSHSystem().build(case.request(ablation="mixed"))
    tiles = built.tensors["tile_columns"].numel() // TILE_COLUMNS
    found["fragments"] = fragment_elements(tiles, DTYPE.itemsize) * DTYPE.itemsize
    return found


def _with(built: BuiltSystem, changed: Found) -> BuiltSystem:
    """The same tensors under a recipe with other sizes."""
    name, _, body = built.recipe.partition(":")
    return replace(
        built, recipe=f"{name}:{json.dumps({**json.loads(body), **changed}, sort_keys=True)}"
    )


def parts(case: Case) -> Found:
    """Windows alone, residual rows alone, and both in one launch, in the split by cost."""
    request = case.request(ablation="mixed")
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
    return {**result, "csr": case.product("csr")}


def planning(case: Case) -> Found:
    """Plans of csr and rsh, stage by stage, without compilation, which is cached."""
    found: Found = {"n": N, "dtype": dtype_name(DTYPE)}
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
    return gcn_matrix(torch.stack([csr.indices.long(), csr.row_ids()]), csr.shape[0])


Spmm = Callable[[Tensor], Tensor]


def _torch_sparse(adjacency: CSR) -> Spmm:
    """torch's CSR product, which is cuSPARSE's."""
    assert adjacency.values is not None
    A = torch.sparse_csr_tensor(
        adjacency.indptr.to(torch.int32), adjacency.indices, adjacency.values, adjacency.shape,
        check_invariants=False,
    )  # fmt: skip
    return lambda B: A @ B


def _forward(spmm: Spmm, inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    H = inputs
    for W in weights:
        H = torch.relu_(spmm(H @ W))
    return H


def gcn(case: Case) -> Found:
    """Six layers of relu(A (X W)) in float32, from a CUDA graph; errors are against csr's."""
    if case.csr.shape[0] != case.csr.shape[1]:
        return {"skipped": "not square"}
    adjacency, device = gcn_adjacency(case.csr), case.device
    found: Found = {"layers": LAYERS, "features": FEATURES, "nnz": adjacency.nnz}
    for hidden in HIDDEN:
        generator = torch.Generator(device=device).manual_seed(hidden)
        weights = [
            torch.randn(fan, out, device=device, generator=generator) * math.sqrt(2 / fan)
            for fan, out in itertools.pairwise([FEATURES, *[hidden] * LAYERS])
        ]
        X = torch.randn(case.csr.shape[0], FEATURES, device=device, generator=generator)
        expected: Tensor | None = None
        for name in GCN_SYSTEMS:
            if name == TORCH:
                spmm = _torch_sparse(adjacency)
            else:
                spmm = build_plan(adjacency, hidden, dtype=torch.float32, system=name).run
            forward = functools.partial(_forward, spmm, X, weights)
            result = forward()
            expected = result if expected is None else expected
            found[f"{hidden} float32 {name}"] = {
                "error": error_of(result, expected),
                "graph": time_product(forward, device, budget=BUDGET).summary(),
            }
    return found


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
                labels = {"n": n, "dtype": dtype_name(dtype), "system": system, "order": order}
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


def main(arguments: Sequence[str]) -> int:
    return run_study(
        "rsh_study", __doc__, arguments, EXPERIMENTS,
        need_gpu=_NEED_GPU, matrices=MATRICES, on_request=("core",),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
