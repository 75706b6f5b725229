"""The GPU record: how tests are run and judged, what is written, when it is out of date."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.record import SCHEMA, check_record, collect, run_tests, write_record

from sparsetile.check.digest import code_digest
from tools import record as module

TESTS = """
import pytest

def test_not_marked():
    raise AssertionError("must not run")

@pytest.mark.gpu
def test_passes():
    pass

@pytest.mark.gpu
def test_fails():
    assert 1 == 2

@pytest.mark.gpu
def test_skips():
    pytest.skip("no reason")

@pytest.mark.gpu
@pytest.mark.xfail
def test_known_to_fail():
    assert 1 == 2

@pytest.fixture
def broken():
    raise RuntimeError("set-up")

@pytest.mark.gpu
def test_cannot_be_set_up(broken):
    pass
"""
CRASH = """
import os, pytest

@pytest.mark.gpu
def test_kills_the_process():
    os._exit(7)
"""


def a_record(outcomes: dict[str, str]) -> dict[str, Any]:
    """A record of today whose tests ended as given."""
    counts = Counter(outcomes.values())
    return {
        "schema": module.SCHEMA,
        "gpu": {"name": "NVIDIA H200", "slug": "h200"},
        "code_digest": code_digest(),
        "selection": None,
        "seconds": 1.5,
        "counts": {"total": len(outcomes), **{name: counts[name] for name in module._OUTCOMES}},
        "tests": {name: {"outcome": word, "seconds": 0.1} for name, word in outcomes.items()},
    }


@pytest.fixture(autouse=True)
def _few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROCESSES", 2)


def checkout(folder: Path, text: str) -> Path:
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (folder / "tests" / "test_some.py").write_text(text)
    return folder


def test_marked_tests_are_run_elsewhere_and_each_outcome_is_kept(tmp_path: Path, capfd):
    """Also where one of them ends its process: that is its own failure alone."""
    found = run_tests(checkout(tmp_path, TESTS + CRASH), marker="gpu")
    outcomes = {name.rpartition("::")[2]: test["outcome"] for name, test in found.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_known_to_fail": "xfailed",
        "test_cannot_be_set_up": "failed",
        "test_kills_the_process": "failed",
    }
    assert all(name.startswith("tests/test_some.py::") for name in found)
    written = capfd.readouterr()
    assert written.out == "" and "test_fails" in written.err


def test_a_crash_of_the_whole_process_is_reported_and_no_outcome_invented(
    monkeypatch, tmp_path: Path
):
    monkeypatch.setattr(module, "PROCESSES", 0)  # with others, the test that crashed has failed
    with pytest.raises(RuntimeError, match="must run to their end, got exit code 7 from pytest"):
        run_tests(checkout(tmp_path, CRASH), marker="gpu")


def answer(monkeypatch, code: int, tests: dict[str, Any]) -> None:
    """Stand in for the child process."""

    def run(command: list[str], **options: object) -> SimpleNamespace:
        report = Path(command[command.index("tests") - 1])
        report.write_text(json.dumps({"exit": code, "tests": tests}))
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(module.subprocess, "run", run)


def test_an_expression_that_pytest_refuses_is_an_error(monkeypatch, tmp_path: Path):
    answer(monkeypatch, 4, {})
    with pytest.raises(
        ValueError, match="verify: -k must be an expression that pytest understands"
    ):
        run_tests(tmp_path, marker="gpu", expression="(")


def test_an_interrupted_run_is_no_result(monkeypatch, tmp_path: Path):
    answer(monkeypatch, 2, {"tests/a.py::b": {"outcome": "passed", "seconds": 1.0}})
    with pytest.raises(RuntimeError, match="must run to their end, got exit code 2"):
        run_tests(tmp_path, marker="gpu")


def test_a_file_that_cannot_be_imported_counts_as_failed():
    outcomes = module._Outcomes()
    outcomes.pytest_collectreport(SimpleNamespace(failed=True, nodeid="tests/a.py"))
    outcomes.pytest_collectreport(SimpleNamespace(failed=False, nodeid="tests/b.py"))
    assert outcomes.tests == {"tests/a.py": {"outcome": "failed", "seconds": 0.0}}


@pytest.fixture
def pretended_gpu(monkeypatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "device_arch", lambda device: "sm_90a")


@pytest.mark.usefixtures("pretended_gpu")
def test_a_record_says_what_ran_where_and_on_which_code(monkeypatch, tmp_path: Path):
    tests = {
        "tests/b.py::two": {"outcome": "skipped", "seconds": 0.0},
        "tests/a.py::one": {"outcome": "passed", "seconds": 0.25},
    }
    monkeypatch.setattr(module, "run_tests", lambda root, marker, expression: tests)
    record = collect(tmp_path)
    assert record["schema"] == SCHEMA and record["code_digest"] == code_digest()
    assert record["gpu"]["slug"] == "h200" and record["gpu"]["arch"] == "sm_90a"
    assert record["counts"] == {
        "total": 2, "passed": 1, "failed": 0, "skipped": 1, "xfailed": 0, "xpassed": 0,
    }  # fmt: skip
    assert list(record["tests"]) == ["tests/a.py::one", "tests/b.py::two"]
    for key in ("date", "driver", "torch", "cuda", "nvrtc", "python", "selection", "seconds"):
        assert key in record
    path = write_record(record, tmp_path)
    assert path == tmp_path / "h200" / "verify.json"
    assert json.loads(path.read_text()) == record
    assert check_record(path) == []
    assert [file.name for file in path.parent.iterdir()] == ["verify.json"]


@pytest.mark.usefixtures("pretended_gpu")
def test_code_that_changes_while_the_tests_run_is_noticed(monkeypatch, tmp_path: Path):
    digests = iter(["before", "after"])
    monkeypatch.setattr(module, "code_digest", lambda: next(digests))
    monkeypatch.setattr(module, "run_tests", lambda root, marker, expression: {})
    with pytest.raises(RuntimeError, match="must stay as it is while the tests run"):
        collect(tmp_path)


def test_no_gpu_no_record(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="verify: machine must be one with a CUDA GPU"):
        collect(tmp_path)


@pytest.mark.parametrize("outcomes", [{}, {"a": "skipped"}])
def test_a_record_in_which_nothing_ran_is_not_written(tmp_path: Path, outcomes: dict[str, str]):
    with pytest.raises(ValueError, match="write_record: record must be of at least one test"):
        write_record(a_record(outcomes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def problems(tmp_path: Path, record: object) -> list[str]:
    path = tmp_path / "verify.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return check_record(path)


def test_a_good_record_has_no_problem(tmp_path: Path):
    assert problems(tmp_path, a_record({"a": "passed", "b": "skipped", "c": "xfailed"})) == []


def test_a_record_of_other_code_is_stale(tmp_path: Path):
    (found,) = problems(tmp_path, {**a_record({"a": "passed"}), "code_digest": "0" * 64})
    assert (
        "the code it covers changed since it was written" in found and "sparsetile verify" in found
    )


def test_every_failed_test_is_named(tmp_path: Path):
    found = problems(tmp_path, a_record({"a": "passed", "b": "failed", "c": "failed"}))
    assert [text.rsplit(" ", 2)[1:] for text in found] == [["b", "failed"], ["c", "failed"]]


@pytest.mark.parametrize("outcomes", [{}, {"a": "skipped"}])
def test_a_record_without_tests_proves_nothing(tmp_path: Path, outcomes: dict[str, str]):
    (found,) = problems(tmp_path, a_record(outcomes))
    assert "no test ran" in found


def test_a_record_of_part_of_the_tests_is_not_enough(tmp_path: Path):
    (found,) = problems(tmp_path, {**a_record({"a": "passed"}), "selection": "csr"})
    assert "covers only the tests selected by -k 'csr'" in found


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "cannot be read"),
        ([], f"has schema list, this checkout reads {SCHEMA}"),
        ({}, f"has schema None, this checkout reads {SCHEMA}"),
        ({**a_record({"a": "passed"}), "schema": 1}, f"has schema 1, this checkout reads {SCHEMA}"),
        ({"schema": SCHEMA, "code_digest": code_digest()}, "does not list an outcome per test"),
        (a_record({"a": "fine"}), "does not list an outcome per test"),
        ({"schema": SCHEMA, "tests": {"a": "passed"}}, "does not list an outcome per test"),
    ],
)
def test_a_file_that_is_no_record_is_told_so(tmp_path: Path, record: object, text: str):
    (found,) = problems(tmp_path, record)
    assert text in found


def test_a_file_that_is_not_there_cannot_be_read(tmp_path: Path):
    (found,) = check_record(tmp_path / "nothing.json")
    assert "cannot be read" in found
