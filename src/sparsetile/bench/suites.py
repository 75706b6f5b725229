"""Suites: data files that say which matrices, widths, types and systems to measure together.

A suite is a TOML file in ``bench/suites``. A matrix is named by its file in the data folder, by a
stand-in of ``sparsetile.data``, or by a ``[generate.NAME]`` table of the suite; ``a|b`` takes the
first that exists.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsetile.bench.baselines import BASELINES
from sparsetile.bench.record import DTYPES, LAYOUTS, OPS
from sparsetile.core.checks import one_of, reduce_name
from sparsetile.core.errors import DataError, value_error
from sparsetile.reorder import REORDERERS

__all__ = [
    "ORDERS", "WEIGHTS", "Part", "Suite", "check_names", "concerns", "load_suite", "suite_names",
]  # fmt: skip

_FOLDER = Path(__file__).resolve().parent / "suites"
WEIGHTS = ("asis", "pattern", "random")
_LISTS = ("matrices", "n", "dtypes", "layouts", "systems", "baselines", "yardstick")
_PART_FIELDS = {*_LISTS, "weighted", "op", "reduce", "reorder", "slowest"}
_FIELDS = _PART_FIELDS | {
    "title", "about", "device", "tf32", "rounds", "part", "ladder", "published", "generate",
}  # fmt: skip
# Row orders of an entry: the plan's own choice, or an algorithm by name.
ORDERS = ("auto", *REORDERERS)


@dataclass(frozen=True)
class Part:
    """One part of a suite: every matrix times every width, type, layout, system.

    ``yardstick`` names the baselines of its products, if they are not those of ``BASELINE_GROUPS``;
    of these, only those in ``baselines`` are measured here. ``slowest`` is the longest time, in
    seconds, of one product of any other baseline; slower ones are not timed.
    """

    matrices: tuple[str, ...]
    n: tuple[int, ...]
    dtypes: tuple[str, ...] = ("float32",)
    weighted: str = "asis"
    op: str = "spmm"
    reduce: str = "sum"
    orders: tuple[str, ...] = ("auto",)
    layouts: tuple[str, ...] = ("rows",)
    systems: tuple[str, ...] = ("*",)
    baselines: tuple[str, ...] = ()
    yardstick: tuple[str, ...] = ()
    slowest: float | None = None


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


def suite_names() -> list[str]:
    """Return the names of the suites that ship with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_suite(name: str) -> Suite:
    """Read a suite by name, or from the path of a ``.toml`` file."""
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
    _known(f"suite {name}", body, _FIELDS)
    for needed in ("matrices", "n"):
        if needed not in body:
            raise DataError(f"bench: suite {name} must have {needed}, got none. Add it.")
    first = _part(name, body, None)
    more = [_part(name, part, first) for part in body.get("part", ())]
    return Suite(
        name=name, title=str(body.get("title", name)), about=str(body.get("about", "")),
        device=one_of("bench", "device", body.get("device", "cuda"), ("cuda", "cpu")),
        tf32=bool(body.get("tf32", True)), rounds=int(body.get("rounds", 1)), parts=(first, *more),
        ladders=tuple(_ladder(ladder) for ladder in body.get("ladder", ())),
        published=tuple(body.get("published", ())), generate=body.get("generate", {}),
    )  # fmt: skip


def _known(where: str, body: Mapping[str, Any], fields: set[str]) -> None:
    for given in body:
        if given not in fields:
            raise DataError(
                f"bench: field of {where} must be one of {sorted(fields)}, "
                f"got {given!r}. Check its spelling."
            )


def concerns(body: Mapping[str, Any], matrix: str) -> bool:
    """Whether a ladder or a published figure is about a matrix.

    ``matrices`` and ``without`` are patterns such as ``gate_proj-*``; without them, every matrix
    counts.
    """
    wanted, unwanted = body.get("matrices", ("*",)), body.get("without", ())
    return any(fnmatch.fnmatchcase(matrix, pattern) for pattern in wanted) and not any(
        fnmatch.fnmatchcase(matrix, pattern) for pattern in unwanted
    )


def _part(suite: str, body: Mapping[str, Any], default: Part | None) -> Part:
    base = default or Part((), ())
    if default is not None:
        _known(f"a part of suite {suite}", body, _PART_FIELDS)
    lists = {
        field: tuple(body.get(key, getattr(base, field)))
        for field, key in [(name, name) for name in _LISTS] + [("orders", "reorder")]
    }
    slowest = body.get("slowest", base.slowest)
    part = replace(
        base,
        **lists,
        weighted=one_of("bench", "weighted", body.get("weighted", base.weighted), WEIGHTS),
        op=one_of("bench", "op", body.get("op", base.op), OPS),
        reduce=reduce_name("bench", body.get("reduce", base.reduce)),
        slowest=None if slowest is None else float(slowest),
    )
    check_names(
        dtypes=(part.dtypes, DTYPES), layouts=(part.layouts, LAYOUTS),
        yardstick=(part.yardstick, BASELINES), reorder=(part.orders, ORDERS),
    )  # fmt: skip
    return part


def check_names(**lists: tuple[Iterable[object], Iterable[str]]) -> None:
    """Raise for a name of a list that is not among its allowed ones."""
    for argument, (given, allowed) in lists.items():
        for name in given:
            one_of("bench", argument, name, allowed)


def _ladder(body: Mapping[str, Any]) -> Mapping[str, Any]:
    one_of("bench", "ladder.compare", body.get("compare", "before"), ("before", "first"))
    return body
