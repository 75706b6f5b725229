"""Runs the cases of ``tools.fuzz`` and ``tools.stress`` in separate processes, one seed each.

A case that hangs, or crashes its process, is a failure like any other: a new process continues with
the next case. A process prints the number of each case it begins, and its outcome, so that its
results count even if it crashes. Below that is what these tools and ``tools.soak`` share: their
options, and records of what ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

import sparsetile as st
from sparsetile.cli.console import note
from sparsetile.core.errors import UnsupportedError, value_error
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from sparsetile.systems.registry import exact_system
from tools.as_capability import capability_of, runs_as
from tools.fuzz_cases import CASES_OF_A_SEED
from tools.fuzz_judge import Wrong, grouped, is_refusal
from tools.parts import part_digests
from tools.record import ROOT, device_facts, one_thread_each, read_proof, write_json

# Seconds for one case. The first with a row order or a kernel compiles it.
CASE_SECONDS = 60.0
# A fresh interpreter that finds the tools and the package of this checkout.
CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.TOOL import worker; worker(*sys.argv[1:])"
)


class AnyCase(Protocol):
    """A dataclass that determines one check."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def replay(self) -> str: ...
    @property
    def features(self) -> Mapping[str, Iterable[str]]: ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: what was ``wrong``, or what was correctly ``refused``, if anything."""

    case: AnyCase
    system: str
    wrong: str = ""
    refused: str = ""

    @property
    def line(self) -> str:
        """How to replay the case, the case, what was wrong."""
        shown = (f"{field.name}={getattr(self.case, field.name)!r}" for field in fields(self.case))
        return f"{self.case.replay} | {', '.join(shown)} | {self.wrong}"


@dataclass
class Tally:
    """Counts outcomes of a tool; ``say`` is called with each failure."""

    say: Callable[[str], None]
    tool: str = "fuzz"
    begun: float = field(default_factory=time.perf_counter)
    cases: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    systems: Counter[str] = field(default_factory=Counter)
    layers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seeds: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.cases += 1
            self.kinds[outcome.case.kind] += 1
            self.seeds.add(outcome.case.seed)
            for feature, values in outcome.case.features.items():
                self.features.setdefault(feature, Counter()).update(values)
            if outcome.wrong:
                self.failures.append(outcome.line)
                self.say(f"{self.tool}: {outcome.line}")
            elif outcome.refused:
                self.refusals[outcome.refused] += 1
            elif outcome.case.kind == "layers":
                self.layers[outcome.system] += 1
            else:
                self.systems[outcome.system] += 1

    def found(self) -> dict[str, Any]:
        """Return the counts for the record."""
        return {
            "seeds": sorted(self.seeds),
            "cases": self.cases,
            "kinds": dict(sorted(self.kinds.items())),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "systems": dict(sorted(self.systems.items())),
            "layers": dict(sorted(self.layers.items())),
            "features": {
                name: dict(sorted(found.items())) for name, found in self.features.items()
            },
            "refusals": dict(self.refusals.most_common()),
            "failures": sorted(self.failures),
        }


@dataclass(frozen=True)
class Work:
    """What processes run."""

    tool: str  # module of ``tools`` whose ``worker`` runs cases
    device: str
    draw: Callable[[int, int], AnyCase]  # seed, number -> case
    words: tuple[str, ...] = ()  # what ``worker`` gets at the end

    def command(self, seed: int, first: int, until: float, alone: bool) -> list[str]:
        words = (self.device, str(seed), str(first), f"{until:.3f}", str(int(alone)), *self.words)
        child = CHILD.replace("TOOL", self.tool)
        return [sys.executable, "-c", child, str(ROOT), str(ROOT / "src"), *words]


class _Seed:
    """The cases of one seed, in one process after the other."""

    def __init__(
        self, work: Work, seed: int, until: float, environment: Mapping[str, str] | None,
        tally: Tally,
    ) -> None:  # fmt: skip
        self.work, self.seed, self.until = work, seed, until
        self.alone, self.environment = environment is None, environment
        self.tally = tally
        self.running: int | None = None  # the case that was begun and has not ended
        self.since = time.monotonic()
        self.following = 0
        self.stopped = self.closed = False
        self.process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Run until the time is over; a process that fails is followed by another."""
        idle = 0
        while not self.closed and time.monotonic() < self.until and idle < 3:
            before = self.following
            code = self._watch()
            if self.running is not None and not self.closed:
                wrong = f"the process ended with code {code}"
                if self.stopped:
                    wrong = f"no end within {CASE_SECONDS:g} s"
                case = self.work.draw(self.seed, self.running)
                self.tally.add(Outcome(case, case.system, wrong=wrong))
                self.following = self.running + 1
            idle = 0 if self.following > before else idle + 1
        if idle and not self.closed:
            self.tally.say(f"{self.work.tool}: seed {self.seed}: its process does not start")

    def _watch(self) -> int:
        """Start a process, count its outcomes, and return its exit status."""
        self.running, self.stopped, self.since = None, False, time.monotonic()
        self.process = subprocess.Popen(
            self.work.command(self.seed, self.following, self.until, self.alone),
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env=self.environment,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self._heard(json.loads(line))
        return self.process.wait()

    def _heard(self, message: dict[str, Any]) -> None:
        self.since = time.monotonic()
        if "compiled" in message:
            return
        if "system" not in message:
            self.running = message["case"]
            return
        case = self.work.draw(self.seed, message["case"])
        self.running, self.following = None, case.number + 1
        self.tally.add(Outcome(case, message["system"], message["wrong"], message["refused"]))

    def stop_if_stuck(self) -> None:
        if time.monotonic() - self.since > CASE_SECONDS:
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def run_in_processes(
    work: Work,
    seed: int,
    seconds: float,
    processes: int,
    say: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    cases: float = math.inf,
) -> dict[str, Any]:
    """Run the cases of several seeds, from ``seed`` on, in parallel; return the record's counts.

    ``environment`` is what several processes have beside this one's. All end after ``cases`` cases.
    """
    tally, until = Tally(say, work.tool), time.monotonic() + seconds
    around = None if processes == 1 else {**one_thread_each(), **(environment or {})}
    seeds = [_Seed(work, seed + k, until, around, tally) for k in range(processes)]
    threads = [threading.Thread(target=each.run, daemon=True) for each in seeds]
    with _stopped_at_the_end(seeds):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and tally.cases < cases:
            time.sleep(0.05)
            for each in seeds:
                each.stop_if_stuck()
    return tally.found()


@contextlib.contextmanager
def _stopped_at_the_end(seeds: list[_Seed]) -> Iterator[None]:
    """End all processes, also after an interrupt."""
    try:
        yield
    finally:
        for each in seeds:
            each.closed = True
            each.stop()


def case_numbers(first: int, until: float) -> Iterator[int]:
    """Numbers of cases from ``first`` on, at least one; processes share the monotonic clock."""
    for number in range(first, CASES_OF_A_SEED):
        yield number
        if time.monotonic() >= until:
            return


def emptied(folder: Path) -> None:
    """Remove the files of cases."""
    for path in folder.iterdir():
        path.unlink()


def described(error: BaseException) -> str:
    """The error with the last line outside of installed packages that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{place}: {' '.join(str(error).split())[:300]}"


def judged(case: AnyCase, run: Callable[[], str], may_refuse: bool = True) -> Outcome:
    """Run a case, which returns its system, and judge its error."""
    try:
        return Outcome(case, run())
    except Wrong as error:
        return Outcome(case, case.system, wrong=str(error))
    except UnsupportedError as error:
        # Only a system that was chosen by name may reject the case.
        named = may_refuse and case.system not in ("auto", exact_system(case.device).name)
        if named and is_refusal(error):
            return Outcome(case, case.system, refused=grouped(error, case.system))
        return Outcome(case, case.system, wrong=described(error))
    except Exception as error:
        return Outcome(case, case.system, wrong=described(error))


def warm(device: str, turn: int, say: Callable[[str], None]) -> None:
    """Compile row orders, each process another one first; the cache on disk is shared."""
    rows = torch.arange(300).repeat_interleave(8)
    A = (torch.stack([rows, (rows * 7 + torch.arange(2400) % 8 * 31) % 300]), None, (300, 300))
    names = sorted(REORDERERS)
    for k in range(len(names)):
        with contextlib.suppress(UnsupportedError):
            st.plan(A, 8, reorder=names[(turn + k) % len(names)], device=device)
        say(names[(turn + k) % len(names)])


def print_outcomes(
    device: str, seed: int, cases: Callable[[Callable[[int], None]], Iterable[Outcome]]
) -> None:
    """Print what :class:`_Seed` reads; ``cases`` calls its argument when a case begins."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints

    def say(**facts: Any) -> None:
        messages.write(json.dumps(facts) + "\n")

    if device == "cuda":
        say(compiled="imports")
        warm(device, seed, lambda name: say(compiled=name))
    for outcome in cases(lambda number: say(case=number)):
        say(case=outcome.case.number, system=outcome.system, wrong=outcome.wrong,
            refused=outcome.refused)  # fmt: skip
        if outcome.wrong and device == "cuda":
            torch.cuda.synchronize()  # raises if the context is lost: a new process continues


def tool_parser(
    tool: str, text: str | None, seconds: float, processes: str = ""
) -> argparse.ArgumentParser:
    """Return the options of a tool; with help for ``processes`` those of one that draws cases."""
    parser = argparse.ArgumentParser(prog=tool, description=(text or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=seconds, help="how long to go on")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--out", type=Path, help=f"folder whose <gpu or cpu>/{tool}.json is written"
    )
    if processes:
        parser.add_argument("--processes", type=int, default=1, help=processes)
        parser.add_argument("--seed", type=int, help="of the first process; fresh if omitted")
        parser.add_argument("--replay", type=int, help="run this one case alone and print it")
    return parser


def check_usage(tool: str, asked: argparse.Namespace, **least: int) -> None:
    """Refuse a device that is not there, and numbers that are too small."""
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise value_error(
            tool, "--device", "a device of this machine", "cuda where there is no GPU",
            "Use --device cpu",
        )  # fmt: skip
    if not 0 < asked.seconds < math.inf:
        raise value_error(tool, "--seconds", "a number above 0", asked.seconds, "Omit it")
    for name, bound in least.items():
        value = getattr(asked, name)
        if value is not None and value < bound:
            raise value_error(tool, f"--{name}", f"{bound} or more", value, "Omit it")


def proof(
    tool: str, schema: int, asked: argparse.Namespace, run: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Run a tool, and write what it found if ``asked.out`` is given."""
    facts, digest = device_facts(asked.device), part_digests()
    found = run()
    if part_digests() != digest:
        raise value_error(tool, "the code", "left as it is meanwhile", "a change", "Run it again")
    if asked.out is not None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"schema": schema, "date": date, **facts, "device": asked.device, "parts": digest}
        folder = facts["gpu"]["slug"] if asked.device == "cuda" else "cpu"
        note(f"{tool}: wrote {write_json(head | found, asked.out / folder / f'{tool}.json')}")
    return found


def read_run(
    path: str | os.PathLike[str], tool: str, schema: int, forms: Mapping[str, Any],
    fewest: Mapping[str, int],
) -> tuple[dict[str, Any], list[str], str]:  # fmt: skip
    """Return a record, empty if it has other fields than ``forms``, what is wrong, and a remedy."""
    again = f"run `python -m tools.{tool}` on that GPU again"
    record, problems = read_proof(path, schema, again)
    if not record:
        return {}, problems, again
    if not all(isinstance(record.get(name), form) for name, form in forms.items()):
        return {}, [f"{path}: does not count {', '.join(forms)}; {again}"], again
    for name, least in fewest.items():
        if record[name] < least:
            problems.append(f"{path}: {record[name]} {name}, fewer than {least}; {again}")
    able = {name for name in SYSTEMS if record.get("device") in SYSTEMS[name].devices}
    if (capability := capability_of(record)) is not None:
        able = {name for name in able if runs_as(name, capability)}
    missing = sorted(able - set(record["systems"]))
    if missing or not able:
        problems.append(f"{path}: no product of {', '.join(missing) or 'any system'}; {again}")
    return record, problems, again


def run_tool(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Run a tool with its arguments and return the exit code."""
    try:
        return run(parser.parse_args(list(arguments)))
    except (ValueError, OSError) as error:
        note(f"{parser.prog}: error: {error}")
        return 2
    except KeyboardInterrupt:
        note(f"{parser.prog}: stopped")
        return 130
