"""Suites: data files that say which matrices, widths, types and systems to measure together.

A suite is a TOML file in ``bench/suites``. A matrix is named by its file in the data folder, by a
stand-in of ``sparsetile.data``, or by a ``[generate.NAME]`` table of the suite; ``a|b`` takes the
first that exists. Systems that are not built yet are named and left out, and so are baselines whose
package is not installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsetile.bench.analysis import BASELINE_GROUPS
from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.record import DTYPES, OPS, entry_key
from sparsetile.checks import one_of, reduce_name
from sparsetile.data.standins import STAND_INS
from sparsetile.errors import DataError, value_error
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS

__all__ = ["Entry", "Expansion", "MatrixSpec", "Suite", "expand", "load_suite", "suite_names"]

_FOLDER = Path(__file__).resolve().parent / "suites"
_SUFFIXES = (".npz", ".mtx", ".mtx.gz")
WEIGHTS = ("asis", "pattern", "random")
_FIELDS = {
    "title", "about", "device", "matrices", "n", "dtypes", "weighted", "tf32", "op", "reduce",
    "reorder", "systems", "baselines", "rounds", "part", "ladder", "published", "generate",
}  # fmt: skip
# Row orders an entry may ask for: the plan's own choice, or an algorithm by name.
ORDERS = ("auto", *REORDERERS)


@dataclass(frozen=True)
class MatrixSpec:
    """Where a matrix comes from: a file, a stand-in, or a generator with its parameters."""

    name: str
    source: str  # "file", "stand-in" or "generated"
    path: str | None = None
    generator: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One block of a suite: every matrix times every width, type, system."""

    matrices: tuple[str, ...]
    n: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    weighted: str = "asis"
    op: str = "spmm"
    reduce: str = "sum"
    orders: tuple[str, ...] = ("auto",)
    systems: tuple[str, ...] = ("*",)
    baselines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A suite file, checked."""

    name: str
    title: str
    about: str
    device: str
    tf32: bool
    rounds: int
    parts: tuple[Part, ...]
    ladders: tuple[Mapping[str, Any], ...]
    published: tuple[Mapping[str, Any], ...]
    generate: Mapping[str, Mapping[str, Any]]


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

    def identity(self) -> dict[str, Any]:
        """Return the part of the record that is known before measuring."""
        return {
            "suite": self.suite,
            "matrix": self.matrix.name,
            "source": self.matrix.source,
            "op": self.op,
            "reduce": self.reduce,
            "weights": self.weights,
            "dtype": self.dtype,
            "n": self.n,
            "system": self.system,
            "kind": self.kind,
            "config": dict(self.config),
            "tf32": self.tf32,
        }

    @property
    def key(self) -> str:
        """The record's key."""
        return entry_key(self.identity())


@dataclass(frozen=True)
class Expansion:
    """A suite on this machine: what will be measured, and what was left out and why."""

    suite: Suite
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


def suite_names() -> list[str]:
    """Return the names of the suites that ship with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_suite(name: str) -> Suite:
    """Read a suite by name, or from the path of a ``.toml`` file.

    Raises
    ------
    ValueError
        There is no such suite.
    DataError
        The file is not a suite.
    """
    path = Path(name)
    if not name.endswith(".toml"):
        path = _FOLDER / f"{one_of('bench', 'suite', name, suite_names())}.toml"
    elif not path.is_file():
        raise value_error(
            "bench", "suite", "a suite's name or an existing .toml file", repr(name),
            f"Suites: {', '.join(suite_names())}",
        )  # fmt: skip
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"bench: suite must be a TOML file, got {path.name} ({error}). Correct it."
        ) from None
    return _suite(path.stem, body)


def _suite(name: str, body: Mapping[str, Any]) -> Suite:
    for given in body:
        if given not in _FIELDS:
            raise DataError(
                f"bench: field of suite {name} must be one of {sorted(_FIELDS)}, "
                f"got {given!r}. Check its spelling."
            )
    for needed in ("matrices", "n"):
        if needed not in body:
            raise DataError(f"bench: suite {name} must have {needed}, got none. Add it.")
    first = _part(name, body, None)
    more = [_part(name, part, first) for part in body.get("part", ())]
    return Suite(
        name=name,
        title=str(body.get("title", name)),
        about=str(body.get("about", "")),
        device=one_of("bench", "device", body.get("device", "cuda"), ("cuda", "cpu")),
        tf32=bool(body.get("tf32", True)),
        rounds=int(body.get("rounds", 1)),
        parts=(first, *more),
        ladders=tuple(_ladder(ladder) for ladder in body.get("ladder", ())),
        published=tuple(body.get("published", ())),
        generate=body.get("generate", {}),
    )


def _part(suite: str, body: Mapping[str, Any], default: Part | None) -> Part:
    held = default or Part((), ())
    part = replace(
        held,
        matrices=tuple(body.get("matrices", held.matrices)),
        n=tuple(int(n) for n in body.get("n", held.n)),
        dtypes=tuple(body.get("dtypes", held.dtypes)),
        weighted=one_of("bench", "weighted", body.get("weighted", held.weighted), WEIGHTS),
        op=one_of("bench", "op", body.get("op", held.op), OPS),
        reduce=reduce_name("bench", body.get("reduce", held.reduce)),
        orders=tuple(body.get("reorder", held.orders)),
        systems=tuple(body.get("systems", held.systems)),
        baselines=tuple(body.get("baselines", held.baselines)),
    )
    for dtype in part.dtypes:
        one_of("bench", "dtypes", dtype, DTYPES)
    for order in part.orders:
        one_of("bench", "reorder", order, ORDERS)
    return part


def _ladder(body: Mapping[str, Any]) -> Mapping[str, Any]:
    one_of("bench", "ladder.compare", body.get("compare", "before"), ("before", "first"))
    return body


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
    suite: Suite,
    *,
    data: Path | None,
    device: str,
    systems: Sequence[str] = (),
    n: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    weighted: str | None = None,
    reduce: str | None = None,
    op: str | None = None,
    matrices: Sequence[str] = (),
    orders: Sequence[str] = (),
) -> Expansion:
    """Turn a suite into entries, narrowed by the arguments that are given.

    Entries come matrix by matrix, and for each product baselines first, so that every system is
    measured within seconds of what it is compared with.
    """
    if data is not None and not data.is_dir():
        raise value_error(
            "bench", "data", "an existing folder of matrices", repr(str(data)),
            "Give --data the folder that holds the .npz or .mtx files",
        )  # fmt: skip
    for dtype in dtypes:
        one_of("bench", "dtype", dtype, DTYPES)
    if weighted is not None:
        one_of("bench", "weights", weighted, WEIGHTS)
    if op is not None:
        one_of("bench", "op", op, OPS)
    for order in orders:
        one_of("bench", "reorder", order, ORDERS)
    files = _files(data)
    names = _Names(device, systems)
    left_out: list[str] = []
    found: dict[str, Entry] = {}
    for part in suite.parts:
        part = replace(
            part,
            n=tuple(n) or part.n,
            dtypes=tuple(dtypes) or part.dtypes,
            weighted=weighted or part.weighted,
            reduce=reduce_name("bench", reduce or part.reduce),
            op=op or part.op,
            orders=tuple(orders) or part.orders,
        )
        for entry in _part_entries(suite, part, names, files, matrices, left_out):
            found.setdefault(entry.key, entry)
    measured = {entry.matrix.name for entry in found.values()}
    said = {text.partition(":")[0] for text in left_out}
    left_out[:0] = [  # first, since a name that was typed matters most to who typed it
        f"{name}: no matrix of suite {suite.name}"
        for name in matrices
        if name not in measured and not any(name in text.split("|") for text in said)
    ]
    if not found:
        raise value_error(
            "bench", f"suite {suite.name}", "runnable here", "nothing to measure",
            "; ".join(left_out[:3]) or "Widen --systems, -n or --matrices",
        )  # fmt: skip
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

    def wanted(self, part: Part, left_out: list[str]) -> Iterator[tuple[str, str]]:
        """(name, kind) to measure: baselines first."""
        # A ratio needs its yardstick: whatever was asked for, the best baseline comes along.
        yardstick = BASELINE_GROUPS.get((self.device, part.op), ())
        listed = [*yardstick, *(self.asked or [*part.baselines, *part.systems])]
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
    suite: Suite,
    part: Part,
    names: _Names,
    files: Mapping[str, Path],
    only: Sequence[str],
    left_out: list[str],
) -> Iterator[Entry]:
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
                for system, kind in chosen:
                    for config in _configs(system, kind, part.orders, left_out):
                        yield Entry(
                            suite.name, spec, part.op, part.reduce, part.weighted, dtype, n,
                            system, kind, config, suite.tf32,
                        )  # fmt: skip
                yield from _ladder_entries(suite, part, names, spec, dtype, n, left_out)


def _configs(
    system: str, kind: str, orders: Sequence[str], left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """Configurations of one system: one per row order where it visits rows in that order."""
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
    suite: Suite,
    part: Part,
    names: _Names,
    spec: MatrixSpec,
    dtype: str,
    n: int,
    left_out: list[str],
) -> Iterator[Entry]:
    for ladder in suite.ladders:
        if n not in ladder.get("n", (n,)) or dtype not in ladder.get("dtypes", (dtype,)):
            continue
        for step in ladder["steps"]:
            system = step["system"]
            if system not in names.here:
                left_out.append(f"ladder {ladder['name']}: {system} not built yet")
                continue
            if names.asked and system not in names.asked:
                continue
            yield Entry(
                suite.name, spec, part.op, part.reduce, part.weighted, dtype, n,
                system, "system", dict(step["config"]), suite.tf32,
            )  # fmt: skip
