"""The mutation run: how mutants are made, run and judged, and the record of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.mutate import (
    LEAST,
    RECORD_NAME,
    apply,
    check_mutations,
    collect,
    compile_mutant,
    kernels_with,
    main,
    outcome_of,
)
from tools.mutations import MUTATIONS, SUITES, Mutation, Suite
from tools.record import ROOT

from sparsetile.jit.source import DEVICE_TREE, device_tree_digest
from sparsetile.kernels import KERNELS
from tests.today import digests_of_today
from tests.tools.sanitizer import FACTS
from tools import mutate as module

RECORDS = sorted((ROOT / "results").glob(f"*/{RECORD_NAME}"))
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
def test_each_mutant_is_run_on_its_own_tree_and_judged(monkeypatch, capsys):
    started: list[tuple[int, int]] = []
    real = module.start_jobs

    def start(jobs: Any, folder: Path, parallel: int) -> Any:
        started.append((len(jobs), parallel))
        if len(started) == 1:
            return real(jobs, folder, parallel)
        return [{"exit": 1, "passed": 1, "test": "a", "error": "AssertionError", "seconds": 1.0}]

    monkeypatch.setattr(module, "start_jobs", start)
    words = ("FAIL", "HANG", "CRASH", "COMPILE", "MEMORY", "NOTHING")
    record = collect([mutant(word) for word in words], parallel=3)
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
    for name in ("fail", "hang", "crash"):
        assert entries[name]["test"].endswith("::test_device_code")
    assert entries["fail"]["error"] == "AssertionError" and entries["hang"]["seconds"] >= 8
    assert record["suites"]["fake"]["passed"] == 2
    assert record["parts"] == digests_of_today() and record["gpu"] == FACTS["gpu"]
    assert record["counts"]["hung"] == 1 and sum(record["counts"].values()) == len(words)
    assert "#define NOTHING: survived" in capsys.readouterr().err


@pytest.fixture
def answered(monkeypatch):
    """The runner answers with these results: first the suite's, then the mutations'."""

    def prepare(*results: dict[str, Any]) -> None:
        held = [{"seconds": 1.0, **result} for result in results]
        monkeypatch.setattr(module, "start_jobs", lambda jobs, folder, parallel: held[: len(jobs)])

    return prepare


PASSED = {"exit": 0, "passed": 5}
FAILED = {"exit": 1, "passed": 0, "test": "a", "error": "AssertionError", "text": ""}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("result", [FAILED, {"exit": 5, "passed": 0}, {"exit": 0, "passed": 0}])
def test_a_suite_that_does_not_pass_without_a_mutation_is_an_error(answered, result):
    answered(result, FAILED)
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
        ({"test": "a", "stopped": "", "signal": -11}, "crashed"),
    ],
)
def test_what_a_result_means(result: dict[str, Any], outcome: str):
    assert outcome_of(result) == outcome


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"before": "no such fragment"}, "exactly once, got 0 times"),
        ({"before": "int"}, "exactly once, got"),
        ({"file": "ptx/nothing.cuh"}, "in ptx/nothing.cuh exactly once, got 0 times"),
        ({"after": "#pragma once  // a comment"}, "must be code, got a comment or white space"),
    ],
)
def test_a_fragment_that_is_not_there_once_or_no_code_is_refused(tmp_path, changes, text):
    with pytest.raises(ValueError) as caught:
        apply(replace(mutant("FAIL"), **changes), tmp_path / "tree")
    assert text in str(caught.value) and "tools/mutations.py" in str(caught.value)


def files_of(tree: Path) -> set[str]:
    """Files of a device tree by their paths in it."""
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*.cu*")}


def test_only_the_named_file_of_the_copy_differs(tmp_path: Path):
    tree = apply(mutant("FAIL"), tmp_path / "tree")
    names = files_of(DEVICE_TREE)
    assert files_of(tree) == names
    differing = {
        name for name in names if (tree / name).read_bytes() != (DEVICE_TREE / name).read_bytes()
    }
    assert differing == {FILE}


def test_kernels_are_found_through_their_includes():
    assert kernels_with("rows/spmm_csr.cu") == ["spmm_csr"]
    assert set(kernels_with("rows/row_items.cuh")) == {
        "spmm_csr", "spmm_direct", "spmm_rstile", "spmm_brp", "spmm_half",
    }  # fmt: skip
    assert set(kernels_with(FILE)) == set(KERNELS)
    assert set(kernels_with("mma/wgmma.cuh")) < set(KERNELS)


# -- The mutations themselves


def test_there_are_enough_mutations_and_each_is_another():
    assert len(MUTATIONS) >= LEAST
    assert min(Counter(each.suite for each in MUTATIONS).values()) >= 3
    assert len({(each.file, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)


def test_every_file_of_device_code_has_a_mutation():
    assert {each.file for each in MUTATIONS} == files_of(DEVICE_TREE)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_each_mutation_applies_to_today_s_sources(mutation: Mutation):
    module.mutated(mutation)
    assert mutation.suite in SUITES and mutation.breaks
    assert "\n" not in mutation.before, "short and local"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_files_of_each_suite_exist(suite: Suite):
    assert suite.tests
    for name in suite.tests:
        assert (ROOT / name.partition("::")[0]).is_file(), name


def test_a_sample_of_the_mutants_compiles_and_differs():
    """Another one each time; ``python -m tools.mutate --compile`` does so for all."""
    for mutation in random.SystemRandom().sample(MUTATIONS, 1):
        assert compile_mutant(mutation), mutation.name


def test_a_mutant_that_changes_nothing_is_found():
    include = '#include "mma/mma.cuh"'
    unused = f"{include}\nstruct Unused {{}};"
    mutation = Mutation("pack/tf32_operand.cu", include, unused, "nothing", "bcsr")
    assert compile_mutant(mutation) == ""


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
    return {**body, **changes}


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


@pytest.mark.parametrize("outcome", ["survived", "invalid", "unfinished"])
def test_every_mutation_that_was_not_noticed_is_named(problems, outcome: str):
    record = a_record()
    record["mutations"][2]["outcome"] = outcome
    (found,) = problems(record)
    assert MUTATIONS[2].file in found and found.endswith(outcome)


def test_where_no_record_is_committed_the_readme_says_so():
    """Run `make mutate` on an H200 after a change of kernels, and take the sentence out again."""
    said = "has to be run again" in " ".join((ROOT / "README.md").read_text().split())
    assert said == (not (ROOT / "results" / "h200" / RECORD_NAME).is_file())


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_in_every_committed_record_all_were_noticed(path: Path):
    assert check_mutations(path) == []


@pytest.mark.usefixtures("checkout")
def test_the_test_that_noticed_a_mutation_before_runs_first(tmp_path: Path):
    chosen = [each for each in MUTATIONS if each.suite == "direct"][:3]
    record = a_record()
    record["mutations"][MUTATIONS.index(chosen[1])]["test"] = ""
    path = tmp_path / "results" / "h200" / RECORD_NAME
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    (tmp_path / "results" / "broken").mkdir()
    (tmp_path / "results" / "broken" / RECORD_NAME).write_text("{")
    other = replace(chosen[2], after=f"{chosen[2].after} ;")
    jobs = module._jobs([*chosen[:2], other], tmp_path / "jobs")
    assert [job.first for job in jobs] == ["", "tests/a.py::b", "", ""], "the suite, then mutations"


# -- The command


@pytest.fixture
def recorded(monkeypatch, tmp_path: Path):
    """The command on a machine whose run ends as the test says."""

    def prepare(outcome: str) -> Path:
        def run(chosen: Any, parallel: int) -> dict[str, Any]:
            record = a_record(counts={}, seconds=1.0)
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


def test_a_survivor_is_recorded_and_exit_code_1(recorded, tmp_path: Path):
    path = recorded("survived")
    assert main(["--out", str(tmp_path)]) == 1 and path.is_file()


@pytest.mark.usefixtures("checkout")
def test_part_of_the_mutations_leaves_the_record_alone(recorded, capsys):
    path = recorded("failed")
    assert main(["--only", MUTATIONS[0].name]) == 0
    assert "the record was left as it is" in capsys.readouterr().err and not path.exists()


def test_a_name_that_no_mutation_has_is_refused(capsys):
    assert main(["--only", "no such mutation"]) == 2
    assert "mutate: --only must be part of the name of a mutation" in capsys.readouterr().err


def test_all_mutants_can_be_compiled_without_a_gpu(monkeypatch, capsys, constants):
    labels = iter(["a[]", ""])
    constants(module, MUTATIONS=MUTATIONS[:2])
    monkeypatch.setattr(module, "compile_mutant", lambda mutation: next(labels))
    assert main(["--compile", "--parallel", "1"]) == 1
    shown = capsys.readouterr().err
    assert "compiles" in shown and "changes no code of the kernels compiled" in shown
