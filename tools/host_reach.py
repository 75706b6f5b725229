"""Which lines each CPU test runs, and with that which tests can notice a change of one.

Every file of tests runs once, in a process of ``tools/host_runner.py``. What it ran is kept for as
long as the code and the file stay as they are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.host_mutations import Place, draw
from tools.host_runner import PRELOAD, HostJob
from tools.mutant_import import RECORD
from tools.parts import HOST_PACKAGES
from tools.record import ROOT, one_thread_each, write_json

LEAST_EACH = 12  # places that are drawn of each package
# Of tests for each mutant, as they take while lines are noted: without that, about 40 s at most.
TESTS_SECONDS = 80.0
FILE_LIMIT = 900.0
# Tests of other folders that concern the packages.
OTHER_TESTS = (
    "contracts/test_systems.py",
    # Code for GPUs, run on the host.
    *(f"emulator/test_{name}.py" for name in ("fresh_graph", "fresh_layers", "intake")),
)
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1)]; "
    "from tools.host_runner import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True)
class Checkout:
    """Code to break and its tests."""

    root: Path = ROOT  # folder with ``src/<name>`` and ``tests``
    name: str = "sparsetile"
    packages: tuple[str, ...] = HOST_PACKAGES  # broken; each has its tests in a folder of its name
    others: tuple[str, ...] = OTHER_TESTS  # further files of tests
    warm: tuple[str, ...] = PRELOAD  # modules that code and tests import from elsewhere

    @property
    def package(self) -> Path:
        return self.root / "src" / self.name

    @functools.cached_property
    def files(self) -> list[Path]:
        return [p for name in self.packages for p in sorted((self.package / name).rglob("*.py"))]

    def tests(self) -> list[Path]:
        tests = self.root / "tests"
        found = [
            path for name in self.packages for path in sorted((tests / name).glob("test_*.py"))
        ]
        return [*found, *(tests / name for name in self.others)]

    def drawn(self, count: int, seed: int) -> list[Place]:
        """Draw places: of each package by its size, but at least ``LEAST_EACH``."""
        sizes = {
            name: sum(
                len(path.read_text(encoding="utf-8").splitlines())
                for path in self.files
                if path.is_relative_to(self.package / name)
            )
            for name in self.packages
        }
        found = []
        for name, size in sizes.items():
            share = max(LEAST_EACH, round(count * size / sum(sizes.values())))
            found += draw(self.package / name, self.package, share, seed)
        return found


@dataclass
class Reach:
    """Which tests run which lines, and how long each test takes."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def add(self, tests: Iterable[Sequence[Any]], lines: np.ndarray, files: Sequence[str]) -> None:
        """Add what one file of tests noted; tests that did not pass are left out."""
        names = [None, *(name if passed else None for name, _, passed in tests)]
        self.seconds |= {name: seconds for name, seconds, passed in tests if passed}
        for number, file, line in lines.tolist():
            if name := names[number]:
                self.tests.setdefault((files[file], line), set()).add(name)

    def chosen(self, place: Place, first: str = "") -> list[str]:
        """Return the tests that reach a place, those first that most likely notice it: for each
        line of the function one of them that runs it, then the others."""
        package, _, rest = place.file.partition("/")
        mirror = f"tests/{package}/test_{Path(rest).stem}.py"
        reaching = set().union(*(self.tests.get((place.file, line), ()) for line in place.lines))

        def rank(test: str) -> tuple[bool, bool, float]:
            file, own = test.partition("::")[0], test.startswith(f"tests/{package}/")
            return not own, file != mirror, self.seconds[test]

        lines = range(place.span[0], place.span[1] + 1)
        by_line = (reaching & self.tests.get((place.file, line), set()) for line in lines)
        one_each = {min(tests, key=rank) for tests in by_line if tests}
        found, left = list[str](), TESTS_SECONDS
        for test in sorted(reaching, key=lambda t: (t != first, t not in one_each, *rank(t))):
            left -= self.seconds[test]
            if found and left < 0:
                break
            found.append(test)
        return found


def start(
    jobs: Sequence[HostJob], checkout: Checkout, folder: Path, parallel: int
) -> list[dict[str, Any]]:
    """Run jobs in the warm process and return what each left."""
    for job in jobs:
        Path(job.folder).mkdir(parents=True)
    path = folder / "jobs.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, "-c", _CHILD, str(ROOT), str(path), "--parallel", str(parallel)]
    command += ["--warm", *checkout.warm]
    around = {**one_thread_each(), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, cwd=ROOT, env=around, stdout=2, check=True)
    return [json.loads((Path(job.folder) / "result.json").read_text()) for job in jobs]


def log_tail(job: HostJob) -> str:
    return "\n".join((Path(job.folder) / "log.txt").read_text().splitlines()[-30:])


def reach_of_tests(checkout: Checkout, folder: Path, kept: Path, parallel: int) -> Reach:
    """Run every file of tests on the code as it is; return which lines each test runs.

    Raise RuntimeError if tests fail on the code as it is.
    """
    files = [path.relative_to(checkout.package).as_posix() for path in checkout.files]
    code = b"".join(path.read_bytes() for path in checkout.files)
    paths = {
        test: kept / hashlib.sha256(code + str(test).encode() + test.read_bytes()).hexdigest()[:32]
        for test in checkout.tests()
    }
    missing = [test for test, path in paths.items() if not path.with_suffix(".json").is_file()]
    jobs = [
        HostJob(
            test.relative_to(checkout.root).as_posix(), str(checkout.root),
            [test.relative_to(checkout.root).as_posix()], str(folder / f"lines-{number}"),
            FILE_LIMIT, FILE_LIMIT, files=[str(path) for path in checkout.files],
        )
        for number, test in enumerate(missing)
    ]  # fmt: skip
    results = start(jobs, checkout, folder, parallel) if jobs else []
    kept.mkdir(parents=True, exist_ok=True)
    for test, job, result in zip(missing, jobs, results, strict=True):
        if result.get("exit") not in (0, 5):  # 5: every test of the file needs a GPU
            raise RuntimeError(
                f"mutate_host: {job.name} must pass on the code as it is, got {result}. Repair "
                f"that first. The end of its log:\n{log_tail(job)}"
            )
        form = np.dtype([("test", "<u4"), ("file", "<u2"), ("line", "<u2")])
        assert form.itemsize == RECORD.size
        np.save(paths[test], np.unique(np.fromfile(Path(job.folder) / "lines", form)))
        write_json({"tests": result["tests"]}, paths[test].with_suffix(".json"))
    reach = Reach()
    for path in paths.values():
        tests = json.loads(path.with_suffix(".json").read_text())["tests"]
        reach.add(tests, np.load(path.with_suffix(".npy")), files)
    return reach
