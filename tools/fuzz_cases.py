"""Draws the cases of ``tools.fuzz``: one frozen record of choices for each (seed, number).

A case determines one check. The same seed, number and device give the same case, so these suffice
to replay a failure. :func:`_settle` says which combinations are omitted, and why.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS

Choice = TypeVar("Choice")

# A case is known by one number, seed * CASES_OF_A_SEED + number.
CASES_OF_A_SEED = 1_000_000
# What is done with A, and how often.
ACTIONS = {
    "product": 30, "transpose": 6, "update": 6, "values": 4, "file": 5, "gradient": 8,
    "second gradient": 4, "tangent": 3, "linear": 7, "spmm": 9, "autocast": 4,
}  # fmt: skip
CUDA_ACTIONS = {"graph": 6}
STRUCTURES = {
    "uniform": 6, "power law": 3, "fem": 3, "blocks": 3, "full row": 2, "full column": 2,
    "empty rows": 3, "no entries": 1, "equal rows": 2, "diagonal": 1,
}  # fmt: skip
CONTAINERS = (
    "csr", "torch csr", "torch csc", "torch coo", "torch coalesced", "torch bsr", "torch bsc",
    "scipy csr", "scipy csc", "scipy coo", "scipy bsr", "scipy dia", "scipy lil", "scipy dok",
    "csr tuple", "csr tuple numpy", "edge tuple", "edge tuple numpy", "npz", "mtx",
)  # fmt: skip
# Containers that allow duplicates, unsorted entries, no values, and their index types.
DUPLICATES = ("torch coo", "scipy coo", "scipy csr", "csr tuple", "csr tuple numpy", "edge tuple",
              "edge tuple numpy", "mtx")  # fmt: skip
UNSORTED = (*DUPLICATES, "torch csr", "torch csc", "scipy csc")
PATTERNS = ("csr", "csr tuple", "csr tuple numpy", "edge tuple", "edge tuple numpy", "mtx")
# scipy drops stored zeros in these formats, so none are drawn.
MOST_DIAGONAL_CELLS = 4 * 10**6
DROP_ZEROS = ("scipy dia", "scipy lil", "scipy dok")
NUMPY = ("scipy", "npz", "numpy", "mtx")
SMALL = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 90, 127, 130, 200, 257, 300)
WIDTHS = (0, 1, 2, 3, 7, 8, 16, 24, 31, 32, 33, 64, 100, 128, 130, 260)
LAYOUTS = {
    "contiguous": 6, "row stride": 3, "misaligned": 3, "expanded rows": 2, "expanded columns": 1,
    "transposed": 2, "every other column": 2, "expanded batch": 1, "negative view": 1,
}  # fmt: skip
LEADS: dict[tuple[int, ...], int] = {(): 16, (2,): 2, (2, 3): 2, (0,): 1, (1, 1): 1, (3, 0): 1}
OUTS = {"none": 6, "contiguous": 2, "row stride": 2, "transposed": 1, "alias": 1, "overlap": 1}
SPECIALS_B = {
    "none": 7, "nan row": 1, "inf": 2, "mixed": 2, "all inf": 1, "uneven columns": 1,
    "uneven rows": 1,
}  # fmt: skip
SPECIALS_A = {"none": 8, "nan": 1, "inf": 1, "zeros": 1, "mixed": 1}


@dataclass(frozen=True)
class Case:
    """One check. Fields that an action does not use are drawn too."""

    seed: int
    number: int
    device: str
    action: str
    rows: int
    cols: int
    structure: str
    duplicates: bool
    unsorted: bool
    container: str
    index: str
    weighted: bool
    values_dtype: str
    scale: float
    special_a: str
    dtype: str
    dtype_given: bool
    n: int
    other: int
    system: str
    order: str
    reorder_columns: bool
    deterministic: bool | None
    tf32: bool
    layout: str
    lead: tuple[int, ...]
    special_b: str
    out: str
    alpha: float
    beta: float
    bias: bool
    relu: bool
    reduce: str
    wide_result: bool
    followed: bool
    tune: str
    inference: bool
    pick: int

    @property
    def replay(self) -> str:
        """The command that runs this case alone."""
        number = self.seed * CASES_OF_A_SEED + self.number
        return f"python -m tools.fuzz --device {self.device} --kind products --replay {number}"

    @property
    def kind(self) -> str:
        return "products"

    @property
    def features(self) -> dict[str, tuple[str, ...]]:
        """What the record counts."""
        names = (
            "action", "structure", "duplicates", "unsorted", "container", "index", "weighted",
            "values_dtype", "dtype", "order", "reorder_columns", "layout", "special_a",
            "special_b", "out", "reduce", "bias", "relu", "tune",
        )  # fmt: skip
        found = {name: (str(getattr(self, name)),) for name in names}
        return {**found, "batch": (str(bool(self.lead)),), "shape": (self._shape(),)}

    def _shape(self) -> str:
        if 0 in (self.rows, self.cols):
            return "empty"
        if 1 in (self.rows, self.cols):
            return "one"
        longer, shorter = max(self.rows, self.cols), min(self.rows, self.cols)
        if longer >= 20 * shorter and longer >= 500:
            return "tall" if self.rows == longer else "wide"
        return "large" if longer > 300 else "small"


def weighted(rng: random.Random, weights: Mapping[Choice, int]) -> Choice:
    return rng.choices(list(weights), list(weights.values()))[0]


def _sizes(rng: random.Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.12:
        size = rng.choice(SMALL)
        return size, size
    if kind < 0.18:
        long, short = rng.choice((2000, 5000, 20001)), rng.choice((1, 2, 7, 20))
        return (long, short) if rng.random() < 0.5 else (short, long)
    if kind < 0.21:
        return rng.choice((700, 1500)), rng.choice((700, 1200))
    return rng.choice(SMALL), rng.choice(SMALL)


def draw(seed: int, number: int, device: str) -> Case:
    """Return case ``number`` of a seed, for a type of device."""
    rng = random.Random(f"{seed}:{number}")
    actions = {**ACTIONS, **(CUDA_ACTIONS if device == "cuda" else {})}
    rows, cols = _sizes(rng)
    systems = sorted(name for name in SYSTEMS if device in SYSTEMS[name].devices)
    dtypes = ("float32", "float64", "float16", "bfloat16")
    case = Case(
        seed=seed,
        number=number,
        device=device,
        action=weighted(rng, actions),
        rows=rows,
        cols=cols,
        structure=weighted(rng, STRUCTURES),
        duplicates=rng.random() < 0.3,
        unsorted=rng.random() < 0.4,
        container=rng.choice(CONTAINERS),
        index=rng.choice(("int32", "int64")),
        weighted=rng.random() < 0.7,
        values_dtype=rng.choice((*dtypes, "int32")),
        scale=rng.choice((1.0,) * 8 + (2.0**-12, 2.0**13)),
        special_a=weighted(rng, SPECIALS_A),
        dtype=rng.choice(dtypes),
        dtype_given=rng.random() < 0.6,
        n=rng.choice(WIDTHS),
        other=rng.choice(WIDTHS),
        system=rng.choice(("auto", *systems)),
        order=rng.choice(("auto", "identity")) if rng.random() < 0.5 else _order(rng),
        reorder_columns=rng.random() < 0.12,
        deterministic=rng.choice((None, None, True)),
        tf32=rng.random() < 0.5,
        layout=weighted(rng, LAYOUTS),
        lead=weighted(rng, LEADS),
        special_b=weighted(rng, SPECIALS_B),
        out=weighted(rng, OUTS),
        alpha=rng.choice((1.0, 1.0, 1.0, 2.0, -0.5, 0.3, 0.0)),
        beta=rng.choice((0.0, 0.0, 1.0, -0.5)),
        bias=rng.random() < 0.3,
        relu=rng.random() < 0.3,
        reduce=weighted(rng, {"sum": 5, "mean": 2, "max": 2, "min": 2}),
        wide_result=rng.random() < 0.15,
        followed=rng.random() < 0.4,
        tune="measure" if rng.random() < 0.01 else "model",
        inference=rng.random() < 0.15,
        pick=rng.randrange(10_000),
    )
    return _settle(case, rng)


def _order(rng: random.Random) -> str:
    return rng.choice((*sorted(REORDERERS), "given"))


def _settle(case: Case, rng: random.Random) -> Case:
    """Change combinations that are not supported; each rule says why."""
    if case.container == "scipy dia" and (case.rows + case.cols) * case.cols > MOST_DIAGONAL_CELLS:
        # 20 x 20001 has up to 20,020 diagonals of 20,001 cells: 3 GB, and a minute to judge.
        case = replace(case, container="scipy coo")
    name = case.container
    if name not in DUPLICATES or case.rows * case.cols == 0:
        case = replace(case, duplicates=False)
    if name not in UNSORTED:
        case = replace(case, unsorted=False)
    if name not in PATTERNS:
        case = replace(case, weighted=True)
    case = replace(case, values_dtype=_values_dtype(case, rng))
    if not case.weighted or case.values_dtype == "int32":
        case = replace(case, special_a="none")
    if name in DROP_ZEROS and case.special_a in ("zeros", "mixed"):
        case = replace(case, special_a="inf")
    if case.dtype in ("float16", "bfloat16") and case.rows * case.cols > 10**6:
        case = replace(case, scale=1.0)
    if case.device == "cpu" and case.action == "threads" and case.rows * case.cols > 10**5:
        # torch takes up to ten seconds for a dense product of 16 bits on one core.
        case = replace(case, dtype="float32")
    if case.action in ("gradient", "second gradient"):
        # Expected gradients of these come from float64 autograd of small dense sums.
        case = replace(
            case, rows=min(case.rows, 40), cols=min(case.cols, 40), n=min(case.n, 8),
            special_a="none", special_b="none", out="none", beta=0.0, scale=1.0,
        )  # fmt: skip
        if case.reduce in ("max", "min"):  # which of equal products wins is not promised
            case = replace(case, layout="contiguous")
        if case.action == "second gradient":
            reduce = "sum" if case.reduce in ("max", "min") else case.reduce
            case = replace(case, dtype="float64", reduce=reduce, relu=False)
        if case.dtype != "float64":  # one rounding, so that the bound of a product applies
            case = replace(case, alpha=1.0, reduce="sum", bias=False, relu=False, wide_result=False)
    if case.out != "none":  # documented: not with out=
        case = replace(case, bias=False, relu=False, wide_result=False)
        if case.reduce in ("max", "min"):
            case = replace(case, out="none")
    if case.reduce in ("max", "min"):  # documented: not with max and min
        case = replace(case, bias=False, relu=False, wide_result=False)
    if case.out == "none":
        case = replace(case, beta=0.0)
    if case.out == "alias" and (case.rows != case.cols or case.reorder_columns or case.lead):
        case = replace(case, out="contiguous")
    if case.dtype == "float64":
        case = replace(case, wide_result=False)
    if case.out == "overlap" and case.reorder_columns:  # B is a copy then
        case = replace(case, out="contiguous")
    if case.out in ("alias", "overlap") or case.action in ("graph", "streams"):
        case = replace(case, layout="contiguous", lead=())
    return case


def _values_dtype(case: Case, rng: random.Random) -> str:
    """A type of A's values that the container has."""
    name, wanted = case.container, case.values_dtype
    if any(word in name for word in NUMPY):
        # numpy has no bfloat16, scipy hardly any float16.
        allowed: Sequence[str] = ("float32", "float64", "int32")
        if "numpy" in name:
            allowed = ("float16", *allowed)
    elif name == "csr":
        allowed = ("float32", "float64", "float16", "bfloat16")
    else:
        allowed = ("float32", "float64", "float16", "bfloat16", "int32")
    return wanted if wanted in allowed else rng.choice(allowed)
