"""Shared code of the papers' studies: a matrix with its measured products, and the record.

A study is a set of experiments. Most take a matrix, some generate what they need. Products run
through plans; times are medians of replayed CUDA graphs. Each product is compared with csr's:
``error`` is the largest difference over the largest element. Exit code 1 when an experiment failed
or a product was wrong, 2 for bad usage. The record is written after every matrix; at the time limit
it lists what is missing under ``not_run``.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.environment import commit as source_commit
from sparsetile.bench.operands import Operands, Order
from sparsetile.cli.console import note
from sparsetile.core.checks import one_of
from sparsetile.core.device import H200
from sparsetile.core.errors import value_error
from sparsetile.core.timer import time_product
from sparsetile.data.catalog import catalog, find, load
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.formats.window_split import Counts, count_columns
from sparsetile.intake.csr import CSR
from sparsetile.plan.family import Family
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import build_plan
from sparsetile.plan.variant import Variant
from sparsetile.reorder import REORDERERS, Permutation
from tools.record import machine_facts, write_json

SCHEMA = 1
# Defaults of products.
N, DTYPE = 128, torch.float16
CUSPARSE = ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3")
# Largest error of a product that only rounds, to 16 bits or to TF32.
WRONG = 0.01
# Seconds of measured work of a product: there are hundreds of them.
BUDGET = 0.004

Found = dict[str, Any]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_of(C: Tensor, expected: Tensor) -> float | None:
    """Largest difference over the largest element; None if it is not finite."""
    if not expected.numel():
        return 0.0
    largest = float(expected.abs().max())
    found = float((C.float() - expected).abs().max()) / (largest or 1.0)
    return found if math.isfinite(found) else None


@functools.cache
def _warm(name: str) -> None:
    """Load an algorithm, and compile it on a new machine, before it is timed."""
    indptr = torch.tensor([0, 1, 3], dtype=torch.int64)
    indices = torch.tensor([0, 0, 1], dtype=torch.int32)
    REORDERERS[name](CSR(indptr, indices, None, (2, 2)))


def find_order(csr: CSR, name: str) -> Order | None:
    """Find a row order by its name and time it; None for the given order."""
    _warm(name)
    begun = time.perf_counter()
    perm = REORDERERS[name](csr).perm
    seconds = time.perf_counter() - begun
    return None if perm is None else Order(name, perm, seconds)


class Case:
    """One matrix on the device, with results that several experiments share."""

    def __init__(self, name: str, csr: CSR, device: torch.device, order: str = "identity") -> None:
        self.name, self.order, self.device = name, order, device
        self.host, self.csr = csr, csr.to(device)
        self.wrong: list[str] = []  # products that were too far from csr's
        self._orders: dict[str, Order] = {}
        self._perms: dict[str, Tensor | None] = {}
        self._counts: dict[tuple[str, int], Counts] = {}
        self._operands: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._products: dict[tuple[Any, ...], Found] = {}

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def found_order(self, name: str) -> Order | None:
        """Find a row order on the host and time it; None for the given order."""
        if name not in self._perms:
            found = find_order(self.host, name)
            self._perms[name] = None if found is None else found.perm.to(self.device)
            if found is not None:
                self._orders[name] = found
        return self._orders.get(name)

    def perm(self, name: str) -> Tensor | None:
        self.found_order(name)
        return self._perms[name]

    def counts(self, order: str, height: int) -> Counts:
        if (order, height) not in self._counts:
            self._counts[order, height] = count_columns(self.csr, self.perm(order), height)
        return self._counts[order, height]

    def request(
        self, n: int = N, dtype: torch.dtype = DTYPE, ablation: str | None = None
    ) -> Request:
        """The request of ``build_plan`` to rsh; without a GPU, for an H200."""
        permutation = Permutation(self.order, self.perm(self.order))
        ceilings = None if self.has_gpu else H200
        return Request(self.csr, n, dtype, permutation, ablation=ablation, ceilings=ceilings)

    def operands(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """B, and csr's product with it in float32."""
        if (n, dtype) not in self._operands:
            generator = torch.Generator(device=self.device).manual_seed(n)
            shape = (self.csr.shape[1], n)
            B = torch.randn(shape, device=self.device, generator=generator).to(dtype)
            plan = build_plan(self.csr, n, dtype=dtype, system="csr")
            self._operands[n, dtype] = B, plan.run(B, out_dtype=torch.float32)
        return self._operands[n, dtype]

    def measured(
        self,
        what: str,
        plan: Plan,
        rows: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Found:
        """Check and time a plan's product, or only some of its ``rows``."""
        B, expected = self.operands(plan.n, plan.dtype)

        def run() -> Tensor:
            return plan.run(B) if out_dtype is None else plan.run(B, out_dtype=out_dtype)

        C = run()
        error = error_of(C, expected) if rows is None else error_of(C[rows], expected[rows])
        if error is None or error > WRONG:
            self.wrong.append(f"{self.name}: {what}, N={plan.n}, {dtype_name(plan.dtype)}: {error}")
        samples = time_product(run, self.device, budget=BUDGET)
        return {"time": samples.summary(), "error": error}

    def built_product(
        self, what: str, request: Request, built: BuiltSystem, rows: Tensor | None = None
    ) -> Found:
        """The product of a build that no ablation names."""
        if not self.has_gpu:
            return {"time": None, "error": None}
        variant = Variant(
            request.csr, request.n, request.dtype, built, request.permutation,
            deterministic=False, report={},
        )  # fmt: skip
        return self.measured(what, Plan(Family(variant)), rows)

    def product(
        self,
        system: str,
        *,
        n: int = N,
        dtype: torch.dtype = DTYPE,
        order: str = "identity",
        ablation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Found:
        """The product of a system's plan, with rsh's split; cached."""
        if not self.has_gpu:
            return {"time": None, "error": None, "split": None}
        key = (system, n, dtype, order, ablation, out_dtype)
        if key not in self._products:
            perm = self.perm(order)
            plan = build_plan(
                self.csr, n, dtype=dtype, system=system, ablation=ablation,
                reorder="identity" if perm is None else perm,
            )  # fmt: skip
            what = f"{system} {ablation or 'default'}, {order}"
            split = plan.info["choices"].get("split")
            found = self.measured(what, plan, out_dtype=out_dtype)
            self._products[key] = {**found, "split": split}
        return self._products[key]


def with_random_values(case: Case) -> Case:
    """The same pattern with values of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    csr = case.host.with_values(torch.randn(case.host.nnz, generator=generator))
    return Case(case.name, csr, case.device, case.order)


def cusparse_times(case: Case, n: int) -> Found:
    """Times of cuSPARSE's three CSR algorithms in float32, by name."""
    B, _ = case.operands(n, torch.float32)
    operands = Operands(case.csr, B, None, "spmm", "sum")
    return {
        name: time_product(
            BASELINES[name].prepare(operands).run, case.device, budget=BUDGET
        ).summary()
        for name in CUSPARSE
    }


def _facts() -> Found:
    """The machine of the record."""
    if torch.cuda.is_available():
        return machine_facts()
    return {"gpu": None, "torch": torch.__version__, "python": platform.python_version()}


def _chosen(tool: str, data: Path | None, asked: str | None, defaults: Sequence[str]) -> list[str]:
    """Names of the matrices: those asked for, which must exist, or the defaults that do."""
    if data is None:
        return []
    if asked is not None:
        names = list(dict.fromkeys(name for name in asked.split(",") if name))
        for name in names:
            find(name, data)  # refuses unknown names
    else:
        present = {entry.name for entry in catalog(data) if not entry.problem}
        names = [name for name in defaults if name in present]
    if not names:
        raise value_error(
            tool, "--matrices", "at least one matrix of the data folder", "none",
            "Name matrices that the folder of --data holds",
        )  # fmt: skip
    return names


def _run_experiments(
    tool: str,
    asked: argparse.Namespace,
    experiments: Mapping[str, Callable[[Case], Found]],
    only: Sequence[str],
    need_gpu: Sequence[str],
    defaults: Sequence[str],
    alone: Mapping[str, Callable[[torch.device], Found]],
) -> int:
    """Run experiments on matrices, write the record after each, and return the exit code."""
    if not 0 < asked.time_limit < math.inf:
        raise value_error(
            tool, "--time-limit", "seconds above 0", asked.time_limit, "Omit --time-limit"
        )
    if asked.out.is_dir():
        raise value_error(tool, "--out", "a file", f"the folder {str(asked.out)!r}", "Name a file")
    names = _chosen(tool, asked.data, asked.matrices, defaults)
    begun = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = True  # what rsh, acc and voltrix need in float32
    record: Found = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": asked.commit or source_commit(),
        **_facts(),
        "order": asked.order,
        "matrices": {},
        "experiments": {name: {} for name in only},
        "failed": [],
        "wrong": [],
        "not_run": [],
    }

    def attempt(name: str | None, experiment: str, call: Callable[[], Found]) -> None:
        started = time.perf_counter()
        late = started - begun > asked.time_limit
        if late or (experiment in need_gpu and device.type != "cuda"):
            record["not_run"].append([name, experiment, "time limit" if late else "no GPU"])
            return
        found = record["experiments"]
        try:
            if name is None:
                made = call()
                record["wrong"] += made.pop("wrong")
                found[experiment] = made
            else:
                found[experiment][name] = call()
        except (RuntimeError, ValueError, MemoryError) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            record["failed"].append([name, experiment, text])
            note(f"{tool}: {name}, {experiment}: {text}")
        else:
            note(f"{tool}: {name}, {experiment}: {time.perf_counter() - started:.1f} s")

    def write() -> None:
        record["seconds"] = round(time.perf_counter() - begun, 1)
        write_json(record, asked.out)

    for experiment in only:
        if experiment in alone:
            attempt(None, experiment, functools.partial(alone[experiment], device))
            write()
    for name in names:
        case: Case | None = None
        if time.perf_counter() - begun <= asked.time_limit:
            case = Case(name, load(name, asked.data), device, asked.order)
            rows, columns = case.csr.shape
            record["matrices"][name] = {"rows": rows, "columns": columns, "nnz": case.csr.nnz}
        for experiment in only:
            if experiment in experiments:
                # Without a case it is late, and nothing is called.
                attempt(name, experiment, functools.partial(experiments[experiment], case))  # type: ignore[arg-type]
        record["wrong"] += [] if case is None else case.wrong
        write()
    write()
    for line in record["wrong"]:
        note(f"{tool}: wrong: {line}")
    note(f"{tool}: wrote {asked.out}, {len(record['not_run'])} experiments not run")
    return 1 if record["failed"] or record["wrong"] else 0


def run_study(
    tool: str,
    about: str | None,
    arguments: Sequence[str],
    experiments: Mapping[str, Callable[[Case], Found]],
    *,
    need_gpu: Sequence[str],
    matrices: Sequence[str],
    generated: Mapping[str, Callable[[torch.device], Found]] | None = None,
    on_request: Sequence[str] = (),
) -> int:
    """Run the study that the arguments ask for and return the exit code.

    Experiments in ``generated`` need no matrix; each returns what was wrong under ``wrong``. Those
    in ``on_request`` are run only if they are named.
    """
    alone = generated or {}
    known = (*alone, *experiments)
    parser = argparse.ArgumentParser(prog=tool, description=(about or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=not alone, help="folder of matrix files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--matrices", help="names, comma-separated; the study's own if omitted")
    usual = ",".join(name for name in known if name not in on_request)
    parser.add_argument("--only", default=usual, help=f"of {', '.join(known)}; {usual} if omitted")
    parser.set_defaults(order="identity")
    if not alone:
        parser.add_argument("--order", help="row order of most experiments")
    parser.add_argument("--time-limit", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--commit", default="", help="commit to record if git is missing")
    asked = parser.parse_args(list(arguments))
    try:
        only = [one_of(tool, "--only", name, known) for name in asked.only.split(",")]
        one_of(tool, "--order", asked.order, REORDERERS)
        with torch.no_grad():
            return _run_experiments(tool, asked, experiments, only, need_gpu, matrices, alone)
    except (ValueError, OSError) as error:
        note(f"{tool}: error: {error}")
        return 2
