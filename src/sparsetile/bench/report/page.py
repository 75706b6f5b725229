"""Records -> one self-contained HTML page: no network, light and dark, usable by keyboard."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsetile.bench.analysis import (
    Group,
    attach_baselines,
    over,
    summarise,
    system_label,
    wrong_baselines,
    yardstick,
)
from sparsetile.bench.environment import host_facts
from sparsetile.bench.hindsight import against_hindsight
from sparsetile.bench.matrices import generated_folder
from sparsetile.bench.planning import planning_split
from sparsetile.bench.record import Damage, Record
from sparsetile.bench.report import charts
from sparsetile.bench.report.matrix_charts import length_histogram
from sparsetile.bench.report.published import ladder_steps, published_rows
from sparsetile.bench.report.ratios import ratio_tables
from sparsetile.bench.report.render import render
from sparsetile.bench.report.svg import Raw
from sparsetile.bench.suites import Suite, load_suite
from sparsetile.check.pictures import spy_mask
from sparsetile.check.tiling import TILES, length_bins, sample_rows, tile_stats
from sparsetile.core.errors import DataError, value_error

__all__ = ["render_page"]

# Matrices whose pictures are drawn: beyond this the page would grow past what opens quickly.
_MAX_PICTURES = 120


def render_page(
    records: Sequence[Record],
    *,
    title: str = "sparsetile benchmarks",
    damaged: Sequence[Damage] = (),
    data: Path | None = None,
) -> str:
    """Return the page as text.

    Parameters
    ----------
    records : list of dict
        From :func:`sparsetile.bench.read_records`, of one or several files.
    title : str
    damaged : list of Damage
        Lines that could not be read; the page names them.
    data : Path, optional
        Folder of matrix files, for the pictures. Without it the page says that they are missing.
    """
    if not records:
        raise value_error(
            "report", "FILES", "records of at least one measurement", "none",
            "Run sparsetile bench first",
        )  # fmt: skip
    if data is not None and not data.is_dir():
        raise value_error(
            "report", "data", "an existing folder of matrices", repr(str(data)),
            "Give --data the folder that holds the .npz or .mtx files",
        )  # fmt: skip
    attached = attach_baselines(records)
    labels = charts.legend_order(
        [r for r in attached if not _is_yardstick(r) and "ablation" not in r["config"]]
    )
    colours = {label: place for place, label in enumerate(labels)}
    return render(
        "report.html",
        function="report",
        scripts=["report.js"],
        title=title,
        machines=_machines(attached),
        counts=Counter(record["status"] for record in attached),
        total=len(attached),
        suites=_suites(attached, colours),
        matrices=_matrices(attached, data),
        pictures=data is not None,
        troubles=_troubles(attached),
        wrong=_wrong(attached),
        damaged=[str(line) for line in damaged],
        records=Raw(_embedded(attached)),
        colours=colours,
    )


def _is_yardstick(record: Record) -> bool:
    return record["kind"] == "baseline" and record["system"] in yardstick(record)


def _machines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One line per machine: name, clocks, driver, versions, commits, dates."""
    held: dict[str, dict[str, Any]] = {}
    for record in records:
        environment = record["environment"]
        name = environment.get("device_name")
        if not name:
            continue
        entry = held.setdefault(
            name, {"name": name, "facts": {}, "commits": {}, "dates": [], "commands": {}}
        )
        facts = dict(environment.get("versions", {}))
        if "driver" in environment:
            facts["driver"] = environment["driver"]
        if environment.get("device") == "cpu" and host_facts(environment):
            facts["host"] = ", ".join(host_facts(environment))
        clocks = environment.get("clocks") or {}
        if clocks.get("clocks.sm"):
            facts["SM clock"] = f"{clocks['clocks.sm']:g} MHz"
        entry["facts"].update(facts)
        entry["commits"][environment.get("commit", "unknown")] = True
        entry["commands"][environment.get("command", "")] = True
        entry["dates"].append(environment.get("date", ""))
    for entry in held.values():
        dates = sorted(date[:10] for date in entry.pop("dates") if date)
        entry["dates"] = "–".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "unknown"
    return list(held.values())


def _suite_file(name: str) -> Suite | None:
    try:
        return load_suite(name)
    except (ValueError, DataError):
        return None  # a suite of the user's own: its records still speak for themselves


def _suites(records: Sequence[Record], colours: charts.Colours) -> list[dict[str, Any]]:
    groups = summarise(records)
    found = []
    for name in dict.fromkeys(record["suite"] for record in records):
        members = [record for record in records if record["suite"] == name]
        suite = _suite_file(name)
        headline = _headline([g for g in groups if g.suite == name])
        found.append(
            {
                "name": name,
                "title": suite.title if suite else name,
                "about": suite.about if suite else "",
                "standins": sorted({r["matrix"] for r in members if r["source"] == "stand-in"}),
                "headline": headline,
                "sentence": _sentence(headline),
                "products": _products(members, groups, name, colours),
                "published": published_rows(suite, members) if suite else [],
                "hindsight": against_hindsight(members),
                "planning": planning_split(members),
                "ladders": ladder_steps(suite, members) if suite else [],
                "ratios": ratio_tables(suite, members) if suite else [],
            }
        )
    return found


def _headline(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The figures at the top of a suite: the planner's choice, else the best system, per width."""
    shown = []
    systems = [group for group in groups if group.kind == "system" and group.op == "spmm"]
    if not systems:
        return []
    # float32 sums are what every suite is judged by; others only where there are none.
    kinds = {(group.dtype, group.reduce) for group in systems}
    first = ("float32", "sum") if ("float32", "sum") in kinds else min(kinds)
    for n in sorted({group.n for group in systems}):
        here = [g for g in systems if g.n == n and (g.dtype, g.reduce) == first]
        if here:
            auto = [group for group in here if group.label == "auto"]
            best = auto[0] if auto else max(here, key=lambda group: group.geomean)
            shown.append(best.as_dict())
    return shown[:4]


def _sentence(headline: Sequence[dict[str, Any]]) -> str:
    """What a suite shows, in one sentence."""
    if not headline:
        return ""
    said = [
        " ".join(filter(None, [head["label"], f"{head['geomean']:.2f}×", head["over"]]))
        + f" at N = {head['n']}"
        for head in headline
    ]
    return f"Fastest in {headline[0]['dtype']}, geomean over the baseline: {', '.join(said)}."


def _products(
    members: Sequence[Record], groups: Sequence[Group], suite: str, colours: charts.Colours
) -> list[dict[str, Any]]:
    """Tables and charts per machine, operation and type of one suite."""
    split: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in members:
        key = (
            record["environment"].get("device_name", ""),
            record["op"],
            record["reduce"],
            record["dtype"],
            over(record),
        )
        split[key].append(record)
    found = []
    for (device_name, op, reduce, dtype, against), inner in split.items():
        rows = [
            group.as_dict()
            for group in groups
            if (group.suite, group.device_name, group.op, group.reduce, group.dtype, group.over)
            == (suite, device_name, op, reduce, dtype, against)
        ]
        if not rows:
            continue
        # Steps of an ablation have a chart of their own.
        timed = [
            r
            for r in inner
            if r["status"] == "ok" and not _is_yardstick(r) and "ablation" not in r["config"]
        ]
        systems = [r for r in timed if r["kind"] == "system"]
        widths = _common_widths(timed)
        found.append(
            {
                "name": " ".join((op, *(() if reduce == "sum" else (reduce,)), dtype))
                + (f", ratio to {against}" if against else ""),
                "device_name": device_name,
                "rows": rows,
                "halves": any(row["float32_geomean"] for row in rows),
                "legend": [label for label in colours if label in _labels(timed)],
                "scatter": _svgs(charts.speedup_scatter(systems, n, colours) for n in widths[:6]),
                "boxes": _svgs(charts.boxes(timed, n, colours) for n in widths[:6]),
                "roofline": _svgs([charts.roofline(systems, colours)]),
                "break_even": _svgs([charts.break_even_curves(systems, colours)]),
                "scaling": _svgs(charts.scaling_lines(timed, colours)),
            }
        )
    return found


def _common_widths(records: Sequence[Record]) -> list[int]:
    """Widths at which most matrices were measured: a chart of a single one shows nothing."""
    matrices: dict[int, set[str]] = defaultdict(set)
    for record in records:
        matrices[record["n"]].add(record["matrix"])
    most = max(map(len, matrices.values()), default=0)
    return sorted(n for n, names in matrices.items() if 2 * len(names) >= most)


def _labels(records: Sequence[Record]) -> set[str]:
    return {system_label(record) for record in records}


def _svgs(drawn: Any) -> list[Raw]:
    return [Raw(svg) for svg in drawn if svg]


def _matrix_path(name: str, source: str, data: Path) -> Path | None:
    """The file of a matrix: in the data folder, or where generated matrices are kept."""
    if source != "file":
        made = sorted(generated_folder().glob(f"{name}-????????.npz"))
        return made[-1] if made else None
    for suffix in (".npz", ".mtx", ".mtx.gz"):
        path = data / f"{name}{suffix}"
        if path.exists():
            return path
    return None


def _matrices(records: Sequence[Record], data: Path | None) -> list[dict[str, Any]]:
    """One entry per matrix: size, and pictures where the file is at hand."""
    from sparsetile.intake import read_matrix

    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["nnz"] and record["matrix"] not in found:
            found[record["matrix"]] = {
                "name": record["matrix"],
                "rows": record["rows"],
                "cols": record["cols"],
                "nnz": record["nnz"],
                "source": record["source"],
                "hash": record.get("matrix_hash", ""),
                "spy": None,
                "tiles": [],
                "lengths": None,
            }
    for entry in sorted(found.values(), key=lambda item: item["nnz"])[:_MAX_PICTURES]:
        path = _matrix_path(entry["name"], entry["source"], data) if data is not None else None
        if path is not None:
            try:
                csr = read_matrix(path, function="report")
            except (DataError, OSError):
                continue  # the page says that this picture is missing
            entry["spy"] = spy_mask(csr)
            sample = sample_rows(csr)
            entry["tiles"] = [tile_stats(sample, *shape) for shape in TILES]
            entry["lengths"] = Raw(length_histogram(length_bins(csr.row_lengths())))
    return sorted(found.values(), key=lambda item: item["name"].lower())


def _wrong(records: Sequence[Record]) -> str:
    """Whose results were wrong; empty where none was."""
    wrong = [record for record in records if record["status"] == "wrong"]
    if not wrong:
        return ""
    theirs = [record for record in wrong if record["kind"] == "baseline"]
    names = ", ".join(dict.fromkeys(record["system"] for record in theirs))
    types = " and ".join(dict.fromkeys(record["dtype"] for record in theirs))
    whose = f" ({names} in {types}), used for no ratio" if theirs else ""
    return (
        f"Wrong results of baselines: {len(theirs):,}{whose}. "
        f"Wrong results of sparsetile: {len(wrong) - len(theirs):,}."
    )


def _troubles(records: Sequence[Record]) -> list[dict[str, str]]:
    """What failed, one by one; baselines that were wrong, by suite and type."""
    failed = [
        {
            "what": f"{record['suite']}: {record['matrix']} N={record['n']} {record['dtype']} "
            f"{system_label(record)}",
            "status": record["status"],
            "reason": record["reason"],
        }
        for record in records
        if record["status"] not in ("ok", "skipped")
        and (record["status"], record["kind"]) != ("wrong", "baseline")
    ]
    wrong = [
        {"what": f"{suite}: {system} {dtype}", "status": "wrong", "reason": said}
        for (suite, system, dtype), said in wrong_baselines(records).items()
    ]
    return failed + wrong


_COLUMNS = (
    "suite", "matrix", "nnz", "system", "n", "dtype", "op", "status", "micros", "spread",
    "speedup", "gflops", "gbps", "floor", "error", "planning", "break_even", "bytes",
    "device", "note",
)  # fmt: skip


def _row(record: Record) -> list[Any]:
    ok = record["status"] == "ok"
    timing = record.get("time") or {}
    middle = timing.get("p50", 0.0)

    def rounded(value: float | None, digits: int = 4) -> float | None:
        return None if value is None else float(f"{value:.{digits}g}")

    return [
        record["suite"],
        record["matrix"],
        record["nnz"],
        system_label(record),
        record["n"],
        record["dtype"],
        record["op"] if record["reduce"] == "sum" else f"{record['op']} {record['reduce']}",
        record["status"],
        rounded(middle * 1e6) if ok else None,
        rounded(100 * (timing["p80"] - timing["p20"]) / middle, 2) if ok else None,
        rounded(record.get("speedup")),
        rounded(record.get("gflops")) if ok else None,
        rounded(record.get("gbps")) if ok else None,
        rounded(100 * record["floor_share"], 3) if record.get("floor_share") else None,
        rounded((record.get("error") or {}).get("worst"), 2),
        rounded(1e3 * record["planning"]["total"], 3) if record.get("planning") else None,
        rounded(record.get("break_even"), 3),
        record.get("format_bytes"),
        record["environment"].get("device_name", ""),
        record.get("reason", ""),
    ]


def _embedded(records: Sequence[Record]) -> str:
    """The data of the page's own tables: columns, rows, and one explanation per plan."""
    explained: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        if record.get("explain"):
            explained[record["matrix"]].setdefault(system_label(record), record["explain"])
    body = {
        "columns": list(_COLUMNS),
        "rows": [_row(record) for record in records],
        "explain": explained,
    }
    # "</" would end the script element, and "<!--" would open a comment in it.
    return json.dumps(body, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
