"""Runs mixed products for a long time on several threads and streams, and checks each of them.

    python -m tools.soak --seconds 120 --device cuda --streams 4 --threads 8 --plans 10000 --out DIR

Every system and type, several widths, transposes, gradients, other values, and plans that are made
and dropped. An operand's memory is freed as soon as the product is launched, and overwritten.
Inputs are small fractions, so that sums are exact and every result is compared with float64. With
``--out`` the counts and the memory at both ends are written to ``DIR/<gpu or cpu>/soak.json``. Exit
code 1 when a result was wrong, a thread failed or memory grew, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparsetile as st
from sparsetile import CSR, Plan
from sparsetile.check.reference import dot_products, reference
from sparsetile.cli.console import note
from sparsetile.core.errors import UnsupportedError
from sparsetile.intake.csr import offsets
from sparsetile.systems import SYSTEMS
from tools.fuzz_pool import check_usage, described, proof, read_run, run_tool, tool_parser

SCHEMA = 2  # 2: a digest for each part of the code
RECORD_NAME = "soak.json"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WIDTHS = (8, 33, 128)
# Products between two checks of results: this many are in flight on a stream at once.
DEPTH = 12
SHOWN = 20
# Bytes by which memory may grow after the first round: host memory that allocators keep, and
# tensors on the GPU that a thread may still have.
HOST_GROWTH, DEVICE_GROWTH = 256 * 2**20, 2**20
# What a committed record must cover.
FEWEST = {"plans": 10_000, "streams": 4, "threads": 8, "seconds": 60}


def _pattern(rows: int, cols: int, chosen: Tensor) -> CSR:
    row, col = chosen.nonzero().T
    return CSR(offsets(torch.bincount(row, minlength=rows)), col.int(), None, (rows, cols))


def _matrices(rng: torch.Generator) -> dict[str, CSR]:
    """Few long rows among short ones, full blocks, and a small one with empty rows."""
    share = 0.5 / (1 + torch.arange(600).unsqueeze(1) / 4.0) + 0.004
    block = torch.arange(256).unsqueeze(1) // 64 + torch.arange(320) // 64
    small = torch.rand(70, 90, generator=rng) < 0.06
    small[::7] = False
    return {
        "long rows": _pattern(600, 500, torch.rand(600, 500, generator=rng) < share),
        "blocks": _pattern(256, 320, (block % 3 == 0).expand(256, 320)),
        "small": _pattern(70, 90, small),
    }


def _fractions(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Numbers k/4, whose sums of products are exact in float32, in TF32 as well."""
    return torch.randint(-4, 5, tuple(shape), generator=rng).double() / 4


@dataclass
class Station:
    """A plan with its operands and expected products."""

    name: str
    csr: CSR
    plan: Plan
    system: str
    B: Tensor
    G: Tensor
    values: Tensor
    expected: dict[str, Tensor]


def _station(name: str, pattern: CSR, n: int, dtype: torch.dtype, system: str, device: str,
             rng: torch.Generator) -> Station:  # fmt: skip
    values, other = (_fractions((pattern.nnz,), rng) + 0.125 for _ in range(2))
    csr = pattern.with_values(values.to(dtype)).to(torch.device(device))
    plan = st.plan(csr, n, dtype=dtype, system=system)
    B, G = (_fractions((size, n), rng) for size in (pattern.shape[1], pattern.shape[0]))
    weighted = pattern.with_values(values)
    expected = {
        "sum": reference(weighted, B)[0],
        "max": reference(weighted, B, "max")[0],
        "transpose": reference(weighted.transposed(), G)[0],
        "values": reference(pattern.with_values(other), B)[0],
        "gradient of values": dot_products(pattern, G, B)[1],
    }
    return Station(
        f"{name}, {system}, {dtype}, N={n}", csr, plan, system, B.to(device, dtype),
        G.to(device, dtype), other.to(device, dtype),
        {kind: result.to(device) for kind, result in expected.items()},
    )  # fmt: skip


def make_stations(device: str, seed: int) -> list[Station]:
    """One for each matrix, system and type that the device supports."""
    rng = torch.Generator().manual_seed(seed)
    able = sorted(name for name in SYSTEMS if device in SYSTEMS[name].devices)
    widths = itertools.cycle(WIDTHS)
    found = []
    for (name, pattern), dtype, system in itertools.product(_matrices(rng).items(), DTYPES, able):
        if device == "cpu" and system == "dense" and dtype.itemsize == 2:
            continue  # torch takes up to a second for one
        with contextlib.suppress(UnsupportedError):
            found.append(_station(name, pattern, next(widths), dtype, system, device, rng))
    return found


@dataclass
class Soak:
    """State shared by all threads: stations, counts, and the end."""

    device: str
    stations: list[Station]
    streams: list[Any]
    seconds: float
    plans_wanted: int
    products: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    plans: int = 0
    wrong: int = 0
    failures: list[str] = field(default_factory=list)
    begun: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def over(self) -> bool:
        late = time.monotonic() - self.begun >= self.seconds
        return late and self.plans >= self.plans_wanted

    def plans_due(self) -> bool:
        share = (time.monotonic() - self.begun) / self.seconds
        return self.plans < min(1.0, share) * self.plans_wanted

    def failed(self, text: str, count: int = 1) -> None:
        with self.lock:
            self.wrong += count
            if len(self.failures) < SHOWN:
                self.failures.append(text)
                note(f"soak: {text}")


class _Thread:
    """Products of one thread, on one stream after the other."""

    def __init__(self, shared: Soak, number: int, seed: int) -> None:
        self.shared, self.number = shared, number
        self.rng = random.Random(f"{seed}:{number}")
        self.flags: list[tuple[str, Tensor]] = []
        self.products: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def run(self, first_round: bool) -> None:
        shared = self.shared
        turns = itertools.count(self.number)
        try:
            while not (first_round or shared.over()):
                with self._stream(next(turns)):
                    due = shared.plans_due()
                    for _ in range(2 if due else DEPTH):
                        self._product(self.rng.choice(shared.stations))
                    if due:
                        self._plan(self.rng.choice(shared.stations))
                    self._look()
            # Every stream runs every product, so that its scratch memory reaches its final size.
            rounds = range(max(len(shared.streams), 1)) if first_round else ()
            for turn, station in itertools.product(rounds, shared.stations):
                with self._stream(turn):
                    for kind in _KINDS:
                        self._product(station, kind)
                    self._look()
        except Exception as error:
            shared.failed(described(error))
        with shared.lock:
            shared.products.update(self.products)
            shared.kinds.update(self.kinds)
        self.products.clear()
        self.kinds.clear()

    @contextlib.contextmanager
    def _stream(self, turn: int) -> Iterator[None]:
        streams = self.shared.streams
        if not streams:
            yield
            return
        stream = streams[turn % len(streams)]
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def _product(self, station: Station, kind: str = "") -> None:
        kind = kind or self.rng.choice(list(_KINDS))
        B, G = station.B.clone(), station.G.clone()
        found, expected = _KINDS[kind](station, station.plan, B, G)
        shapes = B.shape, G.shape
        del B, G  # freed while the product may still run, and overwritten
        for shape in shapes:
            torch.full(shape, torch.nan, dtype=station.plan.dtype, device=station.plan.device)
        self._judge(station, kind, found, expected)

    def _plan(self, station: Station) -> None:
        """Make a plan, give it other values, run it both times, and drop it."""
        plan = st.plan(station.csr, station.plan.n, dtype=station.plan.dtype, system=station.system)
        self._judge(station, "new plan", plan @ station.B, station.expected["sum"])
        plan.update_values(station.values)
        self._judge(station, "update", plan @ station.B, station.expected["values"])
        with self.shared.lock:
            self.shared.plans += 1

    def _judge(self, station: Station, kind: str, found: Tensor, expected: Tensor) -> None:
        unit = torch.finfo(found.dtype).eps
        right = (found.detach().double() - expected).abs() <= unit * expected.abs()
        self.flags.append((f"{station.name}: {kind}", right.all()))
        self.products[station.system] += 1
        self.kinds[kind] += 1

    def _look(self) -> None:
        right = torch.stack([flag for _, flag in self.flags]).tolist()
        for (text, _), one in zip(self.flags, right, strict=True):
            if not one:
                self.shared.failed(text)
        self.flags.clear()


def _gradient(station: Station, plan: Plan, B: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    B.requires_grad_()
    (found,) = torch.autograd.grad(plan.run(B), B, G)
    return found, station.expected["transpose"]


def _value_gradient(station: Station, plan: Plan, B: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    values = station.values.clone().requires_grad_()
    (found,) = torch.autograd.grad(plan.run(B, values=values), values, G)
    return found, station.expected["gradient of values"]


def _into(station: Station, plan: Plan, B: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.full_like(G, torch.nan)
    return plan.run(B, out=out, alpha=2.0), 2 * station.expected["sum"]


_KINDS: dict[str, Callable[[Station, Plan, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "sum": lambda s, plan, B, G: (plan @ B, s.expected["sum"]),
    "out": _into,
    "max": lambda s, plan, B, G: (plan.run(B, reduce="max"), s.expected["max"]),
    "transpose": lambda s, plan, B, G: (plan.T @ G, s.expected["transpose"]),
    "values": lambda s, plan, B, G: (plan.run(B, values=s.values), s.expected["values"]),
    "gradient of B": _gradient,
    "gradient of values": _value_gradient,
}


def _memory(device: str) -> dict[str, int]:
    """Bytes of the process, and of tensors on the GPU, after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if device == "cuda":
        torch.cuda.synchronize()
        found |= {"device": torch.cuda.memory_allocated()}
        found |= {"device_reserved": torch.cuda.memory_reserved()}
    return found


def _all_threads(threads: list[_Thread], first_round: bool) -> None:
    workers = [
        threading.Thread(target=each.run, args=(first_round,), daemon=True) for each in threads
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def soak(
    device: str, seconds: float, streams: int, threads: int, plans: int, seed: int
) -> dict[str, Any]:
    """Run products for a time and a number of plans; return the counts for the record."""
    matmul = torch.backends.cuda.matmul
    before, cores = matmul.allow_tf32, torch.get_num_threads()
    torch.set_num_threads(1)  # each of our threads would have that many of its own
    matmul.allow_tf32 = True  # Tensor Cores take float32 only so; these inputs are exact in TF32
    try:
        on_gpu = device == "cuda"
        used = [torch.cuda.Stream() for _ in range(streams)] if on_gpu else []
        shared = Soak(device, make_stations(device, seed), used, seconds, plans)
        workers = [_Thread(shared, number, seed) for number in range(threads)]
        if on_gpu:
            torch.cuda.synchronize()
        _all_threads(workers[:1], first_round=True)  # compiles, and makes transposes
        # Run everything for a while, so that allocators and caches reach their sizes.
        shared.begun, shared.seconds, shared.plans_wanted = time.monotonic(), seconds / 10, threads
        _all_threads(workers, first_round=False)
        start = _memory(device)
        shared.plans, shared.seconds, shared.plans_wanted = 0, seconds, plans
        shared.begun = time.monotonic()
        _all_threads(workers, first_round=False)
        lasted = time.monotonic() - shared.begun
        end = _memory(device)
    finally:
        matmul.allow_tf32 = before
        torch.set_num_threads(cores)
    return {
        "seed": seed, "streams": streams, "threads": threads, "seconds": round(lasted, 1),
        "plans": shared.plans, "products": sum(shared.products.values()),
        "systems": dict(sorted(shared.products.items())), "kinds": dict(shared.kinds.most_common()),
        "wrong": shared.wrong, "failures": shared.failures,
        "memory_start": start, "memory_end": end,
    }  # fmt: skip


def _problems(found: dict[str, Any]) -> list[str]:
    """The errors of a run: wrong results, and memory that grew."""
    problems = [f"{found['wrong']} wrong: {text}" for text in found["failures"][:1]]
    for name, most in (("host", HOST_GROWTH), ("device", DEVICE_GROWTH)):
        grown = found["memory_end"].get(name, 0) - found["memory_start"].get(name, 0)
        if grown > most:
            problems.append(f"memory of the {name} grew by {grown} bytes, more than {most}")
    return problems


def check_soak(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a record of a GPU, one sentence each; empty when all is right."""
    forms: dict[str, Any] = {
        **dict.fromkeys([*FEWEST, "wrong"], int | float),
        "systems": dict,
        "failures": list,
    }
    forms |= dict.fromkeys(("memory_start", "memory_end"), dict)
    record, problems, _ = read_run(path, "soak", SCHEMA, forms, FEWEST)
    return problems + [f"{path}: {text}" for text in (_problems(record) if record else ())]


def _run(asked: argparse.Namespace) -> int:
    check_usage("soak", asked, streams=1, threads=1, plans=0)
    size = asked.streams, asked.threads, asked.plans
    found = proof(
        "soak", SCHEMA, asked, lambda: soak(asked.device, asked.seconds, *size, asked.seed)
    )
    problems = _problems(found)
    note(
        f"soak: {found['products']} products and {found['plans']} plans in {found['seconds']} s, "
        f"{found['wrong']} wrong; memory {found['memory_start']} to {found['memory_end']}"
    )
    for text in problems:
        note(f"soak: {text}")
    return 1 if problems else 0


def main(arguments: Sequence[str]) -> int:
    """Run the soak test and return the exit code."""
    parser = tool_parser("soak", __doc__, 120.0)
    parser.add_argument("--streams", type=int, default=4, help="of the GPU")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--plans", type=int, default=10_000, help="to make and drop meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    return run_tool(parser, arguments, _run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
