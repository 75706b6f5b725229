"""Runs a suite: one worker per family, entry by entry, a record appended after each.

All workers live at once and take turns, matrix by matrix, so that a system and its baselines are
measured within seconds of each other, on the same clocks. A crash or a timeout costs its own
entry. What is already in the output file is not measured again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparsetile import settings
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.pool import Pool, WorkerAbsent, WorkerDied, WorkerTimeout
from sparsetile.bench.record import SCHEMA, Record, append_record, read_records
from sparsetile.bench.suites import Entry, Expansion, MatrixSpec
from sparsetile.bench.timer import Samples

__all__ = ["Options", "Outcome", "materialise", "run_suite"]


@dataclass(frozen=True)
class Options:
    """How to run, beside what to run."""

    device: str
    out: Path
    command: str = ""
    commit: str = ""
    timeout: float = 120.0
    cold: bool = False
    budget: float = 0.008
    retry: bool = False


@dataclass
class Outcome:
    """What a run did."""

    measured: int = 0
    resumed: int = 0
    seconds: float = 0.0
    troubles: list[str] = field(default_factory=list)


def materialise(spec: MatrixSpec, folder: Path | None = None) -> str:
    """Return the path of a matrix file, generating it once where it is no file.

    Generated matrices are kept in the user's data folder: every worker reads the same one, and
    the next run does too.
    """
    if spec.path is not None:
        return spec.path
    from sparsetile.data.registry import generate
    from sparsetile.data.standins import STAND_INS, stand_in
    from sparsetile.intake import write_npz

    folder = folder or settings.data_dir() / "generated"
    if spec.source == "stand-in":
        recipe = repr(STAND_INS[spec.name])
    else:
        recipe = f"{spec.generator}({sorted(spec.params.items())})"
    path = folder / f"{spec.name}-{_digest(recipe)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if spec.source == "stand-in":
            csr = stand_in(spec.name)
        else:
            csr = generate(str(spec.generator), **dict(spec.params))
        write_npz(path, csr)
    return str(path)


def _digest(text: str) -> str:
    import hashlib

    from sparsetile import __version__

    return hashlib.sha256(f"{__version__} {text}".encode()).hexdigest()[:8]


def _family(entry: Entry) -> str:
    return BASELINES[entry.system].family if entry.kind == "baseline" else entry.system


def _pending(expansion: Expansion, options: Options) -> tuple[list[Entry], int, list[str]]:
    """Entries still to measure, how many are done, and the output file's damaged lines."""
    if not options.out.exists():
        return list(expansion.entries), 0, []
    records, damaged = read_records(options.out)
    done = {
        record["key"]
        for record in records
        if not options.retry or record["status"] in ("ok", "skipped")
    }
    pending = [entry for entry in expansion.entries if entry.key not in done]
    return pending, len(expansion.entries) - len(pending), [str(line) for line in damaged]


def run_suite(
    expansion: Expansion, options: Options, *, console: Console, pool: Pool | None = None
) -> Outcome:
    """Measure every entry that is not in the output file yet.

    Parameters
    ----------
    expansion : Expansion
    options : Options
    console : rich Console
        On stderr; the progress bar shows when it is a terminal.
    pool : Pool, optional
        Workers to use; started for ``options.device`` when None.
    """
    begun = time.perf_counter()
    pending, resumed, damaged = _pending(expansion, options)
    outcome = Outcome(resumed=resumed, troubles=[f"{line} (measured again)" for line in damaged])
    pool = pool or Pool.for_device(options.device)
    run = _Run(expansion, options, pool, outcome)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(expansion.suite.name, total=len(pending))
            for family in dict.fromkeys(_family(entry) for entry in pending):
                pool.start(family)
            for group in _products(pending):
                progress.update(task, description=f"{group[0].matrix.name} N={group[0].n}")
                run.product(group, lambda: progress.advance(task))
    finally:
        pool.close()
        outcome.troubles += [
            f"{family}: worker does not start, {why}" for family, why in pool.given_up.items()
        ]
        outcome.seconds = time.perf_counter() - begun
    return outcome


def _products(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Groups of entries that compute the same product."""

    def same(entry: Entry) -> tuple[Any, ...]:
        return (entry.matrix.name, entry.op, entry.reduce, entry.weights, entry.dtype, entry.n)

    for _, group in itertools.groupby(entries, key=same):
        yield list(group)


class _Run:
    """The state of one run."""

    def __init__(
        self, expansion: Expansion, options: Options, pool: Pool, outcome: Outcome
    ) -> None:
        self._suite = expansion.suite
        self._options = options
        self._pool = pool
        self._outcome = outcome
        self._paths: dict[str, str] = {}
        self._commit = options.commit or source_commit()

    def product(self, group: Sequence[Entry], advance: Callable[[], None]) -> None:
        """Measure the entries of one product, in turns when the suite has several rounds."""
        replies: list[tuple[Entry, dict[str, Any]]] = []
        for entry in group:
            reply = self._measure(entry)
            replies.append((entry, reply))
            if self._suite.rounds == 1:
                self._write(entry, reply)
                advance()
        if self._suite.rounds == 1:
            return
        for _ in range(self._suite.rounds - 1):
            for entry, reply in replies:
                if reply["status"] == "ok":
                    more = self._ask(entry, {"cmd": "again"})
                    if more["status"] == "ok":
                        reply["samples"]["seconds"] += more["samples"]["seconds"]
        for entry, reply in replies:
            self._write(entry, reply)
            advance()

    def _measure(self, entry: Entry) -> dict[str, Any]:
        name = entry.matrix.name
        if name not in self._paths:
            try:
                self._paths[name] = materialise(entry.matrix)
            except (OSError, ValueError, MemoryError) as error:
                return {"status": "error", "reason": f"matrix not made: {error}"}
        request = {
            **entry.identity(),
            "path": self._paths[name],
            "cold": self._options.cold,
            "budget": self._options.budget,
            "rounds": self._suite.rounds,
        }
        return self._ask(entry, {"cmd": "measure", "entry": request})

    def _ask(self, entry: Entry, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._pool.ask(_family(entry), request, self._options.timeout)
        except WorkerTimeout as error:
            return {"status": "timeout", "reason": str(error)}
        except WorkerAbsent as error:
            return {"status": "absent", "reason": str(error)}
        except WorkerDied as error:
            return {"status": "crash", "reason": str(error)}

    def _write(self, entry: Entry, reply: dict[str, Any]) -> None:
        if reply["status"] == "absent":  # nothing was tried: leave it for the next run
            return
        record = self._record(entry, reply)
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        append_record(self._options.out, record)
        self._outcome.measured += 1
        if record["status"] not in ("ok", "skipped"):
            self._outcome.troubles.append(
                f"{record['matrix']} N={record['n']} {record['system']}: "
                f"{record['status']}, {record['reason']}"
            )

    def _record(self, entry: Entry, reply: dict[str, Any]) -> Record:
        environment = self._pool.environment(_family(entry)) or {"device": self._options.device}
        environment |= {"commit": self._commit, "command": self._options.command}
        record: Record = {
            "schema": SCHEMA,
            "key": entry.key,
            **entry.identity(),
            "rows": 0,
            "cols": 0,
            "nnz": 0,
            "weighted": False,
            "reorder": "identity",
        }
        samples = reply.pop("samples", None)
        record |= reply
        if samples is not None:
            measured = Samples(**samples).summary()
            record["time"] = measured
            seconds = measured["p50"]
            record["gflops"] = reply["flops"] / seconds / 1e9
            record["gbps"] = reply["traffic_bytes"] / seconds / 1e9
            floor = reply.get("floor_seconds")
            record["floor_share"] = floor / seconds if floor else None
        record["environment"] = environment
        return record
