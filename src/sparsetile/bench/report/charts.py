"""The charts of a report: speedup scatter and boxes, roofline, break-even, scaling, ladders.

Each takes records with ``speedup`` attached (analysis.attach_baselines) and returns an SVG text,
or an empty text when there is nothing to draw.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from sparsetile.bench.analysis import geomean, system_label
from sparsetile.bench.record import Record
from sparsetile.bench.report.svg import Axis, Chart, short
from sparsetile.core.timer import percentiles

__all__ = [
    "boxes",
    "break_even_curves",
    "ladder_bars",
    "legend_order",
    "peak_gflops",
    "roofline",
    "scaling_lines",
    "speedup_scatter",
]

_WIDTH, _HEIGHT = 400, 272
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 392, 26, 230
# Slower than this is drawn at the edge: how much slower is in the tables.
_LEAST_SPEEDUP = 0.2
# Series colours that the style sheet defines.
SERIES = 10

Colours = Mapping[str, int]


def legend_order(records: Sequence[Record]) -> list[str]:
    """Labels in the order of their colours: systems as registered first, then baselines."""
    ordered = sorted(records, key=lambda record: record["kind"] == "baseline")
    return list(dict.fromkeys(system_label(record) for record in ordered))


def _series(colours: Colours, label: str) -> str:
    return f"s{colours.get(label, 0) % SERIES}"


def _tip(record: Record) -> str:
    speedup = record.get("speedup")
    ratio = "" if speedup is None else f" · {speedup:.2f}×"
    return (
        f"{record['matrix']} · {system_label(record)} · N={record['n']}"
        f"{ratio} · {microseconds(record['time']['p50'])} · {record['gflops']:.0f} GFLOP/s"
    )


def microseconds(seconds: float) -> str:
    """Return a time in print: ``12.3 µs``, ``4.56 ms``.

    >>> microseconds(12.34e-6), microseconds(0.00456)
    ('12.3 µs', '4.56 ms')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _speedups(values: Sequence[float], bottom: float, n: int) -> tuple[Axis, str]:
    """The axis of speedups at one width, and its title."""
    # A dense product at a hundredth of the speed would press all others into one line.
    kept = [max(value, _LEAST_SPEEDUP) for value in values]
    title = f"speedup, N = {n}"
    if min(values) < _LEAST_SPEEDUP:
        title += f" (below {_LEAST_SPEEDUP:g}: at the edge)"
    return Axis.fitted(kept, bottom, _TOP, log=True, include=1.0), title


def speedup_scatter(records: Sequence[Record], n: int, colours: Colours) -> str:
    """Speedup over the best baseline against nonzeros, one dot a matrix and system."""
    shown = [r for r in records if r["n"] == n and r.get("speedup") and r["nnz"] > 0]
    if not shown:
        return ""
    x = Axis.fitted([r["nnz"] for r in shown], _LEFT, _RIGHT, log=True)
    y, y_title = _speedups([r["speedup"] for r in shown], _BOTTOM, n)
    chart = Chart(_WIDTH, _HEIGHT, f"Speedup over the best baseline at N={n}, by matrix")
    chart.frame(x, y, x_title="nonzeros", y_title=y_title, powers=True)
    chart.line(x.start, y.at(1), x.stop, y.at(1), "unity")
    for record in shown:
        classes = f"dot {_series(colours, system_label(record))}"
        chart.dot(x.at(record["nnz"]), y.at(record["speedup"]), classes, _tip(record))
    return chart.render()


def boxes(records: Sequence[Record], n: int, colours: Colours) -> str:
    """Distribution of the speedup per system: box p20 to p80, whiskers min to max, geomean."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record["n"] == n and record.get("speedup"):
            groups[system_label(record)].append(record["speedup"])
    labels = [label for label in colours if label in groups]
    if not labels:
        return ""
    bottom = _BOTTOM - 12
    everything = [value for values in groups.values() for value in values]
    y, y_title = _speedups(everything, bottom, n)
    chart = Chart(_WIDTH, _HEIGHT, f"Distribution of the speedup at N={n}, by system")
    x = Axis(0, len(labels), _LEFT, _RIGHT)
    chart.frame(Axis(1, 1, _LEFT, _RIGHT), y, x_title="", y_title=y_title)
    chart.parts = [part for part in chart.parts if 'class="tick" text-anchor="middle"' not in part]
    chart.line(x.start, y.at(1), x.stop, y.at(1), "unity")
    slot = (_RIGHT - _LEFT) / len(labels)
    for place, label in enumerate(labels):
        values = groups[label]
        low, middle, high = percentiles(values)
        mean = geomean(values)
        centre = x.at(place + 0.5)
        half = min(18.0, slot * 0.32)
        series = _series(colours, label)
        chart.line(centre, y.at(min(values)), centre, y.at(max(values)), f"whisker {series}")
        tip = f"{label} · N={n} · {len(values)} matrices · geomean {mean:.2f}×"
        top = y.at(high)
        chart.rect(centre - half, top, 2 * half, y.at(low) - top, f"box {series}", tip)
        chart.line(centre - half, y.at(middle), centre + half, y.at(middle), f"median {series}")
        chart.text(centre, top - 6 if top > _TOP + 10 else top + 14, f"{mean:.2f}", "value")
        _slanted(chart, centre, bottom + 16, label)
    return chart.render()


def _slanted(chart: Chart, x: float, y: float, text: str) -> None:
    from html import escape

    chart.parts.append(
        f'<text x="{x:.1f}" y="{y:.1f}" class="tick" text-anchor="end" '
        f'transform="rotate(-28 {x:.1f} {y:.1f})">{escape(text)}</text>'
    )


def peak_gflops(records: Sequence[Record], tf32: float) -> float:
    """Return what dense products reach in the records' smallest type, twice that of one twice as
    large; ``tf32`` is what they reach in TF32."""
    item = min(getattr(torch, record["dtype"]).itemsize for record in records)
    return tf32 * 4 / int(item) / 1e9


def roofline(records: Sequence[Record], colours: Colours) -> str:
    """GFLOP/s against flops per compulsory byte, under the machine's measured ceilings."""
    shown = [r for r in records if r.get("gflops") and r.get("traffic_bytes") and r["nnz"]]
    ceilings = next((r["environment"].get("ceilings") for r in shown), None)
    if not shown or not ceilings:
        return ""
    intensity = {id(r): r["flops"] / r["traffic_bytes"] for r in shown}
    x = Axis.fitted(list(intensity.values()), _LEFT + 6, _RIGHT, log=True)
    peak = peak_gflops(shown, ceilings["dense_flops"])
    speeds = [r["gflops"] for r in shown]
    y = Axis.fitted([*speeds, min(peak, ceilings["dram"] * x.high / 1e9)], _BOTTOM, _TOP, log=True)
    chart = Chart(_WIDTH, _HEIGHT, "Roofline: GFLOP/s against arithmetic intensity")
    chart.frame(x, y, x_title="flops per compulsory byte", y_title="GFLOP/s")
    for name, classes in (("dram", "roof"), ("l2_gather", "roof second")):
        points = []
        for step in range(41):
            at = x.low * (x.high / x.low) ** (step / 40)
            value = min(peak, ceilings[name] * at / 1e9)
            if value <= y.high:
                points.append((x.at(at), y.at(value)))
        chart.path(points, classes)
    # One label above the upper roof, one below the lower, so that they never meet.
    for name, rise, text in (("dram", 15, "DRAM"), ("l2_gather", -9, "L2 gather")):
        at = x.low * (x.high / x.low) ** 0.3
        value = ceilings[name] * at / 1e9
        if y.low < value < y.high:
            chart.text(x.at(at), y.at(value) + rise, text, "roof-label")
    for record in shown:
        chart.dot(
            x.at(intensity[id(record)]),
            y.at(record["gflops"]),
            f"dot {_series(colours, system_label(record))}",
            _tip(record),
            2.6,
        )
    return chart.render()


def break_even_curves(records: Sequence[Record], colours: Colours) -> str:
    """Share of products for which planning has paid, against the number of products run."""
    groups: dict[str, list[float | None]] = defaultdict(list)
    for record in records:
        if record["kind"] == "system" and record.get("speedup"):
            groups[system_label(record)].append(record.get("break_even"))
    groups = {
        label: values for label, values in groups.items() if any(v is not None for v in values)
    }
    if not groups:
        return ""
    x = Axis(1, 1e6, _LEFT, _RIGHT, log=True)
    y = Axis(0, 100, _BOTTOM, _TOP)
    chart = Chart(_WIDTH, _HEIGHT, "Share of products whose planning has paid, by products run")
    chart.frame(x, y, x_title="products run", y_title="planning has paid, %", powers=True)
    for label in [name for name in colours if name in groups]:
        values = groups[label]
        paid = sorted(max(1.0, v) for v in values if v is not None)
        points = [(x.start, y.start)]
        for count, at in enumerate(paid, 1):
            points.append((x.at(at), points[-1][1]))
            points.append((x.at(at), y.at(100 * count / len(values))))
        points.append((x.stop, points[-1][1]))
        chart.path(points, f"curve {_series(colours, label)}")
    return chart.render()


def scaling_lines(records: Sequence[Record], colours: Colours) -> list[str]:
    """Time against nonzeros, against rows and against width, one line a system.

    For suites of generated matrices, which are named by what they vary: ``nnz-1e6``, ``rows-1e4``.
    A chart is drawn where the records hold at least two points of it.
    """
    timed = [r for r in records if r["status"] == "ok" and r["nnz"] > 0]
    sizes = [r for r in timed if r["matrix"].startswith("nnz-")]
    rows = [r for r in timed if r["matrix"].startswith("rows-")]
    drawn = []
    for held, varied, title in ((sizes, "nnz", "nonzeros"), (rows, "rows", "rows")):
        widths = Counter(r["n"] for r in held)
        if widths:
            n = widths.most_common(1)[0][0]
            chosen = [r for r in held if r["n"] == n]
            drawn.append(_lines(chosen, varied, title, f"N = {n}", colours))
    matrices = Counter(r["matrix"] for r in sizes)
    if matrices:
        name = matrices.most_common(1)[0][0]
        chosen = [r for r in sizes if r["matrix"] == name]
        drawn.append(_lines(chosen, "n", "columns of B", name, colours))
    return [svg for svg in drawn if svg]


def _lines(records: Sequence[Record], varied: str, title: str, where: str, colours: Colours) -> str:
    groups: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        groups[system_label(record)][record[varied]] = record["time"]["p50"] * 1e6
    points = [(at, t) for line in groups.values() for at, t in line.items()]
    if len({at for at, _ in points}) < 2:
        return ""
    x = Axis.fitted([at for at, _ in points], _LEFT + 6, _RIGHT, log=True)
    y = Axis.fitted([t for _, t in points], _BOTTOM, _TOP, log=True)
    chart = Chart(_WIDTH, _HEIGHT, f"Time against {title}, {where}")
    chart.frame(x, y, x_title=title, y_title=f"µs per product, {where}", powers=varied != "n")
    for label in [name for name in colours if name in groups]:
        line = sorted(groups[label].items())
        series = _series(colours, label)
        chart.path([(x.at(at), y.at(t)) for at, t in line], f"curve {series}")
        for at, t in line:
            chart.dot(x.at(at), y.at(t), f"dot {series}", f"{label} · {short(at)} · {t:.1f} µs")
    return chart.render()


def ladder_bars(steps: Sequence[tuple[str, float]], title: str) -> str:
    """Horizontal bars of an ablation: geomean speedup after each step."""
    if not steps:
        return ""
    row, left = 30, 150
    height = 20 + row * len(steps)
    chart = Chart(_WIDTH, height, f"Ablation: {title}")
    x = Axis(0, max(value for _, value in steps) * 1.15, left, _RIGHT)
    for place, (label, value) in enumerate(steps):
        top = 10 + place * row
        chart.text(left - 8, top + 15, label, "tick", "end")
        chart.rect(left, top + 3, x.at(value) - left, row - 10, "box s0", f"{label}: {value:.2f}×")
        chart.text(x.at(value) + 6, top + 16, f"{value:.2f}×", "value", "start")
    return chart.render()
