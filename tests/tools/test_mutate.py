"""The mutation run: how mutants are made, run and judged, and the record of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.mutate import (
    LEAST,
    PARTIAL_NAME,
    RECORD_NAME,
    check_mutations,
    collect,
    main,
    outcome_of,
)
from tools.mutations import MUTATIONS, SUITES, Mutation, Suite
from tools.record import ROOT

from sparsetile.jit.source import device_tree_digest
from tests.today import digests_of_today
from tests.tools.sanitizer import FACTS
from tools import mutate as module

RECORDS = sorted((ROOT / "results").glob(f"*/{RECORD_NAME}"))
PARTIAL = sorted((ROOT / "results").glob(f"*/{PARTIAL_NAME}"))
FILE = "ptx/ptx.cuh"
# Behaves as the mutated device tree says.
FAKE = """
import os, time
from pathlib import Path
import pytest
from sparsetile.core.errors import CompileError
from sparsetile.jit import source

@pytest.fixture(params=["csr", "acc"])
def system(request):
    return request.param

@pytest.mark.gpu
def test_first(system):
    assert system == "csr", "the suite asks for this system alone"
    assert os.environ["SPARSETILE_CACHE_DIR"].endswith("kernels"), "a cache of its own"

@pytest.mark.gpu
def test_slow_and_left_out():
    raise AssertionError("must not run")

@pytest.mark.gpu
def test_device_code():
    text = (source.DEVICE_TREE / "ptx" / "ptx.cuh").read_text()
    for word in ("FAIL", "HANG", "CRASH", "COMPILE", "MEMORY"):
        if f"#define {word}" in text:
            break
    else:
        return
    assert source.device_tree_digest() != DIGEST
    if word == "HANG":
        time.sleep(600)
    if word == "CRASH":
        os._exit(3)
    if word == "COMPILE":
        raise CompileError("compile: it must compile")
    if word == "MEMORY":
        raise RuntimeError("CUDA error: out of memory")
    assert word is None

def test_not_marked():
    raise AssertionError("must not run")
"""


def mutant(word: str, **changes: Any) -> Mutation:
    return Mutation(
        FILE, "#pragma once", f"#pragma once\n#define {word}", word.lower(), "fake", **changes
    )


@pytest.fixture
def fake(monkeypatch, facts, tmp_path: Path, constants) -> None:
    """A suite that reads the device tree instead of running on a GPU."""
    test = tmp_path / "test_fake.py"
    test.write_text(FAKE.replace("DIGEST", repr(device_tree_digest())))
    monkeypatch.setitem(SUITES, "fake", Suite((str(test),), ("csr",), "left_out"))
    constants(module, TEST_SECONDS=8.0)


@pytest.mark.usefixtures("fake")
def test_each_mutant_is_run_on_its_own_tree_and_judged(monkeypatch, tmp_path: Path, capsys):
    started: list[tuple[int, int]] = []
    passed: dict[str, int] = {}
    real = module.start_jobs

    def start(jobs: Any, folder: Path, parallel: int, until: float) -> Any:
        started.append((len(jobs), parallel))
        if len(started) == 1:
            results = real(jobs, folder, parallel, until)
            for job, result in zip(jobs, results, strict=True):
                passed[job.name.partition("#define ")[2]] = result.get("passed")
            return results
        return [{"exit": 1, "passed": 1, "test": "a", "error": "AssertionError", "seconds": 1.0}]

    monkeypatch.setattr(module, "start_jobs", start)
    words = ("FAIL", "HANG", "CRASH", "COMPILE", "MEMORY", "NOTHING")
    known, first = tmp_path / "known.json", f"{tmp_path / 'test_fake.py'}::test_device_code"
    facts = [module._facts(mutant(word)) for word in ("FAIL", "NOTHING")]
    known.write_text(
        json.dumps({"mutations": [{**each, "test": first, "seconds": 1} for each in facts]})
    )
    record = collect([mutant(word) for word in words], parallel=3, rest=known)
    entries = {entry["breaks"]: entry for entry in record["mutations"]}
    assert {name: entry["outcome"] for name, entry in entries.items()} == {
        "fail": "failed",
        "hang": "hung",
        "crash": "crashed",
        "compile": "invalid",
        "memory": "failed",
        "nothing": "survived",
    }
    assert started == [(7, 3), (1, 1)], "what the machine ran out of is tried again alone"
    assert (passed["FAIL"], passed["COMPILE"]) == (0, 1), "the test that noticed it runs alone"
    assert passed["NOTHING"] == 3, "if it passes, the whole suite runs too"
    for name in ("fail", "hang", "crash"):
        assert entries[name]["test"].endswith("::test_device_code")
    assert entries["fail"]["error"] == "AssertionError" and entries["hang"]["seconds"] >= 8
    assert record["suites"]["fake"]["passed"] == 2
    assert record["parts"] == digests_of_today() and record["gpu"] == FACTS["gpu"]
    assert record["counts"]["hung"] == 1 and sum(record["counts"].values()) == len(words)
    assert "#define NOTHING: survived" in capsys.readouterr().err


@pytest.fixture
def answered(monkeypatch):
    """The runner answers with these results: first the suite's, then the mutations'. The names of
    the jobs that it gets are returned."""

    def prepare(*results: dict[str, Any]) -> list[str]:
        left = [{"seconds": 1.0, **result} for result in results]
        names: list[str] = []

        def start(jobs: Any, folder: Path, parallel: int, until: float) -> Any:
            names.extend(job.name for job in jobs)
            return [left.pop(0) if left else {"seconds": 1.0, **PASSED} for _ in jobs]

        monkeypatch.setattr(module, "start_jobs", start)
        return names

    return prepare


PASSED = {"exit": 0, "passed": 5}
FAILED = {"exit": 1, "passed": 0, "test": "a", "error": "AssertionError", "text": ""}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("result", [FAILED, {"exit": 5, "passed": 0}, {"exit": 0, "passed": 0}])
def test_a_suite_that_does_not_pass_without_a_mutation_is_an_error(answered, result):
    answered(result, FAILED, result)
    with pytest.raises(RuntimeError, match="suite fake must pass on the sources as they are"):
        collect([mutant("FAIL")], parallel=2)


@pytest.mark.usefixtures("fake")
def test_code_that_changes_meanwhile_is_noticed(answered, digests):
    answered(PASSED, FAILED)
    digests += ["before", "after"]
    with pytest.raises(RuntimeError, match="must stay as it is while the tests run"):
        collect([mutant("FAIL")], parallel=2)


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"exit": 0, "passed": 3}, "survived"),
        ({"exit": 1, "passed": 3, "test": "a", "error": "AssertionError", "text": ""}, "failed"),
        ({"exit": 1, "passed": 0, "test": "a", "error": "CompileError", "text": ""}, "invalid"),
        (
            {"exit": 1, "passed": 0, "test": "a", "error": "X", "text": "CUDA out of memory"},
            "unfinished",
        ),
        ({"exit": 2, "passed": 0}, "unfinished"),  # a file that cannot be imported
        ({"exit": 5, "passed": 0}, "unfinished"),  # nothing was collected
        ({"exit": 0, "passed": 0}, "unfinished"),  # everything was skipped
        ({"test": "a", "stopped": "test", "signal": -9}, "hung"),
        ({"test": "a", "stopped": "job", "signal": -9}, "unfinished"),
        ({"test": "a", "stopped": "time", "signal": -9}, "not run"),
        ({"test": "a", "stopped": "", "signal": -11}, "crashed"),
    ],
)
def test_what_a_result_means(result: dict[str, Any], outcome: str):
    assert outcome_of(result) == outcome


# -- Runs that are cut short, and what need not run

RUN_TWO = """
import json, sys, time
from pathlib import Path
from tools import mutant_runner

def run(job):
    time.sleep(float(job.name))
    return {"exit": 0, "passed": 1}

mutant_runner.LAST_SECONDS = 1.0
jobs = []
for name in ("0", "1.2", "60", "0"):
    folder = Path(sys.argv[1]) / str(len(jobs))
    folder.mkdir()
    jobs.append(mutant_runner.AnyJob(name, ".", [], str(folder), 90, 90))
mutant_runner.run_jobs(jobs, 2, run, time.time() + 0.6)
found = [Path(job.folder) / "result.json" for job in jobs]
print(json.dumps([json.loads(path.read_text()) if path.is_file() else None for path in found]))
"""


def test_after_the_time_no_job_starts_and_those_that_run_have_a_little_longer(tmp_path: Path):
    command = [sys.executable, "-c", RUN_TWO, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=50)
    quick, late, cut, never = json.loads(ended.stdout)
    assert outcome_of(quick) == outcome_of(late) == "survived"
    assert outcome_of(cut) == "not run" and cut["seconds"] < 10
    assert never is None


@pytest.mark.usefixtures("fake")
def test_where_no_time_is_left_a_run_says_what_it_did_not_do(capsys):
    record = collect([mutant("FAIL"), mutant("NOTHING")], parallel=2, seconds=0.0)
    assert record["counts"] == {"not run": 2} and record["suites"] == {}
    assert module.suites_not_run(record) == "fake"
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_a_second_try_ends_with_the_time_too(monkeypatch):
    memory = {**FAILED, "text": "out of memory", "seconds": 1.0}
    begun: list[float] = []

    def start(jobs: Any, folder: Path, parallel: int, until: float) -> Any:
        begun.append(until)
        return [{"seconds": 1.0, **PASSED}, memory] if len(begun) == 1 else [module.NOT_RUN]

    monkeypatch.setattr(module, "start_jobs", start)
    record = collect([mutant("FAIL")], parallel=2, seconds=300.0)
    assert record["counts"] == {"not run": 1} and record["suites"]["fake"]["passed"] == 5
    assert begun[0] == begun[1] < time.time() + 300


@pytest.fixture
def earlier(answered, tmp_path: Path, constants) -> tuple[Path, list[Mutation]]:
    """A record of three mutations, of which tests noticed one; the second did not run."""
    chosen = [mutant(word) for word in ("FAIL", "HANG", "NOTHING")]
    constants(module, MUTATIONS=chosen)
    answered(PASSED, FAILED, {"stopped": "time"}, PASSED)
    path = tmp_path / RECORD_NAME
    path.write_text(json.dumps(collect(chosen, parallel=2)))
    return path, chosen


@pytest.mark.usefixtures("fake")
def test_the_rest_of_a_record_runs_and_both_are_recorded(answered, earlier):
    path, chosen = earlier
    started = answered(FAILED, FAILED)
    record = collect(chosen, parallel=2, rest=path)
    assert started == [f"0 {chosen[1].name}", f"1 {chosen[2].name}"], "the suite passed before"
    assert record["counts"] == {"failed": 3} and record["kept"] == 1
    assert record["suites"] == {"fake": {"passed": 5, "seconds": 1.0}}


@pytest.mark.usefixtures("fake")
def test_a_suite_that_did_not_run_is_run_for_mutations_that_are_kept(answered, earlier):
    path, chosen = earlier
    path.write_text(json.dumps({**json.loads(path.read_text()), "suites": {}}))
    started = answered(PASSED)
    record = collect(chosen[:1], parallel=2, rest=path)
    assert started == ["suite fake"] and record["counts"] == {"failed": 1}
    assert module.suites_not_run(record) == ""


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "changes",
    [
        {"parts": {"shared": "of other code"}},
        {"gpu": {"name": "NVIDIA B200", "slug": "b200"}},
        {"schema": 1},
    ],
)
def test_nothing_is_kept_of_other_code_or_another_gpu(answered, earlier, changes):
    path, chosen = earlier
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    started = answered(PASSED, FAILED, FAILED, FAILED)
    assert collect(chosen, parallel=2, rest=path)["kept"] == 0
    assert len(started) == 4


@pytest.mark.usefixtures("fake")
def test_a_mutation_that_is_another_now_is_not_kept(answered, earlier, constants):
    path, chosen = earlier
    chosen = [replace(chosen[0], breaks="something else"), *chosen[1:]]
    constants(module, MUTATIONS=chosen)
    answered(FAILED, FAILED, FAILED)
    record = collect(chosen, parallel=2, rest=path)
    assert record["kept"] == 0 and len(record["mutations"]) == 3


def verified(test: str, *outcomes: str, **changes: Any) -> dict[str, Any]:
    """A record of ``sparsetile verify`` of today with these outcomes of a file's tests."""
    tests = {"csr": {test: {outcome: ["test_a[csr]"] for outcome in outcomes}}}
    body = {"schema": 3, "date": "today", **FACTS, "parts": digests_of_today(), "tests": tests}
    return {**body, **changes}


@pytest.mark.parametrize(
    ("outcomes", "changes", "proven"),
    [
        (("passed", "skipped"), {}, True),
        (("skipped",), {}, False),
        (("passed", "failed"), {}, False),
        (("passed", "xpassed"), {}, False),
        (("passed",), {"parts": {}}, False),
        (("passed",), {"driver": "1.0"}, False),
        (("passed",), {"schema": 2}, False),
        ((), {}, False),
    ],
)
@pytest.mark.usefixtures("fake")
def test_a_suite_rests_on_the_record_of_verify_if_all_its_tests_pass_there(
    answered, checkout, outcomes, changes, proven
):
    path = checkout / "results" / "h200" / "verify.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(verified(SUITES["fake"].tests[0], *outcomes, **changes)))
    started = answered(*([] if proven else [PASSED]), FAILED)
    record = collect([mutant("FAIL")], parallel=2)
    assert ("suite fake" not in started) == proven and record["counts"] == {"failed": 1}
    rests_on = {"proof": "verify.json", "date": "today"}
    assert record["suites"]["fake"] == (rests_on if proven else {"passed": 5, "seconds": 1.0})


# -- The record


def a_record(**changes: Any) -> dict[str, Any]:
    """A record of today in which every mutation was noticed."""
    entries = [
        {
            **module._facts(each),
            "outcome": "failed",
            "test": "tests/a.py::b",
            "seconds": 1.0,
        }
        for each in MUTATIONS
    ]
    body = {"schema": module.SCHEMA, **FACTS, "parts": digests_of_today(), "mutations": entries}
    return {**body, "suites": {key: {"passed": 1, "seconds": 1.0} for key in SUITES}, **changes}


@pytest.fixture
def problems(tmp_path: Path):
    def check(record: object) -> list[str]:
        path = tmp_path / RECORD_NAME
        path.write_text(record if isinstance(record, str) else json.dumps(record))
        return check_mutations(path)

    return check


def test_a_record_of_today_has_no_problem(problems):
    assert problems(a_record()) == []


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "cannot be read"),
        ({"schema": 7}, "has schema 7"),
        (lambda: a_record(mutations=3), "does not list an outcome per mutation"),
        (lambda: a_record(mutations=[{}]), "does not list an outcome per mutation"),
    ],
)
def test_a_file_that_is_no_record_of_today_is_reported(problems, record: Any, text: str):
    (found,) = problems(record() if callable(record) else record)
    assert text in found and "make mutate" in found


def test_too_few_or_other_mutations_are_reported(problems):
    found = problems(a_record(mutations=a_record()["mutations"][: LEAST - 1]))
    assert f"holds {LEAST - 1} mutations, {LEAST} are the least" in found[0]
    assert "tools/mutations.py changed" in found[1]


@pytest.mark.parametrize("outcome", ["survived", "invalid", "unfinished", "not run"])
def test_every_mutation_that_was_not_noticed_is_named(problems, outcome: str):
    record = a_record()
    record["mutations"][2]["outcome"] = outcome
    (found,) = problems(record)
    assert MUTATIONS[2].file in found and found.endswith(outcome)


def test_suites_that_did_not_run_without_mutations_are_named(problems):
    record = a_record()
    del record["suites"]["csr"], record["suites"]["gat"]
    (found,) = problems(record)
    assert "suites did not run without mutations (csr, gat)" in found


def test_where_no_record_is_committed_the_readme_says_how_many_are_left():
    """Run `make mutate` on an H200 after a change of kernels, and take the sentence out again."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    folder = ROOT / "results" / "h200"
    assert ("have yet to run" in readme) == (not (folder / RECORD_NAME).is_file())


def _settled(path: Path) -> list[dict[str, Any]]:
    """Entries of a part of a record that are mutations of today, and were noticed."""
    wanted = {module._key(module._facts(each)) for each in MUTATIONS}
    entries = json.loads(path.read_text())["mutations"]
    return [e for e in entries if module._key(e) in wanted and e["outcome"] in module.NOTICED]


@pytest.mark.parametrize("path", PARTIAL, ids=lambda path: path.parent.name)
def test_in_every_committed_part_of_a_record_all_that_ran_were_noticed(path: Path):
    """Mutations that came since then have yet to run, as those that it had no time for."""
    newer = "tools/mutations.py changed since it was written"
    found = check_mutations(path)
    assert found and all(each.endswith(" not run") or newer in each for each in found)
    assert len(_settled(path)) >= LEAST


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_in_every_committed_record_all_were_noticed(path: Path):
    assert check_mutations(path) == []


def test_the_test_that_noticed_a_mutation_before_runs_first(tmp_path: Path):
    """Jobs of which such a test is known are quick and start last, of those the longest first."""
    chosen = [each for each in MUTATIONS if each.suite == "direct"][:4]
    record = a_record()
    record["mutations"][MUTATIONS.index(chosen[1])]["test"] = ""
    record["mutations"][MUTATIONS.index(chosen[3])]["seconds"] = 47.0
    path, broken = tmp_path / RECORD_NAME, tmp_path / "broken.json"
    path.write_text(json.dumps(record))
    broken.write_text("{")
    other = replace(chosen[2], after=f"{chosen[2].after} ;")
    given = [*chosen[:2], other, chosen[3]]
    jobs = module._jobs(["direct"], given, tmp_path / "jobs", [broken, path])
    assert list(jobs) == ["direct", chosen[1], other, chosen[3], chosen[0]]
    assert [job.first for job in jobs.values()] == ["", "", "", *["tests/a.py::b"] * 2]


def test_if_no_record_names_a_test_the_suite_may(tmp_path: Path):
    (mutation,) = (each for each in MUTATIONS if each.before == "end - begin > job.segment")
    jobs = module._jobs([mutation.suite], [mutation], tmp_path / "jobs", [])
    assert [job.first for job in jobs.values()] == ["", SUITES["grouped"].first]


# -- The command


@pytest.fixture
def recorded(monkeypatch, tmp_path: Path):
    """The command on a machine whose run ends as the test says."""

    def prepare(outcome: str, **changes: Any) -> Path:
        def run(chosen: Any, *rest: Any) -> dict[str, Any]:
            record = a_record(counts={}, seconds=1.0, **changes)
            record["mutations"] = record["mutations"][: len(chosen)]
            for entry in record["mutations"]:
                entry["outcome"] = outcome
            return record

        monkeypatch.setattr(module, "collect", run)
        return tmp_path / "h200" / RECORD_NAME

    return prepare


def test_the_command_writes_the_record(recorded, tmp_path: Path):
    path = recorded("failed")
    assert main(["--out", str(tmp_path)]) == 0
    assert check_mutations(path) == []


def test_a_record_that_lacks_mutations_has_another_name(recorded, tmp_path: Path):
    path = recorded("not run")
    assert main(["--out", str(tmp_path)]) == 1
    assert not path.exists() and path.with_name(PARTIAL_NAME).is_file()


def test_a_survivor_is_recorded_and_exit_code_1(recorded, tmp_path: Path):
    path = recorded("survived")
    assert main(["--out", str(tmp_path)]) == 1 and path.is_file()


def test_the_options_reach_the_run(monkeypatch, recorded, tmp_path: Path):
    recorded("failed")
    asked: list[Any] = []
    real = module.collect
    monkeypatch.setattr(module, "collect", lambda *given: asked.append(given) or real(*given))
    options = ["--seconds", "30", "--rest", "a.json", "--parallel", "3", "--out", str(tmp_path)]
    assert main(options) == 0
    assert asked == [(list(MUTATIONS), 3, 30.0, Path("a.json"))]


def test_a_suite_that_did_not_run_is_named_and_exit_code_1(recorded, tmp_path: Path, capsys):
    recorded("failed", suites={})
    assert main(["--out", str(tmp_path)]) == 1
    assert "suites did not run without mutations: csr" in capsys.readouterr().err


@pytest.mark.usefixtures("checkout")
def test_part_of_the_mutations_leaves_the_record_alone(recorded, capsys):
    path = recorded("failed")
    assert main(["--only", MUTATIONS[0].name]) == 0
    assert "the record was left as it is" in capsys.readouterr().err and not path.exists()


def test_a_name_that_no_mutation_has_is_refused(capsys):
    assert main(["--only", "no such mutation"]) == 2
    assert "mutate: --only must be part of the name of a mutation" in capsys.readouterr().err
