"""The pages' ``sparsetile`` commands run, on small matrices under the names that the pages use."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import scipy.io

from sparsetile.cli import main
from sparsetile.data.generators import power_law
from sparsetile.intake import write_npz
from tests.docs.pages import DOCS
from tests.docs.test_commands import lines

# The first words of commands that another test runs, and what they need.
NOT_RUN = {
    "sparsetile bench core": "32 named matrices; tests/cli runs suites",
    "sparsetile bench matrix.mtx": "half a minute; tests/cli measures a file",
    "sparsetile bench paper:": "named matrices; tests/cli runs suites",
    "sparsetile bench --compare": "two records; tests/bench compares",
    "sparsetile compile": "minutes of NVRTC; tests/cli compiles one kernel",
    "sparsetile data fetch": "a network; tests/cli fetches from a folder",
    "sparsetile doctor": "run by the tutorial's test",
    "sparsetile report": "records; tests/cli reports",
    "sparsetile tune --fit": "a GPU",
    "sparsetile verify": "a GPU",
}
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "results" not in path.parts]
RUN = [
    line
    for line in lines(PAGES)
    if line.startswith("sparsetile ") and not line.startswith(tuple(NOT_RUN))
]


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder of matrices, and a folder DIR in it."""
    folder = tmp_path
    (folder / "DIR").mkdir()
    A = power_law(200, 2000, seed=0)
    for name in (
        "graph.npz",
        "mine.npz",
        "DIR/PubMed.npz",
        "DIR/cage11.npz",
        "DIR/web-NotreDame.npz",
    ):
        write_npz(folder / name, A)
    B = power_law(200, 2000, weighted=True, seed=1)
    matrix = scipy.sparse.csr_matrix(
        (B.values.numpy(), B.indices.numpy(), B.indptr.numpy()), shape=B.shape
    )
    for name in ("a.mtx", "graph.mtx", "matrix.mtx"):
        scipy.io.mmwrite(folder / name, matrix)
    return folder


@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_pages_runs(line: str, places: Path, monkeypatch, environment, capsys):
    monkeypatch.chdir(places)
    environment(
        SPARSETILE_CACHE_DIR=places / "kernels", SPARSETILE_DATA_DIR=places / "DIR",
        SPARSETILE_TUNE_DIR=places / "tuned",
    )  # fmt: skip
    assert main(shlex.split(line, comments=True)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_most_commands_are_run():
    assert len(RUN) > 15
