"""The source archive and the wheel hold all that users need: installed elsewhere, they work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sparsetile
from tests.examples import ROOT

SOURCE = ("pyproject.toml", "README.md", "LICENSE", "src")
USE = """
import sys
from pathlib import Path
import torch
import sparsetile as st
from sparsetile.kernels import KERNELS
assert Path(st.__file__).is_relative_to(sys.argv[1]), st.__file__
A = torch.tensor([[1.0, 0.0, 2.0]]).to_sparse_csr()
# The tutorial's test multiplies by the kernels of a CPU, which numba would compile anew here.
assert (st.plan(A, n=2, system="dense") @ torch.ones(3, 2)).tolist() == [[3.0, 3.0]]
for spec in KERNELS.values():
    assert spec.source(next(iter(spec.configs()))).text()
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is made from the source archive."""
    folder = tmp_path_factory.mktemp("build")
    tree, out = folder / "tree", folder / "dist"
    tree.mkdir()
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCE:
        place = ROOT / name
        copy = shutil.copytree if place.is_dir() else shutil.copy
        copy(place, tree / name, **({"ignore": leave_out} if place.is_dir() else {}))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return out


def test_the_wheel_holds_every_file_of_the_packages(built: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    src = ROOT / "src"
    wanted = {
        path.relative_to(src).as_posix()
        for path in src.rglob("*")
        if path.is_file() and not {"__pycache__"} & {*path.parts} and ".egg-info" not in str(path)
    }
    assert wanted - found == set()
    facts = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert {name.split("/")[0] for name in found - wanted} == {facts}


def test_an_installed_wheel_multiplies_and_has_its_kernels(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-compile", "--target", str(place)]
    subprocess.run([*pip, *options, str(wheel)], check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    script = [sys.executable, "-c", USE, str(place)]
    used = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert used.returncode == 0, used.stderr[-2000:]
    version = subprocess.run(
        [sys.executable, str(place / "bin" / "sparsetile"), "--version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert version.stdout.strip() == wheel.name.split("-")[1], version.stderr[-2000:]


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {sparsetile.__version__}\n" in text
