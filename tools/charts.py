"""The charts of the documentation, drawn from the records.

    python -m tools.charts [--check]

Each chart is an SVG in ``docs/results/pictures``. Its description holds a digest of the points that
it shows: ``--check`` compares it with that of the records, and a test does the same.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsetile.bench.analysis import attach_baselines, geomean
from sparsetile.bench.record import Record, read_records
from sparsetile.cli.console import note
from tools.record import ROOT

FOLDER = ROOT / "docs" / "results" / "pictures"
RECORDS = ROOT / "results" / "h200"
INK, GRID = "#3f444c", "#c9ccd1"  # on white, which the picture brings: dark pages stay readable
COLOURS = ("#2a6fdb", "#d9662b", "#2e9e62")


@dataclass(frozen=True)
class Chart:
    """Series of points (size, speedup), each with its name."""

    name: str
    title: str
    across: str
    series: dict[str, list[tuple[float, float]]]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.svg"

    def digest(self) -> str:
        """Return what the file's description must hold."""
        return hashlib.sha256(json.dumps(self.series).encode()).hexdigest()[:16]

    def is_current(self) -> bool:
        """Whether the file shows these points."""
        return self.path.is_file() and self.digest() in self.path.read_text(encoding="utf-8")


def _rounded(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted((size, float(f"{speedup:.4g}")) for size, speedup in points)


def products() -> Chart:
    """Return the chart of ``auto`` over cuSPARSE on every matrix of the data folder."""
    records = attach_baselines(read_records(RECORDS / "all.jsonl.gz")[0])
    series = {}
    for dtype, words in (("float32", "TF32"), ("float16", "float16")):
        points = [
            (record["nnz"], record["speedup"])
            for record in records
            if record["system"] == "auto" and (record["dtype"], record["n"]) == (dtype, 512)
        ]
        mean = geomean(speedup for _, speedup in points)
        series[f"{words}, N = 512: {mean:.2f}x"] = _rounded(points)
    return Chart(
        "cusparse", "98 real matrices: speedup over the best of cuSPARSE", "entries of A", series
    )


def training_ratios(path: str, dtype: str) -> dict[str, tuple[int, float]]:
    """By graph, its edges and the speedup of a training step over PyG with a sparse tensor."""
    rows = [json.loads(line) for line in (RECORDS / "gnn.jsonl").read_text().splitlines()]
    times: dict[str, dict[str, tuple[int, float]]] = {"pyg-sparse": {}, path: {}}
    for row in rows:
        if row.get("status") == "ok" and (row["setting"], row["dtype"]) == ("gcn2-256", dtype):
            times.get(row["path"], {})[row["matrix"]] = (row["nnz"], row["time"]["p50"])
    theirs = times["pyg-sparse"]
    return {
        name: (nnz, theirs[name][1] / seconds)
        for name, (nnz, seconds) in times[path].items()
        if name in theirs
    }


def training() -> Chart:
    """Return the chart of GCN training over PyG with a sparse tensor."""
    series = {}
    for path, words in (("sparsetile-fused", "eager"), ("sparsetile-cudagraph", "CUDA graph")):
        points = [*training_ratios(path, "float32").values()]
        series[f"{words}: {geomean(ratio for _, ratio in points):.2f}x"] = _rounded(points)
    return Chart(
        "pyg", "GCN training step: speedup over PyG's sparse tensors", "edges of the graph", series
    )


@functools.cache
def cpu_records() -> list[Record]:
    """The timed products of the record of the CPU."""
    found, _ = read_records(ROOT / "results" / "cpu" / "cpu.jsonl")
    return [record for record in found if record["status"] == "ok"]


def cpu_ratios(baseline: str, n: int) -> dict[str, tuple[int, float]]:
    """By matrix, its entries and the speedup of ``cpu`` over a baseline in float32."""
    times: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for record in cpu_records():
        if (record["n"], record["dtype"]) == (n, "float32"):
            times[record["system"]][record["matrix"]] = (record["nnz"], record["time"]["p50"])
    return {
        name: (nnz, times[baseline][name][1] / seconds)
        for name, (nnz, seconds) in times["cpu"].items()
        if name in times[baseline]
    }


def cpu_times(product: str, dtype: str, n: int) -> dict[str, tuple[int, float]]:
    """By matrix, its entries and the speedup of ``plan`` or ``spmm`` over scipy.

    From ``results/cpu/cpu_times.jsonl``, which ``tools.cpu_times`` writes.
    """
    text = (ROOT / "results" / "cpu" / "cpu_times.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        line["matrix"]: (line["nnz"], line["seconds"]["scipy"] / line["seconds"][product])
        for line in lines
        if (line.get("dtype"), line.get("n")) == (dtype, n)
    }


def host() -> Chart:
    """Return the chart of a plan on the CPU over scipy."""
    series = {}
    for n in (1, 128):
        points = [*cpu_times("plan", "float32", n).values()]
        series[f"N = {n}: {geomean(ratio for _, ratio in points):.2f}x"] = _rounded(points)
    return Chart("cpu", "Two cores of a CPU: speedup over scipy", "entries of A", series)


CHARTS: tuple[Callable[[], Chart], ...] = (products, training, host)


def draw(chart: Chart) -> None:
    """Write a chart's file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.size": 10})
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for (label, points), colour in zip(chart.series.items(), COLOURS, strict=False):
        sizes, speedups = zip(*points, strict=True)
        axes.scatter(
            sizes, speedups, s=22, alpha=0.75, label=f"{label} (geomean)", color=colour, lw=0
        )
    top = max(speedup for points in chart.series.values() for _, speedup in points)
    least = min(speedup for points in chart.series.values() for _, speedup in points)
    ticks = [tick for tick in (0.5, 1, 2, 3, 4, 6, 8, 12, 16) if least / 1.1 <= tick <= top * 1.1]
    axes.set(xscale="log", yscale="log", ylim=(min(0.8, least / 1.2), top * 1.2))
    axes.set_yticks(ticks, labels=[f"{tick}x" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1, color=INK, lw=1)
    axes.grid(axis="y", color=GRID, lw=0.5)
    axes.set_xlabel(chart.across, color=INK)
    axes.set_title(chart.title, color=INK, fontsize=11)
    axes.tick_params(colors=INK, which="both")
    for side in axes.spines.values():
        side.set_color(GRID)
    figure.legend(
        frameon=False, labelcolor=INK, loc="outside lower center", ncols=len(chart.series)
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    facts = {"Date": None, "Title": chart.title, "Description": f"points {chart.digest()}"}
    figure.savefig(chart.path, metadata=facts)
    plt.close(figure)
    text = chart.path.read_text(encoding="utf-8")
    lines = [line.rstrip() for line in text.splitlines()]
    chart.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Draw the charts, or say which are old; return the exit code."""
    parser = argparse.ArgumentParser(prog="charts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="draw nothing")
    asked = parser.parse_args(list(arguments))
    old = [chart for chart in (make() for make in CHARTS) if not chart.is_current()]
    for chart in old:
        if not asked.check:
            draw(chart)
        note(f"charts: {chart.path.name} {'is old' if asked.check else 'drawn'}")
    return 1 if old and asked.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
