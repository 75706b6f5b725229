"""The core suite on a GPU that is treated as an older one, beside the GPU itself.

    SPARSETILE_CAPABILITY=8.0 python -m tools.core_as --data DIR --out results [--matrices a,b]
                                                      [-n 32,128,512] [--time-limit SECONDS]

Each system has two processes: one plans and compiles for the GPU at hand, the other for the chosen
capability. All plan a product and check it against float64 at once; then each is timed alone, one
after the other, so that both have the same clocks. cuSPARSE is timed with them.

``DIR/<gpu>/as-sm80/core.jsonl`` has the machine in its first line, then a product in each. Products
that are in the file already are not measured again. Exit code 1 if a product was wrong or failed,
2 for bad usage.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.expansion import Entry, expand
from sparsetile.bench.matrices import materialise
from sparsetile.bench.pool import Pool, Serve, WorkerAbsent, WorkerDied, WorkerTimeout
from sparsetile.bench.suites import load_suite
from sparsetile.cli.console import note
from sparsetile.core import settings
from sparsetile.core.errors import value_error
from sparsetile.core.timer import Samples
from tools.as_capability import CORE_NAME, core_table
from tools.record import command_of, machine_facts

SCHEMA = 1
# Systems that sm_80 runs, in float32: TF32 on Tensor Cores, except csr.
SYSTEMS, DTYPE = ("csr", "acc", "rsh", "half", "brp"), "float32"
CUSPARSE = ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3")
WIDTHS = (32, 128, 512)
# How a product is planned, by the value of SPARSETILE_CAPABILITY in its process.
NATIVE, OLDER = "native", "older"
# Seconds of measured work of a product, and those that a request may take.
BUDGET, REQUEST_SECONDS = 0.006, 60.0
_VARIABLE = "SPARSETILE_CAPABILITY"


def serve_as(capability: str, connection: Connection) -> None:
    """Measure products with the capability, or without one if it is empty."""
    os.environ[_VARIABLE] = capability
    from sparsetile.bench.worker import serve

    serve("cuda", connection)


def pool_of(capability: str) -> Pool:
    """Return workers by family: a system or cuSPARSE's algorithm, and how it is planned."""

    def serve_for(family: str) -> Serve:
        return functools.partial(serve_as, capability if family.endswith(OLDER) else "")

    return Pool(serve_for)


def entries_of(data: Path, matrices: Sequence[str], widths: Sequence[int]) -> list[Entry]:
    """Return the products of the core suite, those of a matrix and width in sequence."""
    made = expand(
        load_suite("core"), data=data, device="cuda", systems=SYSTEMS, n=widths, dtypes=[DTYPE],
        weighted="random", matrices=matrices, orders=["auto"],
    )  # fmt: skip
    return sorted(made.entries, key=lambda each: (each.matrix.name, each.n))


def _key(matrix: str, n: int, system: str) -> str:
    return f"{matrix}|{n}|{system}"


class Run:
    """The processes of one run, and its file."""

    def __init__(self, pool: Pool, path: Path, until: float) -> None:
        self.pool, self.path, self.until = pool, path, until
        self.wrong: list[str] = []

    def ask(self, family: str, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            left = max(self.until - time.monotonic(), 0.0) + 5.0
            return self.pool.ask(family, request, min(REQUEST_SECONDS, left))
        except (WorkerTimeout, WorkerAbsent, WorkerDied) as error:
            return {"status": type(error).__name__, "reason": str(error)}

    def product(self, entries: Sequence[Entry], path: str) -> None:
        """Measure all systems and algorithms of a matrix and width, and write what they took."""
        families = {
            f"{entry.system} {how}": entry
            for entry in entries
            for how in ((NATIVE, OLDER) if entry.kind == "system" else (NATIVE,))
        }

        def prepare(family: str) -> dict[str, Any]:
            # Two rounds: the worker keeps the product. A floor is no part of this record.
            fields = {"path": path, "budget": BUDGET, "rounds": 2, "floor": [1.0, "none"]}
            entry = {**families[family].identity(), **fields}
            return self.ask(family, {"cmd": "measure", "entry": entry})

        with ThreadPoolExecutor(len(families)) as together:
            replies = dict(zip(families, together.map(prepare, families), strict=True))
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for family, reply in replies.items():
            name, _, how = family.partition(" ")
            made: dict[str, Any] = {"status": reply["status"]}
            if reply["status"] == "ok":
                again = self.ask(family, {"cmd": "again"})
                made = {"status": again["status"], "error": reply["error"]["worst"]}
                made |= {"reorder": reply["reorder"], "planning": reply["planning"]["total"]}
                if again["status"] == "ok":
                    made["time"] = Samples(**again["samples"]).summary()
            if made["status"] != "ok" and name not in CUSPARSE:
                made["reason"] = reply.get("reason", "")
                self.wrong.append(f"{families[family].matrix.name}, {family}: {made}")
            found.setdefault(name, {})[how] = made
        base = {"matrix": entries[0].matrix.name, "n": entries[0].n}
        best = {
            name: found[name][NATIVE]["time"]["p50"]
            for name in CUSPARSE
            if "time" in found.get(name, {}).get(NATIVE, {})
        }
        with self.path.open("a") as file:
            for entry in entries:
                if entry.kind == "system":
                    line = {**base, "system": entry.system, "dtype": entry.dtype}
                    line |= {**found[entry.system], "cusparse": min(best.values(), default=None)}
                    file.write(json.dumps(line) + "\n")

    def all(self, entries: Sequence[Entry], done: set[str]) -> list[str]:
        """Measure what is not done, matrix by matrix; return what there was no time for."""
        groups: dict[str, dict[int, list[Entry]]] = {}
        for entry in entries:
            groups.setdefault(entry.matrix.name, {}).setdefault(entry.n, []).append(entry)
        families = {f"{e.system} {NATIVE}" for e in entries}
        families |= {f"{e.system} {OLDER}" for e in entries if e.kind == "system"}
        for family in families:
            self.pool.start(family)
        not_run = []
        for name, by_width in groups.items():
            left = {
                n: members
                for n, members in by_width.items()
                if any(e.kind == "system" and _key(name, n, e.system) not in done for e in members)
            }
            if left and time.monotonic() < self.until:
                path = materialise(next(iter(left.values()))[0].matrix)
                request = {"cmd": "load", "path": path, "weights": "random"}
                self.pool.ask_all(sorted(families), request, REQUEST_SECONDS)
            for n, members in left.items():
                if time.monotonic() >= self.until:
                    not_run.append(f"{name}, N={n}")
                    continue
                self.product(members, path)
        return not_run


def _run(asked: argparse.Namespace, arguments: Sequence[str]) -> int:
    chosen = settings.chosen_gpu()
    if chosen is None:
        raise value_error(
            "core_as", _VARIABLE, "set to a capability", "nothing",
            f"Call {_VARIABLE}=8.0 python -m tools.core_as",
        )  # fmt: skip
    until = time.monotonic() + asked.time_limit
    facts = machine_facts()
    matrices = [name for name in asked.matrices.split(",") if name]
    entries = entries_of(asked.data, matrices, [int(n) for n in asked.n.split(",")])
    path = asked.out / facts["gpu"]["slug"] / CORE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {_key(line["matrix"], line["n"], line["system"]) for line in lines[1:]}
    if not lines:
        head = {
            "schema": SCHEMA, "date": datetime.now(UTC).isoformat(timespec="seconds"), **facts,
            "commit": asked.commit or source_commit(), "command": command_of("core_as", arguments),
        }  # fmt: skip
        path.write_text(json.dumps(head) + "\n")
    pool = pool_of(os.environ[_VARIABLE])
    run = Run(pool, path, until)
    try:
        not_run = run.all(entries, done)
    finally:
        pool.close()
    print("\n".join(core_table(path)))
    for line in [*run.wrong, *(f"no time for {each}" for each in not_run)]:
        note(f"core_as: {line}")
    note(f"core_as: wrote {path}")
    return 1 if run.wrong else 0


def main(arguments: Sequence[str]) -> int:
    """Measure the suite and return the exit code."""
    parser = argparse.ArgumentParser(prog="core_as", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of matrix files")
    parser.add_argument(
        "--out", type=Path, required=True, help="write DIR/<gpu>/as-smXX/core.jsonl"
    )
    parser.add_argument("--matrices", default="", help="names, comma-separated; all if omitted")
    parser.add_argument("-n", default=",".join(map(str, WIDTHS)), help="columns of B")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    try:
        return _run(parser.parse_args(list(arguments)), arguments)
    except (ValueError, OSError) as error:
        note(f"core_as: error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
