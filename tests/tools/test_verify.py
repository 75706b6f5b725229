"""``python -m tools.verify``: when it refuses, what it writes, its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.checked_products import type_names
from tools.verify import main

from tests.cli.conftest import Outcome, assert_refused
from tests.tools.sanitizer import CLEAN_RACES, how, install
from tests.tools.test_record import a_record
from tools import verify as module

Tool = Callable[..., Outcome]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run the tool and return its exit code and what it wrote where."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return run


@pytest.fixture
def recorded(monkeypatch, checkout):
    """A checkout whose GPU tests end as the test says, without a GPU."""
    asked: dict[str, Any] = {}

    def prepare(**outcomes: str) -> dict[str, Any]:
        def collect(root: Path, *, earlier: Any, expression: str | None) -> dict[str, Any]:
            asked.update(root=root, earlier=list(earlier), expression=expression)
            return a_record(outcomes)

        monkeypatch.setattr(module, "collect", collect)
        return asked

    return prepare


def test_it_writes_the_record_of_this_gpu(tool: Tool, recorded, tmp_path: Path):
    asked = recorded(test_a="passed", test_b="skipped")
    outcome = tool()
    path = tmp_path / "results" / "h200" / "verify.json"
    results = tmp_path / "results"
    assert asked == {"root": tmp_path, "earlier": [results, results], "expression": None}
    assert outcome.code == 0
    assert "NVIDIA H200" in outcome.out and path.is_file()
    assert outcome.err == f"sparsetile: wrote {path}\n"


def test_a_failed_test_is_recorded_and_exit_code_1(tool: Tool, recorded, tmp_path: Path):
    recorded(test_a="passed", test_b="failed")
    outcome = tool("--out", tmp_path / "elsewhere", "--json")
    assert outcome.code == 1
    assert outcome.json["counts"]["failed"] == 1
    assert (tmp_path / "elsewhere" / "h200" / "verify.json").is_file()


def test_nothing_is_written_when_no_test_ran(tool: Tool, recorded, tmp_path: Path):
    recorded(test_a="skipped")
    outcome = tool()
    assert outcome.code == 1 and "no test ran, so nothing was written" in outcome.err
    assert not (tmp_path / "results").exists()


def test_outcomes_are_kept_from_out_or_results_and_none_of_them_with_all(
    tool: Tool, recorded, tmp_path: Path
):
    asked = recorded(test_a="passed")
    assert tool("--out", tmp_path / "there").code == 0
    assert asked["earlier"] == [tmp_path / "there", tmp_path / "results"]
    assert tool("--all").code == 0 and asked["earlier"] == []
    assert (tmp_path / "results" / "h200" / "verify.json").is_file()


def test_part_of_the_tests_leaves_the_record_alone(tool, recorded, tmp_path):
    asked = recorded(test_a="passed")
    outcome = tool("-k", "test_a")
    assert outcome.code == 0 and asked["expression"] == "test_a" and asked["earlier"] == []
    assert "the record was left as it is" in outcome.err and not (tmp_path / "results").exists()


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_refuses(tool: Tool):
    assert_refused(
        tool(),
        "verify: machine must be one with a CUDA GPU that torch can use, got none.",
        "sparsetile doctor",
    )


@pytest.fixture
def checked(monkeypatch, facts, checkout, tmp_path: Path, environment):
    """A checkout on a machine with a GPU, and compute-sanitizer behaving as told.

    ``compiled`` has the limits that kernels were compiled within, whether there was a record, and
    the matrices.
    """

    def any_record() -> bool:
        return any(tmp_path.rglob("checkers.json"))

    def prepare(**tools: dict[str, Any]) -> Path:
        folder = install(tmp_path / "bin", **tools)
        environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "results" / "h200" / "checkers.json"

    prepare.compiled = []
    monkeypatch.setattr(
        module,
        "compile_kernels",
        lambda root, limit, matrices: prepare.compiled.append((limit, any_record(), matrices)),
    )
    return prepare


def test_checkers_write_a_record_of_their_own(tool: Tool, checked):
    path = checked(memcheck=how(), racecheck=how(summary=CLEAN_RACES))
    outcome = tool("--checker", "memcheck,racecheck")
    assert outcome.code == 0 and "racecheck" in outcome.out
    assert outcome.err == "".join(
        f"sparsetile: wrote {name} to {path}\n" for name in ("memcheck", "racecheck")
    )
    record = json.loads(path.read_text())
    assert list(record["checkers"]) == ["memcheck", "racecheck"]
    assert record["gpu"]["name"] == "NVIDIA H200" and not path.with_name("verify.json").exists()


def test_what_a_checker_found_is_recorded_shown_and_exit_code_1(
    tool: Tool, checked, tmp_path: Path
):
    checked(any=how(summary="========= ERROR SUMMARY: 4 errors", errors=True))
    outcome = tool("--checker", "synccheck", "--json", "--out", tmp_path / "there")
    assert outcome.code == 1 and "ERROR SUMMARY: 4 errors" in outcome.err
    entry = outcome.json["checkers"]["synccheck"]
    parts = sum(len(type_names(system)) for system in entry["systems"])
    assert entry["errors"] == 4 * parts
    assert (tmp_path / "there" / "h200" / "checkers.json").is_file()


def test_compiles_kernels_once_before_the_first_tool(tool: Tool, checked):
    path = checked()
    tool("--checker", "memcheck,synccheck", "--time-limit", "30", "--out", str(path.parents[1]))
    assert checked.compiled == [(30.0, False, "")] and path.exists()


def test_some_matrices_are_enough_for_a_checker(tool: Tool, checked, tmp_path: Path):
    checked()
    assert tool("--checker", "memcheck", "--matrices", "wide,linear layer").code == 0
    assert [each[2] for each in checked.compiled] == ["wide,linear layer"]
    calls = [json.loads(path.read_text()) for path in (tmp_path / "bin").glob("called-*.json")]
    assert {child[child.index("--matrices") + 1] for _, child, _ in calls} == {"wide,linear layer"}
    outcome = tool("--checker", "memcheck", "--matrices", "wide,nothing")
    assert outcome.code == 2 and "verify: --matrices must be" in outcome.err


def test_one_tool_s_failure_costs_its_own_entry_alone(tool: Tool, checked):
    path = checked(memcheck=how(summary=None, child_exit=255), synccheck=how())
    outcome = tool("--checker", "memcheck,synccheck")
    assert outcome.code == 1
    assert "verify: memcheck must see all products run, got exit status 255" in outcome.err
    assert list(json.loads(path.read_text())["checkers"]) == ["synccheck"]


def test_a_checker_that_is_stopped_leaves_no_record(tool: Tool, checked):
    path = checked(any=how(sleep=True))
    outcome = tool("--checker", "memcheck", "--time-limit", 2)
    assert outcome.code == 1 and "parts within 2 s" in outcome.err
    assert outcome.out == "" and not path.exists()


def test_without_compute_sanitizer_it_refuses(tool: Tool, checked, tmp_path: Path, environment):
    path = checked()
    environment(PATH=tmp_path)
    assert_refused(tool("--checker", "memcheck"), "compute-sanitizer must be installed", "PATH")
    assert not path.exists()


def test_a_checker_has_a_name_and_no_expression(tool: Tool, checked):
    checked()
    assert_refused(
        tool("--checker", "memcheck,leakcheck"),
        "verify: --checker must be one of ['memcheck', 'racecheck', 'synccheck', 'initcheck'], "
        "got 'leakcheck'.",
    )
    assert_refused(
        tool("--checker", "memcheck", "-k", "csr"),
        "verify: -k must be omitted with --checker, got 'csr'.",
    )


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_no_checker_is_started(tool: Tool):
    assert_refused(
        tool("--checker", "memcheck"), "one with a CUDA GPU that torch can use, got none."
    )
