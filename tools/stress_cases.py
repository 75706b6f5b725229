"""Draws the cases of ``tools.stress``: a cold plan or graph, and the jobs of threads on it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from tools.fuzz_cases import CASES_OF_A_SEED, weighted

# Jobs on a plan, and how often.
PLAN_JOBS = {
    "product": 3, "transpose": 3, "gradient": 3, "value gradient": 2, "mean": 2, "max": 2,
    "bias and relu": 2, "narrow": 3, "wide": 1, "autocast": 3, "linear": 1, "into": 1, "values": 1,
}  # fmt: skip
# What is made cold, and how often.
SUBJECTS = {
    "plan": 20, "spmm": 2, "aggregate": 1, "GCNConv": 2, "SAGEConv": 2, "GATConv": 2,
    "SparseLinear": 1,
}  # fmt: skip
LAYERS = tuple(name for name in SUBJECTS if name not in ("plan", "spmm"))
LAYER_JOBS = {"product": 3, "gradient": 2}
# Most failures were found on small squares; the first two are empty or tiny.
SIZES = {0: 1, 1: 1, 5: 3, 64: 4, 200: 3, 608: 4, 3000: 1}
ENTRIES = {0: 1, 2: 3, 50: 4, 1000: 2, 5000: 1}
WIDTHS = (1, 7, 8, 33, 64, 120, 257)
DTYPES = {"float32": 4, "float16": 4, "bfloat16": 2, "float64": 1}


@dataclass(frozen=True)
class StressCase:
    """One cold plan or graph. Fields that a subject does not use are drawn too."""

    seed: int
    number: int
    device: str
    subject: str
    rows: int
    cols: int
    entries: int
    weighted: bool
    dtype: str
    system: str
    order: str
    tune: str
    n: int  # width that is planned
    width: int  # of the operands
    updated: bool
    moved: str
    side: bool  # made on a stream of its own instead of the default one
    waits: bool  # everything is done on the GPU before threads begin
    dropped: bool  # last reference dropped, memory overwritten, while streams still run
    swapped: bool  # each thread makes a plan on its own stream, the next one uses it
    pick: int
    jobs: tuple[tuple[str, ...], ...]  # of each thread, in order

    @property
    def replay(self) -> str:
        """The command that runs this case alone, again and again."""
        number = self.seed * CASES_OF_A_SEED + self.number
        return f"python -m tools.stress --device {self.device} --replay {number}"

    @property
    def kind(self) -> str:
        return "plans"

    @property
    def features(self) -> dict[str, tuple[str, ...]]:
        """What the record counts."""
        names = (
            "subject",
            "dtype",
            "order",
            "tune",
            "side",
            "waits",
            "dropped",
            "swapped",
            "updated",
        )
        found = {name: (str(getattr(self, name)),) for name in names}
        jobs = tuple(job for one in self.jobs for job in one)
        return {**found, "moved": (self.moved or "no",), "threads": (str(len(self.jobs)),),
                "job": jobs}  # fmt: skip


def draw(seed: int, number: int, device: str) -> StressCase:
    """Return case ``number`` of a seed, for a type of device."""
    rng = random.Random(f"stress:{seed}:{number}")
    subject = weighted(rng, SUBJECTS)
    jobs = PLAN_JOBS if subject in ("plan", "spmm") else LAYER_JOBS
    sizes = list(SIZES), list(SIZES.values())
    rows = rng.choices(*sizes)[0]
    systems = sorted(name for name in SYSTEMS if device in SYSTEMS[name].devices)
    own = [name for name in ("csr", "cpu") if name in systems]
    dtype = weighted(rng, DTYPES)
    case = StressCase(
        seed=seed,
        number=number,
        device=device,
        subject=subject,
        rows=rows,
        cols=rows if rng.random() < 0.6 else rng.choices(*sizes)[0],
        entries=rng.choices(list(ENTRIES), list(ENTRIES.values()))[0],
        weighted=rng.random() < 0.7,
        dtype=dtype,
        system=rng.choice(("auto", "auto", *own, *own, *systems)),
        order=rng.choice(("auto", "identity", "lsh", *sorted(REORDERERS))),
        tune=rng.choice(("none", "model")),
        n=rng.choice(WIDTHS),
        width=rng.choice(WIDTHS),
        updated=rng.random() < 0.2,
        moved=rng.choice([name for name in DTYPES if name != dtype]) if rng.random() < 0.1 else "",
        side=rng.random() < 0.3,
        waits=rng.random() < 0.4,
        dropped=rng.random() < 0.3,
        swapped=rng.random() < 0.2,
        pick=rng.randrange(10_000),
        jobs=tuple(
            tuple(weighted(rng, jobs) for _ in range(rng.choice((2, 3, 5))))
            for _ in range(rng.choice((2, 2, 3)))
        ),
    )
    return _settle(case)


def _settle(case: StressCase) -> StressCase:
    """Change combinations that are not supported; each rule says why."""
    if case.subject != "plan":
        case = replace(
            case, system="auto", order="auto", updated=False, moved="", swapped=False
        )  # fmt: skip
        # A graph has one set of nodes, and the smallest that every layer takes is one node.
        case = replace(case, rows=max(case.rows, 1), cols=max(case.rows, 1))
    if case.subject == "spmm":  # what spmm can be asked for
        kinds = {"max": "max", "mean": "mean", "gradient": "gradient", "autocast": "autocast"}
        case = replace(
            case, jobs=tuple(tuple(kinds.get(job, "product") for job in one) for one in case.jobs)
        )
    if not case.weighted or case.swapped:  # the caller must order new values
        case = replace(case, updated=False)
    if case.device == "cpu":  # torch takes long for dense products of 16 bits
        case = replace(case, rows=min(case.rows, 200), cols=min(case.cols, 200))
    if case.tune == "none" and case.system != "auto":
        case = replace(case, tune="model")  # a system by name is not chosen
    return case
