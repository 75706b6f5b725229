"""Our figures beside those of the five papers, computed from the records under ``results``."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparsetile.bench.analysis import attach_baselines, geomean, product_key
from sparsetile.bench.record import Record, read_records
from tools.record import ROOT

__all__ = [
    "ALGORITHMS", "CORE", "NO_RECORD", "READINGS", "core_ratios", "gnn_ratios", "mean", "over",
    "select", "suite_records", "wcsr_records",
]  # fmt: skip

RECORDS = ROOT / "results" / "h200"
ALGORITHMS = tuple(f"cusparse-csr{number}" for number in (1, 2, 3))
NO_RECORD = "no record"
CORE = "voltrix_core.jsonl"  # voltrix, acc, csr and torch.sparse on the core matrices
BRP_GRAPHS = ("PubMed", "CoauthorCS", "CoauthorPhysics")


@functools.cache
def suite_records(name: str) -> tuple[Record, ...]:
    """The timed records of a file, each with the best baseline of its product."""
    records = attach_baselines(read_records(RECORDS / name)[0])
    return tuple(record for record in records if record["status"] == "ok")


@functools.cache
def study(name: str) -> dict[str, Any]:
    """The experiments of a study's record."""
    found: dict[str, Any] = json.loads((RECORDS / name).read_text())["experiments"]
    return found


@functools.cache
def counters() -> dict[str, dict[str, dict[str, Any]]]:
    """Counters of the profiler by product and matrix."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in json.loads((RECORDS / "counters.json").read_text())["products"]:
        if "counters" in entry:
            found.setdefault(entry["product"], {})[entry["matrix"]] = entry["counters"]
    return found


def select(
    name: str, system: str, config: dict[str, str] | None = None, **fields: Any
) -> list[Record]:
    """Records of a system with these options; each field is a value or a list of them."""
    return [
        record
        for record in suite_records(name)
        if record["system"] == system
        and record["config"] == (config or {})
        and all(
            record[key] in wanted if isinstance(wanted, list) else record[key] == wanted
            for key, wanted in fields.items()
        )
    ]


def over(name: str, records: Sequence[Record], other: str) -> list[float]:
    """The ratios of another system's or baseline's times to those of these records."""
    times = {
        product_key(record): record["time"]["p50"]
        for record in suite_records(name)
        if record["system"] == other and not set(record["config"]) - {"layout"}
    }
    keys = [(product_key(record), record["time"]["p50"]) for record in records]
    return [times[key] / seconds for key, seconds in keys if key in times]


def mean(values: Iterable[float | None], digits: int = 2) -> str:
    """A geometric mean as shown, or a dash."""
    found = [value for value in values if value is not None]
    return f"{geomean(found):.{digits}f}" if found else "-"


def speedups(
    name: str, system: str, ns: Sequence[int], config: dict[str, str] | None = None
) -> str:
    return " / ".join(
        mean(
            r.get("speedup") for r in select(name, system, config, n=n, dtype="float32")
        )
        for n in ns
    )  # fmt: skip


def steps(values: Sequence[float]) -> str:
    """Each of these over the one before it."""
    return " / ".join(f"{a / b:.2f}" for a, b in itertools.pairwise(values))


def _graphs(name: str) -> str:
    found = {record["matrix"]: record["source"] for record in suite_records(name)}
    standins = sum(source == "stand-in" for source in found.values())
    return f"{len(found)} graphs, {standins} of them stand-ins"


# --- Voltrix


def _voltrix_suite() -> str:
    core = select(CORE, "voltrix", n=512, dtype="float32")
    others = select("hindsight.jsonl.gz", "voltrix", n=512, dtype="float32")
    ours, older = (mean(record.get("speedup") for record in found) for found in (core, others))
    return (
        f"{ours} at N = 512 ({len(core)} core matrices), {older} on {len(others)} others "
        "(`hindsight.jsonl.gz`)"
    )


def _graph_speedups(name: str, system: str, widths: Sequence[int], dtype: str = "float32") -> str:
    """Means on the graphs that have a record at each width."""
    found = [
        {r["matrix"]: r["speedup"] for r in select(name, system, n=n, dtype=dtype)} for n in widths
    ]
    graphs = set.intersection(*map(set, found))
    means = " / ".join(mean(ratios[graph] for graph in graphs) for ratios in found)
    return f"{means} ({len(graphs)} graphs)"


def _voltrix_graphs() -> str:
    best = []
    for n in (256, 512, 1024):
        fastest: dict[Any, float] = {}
        for record in suite_records("voltrix.jsonl"):
            if record["kind"] == "system" and record["n"] == n:
                key = product_key(record)
                fastest[key] = max(fastest.get(key, 0.0), record["speedup"])
        best.append(mean(fastest.values()))
    ours = _graph_speedups("voltrix_graphs.jsonl", "voltrix", (256, 512, 1024))
    return f"{ours}; the better of `csr` and `acc` {' / '.join(best)} (12, `voltrix.jsonl`)"


def _ladder() -> str:
    order = ["sync", "tma", "bmat", "multitier", "persistent", "whole tiles"]
    matrices = [
        {step["step"]: step["time"]["p50"] for step in matrix["steps"] if step["n"] == 256}
        for matrix in study("voltrix_ladder.json")["ladder"].values()
    ]
    times = [geomean(matrix[name] for matrix in matrices) for name in order]
    return f"{steps(times)} (the last: whole tiles), {len(matrices)} matrices"


def _overlap() -> str:
    found = study("voltrix_study.json")["overlap"].values()
    rates = [
        [step["rate"] for matrix in found for step in matrix["steps"] if step["n"] == n]
        for n in (256, 512)
    ]
    return " / ".join(f"{100 * min(r):.0f} to {100 * max(r):.0f} %" for r in rates)


def _gamma() -> str:
    found = [s for s in study("voltrix_study.json")["gamma"]["steps"] if s["ablation"] is None]
    shown = []
    for n in (256, 512):
        time = {s["deviation"]: s["time"]["p50"] for s in found if s["n"] == n}
        shown.append(" / ".join(f"{100 * (time[d] / time[0] - 1):+.1f}" for d in (64, 128, 192)))
    return f"deviation 64 / 128 / 192: {shown[0]} % at N = 256, {shown[1]} % at 512"


def _range(values: Iterable[float], unit: str = "") -> str:
    found = list(values)
    return f"{min(found):.0f} to {max(found):.0f}{unit}"


def _voltrix_counters() -> str:
    mine, acc = counters()["voltrix"], counters()["acc"]
    reads, conflicts = (
        geomean(here[name] / acc[matrix][name] for matrix, here in mine.items())
        for name in ("dram_read_bytes", "bank_conflicts")
    )
    registers = _range(here["registers"] for here in mine.values())
    ours, theirs = (
        _range((here["tensor_cycles"] for here in found.values()), " %") for found in (mine, acc)
    )
    return (
        f"{registers} registers, DRAM reads {reads:.2f} and bank conflicts {conflicts:.2f} of "
        f"`acc`'s, Tensor Cores busy {ours} (`acc` {theirs})"
    )


def _busiest() -> str:
    mine, without = counters()["voltrix 512"], counters()["voltrix 512 unbalanced"]
    saved = {
        matrix: 100 * (1 - mine[matrix]["most_active_cycles"] / found["most_active_cycles"])
        for matrix, found in without.items()
    }
    return f"ogbl-ddi {saved['ogbl-ddi']:.0f} % less, six matrices {_range(saved.values())} % less"


# --- BRP


def _brp_hits() -> str:
    shown = []
    for matrix in BRP_GRAPHS:
        fastest = min((counters()[name][matrix] for name in ALGORITHMS), key=_seconds)
        hits = counters()["brp direct"][matrix]["l2_hits"]
        shown.append(f"{100 * (hits / fastest['l2_hits'] - 1):+.1f}")
    return f"{' / '.join(shown)} % ({', '.join(BRP_GRAPHS)})"


def _seconds(found: dict[str, Any]) -> float:
    return float(found["seconds"])


def _brp_graphs(experiment: str) -> list[float]:
    """What was counted on each of the paper's eight graphs, for its f and g."""
    found = json.loads((RECORDS.parent / "cpu" / "brp_graphs.json").read_text())["experiments"]
    return [graph["1x4"] for graph in found[experiment].values()]


def _brp_bytes() -> str:
    found = _brp_graphs("bytes")
    return f"{min(found):.2f} to {max(found):.2f} ({len(found)} graphs)"


def _brp_speedups() -> str:
    widths = (32, 64, 128, 256)
    kinds: dict[str, dict[str, str]] = {
        "fixed order": {"ablation": "1x4"}, "atomics": {"ablation": "atomic"}, "as it chooses": {},
    }  # fmt: skip
    return "; ".join(
        f"{kind} {speedups('brp.jsonl', 'brp', widths, config)}" for kind, config in kinds.items()
    )


def _brp_planning() -> str:
    found = select("brp.jsonl", "brp", {"ablation": "1x4"}, n=32)
    return f"{mean((1e3 * record['planning']['total'] for record in found), 1)} ms"


def _brp_shares() -> str:
    found = _brp_graphs("shares")
    return f"{100 * sum(found) / len(found):.1f} % of the entries ({len(found)} graphs)"


# --- RSH


def core_ratios(
    system: str, dtype: str, order: str, n: int, algorithms: Sequence[str] = ALGORITHMS
) -> list[float]:
    """Ratios of the best of cuSPARSE's ``algorithms`` to a system, by matrix of rsh_core.json."""
    found = []
    for matrix in study("rsh_core.json")["core"].values():
        best = min(matrix["cusparse"][str(n)][name]["p50"] for name in algorithms)
        for product in matrix["products"]:
            same = (product["system"], product["dtype"], product["order"], product["n"])
            if same == (system, dtype, order, n) and product["time"]:
                found.append(best / product["time"]["p50"])
    return found


def _rsh(order: str) -> str:
    widths = (64, 128, 256, 512)
    parts = [mean(core_ratios("rsh", "float16", order, n)) for n in widths]
    every = mean(v for n in widths for v in core_ratios("rsh", "float16", order, n))
    return f"{every} ({' / '.join(parts)}), order `{order}`"


def _rsh_graphs() -> str:
    ours = _graph_speedups("rsh_graphs.jsonl", "rsh", (64, 256, 512), "float16")
    return f"{ours}, N = 64 / 256 / 512; core matrices {_rsh('identity')} (`rsh_core.json`)"


def _bytes(pairs: Sequence[tuple[str, str]]) -> str:
    found = study("rsh_study.json")["bytes"].values()
    ratios = [geomean(m[ours] / m[theirs] for m in found) for ours, theirs in pairs]
    return " / ".join(f"{100 * (1 - ratio):.1f} %" for ratio in ratios)


def _thresholds() -> str:
    shown = []
    for tau in (0, 4):
        tiles = [
            step["eight_rows"]["nonzeros_per_tile"]
            for matrix in study("rsh_study.json")["thresholds"].values()
            for step in matrix["steps"]
            if step["tau_nnz"] == tau and step["eight_rows"]["nonzeros_per_tile"]
        ]
        shown.append(f"{sum(tiles) / len(tiles):.1f}")
    return " / ".join(shown)


def _orders() -> str:
    found = study("rsh_study.json")["orders"].values()

    def gain(order: str) -> str:
        return mean(
            m["identity"]["tiles"]["time"]["p50"] / m[order]["tiles"]["time"]["p50"]
            for m in found
            if order in m
        )

    return " / ".join(map(gain, ("rabbit", "locality-mst", "locality-2opt", "locality")))


def _rsh_counters() -> str:
    mine, acc = counters()["rsh float16"], counters()["acc float16"]
    tiles = [name for name, found in mine.items() if found["kernel"] == "spmm_rstile"]

    def pair(counter: str) -> str:
        ours, theirs = (
            sum(found[name][counter] for name in tiles) / len(tiles) for found in (mine, acc)
        )
        return f"{ours:.0f} % (`acc` {theirs:.0f} %)"

    return f"SM throughput {pair('sm_throughput')}, Tensor Cores busy {pair('tensor_cycles')}"


def _rsh_gcn() -> str:
    found = study("rsh_study.json")["gcn"].values()
    shown = []
    for hidden in (64, 256):
        theirs = f"{hidden} float32 torch.sparse"
        pairs = [(m[theirs], m[f"{hidden} float32 rsh"]) for m in found if theirs in m]
        shown.append(mean(a["eager"] / b["eager"] for a, b in pairs if a.get("eager")))
    return f"{' / '.join(shown)} over torch.sparse"


# --- AsyncSparse


def _best_orders(records: Iterable[Record]) -> list[Record]:
    """Each product in the row order in which it is fastest."""
    fastest: dict[Any, Record] = {}
    for record in records:
        best = fastest.setdefault(product_key(record), record)
        if record["time"]["p50"] < best["time"]["p50"]:
            fastest[product_key(record)] = record
    return list(fastest.values())


def wcsr_records(n: int = 1024, name: str = "asyncsparse.jsonl.gz") -> list[Record]:
    return _best_orders(
        record
        for record in suite_records(name)
        if (record["system"], record["dtype"], record["n"]) == ("wcsr", "float32", n)
    )


def _by_density(records: Sequence[Record]) -> str:
    shown = []
    for density in (0.0, 0.001, 0.005, 0.01):
        mine = [r for r in records if r["nnz"] > density * r["rows"] * r["cols"]]
        shown.append(f"{mean(r['gflops'] / 1e3 for r in mine)} ({len(mine)})")
    return " / ".join(shown)


def _bcsr() -> list[Record]:
    return _best_orders(
        record
        for record in suite_records("asyncsparse_tf32.jsonl")
        if record["system"] == "bcsr" and "ablation" not in record["config"]
    )


def _opts() -> list[float]:
    name = "asyncsparse.jsonl.gz"
    found = []
    for step in ("opt0", "opt1", "opt2", "opt3", "opt5", "opt6", "opt7"):
        mine = select(name, "bcsr", {"ablation": step}, n=1024, dtype="bfloat16")
        mine = [record for record in mine if record["matrix"].startswith("gate_proj")]
        found.append(geomean(record["gflops"] / 1e3 for record in mine))
    return found


def _tile_width() -> str:
    name = "asyncsparse.jsonl.gz"
    wide, narrow = (
        {
            product_key(record): record["time"]["p50"]
            for record in select(name, "bcsr", {"ablation": f"columns{columns}"}, n=1024)
        }
        for columns in (256, 128)
    )
    return mean(narrow[key] / seconds for key, seconds in wide.items() if key in narrow)


def _gate_proj() -> str:
    name, shown = "asyncsparse.jsonl.gz", []
    for sparsity in (80, 90, 95, 99):
        matrix = f"gate_proj-{sparsity}"
        mine = select(name, "bcsr", n=4096, dtype="bfloat16", matrix=matrix)
        shown.append(mean(over(name, mine, "torch-dense")))
    return " / ".join(shown)


def _prefill() -> str:
    lines = (RECORDS / "llm.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    mine = [r for r in found if r.get("part") == "prefill" and r.get("sparsity") == 0.9]
    return " / ".join(f"{r['over_dense']:.2f} at {r['tokens']}" for r in mine) or NO_RECORD


# --- Acc


def _acc_ladder() -> str:
    order = [
        {"ablation": "bittcf", "reorder": "identity"},
        *({"ablation": name, "reorder": "affinity"} for name in ("reorder", "cache", "pipeline")),
        {"reorder": "affinity"},
    ]
    found = [select("acc.jsonl", "acc", config, n=128) for config in order]
    return steps([geomean(r["time"]["p50"] for r in records) for records in found])


def _acc_times(config: dict[str, str]) -> dict[Any, float]:
    found = select("acc_parts.jsonl", "acc", {**config, "reorder": "affinity"})
    return {product_key(record): record["time"]["p50"] for record in found}


def _acc_without(part: str, base: dict[str, str]) -> str:
    without, all_parts = _acc_times({"ablation": part}), _acc_times(base)
    ratios = [seconds / all_parts[key] for key, seconds in without.items() if key in all_parts]
    return f"{mean(ratios)} ({len(ratios)} graphs)"


def _acc_balance() -> str:
    gate = _acc_without("ibd-gate", {})
    return f"{_acc_without('no-balance', {})}; {gate} with the paper's gate"


def _acc_hits() -> str:
    mine, csr = counters()["acc"], counters()["csr"]
    shown = []
    for name in ("l1_hits", "l2_hits"):
        points = [found[name] - csr[matrix][name] for matrix, found in mine.items()]
        shown.append(f"{min(points):+.1f} to {max(points):+.1f}")
    return f"{' and '.join(shown)} points"


def _tile_orders() -> dict[str, list[Record]]:
    """Counts of tiles by row order, the same matrices in each."""
    lines = (RECORDS.parent / "cpu" / "tile_orders.jsonl").read_text().splitlines()
    found: dict[str, list[Record]] = {}
    for record in map(json.loads, lines):
        found.setdefault(record["order"], []).append(record)
    return found


def _tile_fill() -> str:
    fill = {
        order: [record["nnz_per_tile"] for record in records]
        for order, records in _tile_orders().items()
    }
    ratios = [
        mean(mine / other for mine, other in zip(fill["affinity"], fill[order], strict=True))
        for order in ("lsh", "rabbit")
    ]
    return f"{' / '.join(ratios)} ({len(fill['affinity'])} matrices)"


def _index_bytes() -> str:
    found = [record["bytes"] for record in _tile_orders()["affinity"]]
    ratios = [geomean(m["BitTCF"] / m[other] for m in found) for other in ("CSR", "ME-TCF 8x8")]
    return " / ".join(f"{100 * (1 - ratio):.1f} % less" for ratio in ratios)


# --- Training


def gnn_ratios(
    path: str, setting: str = "gcn2-256", name: str = "gnn_systems.jsonl.gz"
) -> list[float]:
    """Steps of a backend over those of torch.sparse, by graph."""
    file = RECORDS / name
    if not file.is_file():
        return []
    found = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    timed = [r for r in found if r.get("status") == "ok" and r["setting"] == setting]
    base = {r["matrix"]: r["time"]["p50"] for r in timed if r["path"] == "torch-sparse"}
    return [base[r["matrix"]] / r["time"]["p50"] for r in timed if r["path"] == path]


def _gcn(*systems: str) -> str:
    shown = [f"`{s}` {mean(gnn_ratios(f'sparsetile-{s}'))}" for s in systems]
    graphs = len(gnn_ratios("sparsetile-csr"))
    return f"{', '.join(shown)} ({graphs} graphs)" if graphs else NO_RECORD


READINGS: dict[str, Callable[[], str]] = {
    "voltrix/tab1": lambda: _graphs("voltrix.jsonl"),
    "voltrix/fig9": _voltrix_graphs,
    "voltrix/fig10": _voltrix_suite,
    "voltrix/fig11": _ladder,
    "voltrix/fig12": _voltrix_counters,
    "voltrix/fig13": lambda: _gcn("voltrix", "csr"),
    "voltrix/fig14": _overlap,
    "voltrix/fig15": _busiest,
    "voltrix/fig16": _gamma,
    "voltrix/fig17": lambda: f"R² = {study('voltrix_study.json')['fit']['r2_others']:.4f}",
    "brp/tab1": lambda: _graphs("brp.jsonl"),
    "brp/fig8": _brp_speedups,
    "brp/tab2": _brp_planning,
    "brp/fig9": _brp_shares,
    "brp/fig10": _brp_hits,
    "brp/fig11": _brp_bytes,
    "brp/fig12": lambda: _gcn("brp", "brp-1x4"),
    "rsh/tab1": lambda: _graphs("rsh.jsonl"),
    "rsh/fig10": _rsh_graphs,
    "rsh/fig12": lambda: _rsh("locality"),
    "rsh/fig13": lambda: _bytes([("RS-Tile, 8 rows, thresholds", "BitTCF and schedule")]),
    "rsh/fig14": _thresholds,
    "rsh/fig15": _rsh_counters,
    "rsh/fig16": _orders,
    "rsh/fig17": _rsh_gcn,
    "asyncsparse/tab1": lambda: _by_density(wcsr_records()),
    "asyncsparse/tab1_bcsr": lambda: _by_density(_bcsr()),
    "asyncsparse/fig5": lambda: mean(record.get("speedup") for record in wcsr_records()),
    "asyncsparse/fig6": lambda: " / ".join(f"{value / _opts()[0]:.1f}" for value in _opts()),
    "asyncsparse/tab2": lambda: " / ".join(f"{value:.1f}" for value in _opts()),
    "asyncsparse/fig7": _tile_width,
    "asyncsparse/tab3": _gate_proj,
    "asyncsparse/fig8": _prefill,
    "acc/tab2": lambda: _graphs("acc.jsonl"),
    "acc/fig9": lambda: speedups("acc.jsonl", "acc", (128, 256, 512), {"reorder": "affinity"}),
    "acc/fig10": _tile_fill,
    "acc/fig11": _acc_hits,
    "acc/fig12": _index_bytes,
    "acc/fig13": lambda: _acc_without("dtc-pipeline", {"ablation": "pipeline"}),
    "acc/fig14": _acc_balance,
    "acc/fig15": _acc_ladder,
}
