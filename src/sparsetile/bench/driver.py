"""Runs a suite: one worker per family, entry by entry, a record appended after each.

All workers exist at once and take turns, matrix by matrix, so that a system and its baselines are
measured within seconds of each other, at the same clocks. A crash or a timeout affects only its own
entry. Entries of the output file are not measured again, so the same command continues a run that
was stopped or reached its time limit.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections import defaultdict
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

from sparsetile.bench.analysis import wrong_baselines
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.expansion import Entry, Expansion
from sparsetile.bench.matrices import materialise
from sparsetile.bench.pool import Pool, WorkerAbsent, WorkerDied, WorkerTimeout
from sparsetile.bench.record import SCHEMA, Record, append_record, read_records
from sparsetile.core.timer import Samples

__all__ = ["Options", "Outcome", "run_suite"]

# Time for a running entry to end after the time limit.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """Options of a run other than its suite."""

    device: str
    out: Path
    command: str = ""
    commit: str = ""
    timeout: float = 120.0
    budget: float = 0.008
    retry: bool = False
    time_limit: float | None = None


@dataclass
class Outcome:
    """The result of a run."""

    measured: int = 0
    resumed: int = 0
    seconds: float = 0.0
    troubles: list[str] = field(default_factory=list)
    not_run: list[Entry] = field(default_factory=list)


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

    ``console`` is on stderr; the progress bar shows if it is a terminal. The pool's workers are
    started for ``options.device`` when None.
    """
    begun = time.perf_counter()
    pending, resumed, damaged = _pending(expansion, options)
    outcome = Outcome(resumed=resumed, troubles=[f"{line} (measured again)" for line in damaged])
    pool = pool or Pool.for_device(options.device)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sparsetile-bench-") as scratch:
        for family in dict.fromkeys(_family(entry) for entry in pending):
            pool.start(family)
        run = _Run(expansion, options, pool, outcome, scratch, begun)
        try:
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                task = progress.add_task(expansion.suite.name, total=len(pending))

                def show(entry: Entry) -> None:
                    progress.update(task, description=f"{entry.matrix.name} N={entry.n}")

                run.all(pending, show, lambda: progress.advance(task))
        finally:
            pool.close()
            outcome.troubles += [
                f"{system} {dtype}: wrong on {how}"
                for (system, dtype), how in wrong_baselines(run.wrong).items()
            ]
            outcome.troubles += [
                f"{family}: worker does not start, {why}" for family, why in pool.given_up.items()
            ]
            outcome.seconds = time.perf_counter() - begun
    return outcome


def _by_matrix(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Entries by matrix, in the order of the suite."""
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[entry.matrix.name].append(entry)
    return dict(found)


def _products(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Groups of entries that compute the same product."""

    def same(entry: Entry) -> tuple[Any, ...]:
        return (entry.matrix.name, entry.op, entry.reduce, entry.weights, entry.dtype, entry.n)

    for _, group in itertools.groupby(entries, key=same):
        yield list(group)


class _Run:
    """The state of one run."""

    def __init__(
        self, expansion: Expansion, options: Options, pool: Pool, outcome: Outcome, scratch: str,
        begun: float,
    ) -> None:  # fmt: skip
        self._suite = expansion.suite
        self._options = options
        self._pool = pool
        self._outcome = outcome
        self._scratch = scratch
        self._deadline = begun + (options.time_limit or math.inf)
        self._paths: dict[str, str] = {}
        self._unmade: dict[str, str] = {}
        self._floors: dict[tuple[Any, ...], list[Any]] = {}
        self.wrong: list[Record] = []  # of baselines
        self._commit = options.commit or source_commit()

    def _left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return self._deadline - time.perf_counter()

    def all(
        self, entries: Sequence[Entry], show: Callable[[Entry], None], advance: Callable[[], None]
    ) -> None:
        """Measure every entry, matrix by matrix."""
        for members in _by_matrix(entries).values():
            if self._left() > 0:
                self._load(members)
            for group in _products(members):
                if self._left() <= 0:
                    self._outcome.not_run += group
                    continue
                show(group[0])
                self.product(group, advance)

    def _load(self, members: Sequence[Entry]) -> None:
        """Let all workers read the matrix in parallel."""
        entry = members[0]
        try:
            self._paths[entry.matrix.name] = materialise(entry.matrix)
        except (OSError, ValueError, MemoryError) as error:
            self._unmade[entry.matrix.name] = f"matrix not made: {error}"
            return
        families = dict.fromkeys(_family(member) for member in members)
        request = {"cmd": "load", "path": self._paths[entry.matrix.name], "weights": entry.weights}
        self._pool.ask_all(families, request, self._seconds())

    def _seconds(self) -> float:
        """How long a worker may take to answer."""
        return min(self._options.timeout, max(self._left(), 0.0) + GRACE_SECONDS)

    def product(self, group: Sequence[Entry], advance: Callable[[], None]) -> None:
        """Measure the entries of one product, in turns when the suite has several rounds."""
        replies: list[tuple[Entry, dict[str, Any]]] = []
        for place, entry in enumerate(group):
            if self._left() <= 0:
                self._outcome.not_run += group[place:]
                break
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
        if name in self._unmade:
            return {"status": "error", "reason": self._unmade[name]}
        product = (name, entry.op, entry.weights, entry.dtype, entry.n)
        request = {
            **entry.identity(), "path": self._paths[name], "budget": self._options.budget,
            "rounds": self._suite.rounds, "scratch": self._scratch,
            "floor": self._floors.get(product), "slowest": entry.slowest,
        }  # fmt: skip
        reply = self._ask(entry, {"cmd": "measure", "entry": request})
        if reply.get("floor_seconds"):
            self._floors[product] = [reply["floor_seconds"], reply["floor_term"]]
        return reply

    def _ask(self, entry: Entry, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._pool.ask(_family(entry), request, self._seconds())
        except WorkerTimeout as error:
            if self._left() <= 0:  # ended by the time limit: not an error of the entry
                return {"status": "not run", "reason": str(error)}
            return {"status": "timeout", "reason": str(error)}
        except WorkerAbsent as error:
            return {"status": "absent", "reason": str(error)}
        except WorkerDied as error:
            return {"status": "crash", "reason": str(error)}

    def _write(self, entry: Entry, reply: dict[str, Any]) -> None:
        if reply["status"] in ("absent", "not run"):  # left for the next run
            if reply["status"] == "not run":
                self._outcome.not_run.append(entry)
            return
        record = self._record(entry, reply)
        self._options.out.parent.mkdir(parents=True, exist_ok=True)
        append_record(self._options.out, record)
        self._outcome.measured += 1
        if record["status"] == "wrong" and record["kind"] == "baseline":
            self.wrong.append(record)
        elif record["status"] not in ("ok", "skipped"):
            self._outcome.troubles.append(
                f"{record['matrix']} N={record['n']} {record['system']}: "
                f"{record['status']}, {record['reason']}"
            )

    def _record(self, entry: Entry, reply: dict[str, Any]) -> Record:
        environment = self._pool.environment(_family(entry)) or {"device": self._options.device}
        environment |= {"commit": self._commit, "command": self._options.command}
        record: Record = {
            "schema": SCHEMA, "key": entry.key, **entry.identity(), "rows": 0, "cols": 0, "nnz": 0,
            "weighted": False, "reorder": "identity",
        }  # fmt: skip
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
