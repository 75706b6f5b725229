"""Run the core tests on every pair of Python and torch that can be installed here.

    python -m tools.versions [--python 3.11,3.13] [--torch 2.10,2.13.0+cpu] [--folder DIR]

Without arguments: the oldest and the newest torch that the package index has in the supported
range, on each Python from 3.11 to 3.14 that this machine has. Each pair gets an environment of its
own below DIR (build/versions), which is kept. Prints a table; exit code 1 if a pair failed. A pair
that cannot be installed, because the index has no such wheel, is reported but is no failure.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsetile.cli.console import note, print_table
from tools.record import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# First supported release: see pyproject.toml.
OLDEST_TORCH = (2, 10)
# The tests that every pair runs: a few minutes, and where versions differ.
TESTS = (
    "tests/test_import.py", "tests/core", "tests/intake", "tests/formats", "tests/balance",
    "tests/systems", "tests/plan/test_plan.py", "tests/plan/test_planner.py",
    "tests/nn/test_sparse_linear.py",
)  # fmt: skip
PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "numpy", "scipy", "numba", "safetensors")


def supported(versions: Sequence[str]) -> list[str]:
    """Return the oldest and the newest supported release among those of an index."""
    found = {}
    for version in versions:
        numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
        if numbers and tuple(map(int, numbers.groups()))[:2] >= OLDEST_TORCH:
            found[tuple(map(int, numbers.groups()))] = version
    ordered = [found[key] for key in sorted(found)]
    return list(dict.fromkeys([*ordered[:1], *ordered[-1:]]))


def indexed(python: str) -> list[str]:
    """Return the releases of torch that the package index has for a Python."""
    command = [python, "-m", "pip", "index", "versions", "torch"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    line = re.search(r"Available versions: (.*)", asked.stdout)
    return line.group(1).split(", ") if line else []


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, check=False, cwd=ROOT
    )


def _outcome(python: str, torch: str, folder: Path) -> tuple[str, bool]:
    """Install a pair and run the tests; return what to print, and whether it failed."""
    version = Path(python).name.removeprefix("python")
    home = folder / f"py{version}-torch{torch}"
    inside = home / "bin" / "python"
    if not inside.exists() and _run([python, "-m", "venv", home]).returncode:
        return "no venv", False
    wanted = [f"torch=={torch}", *PACKAGES, "--editable", f"{ROOT}[dev]"]
    made = _run([inside, "-m", "pip", "install", "--quiet", *wanted])
    if made.returncode:
        said = made.stderr.strip().splitlines()
        return f"not installed: {said[-1] if said else 'pip failed'}", False
    ran = _run([inside, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS])
    lines = ran.stdout.strip().splitlines() or ran.stderr.strip().splitlines() or ["no output"]
    if ran.returncode:
        note(ran.stdout[-3000:])
    return re.sub(r"^=+ | =+$", "", lines[-1]), ran.returncode != 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="versions", description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=",".join(PYTHONS), help="versions, with commas")
    parser.add_argument("--torch", help="releases, with commas; else the oldest and the newest")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    asked = parser.parse_args(list(arguments))
    rows, failed = [], False
    for version in asked.python.split(","):
        python = shutil.which(f"python{version}")
        if python is None or _run([python, "--version"]).returncode:
            rows.append([version, "", "not on this machine"])
            continue
        releases = asked.torch.split(",") if asked.torch else supported(indexed(python))
        if not releases:
            rows.append([version, "", "the index has no torch for it"])
        for torch in releases:
            text, wrong = _outcome(python, torch, asked.folder)
            failed |= wrong
            rows.append([version, torch, text])
    print_table(("Python", "torch", "tests"), rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
