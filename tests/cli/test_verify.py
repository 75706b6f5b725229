"""``sparsetile verify``: when it refuses, what it writes, its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsetile.cli import verify as module
from tests.cli.conftest import Cli, assert_refused
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
