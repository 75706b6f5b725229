"""The record of one measurement: its schema, its validation, and JSONL files of records.

A record is one JSON object on one line. What all records of a run share, mostly the environment, is
in one line per run. Its ``run`` is a digest of its content, and the run's records name it, so files
can be joined in any order. Older files, in which every line has the environment, can be read too,
and so can gzipped ones.

``SCHEMA`` changes when a reader of older files would misread a newer one. 2: products in the layout
of a linear layer (``layout`` in ``config``), in FP8, and records that name their baselines
(``yardstick``).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsetile.core.errors import DataError, describe, value_error

__all__ = [
    "DTYPES", "LAYOUTS", "OPS", "SCHEMA", "STATUSES", "Damage", "Record", "append_record",
    "entry_key", "read_records", "validate",
]  # fmt: skip

SCHEMA = 2
# Records of schema 1 have row-major operands and the usual baselines.
_READABLE = (1, SCHEMA)

OPS = ("spmm", "transpose", "sddmm")
DTYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn")
# rows: B and C row-major. linear: B = X.T and C = Y.T of row-major X and Y, as a linear layer has.
LAYOUTS = ("rows", "linear")
# ok: correct and timed. wrong: outside the error bound, so not timed. skipped: cannot run this
# product, or not built. error, crash, timeout: the entry failed, the run went on.
STATUSES = ("ok", "wrong", "skipped", "error", "crash", "timeout")

Record = dict[str, Any]

_GZIPPED = ".gz"
# Fields of a run's line, which are the same for all its records.
_SHARED = ("schema", "suite", "environment", "commit", "command")
_ENTRY = ("suite", "matrix", "op", "reduce", "weights", "dtype", "n", "system")
_TEXT = (
    "key", "suite", "matrix", "source", "op", "reduce", "weights", "dtype", "system", "kind",
    "reorder",
)  # fmt: skip
_COUNTS = ("n", "rows", "cols", "nnz")
_TIMES = ("p20", "p50", "p80")
_KINDS = ("system", "baseline")


def entry_key(entry: Mapping[str, Any]) -> str:
    """Return the key of a measurement within a file; it does not depend on the machine."""
    config = json.dumps(entry.get("config") or {}, sort_keys=True, separators=(",", ":"))
    return "|".join([*(str(entry[name]) for name in _ENTRY), config])


def _fault(name: str, expected: str, actual: object) -> DataError:
    return DataError(describe("record", name, expected, actual, "Make the record again"))


def _require(found: Mapping[str, Any], name: str, kind: type, what: str) -> Any:
    if name not in found:
        raise _fault(name, "present", "nothing")
    value = found[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _fault(name, what, repr(value))
    return value


def _check_seconds(found: Mapping[str, Any]) -> None:
    for name in _TIMES:
        value = found.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None or not number or not 0 < value < math.inf:
            raise _fault(f"time.{name}", "seconds above 0", repr(value))
    if not found["p20"] <= found["p50"] <= found["p80"]:
        times = ", ".join(str(found[name]) for name in _TIMES)
        raise DataError(
            f"record: time must have p20 <= p50 <= p80, got {times}. Make the record again."
        )


def validate(found: object) -> Record:
    """Return ``found`` if it is a record of this schema, else raise DataError saying why not."""
    if not isinstance(found, dict):
        raise DataError(
            f"record: line must be a JSON object, got {type(found).__name__}. Remove the line."
        )
    schema = found.get("schema")
    if schema not in _READABLE:
        raise DataError(
            f"record: schema must be {' or '.join(map(str, _READABLE))}, got {schema!r}. "
            "Read it with the version of sparsetile that made it, or measure again."
        )
    for name in _TEXT:
        _require(found, name, str, "text")
    for name in _COUNTS:
        if _require(found, name, int, "a whole number") < 0:
            raise _fault(name, "0 or more", found[name])
    _require(found, "weighted", bool, "true or false")
    _require(found, "environment", dict, "an object")
    if "yardstick" in found:
        _require(found, "yardstick", list, "a list of baselines")
    layout = _require(found, "config", dict, "an object").get("layout", "rows")
    for name, names in (("status", STATUSES), ("op", OPS), ("dtype", DTYPES), ("kind", _KINDS),
                        ("layout", LAYOUTS)):  # fmt: skip
        value = layout if name == "layout" else _require(found, name, str, "text")
        if value not in names:
            raise _fault(name, f"one of {list(names)}", repr(value))
    if found["status"] == "ok":
        _require(found, "error", dict, "an object")
        _check_seconds(_require(found, "time", dict, "an object"))
    else:
        _require(found, "reason", str, "text")
    return found


@dataclass(frozen=True)
class Damage:
    """A line of a records file that could not be used, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read_records(
    path: str | os.PathLike[str], check: Callable[[object], Record] = validate
) -> tuple[list[Record], list[Damage]]:
    """Read a JSONL file of records, gzipped if its name ends in .gz.

    Returns the valid ones, each with its environment; of several with one key the last, since a
    later run corrects an earlier. Also every other line, with its number and the reason. ``check``
    returns its argument if it is a record, else raises DataError.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        raise FileNotFoundError(
            f"read_records: path must be an existing file of records, got {str(file)!r}. "
            "Check the path."
        )
    try:
        content = file.read_bytes()
        if file.suffix == _GZIPPED:
            content = gzip.decompress(content)
        lines = content.decode("utf-8").splitlines()
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise DataError(
            f"read_records: path must be a text file of records, got {str(file)!r} ({error}). "
            "Give a .jsonl file that sparsetile bench wrote."
        ) from None
    parsed: list[tuple[int, Any]] = []
    damaged: list[Damage] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                parsed.append((number, json.loads(line)))
            except json.JSONDecodeError as error:
                damaged.append(Damage(file.name, number, f"not JSON ({error.msg})"))
    runs = {line["run"]: line for _, line in parsed if _is_run(line)}
    found: dict[str | int, Record] = {}
    for number, line in parsed:
        if _is_run(line):
            continue
        try:
            record = check(_whole(line, runs))
        except DataError as error:
            damaged.append(Damage(file.name, number, str(error)))
        else:
            key = record.get("key", number)
            found.pop(key, None)
            found[key] = record
    return list(found.values()), sorted(damaged, key=lambda line: line.line)


def _is_run(line: Any) -> bool:
    return isinstance(line, dict) and "run" in line and "environment" in line


def _whole(line: Any, runs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a line's record with the fields of its run's line."""
    if not isinstance(line, dict) or "run" not in line:
        return line
    if line["run"] not in runs:
        raise DataError(
            f"record: run must be that of a line with an environment, got {line['run']!r}. "
            "Add that line from the file that this one was cut from."
        )
    record = {**runs[line["run"]], **line}
    del record["run"]
    if "key" not in record and set(_ENTRY) <= set(record):
        record["key"] = entry_key(record)
    return record


def append_record(
    path: str | os.PathLike[str], record: Record, check: Callable[[object], Record] = validate
) -> None:
    """Validate a record and append it as one line, flushed, so that a crash keeps it.

    The line of its run comes before it if the file does not have that yet.
    """
    file = Path(path)
    if file.suffix == _GZIPPED:
        raise value_error(
            "bench", "--out", "a file that is not compressed", repr(str(file)),
            "Write a .jsonl file, and compress it when it is whole",
        )  # fmt: skip
    run, body = _parted(check(record))
    content = file.read_bytes() if file.exists() else b""
    # A run killed in the middle of a write leaves half a line; start on a fresh one.
    text = "\n" if content and not content.endswith(b"\n") else ""
    if f"{run}\n".encode() not in content:
        text += f"{run}\n"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{text}{body}\n")
        stream.flush()


def _parted(record: Record) -> tuple[str, str]:
    """Return the line of a record's run, and the record's own, which names it."""
    shared = {name: record[name] for name in _SHARED if name in record}
    digest = hashlib.sha256(_line(shared).encode()).hexdigest()[:12]
    own = {name: value for name, value in record.items() if name not in shared}
    if set(_ENTRY) <= set(record) and own.get("key") == entry_key(record):
        del own["key"]  # it repeats other fields
    return _line({"run": digest, **shared}), _line({"run": digest, **own})


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)
