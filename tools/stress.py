"""Lets threads on their own streams use cold plans at once, and compares every bit.

    python -m tools.stress --seconds 120 --device cuda --processes 6 [--seed S] [--out DIR]
    python -m tools.stress --device cuda --replay NUMBER [--times 50]

Each case makes one plan, or passes one new graph to ``st.spmm`` or a layer. Two or three threads
then run products, transposes, gradients, other widths and casts, with and without a wait after
planning. In some cases the last reference is dropped, and the memory overwritten, while the streams
still run. Several processes share one GPU: it switches between them, which exposes missing waits.
``tools/stress_cases.py`` draws the cases, ``tools/stress_jobs.py`` has the jobs.

After the threads, the same calls run alone, on the default stream, with a second plan that is made
after everything else. That also detects plans that were built wrongly. Results must be equal bit
for bit; layers that divide are compared within a few roundings.

A failure is one line: how to replay it, the case, what was wrong. With ``--out`` the counts are
written to ``DIR/<gpu or cpu>/stress.json``. On the CPU threads have no streams. Exit code 1 when a
case failed, 2 for bad usage, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile.cli.console import note
from sparsetile.core.errors import UnsupportedError
from sparsetile.nn import clear_graph_cache
from tools.fuzz_cases import CASES_OF_A_SEED
from tools.fuzz_checks import settings
from tools.fuzz_judge import Wrong, equal_bits
from tools.fuzz_pool import (
    Outcome,
    Work,
    case_numbers,
    check_usage,
    judged,
    print_outcomes,
    proof,
    read_run,
    run_in_processes,
    run_tool,
    tool_parser,
)
from tools.stress_cases import PLAN_JOBS, StressCase, draw
from tools.stress_jobs import LOOSE, Operands, Subject, made

SCHEMA = 2  # 2: a digest for each part of the code
RECORD_NAME = "stress.json"
# What a committed record must cover.
FEWEST = {"plans": 20_000, "processes": 4}
# Cycles for which a stream sleeps before its last jobs, so that they still run when a plan is
# dropped: about 1 ms.
SLEEP = 2_000_000
# Sizes of memory that is allocated and overwritten after a plan was dropped, many times each.
FREED = (512, 1024, 2048, 4096, 16_384, 65_536, 262_144)
COPIES = 16
# Seconds after which a thread that waits for the others gives up.
SECONDS = 30.0

Found = Tensor | str  # a result, or the error that it was refused with


class _Streams:
    """The default stream, one to make plans on, and one per thread; nothing on the CPU."""

    def __init__(self, case: StressCase) -> None:
        self.used = case.device == "cuda"
        self.own = [torch.cuda.Stream() for _ in case.jobs] if self.used else []
        self.maker = torch.cuda.Stream() if self.used and case.side else None
        self.others = [*([self.maker] if self.maker else []), *self.own]

    @contextlib.contextmanager
    def of(self, thread: int) -> Iterator[None]:
        with torch.cuda.stream(self.own[thread]) if self.used else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """The stream on which the plan is made, ordered after the default stream."""
        if self.maker is None:
            yield
            return
        self.maker.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.maker):
            yield

    def order(self) -> None:
        """Let the threads' streams wait for the current stream."""
        for stream in self.own:
            stream.wait_stream(torch.cuda.current_stream())

    def gather(self) -> None:
        """Let the current stream wait for all others."""
        for stream in self.others:
            torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> None:
        if self.used:
            torch.cuda.synchronize()


def run_case(case: StressCase) -> str:
    """Run one case; returns the system that ran, or raises."""
    clear_graph_cache()
    st.clear_plan_cache()
    streams, operands = _Streams(case), Operands(case)
    shared: list[Subject] = []
    with streams.making():
        # Operands, layers and new values are the caller's, who must order the streams.
        if case.subject != "plan":
            shared.append(made(operands))
        streams.order()
        if not shared and not case.swapped:
            shared.append(made(operands))
        if case.updated:
            streams.order()
    if case.waits:
        streams.wait()
    found = _ask(case, operands, streams, shared)
    system = shared[0].system
    if case.dropped:
        if case.subject == "plan":
            shared.clear()  # drops a layer's graphs; its parameters are the caller's
        clear_graph_cache()
        st.clear_plan_cache()
        _overwrite(streams)
    streams.gather()
    compare_results(case, operands, found, shared, streams)
    return system


def _ask(
    case: StressCase, operands: Operands, streams: _Streams, shared: list[Subject]
) -> list[list[Found]]:
    """Run the jobs of all threads at once; their kernels may still run afterwards."""
    count = len(case.jobs)
    found: list[list[Found]] = [[] for _ in case.jobs]
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)
    own: dict[int, Subject] = {}

    def body(thread: int) -> None:
        jobs = case.jobs[thread]
        try:
            with streams.of(thread):
                barrier.wait(SECONDS)
                if case.swapped:
                    own[thread] = made(operands)
                    barrier.wait(SECONDS)
                subject = own[(thread + 1) % count] if case.swapped else shared[0]
                for place, job in enumerate(jobs):
                    if case.dropped and streams.used and place >= len(jobs) - 2:
                        torch.cuda._sleep(SLEEP)
                    found[thread].append(_result(subject, thread, job))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(k,)) for k in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]
    shared.extend(own.values())
    return found


def _result(subject: Subject, thread: int, job: str) -> Found:
    try:
        return subject.run(thread, job)
    except UnsupportedError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _overwrite(streams: _Streams) -> None:
    """Allocate freed memory on the streams that it was allocated on, and fill it with numbers that
    are neither addresses nor indices."""
    if not streams.used:
        return
    taken = []
    for stream in (torch.cuda.current_stream(), *streams.others):
        with torch.cuda.stream(stream):
            for size in FREED:
                for _ in range(COPIES):
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0x7F))


def compare_results(
    case: StressCase, operands: Operands, found: list[list[Found]], shared: list[Subject],
    streams: _Streams,
) -> None:  # fmt: skip
    """Make the same calls alone, with a second plan, and compare every result."""
    clear_graph_cache()
    st.clear_plan_cache()
    alone = made(operands)
    flags: list[tuple[int, str, Found, Found, bool | Tensor]] = []
    for thread, jobs in enumerate(case.jobs):
        expected: dict[str, Found] = {}
        for job, result in zip(jobs, found[thread], strict=True):
            if job not in expected:
                expected[job] = _result(alone, thread, job)
            flags.append((thread, job, result, expected[job], _same(alone, result, expected[job])))
    ready = [flag for *_, flag in flags if isinstance(flag, Tensor)]
    read = iter(torch.stack(ready).tolist() if ready else [])
    for thread, job, result, wanted, flag in flags:
        if next(read) if isinstance(flag, Tensor) else flag:
            continue
        after = ""
        if shared:
            kept = _result(shared[0], thread, job)
            right = _same(alone, kept, wanted)
            after = f"; the plan is {'right' if bool(right) else 'wrong'} afterwards"
        raise Wrong(f"thread {thread}, {job}: {_difference(result, wanted)}{after}")
    streams.wait()  # raises errors of kernels before memory is reused


def _same(subject: Subject, found: Found, wanted: Found) -> bool | Tensor:
    """Whether two results are the same, without waiting for the GPU."""
    if isinstance(found, str) or isinstance(wanted, str):
        return isinstance(found, str) and isinstance(wanted, str) and found == wanted
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    if found.numel() == 0:
        return True
    if not subject.bits:
        unit = LOOSE * torch.finfo(found.dtype).eps
        size = wanted.abs().amax() + 1
        return ((found - wanted).abs() <= unit * size).all()
    if subject.operands.case.subject != "plan":
        return (found == wanted).all()  # another system may give the other zero
    if not found.is_cuda:
        return equal_bits(found, wanted)
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return (found.contiguous().view(word) == wanted.contiguous().view(word)).all()


def _difference(found: Found, wanted: Found) -> str:
    if isinstance(found, str) or isinstance(wanted, str):
        shown = [each if isinstance(each, str) else "a result" for each in (found, wanted)]
        return f"{shown[0]} instead of {shown[1]}"
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return f"{found.dtype}{[*found.shape]} instead of {wanted.dtype}{[*wanted.shape]}"
    differ = ~((found == wanted) | (found.isnan() & wanted.isnan()))
    if not bool(differ.any()):
        return "other bits of equal numbers"
    at = tuple(int(k) for k in differ.nonzero()[0])
    return (
        f"{int(differ.sum())} of {found.numel()} elements differ, first {at}: "
        f"{float(found[at]):.9g} instead of {float(wanted[at]):.9g}"
    )


def try_case(case: StressCase) -> Outcome:
    """Run one case and judge its result or its error."""
    with settings(tf32=True):  # Tensor Cores take float32 only so; operands are exact in TF32
        return judged(case, lambda: run_case(case))


def worker(device: str, seed: str, first: str, until: str, alone: str) -> None:
    """Run the cases of a seed and print the outcome of each, for ``tools.fuzz_pool``."""
    torch.set_num_threads(1)  # each of our threads would have that many of its own

    def cases(begins: Callable[[int], None]) -> Iterator[Outcome]:
        for number in case_numbers(int(first), float(until)):
            begins(number)
            yield try_case(draw(int(seed), number, device))

    print_outcomes(device, int(seed), cases)


def check_stress(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of a GPU, one sentence each; empty when all is right."""
    forms = {"plans": int, "processes": int, "systems": dict, "features": dict, "failures": list}
    record, problems, again = read_run(path, "stress", SCHEMA, forms, FEWEST)
    if not record:
        return problems
    idle = sorted(set(PLAN_JOBS) - set(record["features"].get("job", {})))
    if idle:
        problems.append(f"{path}: nobody asked for {', '.join(idle)}; {again}")
    return problems + [f"{path}: {line}" for line in record["failures"]]


def _replay(case: StressCase, times: int) -> int:
    print(case)
    for turn in range(times):
        outcome = try_case(case)
        if outcome.wrong:
            print(f"outcome, time {turn + 1}: {outcome.wrong}")
            return 1
    print(f"outcome: {outcome.refused or 'right'}, {times} times")
    return 0


def _run(asked: argparse.Namespace) -> int:
    check_usage("stress", asked, seed=0, replay=0, processes=1, times=1)
    device = asked.device
    if asked.replay is not None:
        seed, number = divmod(asked.replay, CASES_OF_A_SEED)
        return _replay(draw(seed, number, device), asked.times)
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    work = Work("stress", device, lambda s, number: draw(s, number, device))

    def run() -> dict[str, Any]:
        found = run_in_processes(work, seed, asked.seconds, asked.processes, note)
        refused = sum(found["refusals"].values())
        kept = ("seeds", "seconds", "systems", "features", "refusals", "failures")
        counts = {"processes": asked.processes, "plans": found["cases"] - refused}
        return counts | {name: found[name] for name in kept}

    found = proof("stress", SCHEMA, asked, run)
    note(
        f"stress: seed {seed}: {found['plans']} cold plans in {found['seconds']} s, "
        f"{sum(found['refusals'].values())} refused, {len(found['failures'])} failed"
    )
    return 1 if found["failures"] else 0


def main(arguments: Sequence[str]) -> int:
    """Stress plans, or replay a case, and return the exit code."""
    parser = tool_parser("stress", __doc__, 120.0, "on one GPU at once")
    parser.add_argument("--times", type=int, default=1, help="how often to replay it")
    return run_tool(parser, arguments, _run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
