"""Records of ``tools.gnn_study``: what is trained, how losses are compared, ratios to PyG.

A record is one line of JSON for one graph, network, type and path. It has the loss of every epoch,
so that paths that are measured later can be compared with it.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from statistics import median
from typing import Any

import torch

from sparsetile.bench.analysis import geomean
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.environment import describe_environment
from sparsetile.bench.operands import matrix_hash
from sparsetile.bench.record import Record, append_record, read_records
from sparsetile.core.checks import one_of
from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.data.catalog import find, load
from sparsetile.data.generators import SPEC_PREFIX
from sparsetile.intake import CSR
from sparsetile.nn.gcn import gcn_matrix
from sparsetile.reorder import REORDERERS
from tools.gnn_training import CLASSES, DEFAULT_PATHS, FEATURES, LABELS, PATHS, SETTINGS, train

SCHEMA = 1
# ``a|b`` means the first that exists.
GRAPHS = (
    "CoauthorCS", "CoauthorPhysics", "PubMed", "AmazonComputers", "ogbl-ddi|ddi-like", "DD|dd-like",
    "web-NotreDame", "reddit|reddit-like", "Yelp|yelp-like", "YeastH|yeasth-like",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By device: 500 as in the papers, and few on a CPU.
EPOCHS = {"cuda": 500, "cpu": 10}
# Losses of each of the first epochs may differ by this share of the reference's: sums have another
# order, on a GPU in TF32, and Adam amplifies differences from epoch to epoch. On an H200 they
# differ by up to 0.37 % in float32 (TF32) and 1.8 % in bfloat16.
COMPARED_EPOCHS = 100
NOT_FINITE = 1e30  # replaces a non-finite loss in a record
_BOUNDS = {"cpu": 1e-3, "cuda": 5e-3}
_HALF_BOUND = 2e-2
# Later, when losses are a hundredth of the first, single epochs vary: two runs with the same
# products, one replayed as a CUDA graph, differ by 0.1 to 3 % at most, and by 52 % in one epoch
# (web-NotreDame). The median of those epochs may differ by this many times the share above; ours
# differs by up to 1.3 % in float32 and 3.6 % in bfloat16.
_LATER = 4
# The reference path is the first of these that was measured.
_REFERENCES = ("pyg-sparse", "pyg-edges", "torch-sparse")
# The reference with rounded operands. If it was measured, others may differ by this many times its
# own difference, which rounding alone causes, if that is more than the bounds above.
_CONTROL, _OF_CONTROL = "pyg-rounded", 2.0


@dataclass(frozen=True)
class Selection:
    """What to train, each with each."""

    device: str
    epochs: int
    graphs: Sequence[str] = GRAPHS
    settings: Sequence[str] = tuple(SETTINGS)
    dtypes: Sequence[str] = ("float32",)
    paths: Sequence[str] = DEFAULT_PATHS
    orders: Sequence[str] = ("auto",)

    def checked(self) -> Selection:
        """Return itself, or raise for a name that does not exist."""
        for argument, names, known in (
            ("--settings", self.settings, SETTINGS), ("--dtype", self.dtypes, DTYPES),
            ("--systems", self.paths, PATHS), ("--reorder", self.orders, ["auto", *REORDERERS]),
        ):  # fmt: skip
            for name in names:
                one_of("gnn_study", argument, name, known)
        if self.epochs < 1:
            raise value_error("gnn_study", "--epochs", "1 or more", self.epochs, "Write --epochs 5")
        return self


@dataclass
class GnnOutcome:
    """The result of a run: the selected records, measured now or before."""

    records: list[Record] = field(default_factory=list)
    measured: int = 0
    resumed: int = 0
    not_run: int = 0
    absent: list[str] = field(default_factory=list)


def loss_bound(device: str, dtype: str) -> float:
    """Return the share by which losses of an epoch may differ."""
    return _HALF_BOUND if DTYPES[dtype].itemsize == 2 else _BOUNDS[device]


def loss_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return by how much each epoch's losses differ, as shares of the reference's."""
    if len(losses) != len(reference):
        return [math.inf]
    return [
        abs(mine - theirs) / max(abs(theirs), 1e-6)
        if max(abs(mine), abs(theirs)) < NOT_FINITE
        else math.inf
        for mine, theirs in zip(losses, reference, strict=True)
    ]


def _differences(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the largest difference of the first epochs, and the median of the later ones'."""
    found = loss_differences(losses, reference)
    counted = found if math.inf in found else found[:COMPARED_EPOCHS]
    later = found[COMPARED_EPOCHS:]
    return min(max(counted), 1e30), min(median(later), 1e30) if later else 0.0


def validate_training(found: object) -> Record:
    """Return ``found`` if it is a record of training, else raise DataError saying why not."""
    if isinstance(found, dict) and found.get("schema") == SCHEMA and found.get("suite") == "gnn":
        timed = ("time", "host", "losses", "prepare_seconds", "total_seconds")
        needed = timed if found.get("status") in ("ok", "wrong") else ("reason",)
        missing = [name for name in ("key", "environment", "kind", *needed) if name not in found]
        if not missing:
            return found
    text = f"{str(found)[:40]!r}"
    expected = f"a whole gnn record of schema {SCHEMA}"
    raise DataError(describe("gnn_study", "line", expected, text, "Make the record again"))


def _key(entry: Record) -> str:
    parts = ("matrix", "setting", "dtype", "path", "reorder", "device", "epochs", "labels")
    return "|".join(["gnn", *(str(entry[part]) for part in parts)])


def run_gnn(
    selection: Selection,
    *,
    data: File | None = None,
    out: File,
    retry: bool = False,
    time_limit: float | None = None,
    commit: str = "",
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> GnnOutcome:
    """Train everything that is not in ``out`` yet; a record is appended after each run.

    Names of graphs are looked up in the folder ``data``; absent ones are omitted, and named in the
    outcome. ``retry``: train again what failed, or differed. No run begins ``time_limit`` seconds
    after the first. ``say`` is called with a line about each step.
    """
    begun = time.perf_counter()
    selection.checked()
    known: dict[str, Record] = {}
    if out.exists():
        records, damaged = read_records(out, validate_training)
        for line in damaged:
            say(f"skipped {line}")
        known = {record["key"]: record for record in records}
        known = {key: _compared(record, known) for key, record in known.items()}
    outcome = GnnOutcome()
    for graph in dict.fromkeys(selection.graphs):
        try:
            graph, label, source = _find(graph, data)
        except ValueError as error:
            outcome.absent.append(str(error))
            continue
        entries = _entries(selection, label, source)
        pending = [entry for entry in entries if not _done(known.get(entry["key"]), retry)]
        outcome.resumed += len(entries) - len(pending)
        loaded: CSR | None = None
        for entry in pending:
            if time_limit is not None and time.perf_counter() - begun > time_limit:
                outcome.not_run += 1
                continue
            if loaded is None:
                say(f"reading {graph}")
                loaded = load(graph, data)
            say(f"{label} {entry['setting']} {entry['dtype']} {entry['path']} {entry['reorder']}")
            record = _measure(entry, loaded, known)
            record["environment"] = {
                **describe_environment(selection.device), "commit": commit or source_commit(),
                "command": command,
            }  # fmt: skip
            append_record(out, record, validate_training)
            known[record["key"]] = record
            outcome.measured += 1
        outcome.records += [known[entry["key"]] for entry in entries if entry["key"] in known]
    return outcome


def _done(record: Record | None, retry: bool) -> bool:
    return record is not None and (not retry or record["status"] in ("ok", "skipped"))


def _find(graph: str, data: File | None) -> tuple[str, str, str]:
    """Return which of ``a|b`` exists, its name in records, and its source; else raise."""
    absent = ValueError(graph)
    for name in graph.split("|"):
        try:
            path = find(name, data)
        except ValueError as error:
            absent = error
            continue
        if path is None:
            return name, name, "generated" if name.startswith(SPEC_PREFIX) else "stand-in"
        label = path.name.removesuffix(".gz").removesuffix(".mtx").removesuffix(".npz")
        return name, label, "file"
    raise absent


def _entries(selection: Selection, label: str, source: str) -> list[Record]:
    """Return what identifies each run of a graph; the reference paths come first."""
    entries = []
    for setting in selection.settings:
        for dtype in selection.dtypes:
            for path in (name for name in PATHS if name in selection.paths):
                ours = PATHS[path].kind == "system"
                for order in selection.orders if ours else ("auto",):
                    entry: Record = {
                        "schema": SCHEMA, "suite": "gnn", "matrix": label, "source": source,
                        "setting": setting, "layers": SETTINGS[setting].layers,
                        "hidden": SETTINGS[setting].hidden, "features": FEATURES,
                        "classes": CLASSES, "dtype": dtype, "path": path,
                        "kind": PATHS[path].kind, "labels": LABELS, "reorder": order,
                        "device": selection.device, "epochs": selection.epochs,
                    }  # fmt: skip
                    entries.append(entry | {"key": _key(entry)})
    return entries


def _measure(entry: Record, graph: CSR, known: dict[str, Record]) -> Record:
    """Train one network and return its record; a run that fails is recorded as such."""
    record = dict(entry) | {
        "rows": graph.shape[0], "edges": graph.nnz, "matrix_hash": matrix_hash(graph),
    }  # fmt: skip
    if graph.shape[0] != graph.shape[1]:
        return record | {"status": "skipped", "reason": f"not square: {graph.shape}"}
    path, setting = PATHS[entry["path"]], SETTINGS[entry["setting"]]
    device = torch.device(entry["device"])
    try:
        # Rows are targets: values of the file are not used, as in the papers.
        edges = torch.stack([graph.indices.long(), graph.row_ids()]).to(device)
        matrix = gcn_matrix(edges, graph.shape[0], dtype=DTYPES[entry["dtype"]])
        del edges
        reason = path.missing(matrix, setting.hidden)
        if reason is not None:
            return record | {"status": "skipped", "reason": reason}
        done = train(path, setting, matrix, entry["epochs"], reorder=entry["reorder"])
    except (RuntimeError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return record | {"status": "error", "reason": reason}
    record |= {
        "status": "ok",
        "nnz": matrix.nnz,
        "prepare_seconds": done.prepare_seconds,
        "train_seconds": done.train_seconds,
        "total_seconds": done.prepare_seconds + done.train_seconds,
        "time": done.step.summary(),
        "host": done.host.summary(),
        "peak_bytes": done.peak_bytes,
        "graph_bytes": done.graph_bytes,
        "choices": json.loads(json.dumps(done.choices)),
        "losses": [
            float(f"{loss:.7g}") if math.isfinite(loss) else NOT_FINITE for loss in done.losses
        ],
    }
    return _compared(record, known)


def _compared(record: Record, known: dict[str, Record]) -> Record:
    """Add the reference and the differences from its losses; mark what differs as wrong.

    A record from a file is judged again by its losses.
    """
    if "losses" not in record:
        return record
    for name in _REFERENCES if record["kind"] != "bound" else ():
        other = known.get(_key({**record, "path": name, "reorder": "auto"}))
        if name != record["path"] and other is not None and other["status"] == "ok":
            first, later = _differences(record["losses"], other["losses"])
            bound = loss_bound(record["device"], record["dtype"])
            bounds: tuple[float, ...] = (bound, _LATER * bound)
            control = known.get(_key({**record, "path": _CONTROL, "reorder": "auto"}))
            if record["kind"] != "control" and control is not None and "losses" in control:
                rounding = _differences(control["losses"], other["losses"])
                bounds = tuple(map(max, bounds, (_OF_CONTROL * each for each in rounding)))
            right = record["kind"] == "control" or (first <= bounds[0] and later <= bounds[1])
            return record | {
                "reference": name,
                "loss_difference": first,
                "later_difference": later,
                "loss_bound": bounds[0],
                "status": "ok" if right else "wrong",
            }
        if name == record["path"]:
            break
    return {"reference": None, "loss_difference": None, **record}  # nothing to judge it by


_SAME = ("matrix", "setting", "dtype", "device", "epochs", "features")
_RATIOS = ("step_over_sparse", "total_over_sparse", "step_over_edges")


def gnn_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each record, in their order, with its ratios to PyG's runs of the same.

    Ratios above 1 are faster: ``step`` is that of the median epochs, ``total`` that of all epochs
    with planning. ``memory`` is the peak over that of ``pyg-sparse``. None if either was not
    measured.
    """
    groups: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record["status"] == "ok" and record["kind"] == "baseline":
            groups[tuple(record[name] for name in _SAME)][record["path"]] = record

    def step(record: Record) -> float | None:
        return record.get("time", {}).get("p50")

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    rows = []
    for record in records:
        runs = groups[tuple(record[name] for name in _SAME)] if record["status"] == "ok" else {}
        # PyG multiplies a sparse tensor by torch's product.
        sparse = runs.get("pyg-sparse") or runs.get("torch-sparse", {})
        edges = runs.get("pyg-edges", {})
        kept = ("matrix", "setting", "dtype", "path", "reorder", "status")
        found = ("prepare_seconds", "peak_bytes", "loss_difference")
        rows.append(
            {name: record[name] for name in kept}
            | {name: record.get(name) for name in found}
            | {
                "step_seconds": step(record),
                "host_seconds": record.get("host", {}).get("p50"),
                "step_over_sparse": ratio(step(sparse), step(record)),
                "total_over_sparse": ratio(
                    sparse.get("total_seconds"), record.get("total_seconds")
                ),
                "step_over_edges": ratio(step(edges), step(record)),
                "memory_over_sparse": ratio(record.get("peak_bytes"), sparse.get("peak_bytes")),
                "reason": record.get("reason", ""),
            }
        )
    return rows


def geometric_means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, by network, type, path and row order, the means over graphs of the three ratios."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    names = ("setting", "dtype", "path", "reorder")
    for row in rows:
        if row["status"] == "ok" and row["path"].startswith(("sparsetile", "no-product")):
            groups[tuple(row[name] for name in names)].append(row)
    found = []
    for key, members in groups.items():
        mean: dict[str, Any] = {**dict(zip(names, key, strict=True)), "graphs": len(members)}
        for name in _RATIOS:
            values = [row[name] for row in members if row[name] is not None]
            mean[name] = geomean(values) if values else None
            mean[f"least_{name}"] = min(values, default=None)
        found.append(mean)
    return found
