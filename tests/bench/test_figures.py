"""Figures of the papers by name: the registry, and ``sparsetile bench paper:NAME``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sparsetile.bench.expansion import expand
from sparsetile.bench.figures import Figure, figure, papers
from sparsetile.bench.suites import load_suite
from sparsetile.cli import bench as command
from sparsetile.cli import main
from tests.examples import ROOT

FIGURES = [each for paper in papers() for each in paper.figures]


def test_each_paper_has_its_figures_and_each_a_way_or_a_reason():
    assert [paper.name for paper in papers()] == ["voltrix", "brp", "rsh", "asyncsparse", "acc"]
    assert len({each.name for each in FIGURES}) == len(FIGURES) == 80
    for each in FIGURES:
        ways = [bool(way) for way in (each.suite, each.tool, each.not_run, each.is_drawing)]
        assert sum(ways) == 1, each.name
        assert each.is_drawing or each.paper, each.name


@pytest.mark.parametrize("each", [f for f in FIGURES if f.suite], ids=lambda f: f.name)
def test_suites_of_figures_expand_to_their_system(each: Figure, tmp_path: Path):
    (tmp_path / "PubMed.npz").touch()  # a suite of whatever the folder has needs one
    found = expand(load_suite(each.suite), data=tmp_path, device="cuda", **each.options)
    wanted = set(each.options.get("systems", ()))
    assert wanted <= {entry.system for entry in found.entries}


@pytest.mark.parametrize("each", [f for f in FIGURES if f.tool], ids=lambda f: f.name)
def test_tools_of_figures_exist(each: Figure):
    assert (ROOT / "tools" / f"{each.tool}.py").is_file()


def test_a_name_is_found_with_and_without_its_prefix():
    assert figure("paper:brp/fig8") is figure("brp/fig8")


def test_unknown_figures_are_one_error_that_lists_the_known(capsys):
    assert main(["bench", "paper:voltrix/fig99"]) == 2
    error = capsys.readouterr().err
    assert "bench: SUITE must be paper: and a figure of a paper, got 'paper:voltrix/fig99'" in error
    assert "voltrix/fig9" in error and "acc/fig15" in error and "Traceback" not in error


def test_figures_that_nothing_repeats_say_why(capsys):
    assert main(["bench", "paper:rsh/fig11"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "must be a figure that can be repeated here, got paper:rsh/fig11 (another GPU" in error
    assert main(["bench", "paper:acc/fig1"]) == 2
    assert "it is a drawing" in capsys.readouterr().err


def test_a_figure_of_a_tool_runs_it_in_a_checkout(tmp_path: Path, monkeypatch, capsys):
    ran: list[list[str]] = []

    @dataclasses.dataclass
    class Done:
        returncode: int = 0

    def run(words: list[str], check: bool) -> Done:
        ran.append(words)
        return Done()

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "paper:voltrix/fig14"]) == 2
    assert "Run it in the root of a checkout" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "voltrix_study.py").write_text("")
    assert main(["bench", "paper:voltrix/fig14", "--out", "a.json", "--data", "d"]) == 0
    assert ran[0][1:] == [
        "-m", "tools.voltrix_study", "--only", "overlap", "--out", "a.json", "--data", "d",
    ]  # fmt: skip
    assert "The paper: 85 % / 97 %" in " ".join(capsys.readouterr().err.split())


def test_a_figure_of_a_suite_narrows_it_and_options_narrow_further(monkeypatch):
    asked = []
    monkeypatch.setattr(command, "_run", lambda suite, *rest: asked.append((suite, rest)) or 0)
    assert main(["bench", "paper:asyncsparse/fig5", "-n", "512"]) == 0
    suite, rest = asked[0]
    narrowed = rest[3]
    assert suite == "asyncsparse" and json.dumps(narrowed["systems"]) == '["wcsr"]'
    assert narrowed["n"] == [512] and narrowed["dtypes"] == ["float32"]
