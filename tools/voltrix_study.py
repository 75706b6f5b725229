"""The experiments of the Voltrix-SpMM paper on this machine, as one JSON record.

    python -m tools.voltrix_study --out FILE.json [--data DIR] [--matrices a,b] [--only NAME,NAME]
                                  [--time-limit SECONDS] [--commit TEXT]

    gamma     windows whose tiles are Gamma-distributed, mean 256, deviation 0 to 192: what
              imbalance costs, with and without balance
    fit       Equation 1 fitted to generated products, 80 % of them; R² on the others
    ladder    synchronous copies, bulk copies, BMat, multi-tier pipeline, persistent blocks
    overlap   times with one buffer, with the pipeline, and with no hand-over: the overlap rate
    gather    bytes of rows of B per second, and those of bulk copies without a product

The last three need matrices, and everything needs a GPU: without one the record says so. Products
without a hand-over are wrong by design and are not compared. ``tools.study`` says what a record is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from sparsetile.core.timer import time_product
from sparsetile.formats import BMat
from sparsetile.formats.bmat import WINDOW_ROWS
from sparsetile.intake.csr import CSR
from sparsetile.kernels import bmat as kernel
from sparsetile.kernels.bmat import Pipe
from sparsetile.plan.planner import build_plan
from sparsetile.systems import registry
from sparsetile.systems.voltrix.cost import COPY_SHARE
from sparsetile.tune.fit import fit_readings, readings_of, with_window_tiles
from tools.study import BUDGET, Case, Found, dtype_name, run_study

MATRICES = (
    "ogbl-ddi", "DD", "pkustk04", "bcsstk32", "ex11", "std1_Jac3", "viscorocks", "kim1",
    "3D_51448_3D", "gupta2", "web-NotreDame", "CoauthorPhysics",
)  # fmt: skip
WIDTHS, F32 = (256, 512), torch.float32
LADDER = ("sync", "tma", "bmat", "multitier", "bits", None)
# The paper's sensitivity test: tiles of a window.
GAMMA_MEAN, DEVIATIONS, GAMMA_WINDOWS, GAMMA_COLUMNS = 256, (0, 64, 128, 192), 1056, 16384
BALANCE = (None, "contiguous", "greedy", "unbalanced", "multitier")


def gamma_tiles(deviation: float, windows: int = GAMMA_WINDOWS, seed: int = 0) -> list[int]:
    """Tiles of Gamma-distributed windows with the paper's mean."""
    if deviation == 0:
        return [GAMMA_MEAN] * windows
    shape = (GAMMA_MEAN / deviation) ** 2
    drawn = np.random.default_rng(seed).gamma(shape, GAMMA_MEAN / shape, windows)
    # The same work for every deviation.
    drawn = np.minimum(drawn * (GAMMA_MEAN * windows / drawn.sum()), GAMMA_COLUMNS // 8)
    return np.maximum(np.rint(drawn), 1).astype(int).tolist()


def gamma(device: torch.device) -> Found:
    """Time of uneven windows over that of even ones, by part that is off."""
    found: Found = {"mean": GAMMA_MEAN, "windows": GAMMA_WINDOWS, "steps": []}
    wrong: list[str] = []
    for deviation in DEVIATIONS:
        tiles = gamma_tiles(deviation)
        csr = with_window_tiles(tiles, GAMMA_COLUMNS)
        case = Case(f"gamma {deviation}", csr, device)
        for n, ablation in itertools.product(WIDTHS, BALANCE):
            product = case.product("voltrix", n=n, dtype=F32, ablation=ablation)
            labels = {"deviation": deviation, "tiles": sum(tiles), "n": n, "ablation": ablation}
            found["steps"].append({**labels, **product})
        wrong += case.wrong
    return {**found, "wrong": wrong}


def fit(device: torch.device) -> Found:
    """Coefficients of Equation 1 with D in columns of B, and R² on the other products."""
    wrong: list[str] = []

    def measure(csr: CSR, name: str, n: int) -> float:
        case = Case(name, csr, device)
        product = case.product("voltrix", n=n, dtype=F32)
        wrong.extend(case.wrong)
        return float(product["time"]["p50"])

    found = fit_readings(readings_of(measure))
    model = found.model
    return {
        "model": asdict(model),
        "tiles_of_a_window": model.window / model.tile if model.tile else None,
        "r2_fitted": found.r2_fitted,
        "r2_others": found.r2_others,
        "readings": [asdict(r) for r in found.readings],
        "wrong": wrong,
    }


def ladder(case: Case) -> Found:
    """Each step of the breakdown, with all earlier ones."""
    return {
        "steps": [
            {"n": n, "step": {None: "whole tiles", "bits": "persistent"}.get(step, step)}
            | case.product("voltrix", n=n, dtype=F32, ablation=step)
            for n, step in itertools.product(WIDTHS, LADDER)
        ]
    }


@contextlib.contextmanager
def _pipes(change: Callable[[Pipe], Pipe]) -> Iterator[None]:
    """Every pipeline of the table changed; runners that were made keep the old ones."""
    tables = (kernel.PIPES, kernel.STACKED_PIPES)
    before = [dict(table) for table in tables]
    registry._runners.clear()
    try:
        for table in tables:
            table.update({key: change(pipe) for key, pipe in table.items()})
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.update(old)
        registry._runners.clear()


def overlap_rate(sync: float, ours: float, free: float) -> float | None:
    """Equation 3: the share of the possible saving by overlap; None if nothing can be saved.

    >>> overlap_rate(3.0, 1.5, 1.0)
    0.75
    """
    return (sync - ours) / (sync - free) if sync > free else None


def overlap(case: Case) -> Found:
    """Times with one buffer, as it is, and with no hand-over between producers and consumers."""
    changes: dict[str, Callable[[Pipe], Pipe]] = {
        "sync": lambda pipe: replace(pipe, stages=1),
        "ours": lambda pipe: pipe,
        "free": lambda pipe: replace(pipe, hand_over=False),
    }
    steps = []
    for n in WIDTHS:
        B, _ = case.operands(n, F32)
        seconds = {}
        for name, change in changes.items():
            with _pipes(change):
                plan = build_plan(case.csr, n, dtype=F32, system="voltrix", reorder="identity")
                run = functools.partial(plan.run, B)
                seconds[name] = time_product(run, case.device, budget=BUDGET).median
                del run
                del plan
        steps.append({"n": n, "seconds": seconds, "rate": overlap_rate(**seconds)})
    return {"steps": steps}


def gather(case: Case) -> Found:
    """Bytes of rows of B that a product copies, over its time."""
    rows = {stack: BMat.pack(case.csr, stack=stack).distinct for stack in (1, 2)}
    steps = []
    for n, dtype, stack in itertools.product((*WIDTHS, 1024), (torch.float32, torch.float16), rows):
        height = stack * WINDOW_ROWS
        product = case.product("voltrix", n=n, dtype=dtype, ablation=f"windows of {height}")
        row = n * dtype.itemsize
        width = kernel.slab_width(dtype, n, kernel.widest_slab(dtype, stack)) * kernel.PIECE_BYTES
        labels = {
            "n": n, "dtype": dtype_name(dtype), "window_rows": height,
            "copy_bytes": min(row, width), "bytes": rows[stack] * row,
        }  # fmt: skip
        rate = labels["bytes"] / product["time"]["p50"]
        steps.append({**labels, "rate": rate, **product})
    return {"rows": rows[1], "rows_of_32": rows[2], "copies_alone": COPY_SHARE, "steps": steps}


# Experiments on the device alone, and on a matrix.
GENERATED: dict[str, Callable[[torch.device], Found]] = {"gamma": gamma, "fit": fit}
MEASURED: dict[str, Callable[[Case], Found]] = {
    "ladder": ladder, "overlap": overlap, "gather": gather,
}  # fmt: skip
EXPERIMENTS = (*GENERATED, *MEASURED)


def main(arguments: Sequence[str]) -> int:
    return run_study(
        "voltrix_study", __doc__, arguments, MEASURED,
        need_gpu=EXPERIMENTS, matrices=MATRICES, generated=GENERATED,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
