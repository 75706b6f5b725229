"""The experiments of the BRP-SpMM paper on this machine, as one JSON record.

    python -m tools.brp_study --data DIR --out FILE.json [--matrices a,b] [--only NAME,NAME]
                              [--order NAME] [--time-limit SECONDS] [--commit TEXT]

    products   float32 in TF32 with random values, N = 32 to 256: cuSPARSE's three algorithms, csr,
               rsh, brp as it chooses, with the paper's f = 1 and g = 4, the same straight into
               registers, and with its atomics; at N = 32 every f and g
    shares     share of the entries that groups hold, for every f and g
    bytes      index bytes of the format over CSR's, for every f with g = 4
    builds     seconds by stage of building brp, acc, wcsr, rsh and voltrix, after a warm-up
    program    bytes of the kernels' code, and registers

``tools.study`` says what a record is. Only products and builds need a GPU; the others count on the
host.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from sparsetile.formats.brp import TILE_COLUMNS, ColumnMajor, sort_windows
from sparsetile.jit.compiler import compile_source
from sparsetile.kernels.brp import FIXED, SPMM_BRP, brp_config, choose_brp_slabs
from sparsetile.kernels.rstile import SPMM_RSTILE, choose_slabs, rstile_config
from sparsetile.systems import SYSTEMS
from sparsetile.systems.brp.cost import CHOICES
from sparsetile.systems.brp.system import ATOMIC, DIRECT
from tools.study import (
    Case,
    Found,
    cusparse_times,
    run_study,
    with_random_values,
)

# The core suite, the paper's matrices among it first.
MATRICES = (
    "CoauthorCS", "PubMed", "CoauthorPhysics", "bcsstk32", "pkustk04", "ex11", "DD", "ogbl-ddi",
    "AmazonComputers", "soc-Epinions1", "cage11", "usroads", "copter2", "rajat16", "finan512",
    "3D_51448_3D", "BlogCatalog3", "FB15k-237", "PROTEINS", "Trefethen_20000", "cit-HepPh",
    "dlmc-tr-rand07-dec2-ffn1", "email-Enron", "gupta2", "kim1", "lp_nug30", "nw04", "sme3Da",
    "squirrel", "std1_Jac3", "viscorocks", "web-NotreDame",
)  # fmt: skip
F32, ARCH = torch.float32, "sm_90a"
WIDTHS, NARROW = (32, 64, 128, 256), 32
PAPER = "1x4"
# System -> the ablation that is built.
BUILDS = {"brp": PAPER, "rsh": "tiles", "acc": None, "wcsr": None, "voltrix": None}
REPEATS = 3


def products(case: Case) -> Found:
    """Times by width: ``cusparse``, systems, and every f and g if B is narrow."""
    weighted, found = with_random_values(case), {}
    for n in WIDTHS:
        of_width: Found = {"cusparse": cusparse_times(weighted, n)}
        asked: list[tuple[str, str | None]] = [("csr", None), ("rsh", None), ("brp", None)]
        asked += [("brp", PAPER), ("brp", DIRECT), ("brp", ATOMIC)]
        if n == NARROW:
            asked += [("brp", f"{f}x{g}") for f, g in CHOICES if f"{f}x{g}" != PAPER]
        for system, ablation in asked:
            label = system if ablation is None else f"{system} {ablation}"
            of_width[label] = weighted.product(
                system, n=n, dtype=F32, order=case.order, ablation=ablation
            )
        found[str(n)] = of_width
    case.wrong += weighted.wrong
    return found


def shares(case: Case) -> Found:
    """Share of the entries in groups by f and g."""
    found = sort_windows(case.csr, case.perm(case.order))
    slices = {f: found.slices(f)[1].diff() for f, _ in CHOICES}
    return {
        f"{f}x{g}": int((slices[f] // (TILE_COLUMNS * g)).sum())
        * (TILE_COLUMNS * f * g)
        / max(case.csr.nnz, 1)
        for f, g in CHOICES
    }


def index_bytes(case: Case) -> Found:
    """Index bytes over CSR's, each with 4-byte columns and row pointers."""
    found, nnz = sort_windows(case.csr, case.perm(case.order)), case.csr.nnz
    sizes = {}
    for f in FIXED:
        groups, slots, rows = paper_sizes(found, f, 4)
        # The paper's lists, but a byte for each place in a tile: group_window_id, old_col_id,
        # local_id; res_rows_id, res_row_offset, res_col_id.
        tiles = 4 * groups * (1 + TILE_COLUMNS * 4) + slots
        sizes[f"{f}x4"] = tiles + 4 * (2 * rows + 1 + nnz - slots)
    return {name: size / (4 * (nnz + case.csr.shape[0] + 1)) for name, size in sizes.items()}


def paper_sizes(found: ColumnMajor, fixed: int, group: int) -> tuple[int, int, int]:
    """Return all groups of a matrix, the entries in them, and the rows with other entries."""
    kept = torch.ones_like(found.window_entry[1:], dtype=torch.bool)
    groups, inside = found.grouped(fixed, TILE_COLUMNS * group, kept)
    outside = torch.ones_like(found.entry, dtype=torch.bool)
    outside[inside] = False
    place, _, _ = found.by_row(torch.nonzero(outside).squeeze(1))
    return int(groups.sum()), inside.numel(), torch.unique_consecutive(place).numel()


def _built_seconds(case: Case, system: str, ablation: str | None) -> dict[str, float]:
    """Seconds of one build by stage; ``choose`` is what comes before the format."""

    def now() -> float:
        if case.has_gpu:
            torch.cuda.synchronize(case.device)
        return time.perf_counter()

    request = case.request(NARROW, F32, ablation).changed(timed=True)
    begun = now()
    built = SYSTEMS[system].build(request)
    total = now() - begun
    return {**built.seconds, "choose": total - sum(built.seconds.values()), "total": total}


def builds(case: Case) -> Found:
    """Median seconds by system and stage; A is on the device, nothing else is prepared."""
    found: Found = {}
    for system, ablation in BUILDS.items():
        if reasons := SYSTEMS[system].reasons(case.request(NARROW, F32, ablation)):
            found[system] = {"skipped": "; ".join(reasons)}
            continue
        runs = [_built_seconds(case, system, ablation) for _ in range(REPEATS + 1)][1:]
        found[system] = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    return found


@functools.cache
def _program() -> Found:
    slabs = choose_brp_slabs(F32, NARROW)
    sources = {f"brp f = {f}": SPMM_BRP.source(brp_config(F32, slabs, True, f)) for f in FIXED}
    sources["brp f = 1, atomics"] = SPMM_BRP.source(brp_config(F32, slabs, True, 1, atomic=True))
    config = rstile_config(F32, choose_slabs(F32, NARROW), True)
    sources["rsh"] = SPMM_RSTILE.source(config)
    found: Found = {}
    for name, source in sources.items():
        made = compile_source(source, ARCH)
        found[name] = {"bytes": len(made.cubin), "registers": made.resources.registers}
    return found


def program(_: Case) -> Found:
    """Bytes of a cubin and registers of a thread at N = 32, by f and with atomics, and rsh's."""
    return _program()


EXPERIMENTS: dict[str, Callable[[Case], Found]] = {
    "products": products,
    "shares": shares,
    "bytes": index_bytes,
    "builds": builds,
    "program": program,
}
NEED_GPU = ("products", "builds")


def main(arguments: Sequence[str]) -> int:
    return run_study(
        "brp_study", __doc__, arguments, EXPERIMENTS, need_gpu=NEED_GPU, matrices=MATRICES
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
