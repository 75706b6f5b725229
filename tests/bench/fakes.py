"""Records as a GPU run would write them, made up: for tests of everything that reads records."""

from __future__ import annotations

import math
import random
from typing import Any

from sparsetile.bench.record import SCHEMA, Record, entry_key, validate

SYSTEMS = {"auto": 0.55, "csr": 0.58, "cusparse": 1.15, "dense": 6.0}
BASELINES = {
    "cusparse-csr1": 1.2,
    "cusparse-csr2": 1.0,
    "cusparse-csr3": 1.1,
    "torch-csr": 1.3,
    "torch-dense": 5.0,
    "pyg": 9.0,
}


def environment(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cuda",
        "device_name": "Test GPU",
        "driver": "580.00",
        "clocks": {"clocks.sm": 1980.0},
        "ceilings": {"dram": 4.2e12, "l2_gather": 9.1e12, "dense_flops": 390e12},
        "versions": {"python": "3.12.0", "torch": "2.11.0", "cusparse": "12.6.3"},
        "date": "2026-01-01T00:00:00Z",
        "commit": "0123456789ab",
        "command": "sparsetile bench core --data data",
        **changes,
    }


def record(
    matrix: str = "PubMed",
    system: str = "csr",
    n: int = 128,
    seconds: float = 1e-5,
    **changes: Any,
) -> Record:
    """Return one valid record."""
    nnz, rows = changes.get("nnz", 88648), changes.get("rows", 19717)
    found: Record = {
        "schema": SCHEMA,
        "suite": "core",
        "matrix": matrix,
        "source": "file",
        "op": "spmm",
        "reduce": "sum",
        "weights": "asis",
        "dtype": "float32",
        "n": n,
        "system": system,
        "kind": "baseline" if system in BASELINES or system == "scipy" else "system",
        "config": {},
        "tf32": False,
        "rows": rows,
        "cols": rows,
        "nnz": nnz,
        "weighted": False,
        "reorder": "identity",
        "status": "ok",
        "matrix_hash": "0123456789abcdef",
        "chosen": system,
        "planning": {"build": 1e-3, "compile": 0.05, "total": 0.0512},
        "format_bytes": 8 * nnz,
        "error": {"worst": 0.3, "max_abs": 1e-5, "rows_checked": rows, "full": True},
        "time": {
            "p20": seconds * 0.99,
            "p50": seconds,
            "p80": seconds * 1.01,
            "method": "graph",
            "launches": 20,
            "samples": 20,
        },
        "flops": 2 * nnz * n,
        "traffic_bytes": 4 * nnz + 8 * n * rows,
        "gflops": 2 * nnz * n / seconds / 1e9,
        "gbps": (4 * nnz + 8 * n * rows) / seconds / 1e9,
        "floor_seconds": seconds / 2,
        "floor_share": 0.5,
        "floor_term": "gather by row",
        "environment": environment(),
        **changes,
    }
    found["key"] = entry_key(found)
    return validate(found)


def failed(status: str = "crash", reason: str = "ended by SIGSEGV", **changes: Any) -> Record:
    """Return a record of an entry that was not timed."""
    found = record(**changes)
    for name in ("time", "error", "gflops", "gbps", "floor_share", "planning"):
        found.pop(name)
    return validate({**found, "status": status, "reason": reason})


def a_run(
    matrices: int = 32, widths: tuple[int, ...] = (32, 128, 512), **changes: Any
) -> list[Record]:
    """Return a whole run: matrices × widths × systems and baselines, times that look real."""
    rng = random.Random(7)
    found = []
    for place in range(matrices):
        nnz = int(10 ** rng.uniform(4.6, 6.8))
        rows = max(1000, int(nnz / rng.uniform(3, 60)))
        for n in widths:
            base = max(4e-6, nnz * n * 4 / 4e12) * rng.uniform(0.9, 1.6)
            for system, factor in (BASELINES | SYSTEMS).items():
                seconds = base * factor * math.exp(rng.gauss(0, 0.22))
                found.append(
                    record(
                        f"matrix-{place:03d}", system, n, seconds, nnz=nnz, rows=rows,
                        floor_share=min(0.95, base * 0.3 / seconds), **changes,
                    )
                )  # fmt: skip
    return found
