"""The GPU record: how tests are run and judged, what is written, when it is out of date."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools.digest import code_digest
from tools.record import (
    SCHEMA,
    check_record,
    collect,
    command_of,
    counting,
    run_tests,
    write_record,
)

from tests.today import digests_of_today, gpu_tests_of_today
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

@pytest.mark.gpu
def test_kept():
    raise AssertionError("must not run")
"""
CRASH = """
import os, pytest

@pytest.mark.gpu
def test_kills_the_process():
    os._exit(7)
"""


# Of one system, of another, and of none.
ACC, WCSR, NONE = "tests/a.py::t[acc]", "tests/a.py::t[wcsr-tall]", "tests/a.py::t[a]"


def counts(outcomes: dict[str, str]) -> dict[str, int]:
    words = list(outcomes.values())
    return {"total": len(words), **{name: words.count(name) for name in module._OUTCOMES}}


def a_record(outcomes: dict[str, str], *changed: str, **facts: Any) -> dict[str, Any]:
    """A record of today whose tests ended as given; parts that are named have changed since."""
    return {
        "schema": SCHEMA,
        "date": "2026-01-02T03:04:05+00:00",
        "gpu": {"name": "NVIDIA H200", "slug": "h200"},
        "parts": {**digests_of_today(), **dict.fromkeys(changed, "0" * 64)},
        "dates": dict.fromkeys(digests_of_today(), "2026-01-02T03:04:05+00:00"),
        "ran": len(outcomes),
        "seconds": 1.5,
        "counts": counts(outcomes),
        "tests": module._grouped(outcomes, gpu_tests_of_today()),
        **facts,
    }


def an_old_record(outcomes: dict[str, str], **facts: Any) -> dict[str, Any]:
    """The same as it was before there were parts."""
    return {
        "schema": SCHEMA - 1,
        "date": "2026-01-02T03:04:05+00:00",
        "gpu": {"name": "NVIDIA H200", "slug": "h200"},
        "code_digest": code_digest(),
        "tests": {name: {"outcome": word, "seconds": 0.1} for name, word in outcomes.items()},
        **facts,
    }


@pytest.fixture(autouse=True)
def _few_processes(constants) -> None:
    constants(module, PROCESSES=2)


def checkout(folder: Path, text: str) -> Path:
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (folder / "tests" / "test_some.py").write_text(text)
    return folder


def test_marked_tests_are_run_elsewhere_and_each_outcome_is_kept(tmp_path: Path, capfd):
    """Also where one of them ends its process: that is its own failure alone. Tests that a record
    has already are there and are not run."""
    kept = "tests/test_some.py::test_kept"
    found, there = run_tests(
        checkout(tmp_path, TESTS + CRASH),
        marker="gpu",
        kept=[kept, "tests/test_some.py::test_gone"],
    )
    outcomes = {name.rpartition("::")[2]: outcome for name, outcome in found.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_known_to_fail": "xfailed",
        "test_cannot_be_set_up": "failed",
        "test_kills_the_process": "failed",
    }
    assert all(name.startswith("tests/test_some.py::") for name in found)
    assert there == {*found, kept}
    written = capfd.readouterr()
    assert written.out == "" and "test_fails" in written.err


def test_a_crash_of_the_whole_process_is_reported_and_no_outcome_invented(
    tmp_path: Path, constants
):
    constants(module, PROCESSES=0)  # with others, the test that crashed has failed
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
    answer(monkeypatch, 2, {"tests/a.py::b": "passed"})
    with pytest.raises(RuntimeError, match="must run to their end, got exit code 2"):
        run_tests(tmp_path, marker="gpu")


def test_a_file_that_cannot_be_imported_counts_as_failed():
    outcomes = module._Outcomes()
    outcomes.pytest_collectreport(SimpleNamespace(failed=True, nodeid="tests/a.py"))
    outcomes.pytest_collectreport(SimpleNamespace(failed=False, nodeid="tests/b.py"))
    assert outcomes.tests == {"tests/a.py": "failed"}


@pytest.fixture
def pretended_gpu(monkeypatch, torch_cuda) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    torch_cuda(is_available=True, device_count=1, get_device_properties=properties)
    monkeypatch.setattr(module, "device_arch", lambda device: "sm_90a")


def test_a_chosen_capability_has_a_record_of_its_own(pretended_gpu, environment, tmp_path: Path):
    environment(SPARSETILE_CAPABILITY="8.0")
    facts = module.machine_facts()
    assert facts["gpu"]["slug"] == "h200/as-sm80"
    path = write_record({"counts": {"total": 1, "skipped": 0}, **facts}, tmp_path)
    assert path == tmp_path / "h200" / "as-sm80" / "verify.json"


@pytest.fixture
def tests_end(monkeypatch, pretended_gpu):
    """Say how the tests end that a run finds; returns the tests that were run."""
    ran: list[str] = []

    def end(outcomes: dict[str, str]) -> list[str]:
        def run(root: Path, *, marker: str, expression: str | None, kept: Any):
            assert marker == "gpu"
            ran[:] = [name for name in outcomes if name not in kept]
            return {name: outcomes[name] for name in ran}, set(outcomes)

        monkeypatch.setattr(module, "run_tests", run)
        return ran

    return end


def made(tests_end, tmp_path: Path, outcomes: dict[str, str], held: dict[str, Any] | None = None):
    """Collect with a record held, of this machine; return the new one and what was run."""
    ran = tests_end(outcomes)
    if held is not None:
        write_record({"counts": counts(outcomes), **held, **module.machine_facts()}, tmp_path)
    return collect(tmp_path, earlier=[tmp_path / "empty", tmp_path]), list(ran)


def test_a_record_says_what_ran_where_and_on_which_code(tests_end, tmp_path: Path):
    tests = {NONE: "skipped", WCSR: "passed", ACC: "passed"}
    record, ran = made(tests_end, tmp_path, tests)
    assert (
        record["schema"] == SCHEMA and record["parts"] == digests_of_today() and ran == list(tests)
    )
    assert record["gpu"]["slug"] == "h200" and record["gpu"]["arch"] == "sm_90a"
    assert record["counts"] == counts(tests) and set(record["dates"]) == set(digests_of_today())
    assert record["tests"] == {
        "acc": {"tests/a.py": {"passed": ["t[acc]"]}},
        "shared": {"tests/a.py": {"skipped": ["t[a]"]}},
        "wcsr": {"tests/a.py": {"passed": ["t[wcsr-tall]"]}},
    }
    for key in ("date", "driver", "torch", "cuda", "nvrtc", "python", "ran", "seconds"):
        assert key in record
    path = write_record(record, tmp_path)
    assert path == tmp_path / "h200" / "verify.json"
    assert json.loads(path.read_text()) == record
    assert check_record(path, tests) == []
    assert [file.name for file in path.parent.iterdir()] == ["verify.json"]


ALL = {ACC: "passed", WCSR: "passed", NONE: "passed"}


@pytest.mark.parametrize(
    "changed, ran",
    [
        ((), []),
        (("acc",), [ACC]),
        (("wcsr",), [WCSR]),
        (("acc", "wcsr"), [ACC, WCSR]),
        (("brp",), []),
        (("shared",), [ACC, WCSR, NONE]),
    ],
)
def test_only_tests_of_parts_that_changed_are_run_again(tests_end, tmp_path, changed, ran):
    held = a_record(ALL, *changed)
    record, got = made(tests_end, tmp_path, ALL, held)
    assert got == ran and record["ran"] == len(ran) and record["counts"]["passed"] == 3
    assert record["parts"] == digests_of_today() and record["tests"] == held["tests"]
    same = {name for name in digests_of_today() if record["dates"][name] == held["date"]}
    assert same == (set() if "shared" in changed else {*digests_of_today()} - {*changed})


def test_new_and_failed_tests_are_run_and_removed_ones_drop_out(tests_end, tmp_path: Path):
    removed = {"tests/a.py::gone": "passed", "tests/a.py::gone too": "failed"}
    held = a_record({ACC: "failed", WCSR: "passed", **removed})
    assert [text.endswith(" failed") for text in problems(tmp_path, held)] == [True, True]
    record, ran = made(tests_end, tmp_path, ALL, held)
    assert ran == [ACC, NONE] and record["counts"] == counts(ALL)
    assert "gone" not in json.dumps(record)


@pytest.mark.parametrize(
    "facts",
    [{"driver": "600"}, {"schema": 1}, {"tests": 3}, {"parts": None}, {"tests": {"acc": 3}}],
)
def test_outcomes_of_another_machine_or_of_no_record_are_not_kept(tests_end, tmp_path, facts):
    tests_end(ALL)
    held = {**a_record(ALL), **module.machine_facts(), **facts}
    write_record(held, tmp_path)
    assert collect(tmp_path, earlier=[tmp_path])["ran"] == 3


def test_an_outcome_does_not_count_for_a_part_that_its_test_was_not_run_for(tmp_path: Path):
    """A file that names another system since then: the record knew nothing of that."""
    record = a_record(ALL)
    assert counting(record, gpu_tests_of_today()) == ALL
    record["tests"]["brp"] = record["tests"].pop("acc")
    assert counting(record, gpu_tests_of_today()) == {WCSR: "passed", NONE: "passed"}
    (found,) = problems(tmp_path, record, ALL)
    assert f"lacks {ACC}; run" in found


def test_a_record_from_before_there_were_parts_counts_while_its_code_is_today_s(
    tests_end, tmp_path: Path
):
    assert problems(tmp_path, an_old_record(ALL)) == []
    (found,) = problems(tmp_path, an_old_record(ALL, code_digest="0"))
    assert "code changed since it was run (some part)" in found
    record, ran = made(tests_end, tmp_path, ALL, an_old_record(ALL))
    assert (
        ran == []
        and record["parts"] == digests_of_today()
        and set(record["dates"].values()) == {"2026-01-02T03:04:05+00:00"}
    )
    assert record["tests"] == a_record(ALL)["tests"]
    _, ran = made(tests_end, tmp_path, ALL, an_old_record(ALL, code_digest="0"))
    assert ran == list(ALL)


@pytest.mark.usefixtures("pretended_gpu")
def test_code_that_changes_while_the_tests_run_is_noticed(monkeypatch, tmp_path: Path, digests):
    today = digests_of_today()
    digests += [today, {**today, "acc": "0"}]
    monkeypatch.setattr(module, "run_tests", lambda root, **_: ({}, set()))
    with pytest.raises(RuntimeError, match="must stay as it is while the tests run"):
        collect(tmp_path)


def test_no_gpu_no_record(no_gpu: None, tmp_path: Path):
    with pytest.raises(ValueError, match="verify: machine must be one with a CUDA GPU"):
        collect(tmp_path)


@pytest.mark.parametrize("outcomes", [{}, {"a": "skipped"}])
def test_a_record_in_which_nothing_ran_is_not_written(tmp_path: Path, outcomes: dict[str, str]):
    with pytest.raises(ValueError, match="write_record: record must be of at least one test"):
        write_record(a_record(outcomes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def problems(tmp_path: Path, record: object, there: Iterable[str] = ()) -> list[str]:
    path = tmp_path / "verify.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return check_record(path, there)


def test_a_good_record_has_no_problem(tmp_path: Path):
    assert problems(tmp_path, a_record({"a": "passed", "b": "skipped", "c": "xfailed"})) == []


def test_parts_that_changed_are_named(tmp_path: Path):
    (found,) = problems(tmp_path, a_record({"a": "passed"}, "brp", "wcsr"))
    assert "code changed since it was run (brp, wcsr)" in found and "sparsetile verify" in found


def test_tests_that_are_not_in_it_are_named_unless_they_need_no_gpu(tmp_path: Path):
    record = a_record({ACC: "passed"})
    assert problems(tmp_path, record, [ACC, "tests/a.py::t[cpu-cuda]"]) == []
    (found,) = problems(tmp_path, record, [ACC, WCSR, NONE])
    assert f"lacks {WCSR} and 1 more" in found


def test_an_outcome_counts_if_the_test_uses_fewer_parts_than_when_it_ran(tmp_path: Path):
    record = a_record({ACC: "passed"})
    (held,) = record["tests"].values()
    record["tests"] = {"acc brp": held}
    assert problems(tmp_path, record, [ACC]) == []
    record["tests"] = {"brp": held}
    (found,) = problems(tmp_path, record, [ACC])
    assert f"lacks {ACC}" in found


def test_every_failed_test_is_named(tmp_path: Path):
    found = problems(tmp_path, a_record({"a": "passed", "b": "failed", "c": "failed"}))
    assert [text.rsplit(" ", 2)[1:] for text in found] == [["b", "failed"], ["c", "failed"]]


def test_a_command_names_no_folder_of_the_machine(tmp_path: Path):
    command = command_of("study", ["--out", str(tmp_path / "a.jsonl"), "--data", "data/core"])
    assert command == "python -m tools.study --out a.jsonl --data data/core"


@pytest.mark.parametrize("outcomes", [{}, {"a": "skipped"}])
def test_a_record_without_tests_proves_nothing(tmp_path: Path, outcomes: dict[str, str]):
    (found,) = problems(tmp_path, a_record(outcomes))
    assert "no test ran" in found


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "cannot be read"),
        ([], f"has schema list, this checkout reads {SCHEMA}"),
        ({}, f"has schema None, this checkout reads {SCHEMA}"),
        (
            lambda: a_record({"a": "passed"}, schema=1),
            f"has schema 1, this checkout reads {SCHEMA}",
        ),
        ({"schema": SCHEMA, "parts": {}}, "does not list an outcome per test"),
        (lambda: an_old_record({"a": "fine"}), "does not list an outcome per test"),
        (lambda: a_record({"a": "fine"}), "does not list an outcome per test"),
        ({"schema": SCHEMA, "tests": {"a": "passed"}}, "does not list an outcome per test"),
    ],
)
def test_a_file_that_is_no_record_is_told_so(tmp_path: Path, record: Any, text: str):
    (found,) = problems(tmp_path, record() if callable(record) else record)
    assert text in found


def test_a_file_that_is_not_there_cannot_be_read(tmp_path: Path):
    (found,) = check_record(tmp_path / "nothing.json")
    assert "cannot be read" in found
