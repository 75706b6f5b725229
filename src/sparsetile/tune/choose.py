"""Which system serves a request: by model, or by measuring each on random input."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsetile.core.device import Machine, machine
from sparsetile.formats import count_blocks
from sparsetile.intake.csr import CSR
from sparsetile.kernels.bcsr import BLOCK, WARPGROUP_COLUMNS, WIDE
from sparsetile.systems import Request, Stage
from sparsetile.systems.registry import SYSTEMS, runner
from sparsetile.systems.wcsr.system import TALL_COLUMNS, tall_windows_pay

__all__ = ["measure", "measure_systems", "predict_systems"]


@dataclass(frozen=True)
class _Rates:
    """What ``csr`` or ``acc`` needs: seconds to start, then bytes at shares of the ceilings."""

    start: float
    entries: float  # a row of B for each entry, over L2's gather rate: most come from L1
    pairs: float  # a row of B for each distinct (8-row window, column) pair, over the same
    extra: int  # bytes that a pair costs beside its row of B, which is decoding
    a: float  # A once, over DRAM's rate
    held: float  # B and C once, as far as L2 can hold them, over the same
    beyond: float  # and what is beyond L2; above 1 because a part of it is still there

    def seconds(self, request: Request, ceilings: Machine, pairs: int) -> float:
        """Return the seconds of one product: every term, one after the other."""
        row = request.dtype.itemsize * request.n
        gathered = row * request.csr.nnz / self.entries + (row + self.extra) * pairs / self.pairs
        once = row * _rows_once(request.csr)
        beyond = max(once - ceilings.l2_bytes, 0)
        streamed = _a_bytes(request) / self.a + (once - beyond) / self.held + beyond / self.beyond
        return self.start + gathered / ceilings.l2_gather + streamed / ceilings.dram


# Fitted to the records of core matrices, by bytes of an element (docs/planning.md).
_CSR = {
    4: _Rates(2.25e-6, 6.0, 1.42, 0, 0.50, 1.58, 1.25),
    2: _Rates(3.4e-6, 2.55, 1.99, 0, 0.455, 1.44, 0.80),
}
_ACC = {
    4: _Rates(6.6e-6, math.inf, 1.05, 148, math.inf, 1.79, 1.29),
    2: _Rates(6.9e-6, math.inf, 0.89, 155, math.inf, 2.0, 1.145),
}
_SHORT_WINDOW = 8
_CUSPARSE_SHARE = 0.40
# What bcsr reaches of the dense product's flops, of gathers from L2 and of DRAM; development
# readings (docs/asyncsparse.md).
_BCSR_FLOPS, _BCSR_L2, _BCSR_DRAM = 0.6, 0.9, 0.75
# What tall windows of wcsr reach of the gather of distinct (64-row window, column) pairs and of
# DRAM, one after the other, and what they need to start; fitted to results/h200/asyncsparse.jsonl.
# Decoding is as slow as the gather of 256 columns in float32: less is not faster (an estimate).
_WCSR_L2, _WCSR_DRAM, _WCSR_START = 0.64, 0.7, 7e-6
_WCSR_WINDOW, _WCSR_ITEM = 64, 4
_DENSE_SHARE = 0.55
# A sparse product on CPU cores runs at about this share of a dense one per flop.
_CPU_SPARSE_SHARE = 0.15


def _rows_once(csr: CSR) -> int:
    """Rows of B and C together, each once."""
    return min(csr.shape[1], csr.nnz) + csr.shape[0]


def _a_bytes(request: Request) -> int:
    """Bytes of A's columns and values."""
    csr = request.csr
    return csr.nnz * (4 + (0 if csr.values is None else request.dtype.itemsize))


def _random_pairs(csr: CSR) -> int:
    """Pairs of entries scattered at random: rows that are alike have fewer."""
    if csr.nnz == 0:
        return 0
    cells = csr.shape[0] * csr.shape[1]
    met = 1 - (1 - csr.nnz / cells) ** _SHORT_WINDOW
    return min(csr.nnz, round(cells / _SHORT_WINDOW * met))


def _gather_seconds(request: Request, ceilings: Machine) -> float:
    """Seconds at the ceilings: a row of B for each entry by L2, or everything once by DRAM."""
    csr, row = request.csr, request.dtype.itemsize * request.n
    gathered = row * (csr.nnz + csr.shape[0]) / ceilings.l2_gather
    once = _a_bytes(request) + row * _rows_once(csr)
    return ceilings.launch + max(gathered, once / ceilings.dram)


def _block_seconds(request: Request, ceilings: Machine) -> float:
    """Seconds of ``bcsr``: the largest of Tensor Cores, L2 into shared memory, and DRAM."""
    csr, item, n = request.csr, request.dtype.itemsize, request.n
    rows, cols = csr.shape
    blocks = count_blocks(csr, BLOCK, request.permutation.perm)
    cells = blocks * BLOCK**2
    columns = -(-n // WARPGROUP_COLUMNS) * WARPGROUP_COLUMNS  # multiplied, whatever B has
    tensor = 2.0 * cells * columns / (_BCSR_FLOPS * ceilings.dense_flops * 4 / item)
    copied = item * (blocks * BLOCK * n + cells * WIDE.slabs(n))
    once = item * (cells + n * (min(cols, blocks * BLOCK) + rows))
    seconds = max(
        tensor,
        copied / (_BCSR_L2 * ceilings.l2_gather),
        once / (_BCSR_DRAM * ceilings.dram),
    )
    if request.dtype is torch.float32:  # B is rounded and turned first
        seconds += ceilings.launch + 2 * item * cols * n / ceilings.dram
    if csr.nnz < cells:  # a second kernel asks whether C needs repair
        seconds += ceilings.launch
    return ceilings.launch + seconds


def _window_seconds(request: Request, ceilings: Machine) -> float:
    """Seconds of ``wcsr`` on tall windows: rows of B behind distinct pairs, then B and C once."""
    csr, item, n = request.csr, request.dtype.itemsize, request.n
    pairs = request.pairs(_WCSR_WINDOW)
    columns = -(-n // TALL_COLUMNS) * TALL_COLUMNS
    gathered = _WCSR_ITEM * columns * pairs / ceilings.l2_gather
    once = item * n * (min(csr.shape[1], pairs) + csr.shape[0]) / ceilings.dram
    return _WCSR_START + gathered / _WCSR_L2 + once / _WCSR_DRAM


def predict_systems(
    request: Request, able: list[str], ceilings: Machine | None = None
) -> dict[str, float]:
    """Return the predicted seconds of each able system, on the request's device unless told."""
    ceilings = ceilings or machine(request.device)
    rows, cols = request.csr.shape
    dense_flops = 2.0 * rows * cols * request.n
    sparse_flops = 2.0 * request.csr.nnz * request.n
    speedup = 4 / request.dtype.itemsize
    exact = request.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    if request.device.type == "cuda" and (exact or request.dtype is torch.float64):
        speedup = 0.13  # plain FP32 and FP64 units: about 50 TFLOP/s where TF32 has 390
    dense_bytes = request.dtype.itemsize * (rows * cols + request.n * (cols + rows))
    dense = max(dense_flops / (ceilings.dense_flops * speedup), dense_bytes / ceilings.dram)
    choice = len(able) > 1
    if choice and ("acc" in able or "wcsr" in able):
        pairs = request.pairs(_SHORT_WINDOW)
    else:  # counting sorts all entries, and would not change the choice
        pairs = _random_pairs(request.csr)
    wide = 4 if request.dtype.itemsize >= 4 else 2
    tiled = _ACC[wide].seconds(request, ceilings, pairs)
    blocked = 0.0
    if choice and "bcsr" in able:
        blocked = _block_seconds(request, ceilings)
    windowed = tiled  # where short windows are what wcsr takes, it is acc
    if choice and "wcsr" in able and tall_windows_pay(request):
        windowed = _window_seconds(request, ceilings)
    predicted = {
        "acc": tiled,
        "bcsr": blocked,
        "csr": _CSR[wide].seconds(request, ceilings, pairs),
        "cusparse": _gather_seconds(request, ceilings) / _CUSPARSE_SHARE,
        "wcsr": windowed,
        "dense": (ceilings.launch + dense) / _DENSE_SHARE,
        "cpu": ceilings.launch
        + sparse_flops / (ceilings.dense_flops * _CPU_SPARSE_SHARE)
        + rows * 1e-9,
    }
    return {name: predicted[name] for name in able}


def measure(run: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Return the median seconds of ``run`` after two warm-up calls."""
    run()
    run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3)
        else:
            begun = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


def measure_systems(request: Request, able: list[str]) -> tuple[dict[str, float], dict[str, Stage]]:
    """Build and time every able system on random input; return seconds and stages by name."""
    csr = request.csr
    values = None if csr.values is None else csr.values.detach().to(request.dtype)
    B = torch.randn(csr.shape[1], request.n, device=request.device).to(request.dtype)
    out = torch.empty((csr.shape[0], request.n), dtype=request.dtype, device=request.device)
    seconds: dict[str, float] = {}
    stages: dict[str, Stage] = {}
    for name in able:
        stage = stages[name] = SYSTEMS[name].build(request)
        work = runner(stage.recipe)
        packed = work.pack(stage.parts, values, request.dtype) if work.packs else None

        product = functools.partial(work.spmm, stage.parts, values, packed, B, out)
        seconds[name] = measure(product, request.device)
    return seconds, stages
