"""``sparsetile bench gnn``: GCNs of the papers' sizes trained with PyG's products and ours.

A record is one JSON object a line, complete in itself, for one graph, network, type and path. It
holds the loss of every epoch, so that paths measured later, or on another day, are still held
against the first.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from statistics import median

import torch

from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.environment import describe_environment
from sparsetile.bench.gnn_paths import PATHS
from sparsetile.bench.orders import matrix_hash
from sparsetile.bench.record import Record, append_record, read_records
from sparsetile.bench.training import CLASSES, FEATURES, LABELS, SETTINGS, train
from sparsetile.core.checks import one_of
from sparsetile.core.errors import DataError, describe, value_error
from sparsetile.data.catalog import find, load
from sparsetile.data.generators import SPEC_PREFIX
from sparsetile.intake import CSR
from sparsetile.nn.gcn import gcn_matrix
from sparsetile.reorder import REORDERERS

__all__ = [
    "DTYPES",
    "EPOCHS",
    "GRAPHS",
    "TITLE",
    "GnnOutcome",
    "Selection",
    "loss_bound",
    "loss_differences",
    "run_gnn",
    "validate_training",
]

SCHEMA = 1
TITLE = "Training of GCNs: PyG's products and sparsetile's"
# Of ``a|b`` the first that is there.
GRAPHS = (
    "CoauthorCS", "CoauthorPhysics", "PubMed", "AmazonComputers", "ogbl-ddi|ddi-like", "DD|dd-like",
    "web-NotreDame", "reddit|reddit-like", "Yelp|yelp-like", "YeastH|yeasth-like",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# By device: 500 as the papers have it, and few where a host trains.
EPOCHS = {"cuda": 500, "cpu": 10}
# Losses of each of the first epochs may differ by this share of the reference's: sums are added in
# other orders, in TF32 on a GPU, and Adam amplifies what differs from epoch to epoch. On an H200
# ours differ by up to 0.37 % in float32 (TF32) and 1.8 % in bfloat16 there.
COMPARED_EPOCHS = 100
NOT_FINITE = 1e30  # what a record has in place of such a loss
_BOUNDS = {"cpu": 1e-3, "cuda": 5e-3}
_HALF_BOUND = 2e-2
# Later, when losses are a hundredth of what they were, single epochs say nothing: two runs with the
# same products, one replayed as a CUDA graph, are 0.1 to 3 % apart at their worst, and 52 % in an
# epoch in which Adam leaves a valley (web-NotreDame). The median of those epochs may differ by so
# many times the share above; ours differs by up to 1.3 % in float32 and 3.6 % in bfloat16.
_LATER = 4
# The paths whose losses the others are held against, the first that was measured.
_REFERENCES = ("pyg-sparse", "pyg-edges")
# The reference with rounded operands, where it was measured: others may differ by so many times
# what rounding alone does to a network, if that is more than the bounds above. (AmazonComputers
# leaves a valley in epochs 95 and 96.)
_CONTROL, _OF_CONTROL = "pyg-rounded", 2.0


@dataclass(frozen=True)
class Selection:
    """What to train, each with each."""

    device: str
    epochs: int
    graphs: Sequence[str] = GRAPHS
    settings: Sequence[str] = tuple(SETTINGS)
    dtypes: Sequence[str] = ("float32",)
    paths: Sequence[str] = tuple(PATHS)
    orders: Sequence[str] = ("auto",)

    def checked(self) -> Selection:
        """Return itself, or raise for a name that does not exist."""
        for argument, names, known in (
            ("--settings", self.settings, SETTINGS), ("--dtype", self.dtypes, DTYPES),
            ("--systems", self.paths, PATHS), ("--reorder", self.orders, ["auto", *REORDERERS]),
        ):  # fmt: skip
            for name in names:
                one_of("bench gnn", argument, name, known)
        if self.epochs < 1:
            raise value_error("bench gnn", "--epochs", "1 or more", self.epochs, "Write --epochs 5")
        return self


@dataclass
class GnnOutcome:
    """What a run did: the records asked for, measured now or before."""

    records: list[Record] = field(default_factory=list)
    measured: int = 0
    resumed: int = 0
    not_run: int = 0
    absent: list[str] = field(default_factory=list)


def loss_bound(device: str, dtype: str) -> float:
    """Return by which share losses of an epoch may differ."""
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


def _fault(name: str, expected: str, actual: object) -> DataError:
    return DataError(describe("gnn", name, expected, actual, "Make the record again"))


def validate_training(found: object) -> Record:
    """Return ``found`` if it is a record of training, else raise DataError saying why not."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.get("suite") != "gnn":
        raise _fault("line", f"a gnn record of schema {SCHEMA}", f"{str(found)[:40]!r}")
    for name in ("key", "matrix", "source", "setting", "dtype", "path", "kind", "device", "status"):
        if not isinstance(found.get(name), str):
            raise _fault(name, "text", repr(found.get(name)))
    for name in ("epochs", "layers", "hidden"):
        if not isinstance(found.get(name), int) or found[name] < 1:
            raise _fault(name, "a whole number from 1 up", repr(found.get(name)))
    if not isinstance(found.get("environment"), dict):
        raise _fault("environment", "an object", repr(found.get("environment")))
    if found["status"] not in ("ok", "wrong", "skipped", "error"):
        raise _fault("status", "ok, wrong, skipped or error", repr(found["status"]))
    if found["status"] in ("skipped", "error"):
        if not isinstance(found.get("reason"), str):
            raise _fault("reason", "text", repr(found.get("reason")))
        return found
    losses = found.get("losses")
    if not isinstance(losses, list) or len(losses) != found["epochs"]:
        raise _fault("losses", "one number per epoch", repr(losses)[:40])
    for name in ("prepare_seconds", "train_seconds", "total_seconds"):
        value = found.get(name)
        if not isinstance(value, float) or not 0 <= value < math.inf:
            raise _fault(name, "seconds", repr(value))
    for name in ("time", "host"):
        held = found.get(name)
        if not isinstance(held, dict) or not 0 < held.get("p50", 0) < math.inf:
            raise _fault(name, "an object with p50 above 0", repr(held))
    return found


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
    """Train everything that ``out`` does not hold yet; a record is appended after each run.

    Parameters
    ----------
    selection : Selection
    data : path, optional
        Folder in which names of graphs are looked up. Graphs that are not there are omitted, and
        named in the outcome.
    retry : bool
        Train again what failed, or differed.
    time_limit : float, optional
        Seconds after which no further run begins.
    say : callable
        Told what is being done.
    """
    begun = time.perf_counter()
    selection.checked()
    held: dict[str, Record] = {}
    if out.exists():
        records, damaged = read_records(out, validate_training)
        for line in damaged:
            say(f"skipped {line}")
        held = {record["key"]: record for record in records}
        held = {key: _held_against(record, held) for key, record in held.items()}
    outcome = GnnOutcome()
    for graph in dict.fromkeys(selection.graphs):
        try:
            graph, label, source = _find(graph, data)
        except ValueError as error:
            outcome.absent.append(str(error))
            continue
        entries = _entries(selection, label, source)
        pending = [entry for entry in entries if not _done(held.get(entry["key"]), retry)]
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
            record = _measure(entry, loaded, held)
            record["environment"] = {
                **describe_environment(selection.device), "commit": commit or source_commit(),
                "command": command,
            }  # fmt: skip
            append_record(out, record, validate_training)
            held[record["key"]] = record
            outcome.measured += 1
        outcome.records += [held[entry["key"]] for entry in entries if entry["key"] in held]
    return outcome


def _done(record: Record | None, retry: bool) -> bool:
    return record is not None and (not retry or record["status"] in ("ok", "skipped"))


def _find(graph: str, data: File | None) -> tuple[str, str, str]:
    """Return which of ``a|b`` is there, its name in records, and where it is from; else raise."""
    names = graph.split("|")
    for last, name in enumerate(names, 1 - len(names)):
        try:
            path = find(name, data)
        except ValueError:
            if last == 0:
                raise
            continue
        if path is None:
            return name, name, "generated" if name.startswith(SPEC_PREFIX) else "stand-in"
        label = path.name.removesuffix(".gz").removesuffix(".mtx").removesuffix(".npz")
        return name, label, "file"
    raise AssertionError("split gives at least one name")


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
                        "device": selection.device,
                        "epochs": selection.epochs,
                    }  # fmt: skip
                    entries.append(entry | {"key": _key(entry)})
    return entries


def _measure(entry: Record, graph: CSR, held: dict[str, Record]) -> Record:
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
    return _held_against(record, held)


def _held_against(record: Record, held: dict[str, Record]) -> Record:
    """Add the reference and the differences from its losses; mark what differs as wrong.

    A record from a file is judged again: it holds its losses.
    """
    if "losses" not in record:
        return record
    for name in _REFERENCES if record["kind"] != "bound" else ():
        other = held.get(_key({**record, "path": name, "reorder": "auto"}))
        if name != record["path"] and other is not None and other["status"] == "ok":
            first, later = _differences(record["losses"], other["losses"])
            bound = loss_bound(record["device"], record["dtype"])
            bounds: tuple[float, ...] = (bound, _LATER * bound)
            control = held.get(_key({**record, "path": _CONTROL, "reorder": "auto"}))
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
