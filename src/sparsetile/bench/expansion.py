"""A suite on this machine: which measurements to make, which are omitted and why.

Matrices are found in the data folder, among the stand-ins, or in the suite's own generators. These
are omitted and reported: systems and steps of ladders that do not exist, baselines whose package is
not installed, and products in a type or layout that a system or baseline does not support.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsetile.bench.analysis import BASELINE_GROUPS
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.record import DTYPES, LAYOUTS, OPS, entry_key
from sparsetile.bench.suites import ORDERS, WEIGHTS, Part, Suite, check_names, concerns
from sparsetile.core.checks import one_of, reduce_name
from sparsetile.core.errors import value_error
from sparsetile.data.standins import STAND_INS
from sparsetile.systems import SYSTEMS

__all__ = ["Entry", "Expansion", "MatrixSpec", "expand"]

_SUFFIXES = (".npz", ".mtx", ".mtx.gz")


@dataclass(frozen=True)
class MatrixSpec:
    """Where a matrix comes from: a file, a stand-in, or a generator with its parameters."""

    name: str
    source: str  # "file", "stand-in" or "generated"
    path: str | None = None
    generator: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One measurement to make."""

    suite: str
    matrix: MatrixSpec
    op: str
    reduce: str
    weights: str
    dtype: str
    n: int
    system: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tf32: bool = True
    yardstick: tuple[str, ...] = ()  # its baselines; the usual ones when empty
    slowest: float | None = None

    def identity(self) -> dict[str, Any]:
        """Return the part of the record that is known before measuring."""
        return {
            "suite": self.suite, "matrix": self.matrix.name, "source": self.matrix.source,
            "op": self.op, "reduce": self.reduce, "weights": self.weights, "dtype": self.dtype,
            "n": self.n, "system": self.system, "kind": self.kind, "config": dict(self.config),
            "tf32": self.tf32, **({"yardstick": list(self.yardstick)} if self.yardstick else {}),
        }  # fmt: skip

    @property
    def key(self) -> str:
        """The record's key."""
        return entry_key(self.identity())


@dataclass(frozen=True)
class Expansion:
    """A suite on this machine: what will be measured, what is omitted and why."""

    suite: Suite
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


def _files(data: Path | None) -> dict[str, Path]:
    """Matrix files of the data folder by name, sorted."""
    if data is None:
        return {}
    found: dict[str, Path] = {}
    for path in sorted(data.iterdir()):
        for suffix in _SUFFIXES:
            if path.name.endswith(suffix):
                found.setdefault(path.name.removesuffix(suffix), path)
    return found


def _resolve(name: str, suite: Suite, files: Mapping[str, Path]) -> MatrixSpec | None:
    for choice in name.split("|"):
        if choice in files:
            return MatrixSpec(choice, "file", path=str(files[choice]))
        if choice in suite.generate:
            body = suite.generate[choice]
            return MatrixSpec(
                choice, "generated", generator=str(body["generator"]), params=body["params"]
            )
        if choice in STAND_INS:
            return MatrixSpec(choice, "stand-in")
    return None


def expand(
    suite: Suite, *, data: Path | None, device: str, systems: Sequence[str] = (),
    n: Sequence[int] = (), dtypes: Sequence[str] = (), weighted: str | None = None,
    reduce: str | None = None, op: str | None = None, matrices: Sequence[str] = (),
    orders: Sequence[str] = (), layouts: Sequence[str] = (),
) -> Expansion:  # fmt: skip
    """Turn a suite into entries, narrowed by the arguments that are given.

    Entries come matrix by matrix, and for each product baselines first, so that every system is
    measured within seconds of what it is compared with.
    """
    if data is not None and not data.is_dir():
        raise value_error(
            "bench", "data", "an existing folder of matrices", repr(str(data)),
            "Give --data the folder that holds the .npz or .mtx files",
        )  # fmt: skip
    check_names(
        dtype=(dtypes, DTYPES), weights=(filter(None, [weighted]), WEIGHTS),
        op=(filter(None, [op]), OPS), reorder=(orders, ORDERS), layout=(layouts, LAYOUTS),
    )  # fmt: skip
    files = _files(data)
    names = _Names(device, systems)
    left_out: list[str] = []
    found: dict[str, Entry] = {}
    for part in suite.parts:
        part = replace(
            part, n=tuple(n) or part.n, dtypes=tuple(dtypes) or part.dtypes,
            weighted=weighted or part.weighted, reduce=reduce_name("bench", reduce or part.reduce),
            op=op or part.op, orders=tuple(orders) or part.orders,
            layouts=tuple(layouts) or part.layouts,
        )  # fmt: skip
        for entry in _part_entries(suite, part, names, files, matrices, left_out):
            found.setdefault(entry.key, entry)
    measured = {entry.matrix.name for entry in found.values()}
    named = {text.partition(":")[0] for text in left_out}
    left_out[:0] = [  # first, since the user typed these names
        f"{name}: no matrix of suite {suite.name}"
        for name in matrices
        if name not in measured and not any(name in text.split("|") for text in named)
    ]
    if not found:
        why = "; ".join(left_out[:3]) or "Widen --systems, -n or --matrices"
        if data is None:
            why += ". Give --data the folder that holds the .npz or .mtx files"
        raise value_error(
            "bench", f"suite {suite.name}", "runnable here", "nothing to measure", why
        )
    return Expansion(suite, tuple(found.values()), tuple(dict.fromkeys(left_out)))


class _Names:
    """Which systems and baselines exist here, and which of them the caller asked for."""

    def __init__(self, device: str, asked: Sequence[str]) -> None:
        self.built = ["auto", *SYSTEMS]
        self.here = ["auto", *(k for k, system in SYSTEMS.items() if device in system.devices)]
        self.baselines = {k: b for k, b in BASELINES.items() if device in b.devices}
        self.asked = list(asked)
        self.device = device
        for name in asked:
            one_of("bench", "systems", name, [*self.built, *BASELINES])

    def yardstick(self, part: Part) -> Sequence[str]:
        """Baselines that the part's products are compared with."""
        return part.yardstick or BASELINE_GROUPS.get((self.device, part.op), ())

    def wanted(self, part: Part, left_out: list[str]) -> Iterator[tuple[str, str]]:
        """(name, kind) to measure: baselines first."""
        # A ratio needs its baseline, so the best one is always measured.
        along = self.yardstick(part)
        if part.yardstick:  # another part may measure the other baselines
            along = [name for name in part.yardstick if name in part.baselines]
        listed = [*along, *(self.asked or [*part.baselines, *part.systems])]
        for name in listed:
            if name in self.baselines and part.op in self.baselines[name].ops:
                missing = self.baselines[name].missing()
                if missing is None:
                    yield name, "baseline"
                else:
                    left_out.append(f"{name}: {missing}")
        for name in listed:
            if name == "*":
                yield from ((system, "system") for system in self.here)
            elif name in self.here:
                yield name, "system"
            elif name in self.built:
                left_out.append(f"{name}: does not run on {self.device}")
            elif name not in BASELINES:
                left_out.append(f"{name}: not built yet")


def _part_entries(
    suite: Suite, part: Part, names: _Names, files: Mapping[str, Path], only: Sequence[str],
    left_out: list[str],
) -> Iterator[Entry]:  # fmt: skip
    chosen = list(dict.fromkeys(names.wanted(part, left_out)))
    listed = [name for item in part.matrices for name in (files if item == "*" else [item])]
    if "*" in part.matrices and not files:
        left_out.append("every matrix of the data folder: no --data DIR was given")
    for name in listed:
        spec = _resolve(name, suite, files)
        if spec is None:
            left_out.append(f"{name}: neither in the data folder nor a stand-in")
            continue
        if only and spec.name not in only:
            continue
        for dtype in part.dtypes:
            for n in part.n:
                for layout in part.layouts:
                    product = replace(part, dtypes=(dtype,), n=(n,), layouts=(layout,))
                    yield from _product_entries(suite, product, names, spec, chosen, left_out)
                    yield from _ladder_entries(suite, product, names, spec, left_out)


def _entry(
    suite: Suite, product: Part, spec: MatrixSpec, system: str, kind: str, config: dict[str, Any],
    slowest: float | None = None,
) -> Entry:  # fmt: skip
    """One measurement of a part that was narrowed to one product."""
    (dtype,), (n,), (layout,) = product.dtypes, product.n, product.layouts
    if layout != "rows":
        config = {**config, "layout": layout}
    return Entry(
        suite.name, spec, product.op, product.reduce, product.weighted, dtype, n, system, kind,
        config, suite.tf32, product.yardstick, slowest,
    )  # fmt: skip


def _product_entries(
    suite: Suite, product: Part, names: _Names, spec: MatrixSpec, chosen: Sequence[tuple[str, str]],
    left_out: list[str],
) -> Iterator[Entry]:  # fmt: skip
    (dtype,), (layout,) = product.dtypes, product.layouts
    for system, kind in chosen:
        refused = _refusal(system, kind, product)
        if refused is not None:
            what = dtype if layout == "rows" else f"{dtype}, layout {layout}"
            left_out.append(f"{system} in {what}: {refused}")
            continue
        # Baselines that others are compared with are timed, however long they take.
        limited = kind == "baseline" and system not in names.yardstick(product)
        slowest = product.slowest if limited else None
        for config in _configs(system, kind, product.orders, left_out):
            yield _entry(suite, product, spec, system, kind, config, slowest)


def _refusal(system: str, kind: str, product: Part) -> str | None:
    """Why a system or baseline supports no product of this type or layout; None if it does."""
    (dtype,), (layout,) = product.dtypes, product.layouts
    if layout != "rows" and (product.op, product.reduce) != ("spmm", "sum"):
        return "only the sum of the plain product has this layout"
    if kind == "baseline":
        return BASELINES[system].refuses(dtype, layout)
    if system not in SYSTEMS:
        return None  # auto supports what any of them does
    taken = [str(each).removeprefix("torch.") for each in SYSTEMS[system].dtypes]
    return None if dtype in taken else f"takes {', '.join(taken)}"


def _configs(
    system: str, kind: str, orders: Sequence[str], left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """Configurations of one system: one per row order if it visits rows in that order."""
    if kind == "baseline":
        yield {}
        return
    for order in orders:
        if order == "auto":
            yield {}
        elif system in SYSTEMS and not SYSTEMS[system].ordered:
            left_out.append(f"{system} with reorder={order}: takes rows as they come")
        else:
            yield {"reorder": order}


def _ladder_entries(
    suite: Suite, product: Part, names: _Names, spec: MatrixSpec, left_out: list[str]
) -> Iterator[Entry]:
    (dtype,), (n,), (layout,) = product.dtypes, product.n, product.layouts
    for ladder in suite.ladders:
        if n not in ladder.get("n", (n,)) or dtype not in ladder.get("dtypes", (dtype,)):
            continue
        if layout != "rows" or not concerns(ladder, spec.name):
            continue
        for step in ladder["steps"]:
            system, ablation = step["system"], step["config"].get("ablation")
            if system not in names.here:
                left_out.append(f"ladder {ladder['name']}: {system} not built yet")
            elif ablation is not None and ablation not in SYSTEMS[system].ablations:
                left_out.append(f"ladder {ladder['name']}: {system} has no {ablation} yet")
            elif not names.asked or system in names.asked:
                config, slowest = dict(step["config"]), ladder.get("slowest")
                yield _entry(suite, product, spec, system, "system", config, slowest)
