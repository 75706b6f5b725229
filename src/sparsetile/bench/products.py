"""From an entry to a product ready to check and time: matrix, operands, plan or baseline.

Used inside a worker. Matrices are read once and kept while entries of the same matrix follow.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.operands import Operands, Order, Prepared, matrix_hash
from sparsetile.core.device import machine
from sparsetile.core.errors import UnsupportedError
from sparsetile.core.files import replacing
from sparsetile.intake import CSR, read_matrix
from sparsetile.intake.csr import FP8, result_dtype
from sparsetile.plan.planner import build_plan
from sparsetile.systems import SYSTEMS
from sparsetile.tune import KEPT_RUNS, floor_seconds

__all__ = ["Workbench", "prepare", "traffic_bytes"]

_MEMORY_SHARE = 0.8


def _weighted(csr: CSR, weights: str) -> CSR:
    if weights == "pattern":
        return csr.with_values(None)
    if weights == "random":
        generator = torch.Generator().manual_seed(0)
        return csr.with_values(torch.randn(csr.nnz, generator=generator))
    return csr


class Workbench:
    """The current matrix, on the device, and what was already computed about it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._path = ""
        self._host: CSR | None = None
        self.hash = ""
        self._placed: dict[tuple[str, bool], CSR] = {}
        self._floors: dict[tuple[Any, ...], tuple[float, str]] = {}
        self._orders: dict[str, Order] = {}

    def matrix(self, path: str, weights: str, transposed: bool) -> CSR:
        """Return the matrix of a file on the device."""
        if path != self._path or self._host is None:
            self._placed.clear()
            self._floors.clear()
            self._orders.clear()
            self._host = read_matrix(path, function="bench")
            self.hash = matrix_hash(self._host)
            self._path = path
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        key = (weights, transposed)
        if key not in self._placed:
            placed = _weighted(self._host, weights).to(self.device)
            self._placed[key] = placed.transposed() if transposed else placed
        return self._placed[key]

    def floor(self, operands: Operands, weights: str) -> tuple[float, str] | None:
        """Return the floor and its term; None if the ceilings were never measured."""
        if self.device.type != "cuda" or operands.op == "sddmm" or operands.csr.nnz == 0:
            return None
        key = (operands.op, weights, operands.dtype, operands.B.shape[1])
        if key not in self._floors:
            found = floor_seconds(
                operands.csr, operands.B.shape[1], operands.dtype, machine(self.device)
            )
            self._floors[key] = (found.seconds, found.term)
        return self._floors[key]

    def order(self, name: str, scratch: str | None) -> Order | None:
        """Return a row order of this matrix if a worker of the run has found it."""
        file = self._order_file(name, scratch)
        if name not in self._orders and file is not None and file.exists():
            saved = torch.load(file, weights_only=True)
            self._orders[name] = Order(name, saved["perm"].to(self.device), saved["seconds"])
        return self._orders.get(name)

    def keep_order(self, order: Order, scratch: str | None) -> None:
        """Store a row order, also for the other workers of the run."""
        self._orders[order.name] = order
        file = self._order_file(order.name, scratch)
        if file is not None:
            with replacing(file) as partial:
                torch.save({"perm": order.perm.cpu(), "seconds": order.seconds}, partial)

    def _order_file(self, name: str, scratch: str | None) -> Path | None:
        return Path(scratch) / f"{self.hash}-{name}.pt" if scratch else None

    def operands(self, entry: Mapping[str, Any]) -> Operands:
        """Return A, B and G of an entry; B and G are random, made on the device.

        B is row-major, or K-major (X.T of a row-major X) for a linear layer and in FP8, for which
        Tensor Cores support nothing else.
        """
        layout = entry["config"].get("layout", "rows")
        if layout != "rows" and (entry["op"], entry["reduce"]) != ("spmm", "sum"):
            raise UnsupportedError(f"layout {layout} is for sums of the plain product")
        dtype = getattr(torch, entry["dtype"])
        csr = self.matrix(entry["path"], entry["weights"], entry["op"] == "transpose")
        n = int(entry["n"])
        rows, cols = csr.shape
        needed = n * (result_dtype(dtype).itemsize * rows + dtype.itemsize * cols) * 2
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if needed > _MEMORY_SHARE * free:
                raise UnsupportedError(
                    f"B and C take {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free"
                )
        generator = torch.Generator(device=self.device).manual_seed(n)

        def random(height: int, width: int) -> Tensor:
            return torch.randn(height, width, device=self.device, generator=generator).to(dtype)

        G = random(rows, n) if entry["op"] == "sddmm" else None
        k_major = layout == "linear" or dtype is FP8
        B = random(n, cols).T if k_major else random(cols, n)
        return Operands(csr, B, G, entry["op"], entry["reduce"], layout)


def traffic_bytes(operands: Operands) -> int:
    """Bytes that any method must move once: A, B and C."""
    csr, item = operands.csr, operands.dtype.itemsize
    values = 0 if csr.values is None else item
    result = operands.result_dtype.itemsize
    dense = operands.B.shape[1] * (result * csr.shape[0] + item * csr.shape[1])
    return 4 * (csr.shape[0] + 1) + (4 + values) * csr.nnz + dense


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare(entry: Mapping[str, Any], operands: Operands, bench: Workbench) -> Prepared:
    """Plan the product. Raises UnsupportedError, with the reason, if it cannot run."""
    baseline = BASELINES[entry["system"]] if entry["kind"] == "baseline" else None
    reason = None if baseline is None else baseline.reason(operands)
    if reason is not None:
        raise UnsupportedError(reason)
    _synchronise(operands.device)
    begun = time.perf_counter()
    ready = _planned(entry, operands, bench) if baseline is None else baseline.prepare(operands)
    _synchronise(operands.device)
    spent = time.perf_counter() - begun
    if baseline is not None:
        ready.planning, ready.chosen = {"build": spent}, ready.chosen or entry["system"]
    ready.planning["total"] = spent + ready.planning.pop("found_before", 0.0)
    return ready


def _uses_tf32(name: str, operands: Operands) -> bool:
    """Whether a system may round the operands to TF32: its own kernels, or torch's for it."""
    allowed = torch.backends.cuda.matmul.allow_tf32 and operands.device.type == "cuda"
    system = SYSTEMS[name]
    rounds = system.rounds_to_tf32 or system.follows_tf32
    return bool(allowed and rounds and operands.dtype is torch.float32)


def _planned(entry: Mapping[str, Any], operands: Operands, bench: Workbench) -> Prepared:
    config = dict(entry["config"])
    config.pop("layout", None)  # belongs to the operands, not to the plan
    parameters = inspect.signature(build_plan).parameters
    unknown = [name for name in config if name not in parameters]
    if unknown:
        raise UnsupportedError(f"plan() does not take {', '.join(unknown)} yet")
    known_steps = SYSTEMS[entry["system"]].ablations if entry["system"] in SYSTEMS else ()
    if "ablation" in config and config["ablation"] not in known_steps:
        raise UnsupportedError(f"{entry['system']} has no {config['ablation']} yet")
    csr = bench.matrix(entry["path"], entry["weights"], False)
    n, dtype = int(entry["n"]), operands.dtype
    config.setdefault("system", entry["system"])
    config.setdefault("expected_runs", KEPT_RUNS)
    asked, scratch = config.get("reorder"), entry.get("scratch")
    known = bench.order(asked, scratch) if asked else None
    if known is not None:
        config["reorder"] = known.perm
    planned = build_plan(csr, n, dtype=dtype, device=operands.device, timed=True, **config)
    planning = {name: float(spent) for name, spent in planned.info["seconds"].items()}
    planning |= planned.info["build"]  # format and schedule are parts of build
    if known is not None:
        planning["reorder"] = planning["found_before"] = known.seconds
    elif asked and planned._variant.permutation.perm is not None:
        order = Order(asked, planned._variant.permutation.perm, planning["reorder"])
        bench.keep_order(order, scratch)
    product, reduce, B = planned, operands.reduce, operands.B
    if operands.op == "transpose":
        begun = time.perf_counter()
        product = planned.T
        _synchronise(operands.device)
        planning["transpose"] = time.perf_counter() - begun
    if operands.op == "sddmm":
        (tensors, recipe), G = planned.flat, operands.G

        def run() -> Tensor:
            return torch.ops.sparsetile.sddmm(tensors, G, B, recipe, 1.0)

    elif operands.layout == "linear":
        shape = (B.shape[1], product.shape[0])
        Y = torch.empty(shape, dtype=operands.result_dtype, device=operands.device)

        def run() -> Tensor:
            return product.run(B, out=Y.T)

    else:

        def run() -> Tensor:
            return product.run(B, reduce=reduce)

    return Prepared(
        run, planning=planning, format_bytes=int(product.info["format_bytes"]),
        reorder=known.name if known and product.reorder == "given" else product.reorder,
        chosen=product.system, choices=dict(product.info["choices"]),
        uses_tf32=_uses_tf32(product.system, operands),
    )  # fmt: skip
