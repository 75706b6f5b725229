"""``sparsetile verify``: when it refuses, what it writes, its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparsetile import checkers
from sparsetile.cli import verify as module
from tests.cli.conftest import Cli, assert_refused
from tests.sanitizer import CLEAN_RACES, FACTS, how, install
from tests.test_record import a_record


@pytest.fixture
def recorded(monkeypatch, tmp_path: Path):
    """A checkout whose GPU tests end as the test says, without a GPU."""
    asked: dict[str, Any] = {}

    def prepare(**outcomes: str) -> dict[str, Any]:
        def collect(root: Path, *, expression: str | None) -> dict[str, Any]:
            asked.update(root=root, expression=expression)
            return {**a_record(outcomes), "selection": expression}

        monkeypatch.setattr(module, "collect", collect)
        monkeypatch.setattr(module, "checkout_root", lambda: tmp_path)
        return asked

    return prepare


def test_it_writes_the_record_of_this_gpu(cli: Cli, recorded, tmp_path: Path):
    asked = recorded(test_a="passed", test_b="skipped")
    outcome = cli("verify")
    path = tmp_path / "results" / "h200" / "verify.json"
    assert outcome.code == 0 and asked == {"root": tmp_path, "expression": None}
    assert "NVIDIA H200" in outcome.out and path.is_file()
    assert outcome.err == f"sparsetile: wrote {path}\n"


def test_a_failed_test_is_recorded_and_exit_code_1(cli: Cli, recorded, tmp_path: Path):
    recorded(test_a="passed", test_b="failed")
    outcome = cli("verify", "--out", tmp_path / "elsewhere", "--json")
    assert outcome.code == 1
    assert outcome.json["counts"]["failed"] == 1
    assert (tmp_path / "elsewhere" / "h200" / "verify.json").is_file()


def test_nothing_is_written_when_no_test_ran(cli: Cli, recorded, tmp_path: Path):
    recorded(test_a="skipped")
    outcome = cli("verify")
    assert outcome.code == 1 and "no test ran, so nothing was written" in outcome.err
    assert not (tmp_path / "results").exists()


def test_part_of_the_tests_leaves_the_record_alone_unless_told_where(cli, recorded, tmp_path):
    asked = recorded(test_a="passed")
    outcome = cli("verify", "-k", "test_a")
    assert outcome.code == 0 and asked["expression"] == "test_a"
    assert "the record was left as it is" in outcome.err and not (tmp_path / "results").exists()
    assert cli("verify", "-k", "test_a", "--out", tmp_path / "part").code == 0
    assert (tmp_path / "part" / "h200" / "verify.json").is_file()


def test_outside_a_checkout_it_refuses(cli: Cli, monkeypatch):
    monkeypatch.setattr(module, "checkout_root", lambda: None)
    assert_refused(
        cli("verify"), "verify: installation must be a source checkout with its tests", "Clone"
    )


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_refuses(cli: Cli):
    assert_refused(
        cli("verify"),
        "verify: machine must be one with a CUDA GPU that torch can use, got none.",
        "sparsetile doctor",
    )


@pytest.fixture
def checked(monkeypatch, tmp_path: Path):
    """A checkout on a machine with a GPU, and compute-sanitizer behaving as told."""

    def prepare(**tools: dict[str, Any]) -> Path:
        folder = install(tmp_path / "bin", **tools)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "results" / "h200" / "checkers.json"

    for place in (checkers, module):
        monkeypatch.setattr(place, "machine_facts", lambda: dict(FACTS))
    monkeypatch.setattr(module, "checkout_root", lambda: tmp_path)
    return prepare


def test_checkers_write_a_record_of_their_own(cli: Cli, checked):
    path = checked(memcheck=how(), racecheck=how(summary=CLEAN_RACES))
    outcome = cli("verify", "--checker", "memcheck,racecheck")
    assert outcome.code == 0 and "racecheck" in outcome.out
    assert outcome.err == "".join(
        f"sparsetile: wrote {name} to {path}\n" for name in ("memcheck", "racecheck")
    )
    record = json.loads(path.read_text())
    assert list(record["checkers"]) == ["memcheck", "racecheck"]
    assert record["gpu"]["name"] == "NVIDIA H200" and not path.with_name("verify.json").exists()


def test_what_a_checker_found_is_recorded_shown_and_exit_code_1(cli: Cli, checked, tmp_path: Path):
    checked(any=how(summary="========= ERROR SUMMARY: 4 errors", errors=True))
    outcome = cli("verify", "--checker", "synccheck", "--json", "--out", tmp_path / "there")
    assert outcome.code == 1 and "ERROR SUMMARY: 4 errors" in outcome.err
    assert outcome.json["checkers"]["synccheck"]["errors"] == 4
    assert (tmp_path / "there" / "h200" / "checkers.json").is_file()


def test_one_tool_s_failure_costs_its_own_entry_alone(cli: Cli, checked):
    path = checked(memcheck=how(summary=None, child_exit=255), synccheck=how())
    outcome = cli("verify", "--checker", "memcheck,synccheck")
    assert outcome.code == 1
    assert "verify: memcheck must see all products run, got exit status 255" in outcome.err
    assert list(json.loads(path.read_text())["checkers"]) == ["synccheck"]


def test_a_checker_that_is_stopped_leaves_no_record(cli: Cli, checked):
    path = checked(any=how(sleep=True))
    outcome = cli("verify", "--checker", "memcheck", "--time-limit", 2)
    assert outcome.code == 1 and "got no end within 2 s" in outcome.err
    assert outcome.out == "" and not path.exists()


def test_without_compute_sanitizer_it_refuses(cli: Cli, checked, monkeypatch, tmp_path: Path):
    path = checked()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_refused(
        cli("verify", "--checker", "memcheck"), "compute-sanitizer must be installed", "PATH"
    )
    assert not path.exists()


def test_a_checker_has_a_name_and_no_expression(cli: Cli, checked):
    checked()
    assert_refused(
        cli("verify", "--checker", "memcheck,initcheck"),
        "verify: --checker must be one of ['memcheck', 'racecheck', 'synccheck'], got 'initcheck'.",
    )
    assert_refused(
        cli("verify", "--checker", "memcheck", "-k", "csr"),
        "verify: -k must be left away with --checker, got 'csr'.",
    )


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_no_checker_is_started(cli: Cli):
    assert_refused(
        cli("verify", "--checker", "memcheck"), "one with a CUDA GPU that torch can use, got none."
    )
