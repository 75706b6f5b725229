"""The command line called in this process, with folders of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparsetile.cli import main
from sparsetile.data.generators import banded, random
from sparsetile.intake import write_npz


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, environment) -> Cli:
    """Run one command and return its exit code and what it wrote where."""
    environment(
        SPARSETILE_CACHE_DIR=tmp_path / "kernels", SPARSETILE_DATA_DIR=tmp_path / "downloads"
    )

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a weighted and a pattern matrix, and a file that is no matrix."""
    data = tmp_path / "data"
    data.mkdir()
    write_npz(data / "weighted.npz", random(60, 50, nnz=400, weighted=True, seed=1))
    write_npz(data / "band.npz", banded(40, 2))
    (data / "broken.mtx").write_text("%%MatrixMarket matrix coordinate real general\n3 3 9\n1 1\n")
    return data


@pytest.fixture
def compiler(monkeypatch) -> Callable[[ModuleType, Callable[..., object]], None]:
    """Call it with a command's module and what compiles its kernels."""

    def replace(module: ModuleType, made_by: Callable[..., object]) -> None:
        monkeypatch.setattr(module, "compile_source", made_by)

    return replace


def assert_refused(outcome: Outcome, *texts: str) -> None:
    """Bad usage: exit code 2, one line on stderr that says it all, nothing on stdout."""
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("sparsetile: error: ")
    for text in texts:
        assert text in lines[0]
