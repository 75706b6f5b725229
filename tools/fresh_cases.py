"""What the parts of tools.fresh_times share: matrices, their baselines, figures and time limits.

A case is one matrix with random float32 values. Its variants are the matrix with the order of its
rows, its columns or both reversed: as large and as uneven, but another pattern, so that nothing
kept of one, in memory or on disk, serves another.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsetile.bench.analysis import geomean
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.operands import Operands
from sparsetile.cli.console import note
from sparsetile.core.timer import Samples, one_product, time_product
from sparsetile.data.catalog import catalog, load
from sparsetile.intake.csr import CSR

__all__ = [
    "BUDGET",
    "WRONG",
    "Baselines",
    "Case",
    "Context",
    "Figures",
    "graph_time",
    "matrix_names",
    "poison",
    "sampled_error",
    "tf32",
    "wrong",
]

Figure = dict[str, Any]

# Seconds of measured work of one kernel time.
BUDGET = 0.004
# Largest error of a sampled element over the sum of its products' sizes.
WRONG = {False: 1e-5, True: 2e-3}
SAMPLED_ROWS, LONGEST_ROWS = 24, 8
SPMM = ("cusparse-csr1", "cusparse-csr2", "cusparse-csr3")
SPMV = ("cusparse-spmv1", "cusparse-spmv2")


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether torch allows TF32 for float32 products inside the block."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Fill the memory that the next result will probably get with NaN."""
    torch.full(tuple(shape), math.nan, dtype=dtype, device=device)


def graph_time(run: Callable[[], object], device: torch.device) -> Samples:
    """Time of one product by a replayed CUDA graph; by the clock on the CPU."""
    return time_product(run, device, budget=BUDGET)


@dataclass(frozen=True)
class Baselines:
    """Seconds of cuSPARSE's algorithms by name: preprocessing and kernel."""

    preprocess: dict[str, float]
    kernel: dict[str, float]
    call: float = math.nan  # of the fastest, launches of the host included
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> Figure:
        """Fields of a figure: what failed, if anything did."""
        return {"baseline_failures": self.failures} if self.failures else {}

    @property
    def best(self) -> str | None:
        return min(self.kernel, key=self.kernel.__getitem__, default=None)

    def total(self, count: int) -> float:
        """Least seconds of ``count`` products; infinite without a GPU."""
        totals = (self.preprocess[name] + count * each for name, each in self.kernel.items())
        return min(totals, default=math.inf)


class Case:
    """One matrix on a device, and what is measured only once of it."""

    def __init__(self, name: str, csr: CSR, device: torch.device, index: torch.dtype) -> None:
        self.name, self.device, self.index = name, device, index
        self._generator = torch.Generator(device=device).manual_seed(0)
        csr = csr.to(device)
        values = torch.randn(csr.nnz, device=device, generator=self._generator)
        self.csr = replace(csr, values=values, entry_map=None)
        self._variants: dict[int, CSR] = {0: self.csr}
        self._baselines: dict[int, Baselines] = {}

    @property
    def rows(self) -> int:
        return self.csr.shape[0]

    def variant(self, number: int) -> CSR:
        """The matrix as it is (0), with rows (1), columns (2) or both (3) reversed."""
        number %= 4
        if number not in self._variants:
            self._variants[number] = _reversed(self.csr, bool(number & 1), bool(number & 2))
        return self._variants[number]

    def arrays(self, variant: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """New row pointers, columns and random values."""
        csr = self.variant(variant)
        values = torch.randn(csr.nnz, device=self.device, generator=self._generator)
        return _as(csr.indptr, self.index), _as(csr.indices, self.index), values

    def fresh(self, variant: int = 0) -> Tensor:
        """A new sparse tensor of new arrays."""
        return torch.sparse_csr_tensor(
            *self.arrays(variant), self.csr.shape, check_invariants=False
        )

    def dense(self, n: int) -> Tensor:
        """A new random B."""
        shape = (self.csr.shape[1], n)
        return torch.randn(shape, device=self.device, generator=self._generator)

    def baselines(self, n: int) -> Baselines:
        """cuSPARSE's times in float32, kept; empty on the CPU."""
        if self.device.type != "cuda":
            return Baselines({}, {})
        if n not in self._baselines:
            self._baselines[n] = self._measure_baselines(n)
        return self._baselines[n]

    def _measure_baselines(self, n: int) -> Baselines:
        # cuSPARSE takes 32-bit row pointers as they are: making them is not its preprocessing.
        csr = replace(self.csr, indptr=self.csr.indptr.to(torch.int32), checked=True)
        operands = Operands(csr, self.dense(n), None, "spmm", "sum")
        preprocess: dict[str, float] = {}
        kernel: dict[str, float] = {}
        runs: dict[str, Callable[[], object]] = {}
        failures: dict[str, str] = {}
        for name in (*SPMM, *(SPMV if n == 1 else ())):
            try:
                prepare = functools.partial(BASELINES[name].prepare, operands)
                runs[name] = prepare().run
                spent = min(one_product(prepare, self.device) for _ in range(3))
                kernel[name] = graph_time(runs[name], self.device).median
                preprocess[name] = spent
            except Exception as error:  # the others are measured
                failures[name] = f"{type(error).__name__}: {error}"
        if not kernel:
            return Baselines({}, {}, failures=failures)
        fastest = runs[min(kernel, key=kernel.__getitem__)]

        def calls() -> None:
            for _ in range(100):
                fastest()

        calls()
        call = one_product(calls, self.device) / 100
        return Baselines(preprocess, kernel, call, failures)


def _as(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.to(dtype, copy=True)


def _reversed(csr: CSR, rows: bool, columns: bool) -> CSR:
    """The matrix with its rows, its columns or both in reversed order."""
    row, column, values = csr.row_ids(), csr.indices, csr.values
    assert values is not None
    row = csr.shape[0] - 1 - row if rows else row
    column = csr.shape[1] - 1 - column if columns else column
    order = torch.argsort(row.to(torch.int64) * csr.shape[1] + column)
    lengths = csr.row_lengths().flip(0) if rows else csr.row_lengths()
    indptr = torch.zeros_like(csr.indptr)
    indptr[1:] = torch.cumsum(lengths, 0)
    return CSR(indptr, column[order].contiguous(), values[order], csr.shape)


def sampled_error(
    indptr: Tensor, indices: Tensor, values: Tensor, B: Tensor, C: Tensor, seed: int = 0
) -> float:
    """Largest error of some rows of C, each element over the sum of its products' sizes.

    Rows are random ones and the longest. The reference is computed in float64; a result that is
    not finite is infinitely wrong.
    """
    rows = indptr.numel() - 1
    if rows == 0 or C.numel() == 0:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(rows, (SAMPLED_ROWS,), generator=generator).tolist()
    longest = (indptr[1:] - indptr[:-1]).topk(min(LONGEST_ROWS, rows)).indices.tolist()
    chosen = torch.tensor(drawn + longest, device=indptr.device)
    bounds = zip(indptr[chosen].tolist(), indptr[chosen + 1].tolist(), strict=True)
    worst = torch.zeros((), dtype=torch.float64, device=C.device)
    for row, (begin, end) in zip(chosen.tolist(), bounds, strict=True):
        taken = B[indices[begin:end].to(torch.int64)].double()
        own = values[begin:end].double()
        difference = (C[row].double() - own @ taken).abs()
        size = own.abs() @ taken.abs()
        # An empty sum has to be 0 exactly.
        scaled = torch.where(difference == 0, 0.0, difference / size)
        worst = torch.maximum(worst, torch.nan_to_num(scaled, math.inf, math.inf).max())
    return float(worst)


def wrong(error: float, tf32_allowed: bool) -> Figure:
    """The fields of an error, and whether it is too large."""
    bad = error > WRONG[tf32_allowed]
    return {"error": error} | ({"wrong": True} if bad else {})


@dataclass
class Figures:
    """The lines of a record, written as they come.

    A figure has ``part``, ``group`` (one row of the table) and ``subject`` (usually a matrix).
    ``ratios`` are summarised by their geometric means, and ``medians`` by their medians.
    """

    path: Path
    lines: list[Figure] = field(default_factory=list)

    def begin(self, environment: Figure) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")
        self.add({"schema": 1, "environment": environment})

    def add(self, line: Figure) -> None:
        self.lines.append(line)
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(_plain(line)) + "\n")

    def of(self, part: str) -> list[Figure]:
        return [line for line in self.lines if line.get("part") == part]

    def rows(self, part: str) -> list[list[str]]:
        """Table: group, ratio, figures, geometric mean, lowest and its subject."""
        made = []
        for group, name, found in _columns(self.of(part), "ratios"):
            low, subject = min(found)
            mean = geomean(max(value, 1e-9) for value, _ in found)
            lowest = f"{low:.2f} {subject}"
            made.append([part, group, name, str(len(found)), f"{mean:.3f}", lowest])
        for group, name, found in _columns(self.of(part), "medians"):
            middle = statistics.median(value for value, _ in found)
            high, subject = max(found)
            made.append(
                [part, group, name, str(len(found)), f"{middle:.4g} median",
                 f"{high:.4g} {subject}, highest"]
            )  # fmt: skip
        return made

    def lowest(self, part: str, most: int = 5) -> list[str]:
        """The lowest of each ratio of a part, one line a ratio."""
        found: dict[str, list[tuple[float, str]]] = {}
        for group, name, values in _columns(self.of(part), "ratios"):
            found.setdefault(name, []).extend(
                (value, f"{subject} {group}") for value, subject in values
            )
        return [
            f"{name}: " + "; ".join(f"{value:.3f} {text}" for value, text in sorted(each)[:most])
            for name, each in found.items()
        ]

    def problems(self, part: str) -> list[str]:
        """Figures that failed or were wrong, and what was skipped for which reason."""
        texts: list[str] = []
        skipped: dict[str, list[str]] = {}
        for line in self.of(part):
            where = f"{line.get('subject', '')}, {line.get('group', '')}"
            if "failed" in line:
                texts.append(f"failed: {where}: {line['failed']}")
            if line.get("wrong"):
                texts.append(f"wrong: {where}: error {line['error']:.3g}")
            for name, text in line.get("baseline_failures", {}).items():
                texts.append(f"baseline {name}: {where}: {text}")
            if "skipped" in line:
                skipped.setdefault(line["reason"], []).extend(line["skipped"])
        for reason, subjects in skipped.items():
            shown = "; ".join(subjects[:8]) + "; ..." * (len(subjects) > 8)
            texts.append(f"skipped {len(subjects)} ({reason}): {shown}")
        return texts


def _columns(
    lines: Sequence[Figure], kind: str
) -> Iterator[tuple[str, str, list[tuple[float, str]]]]:
    """Yield (group, name, [(value, subject)]) of one kind of number, in the order of the lines."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for line in lines:
        for name, value in line.get(kind, {}).items():
            if value is not None and not math.isnan(value):
                found.setdefault((line["group"], name), []).append((value, line["subject"]))
    for (group, name), values in found.items():
        yield group, name, values


def _plain(value: Any) -> Any:
    """Round floats to six digits; JSON has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _core_names(folder: Path) -> list[str]:
    """Return the names in the folder's ``CORE.txt``; none if it has no such file."""
    path = folder / "CORE.txt"
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def matrix_names(asked: str, data: Path) -> list[str]:
    """``core``, ``all``, a number of core matrices spread evenly, or names with commas."""
    present = [entry.name for entry in catalog(data) if not entry.problem]
    core = [name for name in _core_names(data) if name in present] or present
    if asked == "core":
        return core
    if asked == "all":
        return core + [name for name in present if name not in core]
    if asked.isdigit():
        count = max(1, min(int(asked), len(core)))
        return [core[place * len(core) // count] for place in range(count)]
    return asked.split(",")


class Context:
    """What a part gets: device, matrices, where figures go, and when to stop.

    Attributes
    ----------
    deadline : float
        In seconds of ``time.perf_counter``. What has not begun by then is skipped and named.
    """

    def __init__(
        self, device: torch.device, data: Path, names: Sequence[str], figures: Figures,
        index: torch.dtype, small: bool,
    ) -> None:  # fmt: skip
        self.device, self.names, self.figures, self.small = device, names, figures, small
        self._data, self._index = data, index
        self._cases: dict[str, Case] = {}
        self.deadline = math.inf

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def case(self, name: str) -> Case:
        if name not in self._cases:
            csr = load(name, self._data)
            self._cases[name] = Case(name, csr, self.device, self._index)
        return self._cases[name]

    def attempt(self, part: str, group: str, subject: str, measure: Callable[[], Figure]) -> None:
        """Add a figure, or the text of what it failed with."""
        if self.late:
            return self.skip(part, [f"{subject}, {group}"])
        line: Figure = {"part": part, "group": group, "subject": subject}
        try:
            line |= measure()
        except Exception as error:  # a failing case is a result, and the next ones are measured
            text = " ".join(str(error).split())[:300]
            line["failed"] = f"{type(error).__name__}: {text}"
            note(f"fresh_times: {part}, {subject}, {group}: {line['failed']}")
        self.figures.add(line)

    def skip(self, part: str, subjects: Sequence[str], reason: str = "time limit") -> None:
        if subjects:
            line = {"part": part, "skipped": list(subjects), "reason": reason}
            self.figures.add(line)

    def each_matrix(self, part: str, measure: Callable[[Case], None]) -> None:
        """Call ``measure`` for one matrix after the other until the time is up."""
        for place, name in enumerate(self.names):
            if self.late:
                self.skip(part, self.names[place:])
                return
            try:
                case = self.case(name)
            except Exception as error:  # a matrix that cannot be read
                self.skip(part, [name], f"{type(error).__name__}: {error}")
                continue
            measure(case)
