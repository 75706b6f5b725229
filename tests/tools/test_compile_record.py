"""The compile record: it is of today's device code, nothing spills unlisted, a sample compiles.

No GPU is needed. ``make compile-all`` compiles every configuration and writes the record.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tools.compile_all import (
    FIELDS,
    FOLDER,
    OTHERS,
    SCHEMA,
    as_text,
    check_compiled,
    collect,
    compile_job,
    jobs,
    kernel_digest,
    main,
    record_path,
    unchanged,
    unlisted_spills,
)

from sparsetile.jit import ARCHITECTURES, nvrtc_version
from sparsetile.jit import source as jit_source
from sparsetile.jit.source import DEVICE_TREE
from sparsetile.kernels import KERNELS, KernelSpec
from tests.today import kernel_digests_of_today
from tools import compile_all as module


@pytest.fixture(autouse=True)
def _digests_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "kernel_digests", kernel_digests_of_today)


RECORDS = sorted(FOLDER.glob("*.json"))
CHOSEN = 1  # configurations compiled again, beside one of every eighth kernel


def _sample(seed: int) -> list[module.Job]:
    """One configuration of an eighth of the kernels for one architecture, and another; at random.

    The record holds all of them and its digests are today's, so that a sample has to show only that
    this compiler still gives the record's numbers. Each is drawn sooner or later.
    """
    everything = jobs()
    random.Random(seed).shuffle(everything)
    each = {job.spec.name: job for job in everything}
    drawn = [*list(each.values())[::8], *everything[:CHOSEN]]
    return list({(job.source.label, job.arch): job for job in drawn}.values())


def test_there_is_a_record():
    assert RECORDS, "run `make compile-all` and commit results/compile"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_is_of_today_s_code_and_without_unlisted_spills(path: Path):
    assert check_compiled(path) == []


def test_a_sample_compiles_to_what_the_record_says():
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the sample: {seed}")  # pytest shows it where the test fails
    held = json.loads(record_path().read_text()) if record_path().is_file() else {}
    comparable = (
        held.get("kernels") == kernel_digests_of_today()
    )  # else the record's own test fails
    for job in _sample(seed):
        numbers = compile_job(job)
        found = {"configurations": {job.source.label: {job.arch: numbers}}}
        assert numbers[0] > 0 and unlisted_spills(found) == []
        if comparable:
            assert held["configurations"][job.source.label][job.arch] == numbers, job.source.label


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_kernel_allows_no_more_spills_than_it_has(path: Path):
    most = dict.fromkeys(KERNELS, 0)
    for label, archs in json.loads(path.read_text())["configurations"].items():
        name = label.partition("[")[0]
        most[name] = max(most[name], *(max(archs[a][1:3]) for a in ARCHITECTURES if a in archs))
    assert most == {name: spec.allowed_spills for name, spec in KERNELS.items()}


def test_kernels_compile_for_other_gpus_in_every_value_of_each_constant():
    every, others = set[tuple[str, str, object]](), dict[str, set[tuple[str, str, object]]]()
    for job in jobs():
        found = {(job.spec.name, name, value) for name, value in job.source.config}
        every |= found
        others.setdefault(job.arch, set()).update(found)
    for arch in OTHERS:
        here = {each for each in every if KERNELS[each[0]].runs_on(arch)}
        assert others[arch] == here and len(here) > 100
    # A GPU where nobody has run the kernels has its spills in the record, and no error.
    label = "linear_few[x]"
    spills = {"configurations": {label: {"sm_80": [32, 0, 0, 0], "sm_120a": [32, 16, 16, 0]}}}
    assert unlisted_spills(spills) == []
    assert unlisted_spills(spills, OTHERS) == [
        "linear_few[x] spills 16 bytes on sm_120a, 0 are allowed"
    ]


def a_record(**changes: Any) -> dict[str, Any]:
    """A record of today in which every configuration has 32 registers and no spills."""
    held: dict[str, dict[str, list[int]]] = {}
    for job in jobs():
        held.setdefault(job.source.label, {})[job.arch] = [32, 0, 0, 0]
    body = {"schema": SCHEMA, "kernels": kernel_digests_of_today(), "configurations": held}
    return {**body, **changes}


@pytest.fixture
def problems(tmp_path: Path):
    def check(record: object) -> list[str]:
        path = tmp_path / "13.0.json"
        path.write_text(record if isinstance(record, str) else json.dumps(record))
        return check_compiled(path)

    return check


def test_a_record_of_today_has_no_problem(problems):
    assert problems(a_record()) == []


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "cannot be read"),
        ([], "is no compile record of schema 1"),
        ({"schema": 7}, "is no compile record of schema 1"),
        ({"schema": SCHEMA}, "device code or configurations of"),
        (
            {"schema": SCHEMA, "kernels": {**kernel_digests_of_today(), "spmm_csr": "0"}},
            "device code or configurations of spmm_csr changed since",
        ),
    ],
)
def test_a_file_that_is_no_record_of_today_is_reported(problems, record: object, text: str):
    (found,) = problems(record)
    assert text in found and "make compile-all" in found


def test_each_missing_unknown_spilling_or_empty_configuration_is_reported(problems):
    record = a_record()
    held = record["configurations"]
    label = next(iter(held))
    arch = next(iter(held[label]))
    numbers = held[label].pop(arch)
    assert problems(record)[0].endswith(f"{label} for {arch} is missing")
    held[label][arch] = [0, 0, 0, 0]
    assert problems(record)[0].endswith(f"{label} has no registers on {arch}")
    held[label][arch] = [numbers[0], 0, 8, 0]
    assert problems(record)[0].endswith(f"{label} spills 8 bytes on {arch}, 0 are allowed")
    held[label][arch] = numbers
    held["nothing[]"] = {arch: numbers}
    assert problems(record)[0].endswith(f"nothing[] for {arch} is unknown")


def test_kernels_that_did_not_change_are_not_compiled_again():
    digests = kernel_digests_of_today()
    assert len(set(digests.values())) == len(KERNELS)
    today = a_record()
    labels = today["configurations"]
    assert unchanged(today) == labels, "a record of today knows all"
    older = {**today, "kernels": {**digests, "spmm_csr": "0"}}
    rest = {label for label in labels if not label.startswith("spmm_csr[")}
    assert set(unchanged(older)) == rest and len(rest) < len(labels)
    assert unchanged(a_record(kernels={})) == {}, "one from before such digests"


def test_only_new_configurations_of_a_kernel_are_compiled():
    spec, today = KERNELS["tf32_operand"], a_record()
    labels = sorted(label for label in today["configurations"] if label.startswith(spec.name))
    for missing in labels[0], labels[-1]:
        held = {label: each for label, each in today["configurations"].items() if label != missing}
        mine = [label for label in labels if label != missing]
        digests = {**today["kernels"], spec.name: kernel_digest(spec, mine)}
        assert unchanged({**today, "kernels": digests, "configurations": held}) == held
        digests[spec.name] = kernel_digest(spec)  # of others than the record holds
        rest = set(held) - set(mine)
        assert set(unchanged({**today, "kernels": digests, "configurations": held})) == rest
    assert kernel_digest(spec, ["tf32_operand[gone]"]) == "" == kernel_digest(spec, [])


@pytest.fixture
def tree(tmp_path: Path, constants) -> Path:
    """A copy of the device tree that kernels are compiled from."""
    copy = Path(shutil.copytree(DEVICE_TREE, tmp_path / "cuda"))
    for place in (module, jit_source):
        constants(place, DEVICE_TREE=copy)
    return copy


def test_a_kernel_s_digest_is_of_what_it_includes(tree: Path):
    spec = KERNELS["gather_rows"]
    before = kernel_digest(spec)

    def with_more(name: str, text: str) -> str:
        path, now = tree / name, (tree / name).read_text()
        path.write_text(now + text)
        digest = kernel_digest(spec)
        path.write_text(now)
        return digest

    assert with_more("ptx/ptx.cuh", "// nothing\n") == before
    assert with_more("ptx/ptx.cuh", "int more;\n") != before
    assert with_more(spec.file, "int more;\n") != before
    assert with_more("ptx/element.cuh", "int more;\n") == before, "not included"


def test_a_kernel_s_digest_does_not_depend_on_folders_and_order_of_includes(tree: Path):
    spec = KERNELS["gat_vectors"]
    before, path = kernel_digest(spec), tree / spec.file
    (tree / "sums").mkdir()
    (tree / "epilogue" / "column_sums.cuh").rename(tree / "sums" / "column_sums.cuh")
    old = '#include "attention/gat.cuh"\n#include "epilogue/column_sums.cuh"\n'
    new = '#include "sums/column_sums.cuh"\n#include "attention/gat.cuh"\n'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert kernel_digest(spec) == before
    path.write_text(text.replace(old, new.replace("\n#", "\nint between;\n#", 1)))
    assert kernel_digest(spec) != before
    path.rename(tree / "sums" / path.name)
    (tree / "sums" / path.name).write_text(text.replace(old, new))
    moved = KernelSpec(**{**vars(spec), "file": f"sums/{path.name}"})
    assert moved.name == spec.name and kernel_digest(moved) == before


def test_the_record_of_a_run_keeps_what_is_known():
    known = {"other[]": {"sm_90a": [1, 2, 3, 4]}}
    record = collect([], 1, lambda: None, known)
    assert record["configurations"] == known and record["compiled"] == 0


def test_spills_that_are_listed_are_allowed_up_to_their_number(monkeypatch):
    spec = KERNELS["tf32_operand"]
    label = spec.source(next(spec.configs())).label
    record = {"configurations": {label: {"sm_90a": [32, 8, 16, 0]}}}
    for allowed, count in ((15, 1), (16, 0)):
        listed = KernelSpec(**{**vars(spec), "allowed_spills": allowed})
        monkeypatch.setitem(KERNELS, spec.name, listed)
        assert len(unlisted_spills(record)) == count


def test_a_kernel_s_jobs_are_compiled_in_parallel_and_recorded(tmp_path: Path):
    work = jobs(["tf32_operand"])
    done: list[None] = []
    record = collect(work, 2, lambda: done.append(None))
    assert len(done) == len(work) and record["fields"] == list(FIELDS)
    assert record["nvrtc"] == "{}.{}".format(*nvrtc_version())
    held = record["configurations"]
    assert {(label, arch) for label in held for arch in held[label]} == {
        (job.source.label, job.arch) for job in work
    }
    assert all(numbers[0] > 0 for archs in held.values() for numbers in archs.values())
    text = as_text(record)
    assert json.loads(text) == record
    assert len(text.splitlines()) < 20 + len(KERNELS) + len(held)


@pytest.fixture
def one_kernel(monkeypatch) -> None:
    """Compile one small kernel in place of all."""
    monkeypatch.setattr(module, "jobs", lambda kernels=None: jobs(["tf32_operand"]))


@pytest.fixture
def resources(monkeypatch) -> list[int]:
    """Registers, spills and shared bytes of every kernel; nothing is compiled."""
    found = [32, 0, 0, 0]
    monkeypatch.setattr(module, "compile_job", lambda job: list(found))
    return found


@pytest.mark.usefixtures("one_kernel")
def test_a_refused_configuration_is_an_error_and_nothing_is_written(monkeypatch, tmp_path, capsys):
    def refuse(source: object, arch: str, use_cache: bool) -> None:
        raise module.CompileError("compile: it must compile, got an error.")

    monkeypatch.setattr(module, "compile_source", refuse)
    assert main(["--out", str(tmp_path)]) == 1
    assert "every configuration must compile, got" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_the_record_of_this_nvrtc_and_reports_spills(
    one_kernel, resources, tmp_path, capsys
):
    assert main(["--out", str(tmp_path), "--jobs", "1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [record_path().name]
    resources[1:3] = 4, 4
    assert main(["--out", str(tmp_path)]) == 0, "nothing changed, nothing is compiled"
    assert main(["--out", str(tmp_path), "--again"]) == 1
    assert "spills 4 bytes on sm_90a, 0 are allowed" in capsys.readouterr().err


@pytest.mark.usefixtures("resources")
def test_part_of_the_kernels_leaves_the_record_alone(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--kernel", "tf32_operand"]) == 0
    assert "the record was left as it is" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--kernel", "nothing"], "--kernel must be one of"),
        (["--jobs", "-1"], "--jobs must be 0 or a number of threads, got -1"),
    ],
)
def test_bad_usage_is_refused(words: list[str], text: str, capsys):
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_the_digest_changes_with_configurations_and_generated_headers():
    spec = KERNELS["tf32_operand"]
    before = kernel_digest(spec)
    fewer = KernelSpec(**{**vars(spec), "configs": lambda: iter(list(spec.configs())[1:])})
    assert kernel_digest(fewer) != before
    other = KernelSpec(**{**vars(spec), "params": KERNELS["spmm_csr"].params})
    assert kernel_digest(other) != before
    assert kernel_digest(KernelSpec(**vars(spec))) == before
