"""The checkers' record: how a tool is run and judged, what is written, when it is out of date."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.checked_products import BLOCK_SYSTEM, LAYER, type_names
from tools.checkers import (
    SCHEMA,
    TOOLS,
    check_checkers,
    checker,
    find_tool,
    run_checkers,
    write_checkers,
)
from tools.child_processes import run_within
from tools.record import ROOT

from sparsetile.kernels import KERNELS
from sparsetile.systems import SYSTEMS
from sparsetile.systems.registry import register, unregister
from tests.contracts.cases import MATRICES
from tests.today import digests_of_today
from tests.tools.sanitizer import CLEAN_RACES, FACTS, VERSION, how, install, ran
from tools import checkers as module

RECORDS = sorted((ROOT / "results").glob(f"*/{module.RECORD_NAME}"))
# Of GPUs that were treated as older ones.
AS_RECORDS = sorted((ROOT / "results").glob(f"*/as-*/{module.RECORD_NAME}"))


@pytest.fixture
def tool(tmp_path: Path, environment):
    """Put the stand-in on PATH, behaving as told."""

    def prepare(**tools: dict[str, Any]) -> Path:
        folder = install(tmp_path / "bin", **tools)
        environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return prepare


ONE = "wide"


def run_checker(root: Path, tool: str, **how: Any) -> dict[str, Any]:
    """Run one tool over the products and return its entry of the record."""
    ((_, found),) = run_checkers(root, [tool], **how)
    if isinstance(found, RuntimeError):
        raise found
    return found


@pytest.fixture(autouse=True)
def one_type(monkeypatch):
    """A process for each type of each system is what takes time here: one of each will do."""
    monkeypatch.setattr(module, "type_names", lambda system: type_names(system)[:1])


def parts_of(entry: dict[str, Any]) -> int:
    return len(entry["systems"])


def called(folder: Path) -> dict[str, list[Any]]:
    """What the tool was asked for: its options, the child's and the folder, by system."""
    found: dict[str, list[Any]] = {}
    for path in folder.glob("called-*.json"):
        found.setdefault(path.stem.split("-")[1], []).append(json.loads(path.read_text()))
    return found


def test_a_clean_run_says_what_ran_with_which_tool(tool, tmp_path: Path):
    folder = tool()
    entry = run_checker(tmp_path, "memcheck", limit=60, matrices=ONE)
    assert entry["version"] == VERSION
    systems = checker("memcheck").systems
    assert (entry["matrices"], entry["products"]) == (["odd sizes", "wide"], 12 * len(systems))
    assert (entry["errors"], entry["exit"], entry["log"]) == (0, 0, [])
    assert entry["kernels"] == list(KERNELS) and entry["seconds"] > 0
    assert set(called(folder)) == set(systems)
    for system, calls in called(folder).items():
        for options, child, where in calls:
            assert options[:2] == ["--tool", "memcheck"] and Path(where) == tmp_path
            watched = [b for a, b in itertools.pairwise(options) if a == "--kernel-name"]
            assert watched == [f"kernel_substring={name}" for name in KERNELS]
            asked = ["--device", "cuda", "--systems", system, "--matrices", ONE, "--types"]
            assert child[6:-1] == asked
        assert [child[-1] for _, child, _ in calls] == type_names(system)[:1]


def test_parts_that_share_the_cores_take_one_thread_each(tmp_path: Path, environment):
    environment(OMP_NUM_THREADS="3")
    program = "import os; open('said', 'w').write(os.environ['OMP_NUM_THREADS'])"
    assert run_within([sys.executable, "-c", program], tmp_path, 60) == 0
    assert (tmp_path / "said").read_text() == "1"


def test_each_type_of_a_system_has_a_process_and_all_matrices(tool, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "type_names", type_names)
    folder = tool()
    entry = run_checker(tmp_path, "memcheck", limit=60)
    for system in entry["systems"]:
        calls = called(folder)[system]
        assert sorted(child[-1] for _, child, _ in calls) == sorted(type_names(system))
        for _, child, _ in calls:
            assert child[-3].split(",") == [*MATRICES, LAYER]


def test_a_run_that_was_stopped_is_gone_on_with(tool, tmp_path: Path, monkeypatch, facts):
    """Parts that were clean are kept beside the record, and nothing of other code is taken."""
    folder, out = tool(), tmp_path / "out"
    partial = out / facts["gpu"]["slug"] / module.PARTIAL_NAME
    whole, asked = module.watch_part, []

    def one_part(*args: Any) -> Any:
        asked.append(args[-1])
        return whole(*args) if len(asked) <= 3 else None

    monkeypatch.setattr(module, "watch_part", one_part)
    with pytest.raises(RuntimeError, match=r"got 3 of \d+ parts within 60 s.*Run it again"):
        run_checker(tmp_path, "memcheck", limit=60, matrices=ONE, folder=out)
    assert len(json.loads(partial.read_text())["clean"]) == 3
    monkeypatch.setattr(module, "watch_part", whole)
    before = len(list(folder.glob("called-*.json")))
    entry = run_checker(tmp_path, "memcheck", limit=60, matrices=ONE, folder=out)
    parts = parts_of(entry)
    assert entry["products"] == 12 * parts and not partial.exists()
    assert len(list(folder.glob("called-*.json"))) - before == parts - 3
    for damaged in ("", "[]", "{}", '{"clean": 3}', json.dumps({**facts, "clean": {"a": 1}})):
        partial.write_text(damaged)
        assert module.Kept(out).get("memcheck csr float32 wide") is None


def test_a_part_that_was_not_clean_is_not_kept(tool, tmp_path: Path, facts):
    tool(any=how(report=ran(0)))
    with pytest.raises(RuntimeError, match="no product"):
        run_checker(tmp_path, "memcheck", limit=60, matrices=ONE, folder=tmp_path / "out")
    found = module.Watched(1, 0, 86, [], 3, "", [])
    kept = module.Kept(tmp_path / "out")
    kept.put("memcheck csr float32", found)
    assert kept.get("memcheck csr float32") is None


def test_products_run_without_a_tool_to_compile_their_kernels(monkeypatch, tmp_path: Path):
    commands = []
    monkeypatch.setattr(module, "run_within", lambda command, root, limit: commands.append(command))
    module.compile_kernels(tmp_path, limit=60.0)
    asked = [
        {name: words[words.index(name) + 1] for name in ("--systems", "--types")}
        for words in commands
    ]
    systems = {name for each in TOOLS for name in checker(each).systems}
    assert {each["--systems"] for each in asked} == systems
    kinds = [each["--types"] for each in asked if each["--systems"] == "acc"]
    assert sorted(kinds) == sorted(module.type_names("acc"))
    assert not any("--tool" in words for words in commands)
    commands.clear()
    module.compile_kernels(tmp_path, limit=0.0)
    assert commands == [], "no time is left"
    module.compile_kernels(tmp_path, limit=60.0, matrices=ONE)
    assert {words[words.index("--matrices") + 1] for words in commands} == {ONE}


def test_racecheck_watches_the_kernels_with_shared_memory_alone(tool, tmp_path: Path):
    folder = tool(racecheck=how(summary=CLEAN_RACES))
    entry = run_checker(tmp_path, "racecheck", limit=60, matrices=ONE)
    shared = [name for name, spec in KERNELS.items() if spec.shared_memory]
    assert shared and entry["kernels"] == shared
    assert entry["systems"] == sorted(
        name for name, system in SYSTEMS.items() if set(shared) & set(system.kernels)
    )
    assert set(called(folder)) == set(entry["systems"]) and "sddmm_csr" not in entry["kernels"]
    options, _, _ = called(folder)[entry["systems"][0]][0]
    assert options.count("--kernel-name") == len(shared)
    # cuBLAS in 16 bits does not end under racecheck: the record says what was left out.
    assert entry["left_out"] == ["dense bfloat16", "dense float16"]
    kinds = {words[words.index("--types") + 1] for _, words, _ in called(folder)["dense"]}
    assert "float32" in kinds and not kinds & {"float16", "bfloat16"}


UNWRITTEN = (
    "========= Uninitialized __global__ memory read of size 4 bytes\n"
    "=========     at {}+0x1c0\n"
    "=========     by thread (0,0,0) in block (0,0,0)\n"
)


def test_initcheck_watches_every_kernel_and_counts_ours(tool, tmp_path: Path):
    theirs = UNWRITTEN.format("void at::native::copy_kernel(float *)")
    ours = UNWRITTEN.format("spmm_csr_kernel(Params)")
    summary = "========= ERROR SUMMARY: {} errors"
    folder = tool(initcheck=how(summary=theirs + summary.format(1), errors=True))
    entry = run_checker(tmp_path, "initcheck", limit=60, matrices=ONE)
    count = parts_of(entry)
    assert (entry["errors"], entry["elsewhere"], entry["exit"]) == (0, count, 0)
    assert entry["kernels"] == list(KERNELS) and entry["log"] == []
    for system, calls in called(folder).items():
        for options, words, _ in calls:
            assert "--kernel-name" not in options and "--print-limit" in options
            # It does not see what the copy engine stores: there fresh memory is filled instead.
            kind = words[words.index("--types") + 1]
            unseen = system in {"bcsr", "dense"} and kind in {"float16", "bfloat16"}
            assert ("--fill" in words) == unseen
    # One of ours, one of theirs, and one that was not printed, which may be ours.
    tool(initcheck=how(summary=theirs + ours + summary.format(3), errors=True))
    entry = run_checker(tmp_path, "initcheck", limit=60, matrices=ONE)
    assert (entry["errors"], entry["elsewhere"], entry["exit"]) == (2 * count, count, 86)
    assert any("spmm_csr_kernel" in line for line in entry["log"])


def test_kernels_that_say_so_are_those_with_shared_memory():
    tree = ROOT / "src" / "sparsetile" / "kernels" / "cuda"
    include = re.compile(r'#include "([^"]+)"')

    def uses(name: str) -> bool:
        text = (tree / name).read_text()
        return "__shared__" in text or any(map(uses, include.findall(text)))

    for name, spec in KERNELS.items():
        assert spec.shared_memory == uses(spec.file), name


def test_every_kernel_of_ours_is_launched_by_a_system_that_is_checked():
    assert set(checker("memcheck").kernels) == set(KERNELS)
    for name in TOOLS:
        assert all(SYSTEMS[system].kernels for system in checker(name).systems)


def test_as_an_older_gpu_only_its_kernels_are_watched(torch_cuda, environment):
    torch_cuda(get_device_capability=(9, 0))
    environment(SPARSETILE_CAPABILITY="8.0")
    found = checker("memcheck")
    assert {"acc", "csr", BLOCK_SYSTEM} <= set(found.systems), "layers of blocks run there"
    assert not {"voltrix", "wcsr"} & set(found.systems)
    assert "linear_blocks" in found.kernels and "spmm_bcsr" not in found.kernels


def test_a_system_joins_by_being_registered():
    class Another(type(SYSTEMS["csr"])):  # type: ignore[misc]
        name = "another"
        kernels = ("spmm_bittcf",)
        exact_on = ()

    register(Another())
    try:
        assert all("another" in checker(tool).systems for tool in TOOLS)
    finally:
        unregister("another")
    assert all("another" not in checker(tool).systems for tool in TOOLS)


@pytest.mark.parametrize(
    ("name", "summary", "errors"),
    [
        ("memcheck", "========= ERROR SUMMARY: 1 error", 1),
        ("synccheck", "========= ERROR SUMMARY: 230 errors", 230),
        (
            "racecheck",
            "========= RACECHECK SUMMARY: 5 hazards displayed (3 errors, 2 warnings)",
            5,
        ),
    ],
)
def test_what_a_tool_found_is_counted_and_its_log_kept(tool, tmp_path, name, summary, errors):
    # An error poisons the context, so that the products fail as well.
    tool(**{name: how(summary=summary, errors=True, report=ran(3, "RuntimeError: CUDA error"))})
    entry = run_checker(tmp_path, name, limit=60, matrices=ONE)
    count = parts_of(entry)
    found = (entry["errors"], entry["exit"], entry["products"])
    assert found == (errors * count, 86, 3 * count)
    shown = ["========= COMPUTE-SANITIZER", summary] * count
    assert entry["log"] == shown[: module.SHOWN_LINES]


def test_a_crash_that_the_tool_saw_is_what_it_found(tool, tmp_path: Path):
    tool(any=how(summary="========= ERROR SUMMARY: 2 errors", errors=True, report=None))
    entry = run_checker(tmp_path, "memcheck", limit=60, matrices=ONE)
    errors = 2 * parts_of(entry)
    assert (entry["errors"], entry["products"], entry["matrices"]) == (errors, 0, [])


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (how(child_exit=1, report=ran(4, "RuntimeError: 7 wrong")), "status 1: RuntimeError: 7"),
        (how(child_exit=1, report=None), "got exit status 1: no report of what ran"),
        (how(report=None), "got exit status 0: no report of what ran"),
        (how(child_exit=139, report=ran()), "got exit status 139: no failure was reported"),
        (how(summary=None, child_exit=255), "got exit status 255 without a summary"),
        (how(report=ran(0)), "got no product"),
    ],
)
def test_a_run_that_proves_nothing_is_an_error(tool, tmp_path: Path, behaviour, text: str):
    tool(any=behaviour)
    with pytest.raises(RuntimeError, match="verify: memcheck must see all products run") as caught:
        run_checker(tmp_path, "memcheck", limit=60, matrices=ONE)
    assert text in str(caught.value) and "Nothing was written for it" in str(caught.value)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_a_tool_that_takes_too_long_is_stopped_with_all_it_started(tool, tmp_path: Path):
    folder = tool(any=how(sleep=True))
    with pytest.raises(RuntimeError, match=r"got 0 of \d+ parts within 3 s\. .* Give it longer"):
        run_checker(tmp_path, "memcheck", limit=3)
    started = [int(path.read_text()) for path in folder.glob("slept-*")]
    assert started
    until = time.monotonic() + 10
    while not all(map(_gone, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(_gone, started))


def test_kernels_that_change_meanwhile_are_noticed(tool, tmp_path: Path, digests):
    tool()
    digests += ["before", "after"]
    with pytest.raises(RuntimeError, match="got a change of the code meanwhile"):
        run_checker(tmp_path, "memcheck", limit=60, matrices=ONE)


def test_without_the_tool_it_is_said_where_to_find_it(tmp_path: Path, environment):
    environment(PATH=tmp_path)
    with pytest.raises(ValueError) as caught:
        find_tool()
    assert str(caught.value) == (
        "verify: compute-sanitizer must be installed to run a checker, got nothing of that name "
        "on PATH. It comes with the CUDA toolkit; put its folder on PATH."
    )
    broken = tmp_path / "compute-sanitizer"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ValueError, match=r"got one that does not start .*exit status 3"):
        find_tool()


def test_the_products_really_run_below_the_tool(tool, monkeypatch):
    # One of its systems runs here: the others' processes would plan nothing.
    monkeypatch.setattr(module, "checker", lambda name: replace(checker(name), systems=("dense",)))
    tool(any=how(real=True))
    entry = run_checker(ROOT, "memcheck", limit=300, device="cpu", matrices="odd sizes,empty rows")
    assert entry["matrices"] == ["odd sizes", "empty rows"]
    assert entry["products"] >= 2 * 2, "both matrices at two widths"


def entry_of(**changes: Any) -> dict[str, Any]:
    return {"version": "1", "products": 9, "matrices": ["a"], "errors": 0, "exit": 0, **changes}


def test_entries_of_other_tools_stay_while_code_and_machine_are_the_same(facts, tmp_path: Path):
    path, _ = write_checkers({"memcheck": entry_of()}, tmp_path)
    assert path == tmp_path / "h200" / "checkers.json"
    write_checkers({"synccheck": entry_of(products=3)}, tmp_path)
    _, record = write_checkers({"synccheck": entry_of(products=4)}, tmp_path)
    assert json.loads(path.read_text()) == record
    assert record["checkers"] == {"memcheck": entry_of(), "synccheck": entry_of(products=4)}
    assert record["parts"] == digests_of_today() and record["gpu"] == FACTS["gpu"]
    facts["driver"] = "600.1"
    _, record = write_checkers({"racecheck": entry_of()}, tmp_path)
    assert list(record["checkers"]) == ["racecheck"], "others were of another driver"


@pytest.mark.usefixtures("facts")
@pytest.mark.parametrize("before", ["{", "[]", '{"checkers": 3}'])
def test_a_damaged_record_is_replaced(tmp_path: Path, before: str):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "checkers.json").write_text(before)
    path, _ = write_checkers({"memcheck": entry_of()}, tmp_path)
    assert check_checkers(path) == []


def test_nothing_is_written_of_no_tool(tmp_path: Path):
    with pytest.raises(ValueError, match="write_checkers: entries must be of at least one tool"):
        write_checkers({}, tmp_path)


def a_record(**entries: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, **FACTS, "parts": digests_of_today(), "checkers": entries}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "cannot be read"),
        ([], f"has schema list, this checkout reads {SCHEMA}"),
        ({"schema": 7}, f"has schema 7, this checkout reads {SCHEMA}"),
        (lambda: a_record(), "holds no checker"),
        ({"schema": SCHEMA, "checkers": 3}, "holds no checker"),
        (
            lambda: a_record(memcheck=entry_of(errors=2, exit=86)),
            "memcheck found 2 errors (exit 86)",
        ),
        (lambda: a_record(memcheck=entry_of(exit=1)), "memcheck found 0 errors (exit 1)"),
        (lambda: a_record(synccheck=entry_of(products=0)), "synccheck saw no product"),
        (lambda: a_record(nocheck=entry_of()), "nocheck is no entry of a checker"),
        (lambda: a_record(memcheck={}), "memcheck is no entry of a checker"),
    ],
)
def test_a_record_that_proves_too_little_is_told_so(tmp_path: Path, record, text: str):
    path = tmp_path / "checkers.json"
    record = record() if callable(record) else record
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    (found,) = check_checkers(path)
    assert text in found


def test_a_clean_record_of_today_has_no_problem(tmp_path: Path):
    path = tmp_path / "checkers.json"
    path.write_text(json.dumps(a_record(memcheck=entry_of(), racecheck=entry_of())))
    assert check_checkers(path) == []


@pytest.mark.parametrize("path", [*RECORDS, *AS_RECORDS], ids=lambda path: path.parent.name)
def test_every_committed_record_is_whole_and_without_errors(path: Path):
    """There may be none: README says so then."""
    assert check_checkers(path) == []


def test_where_no_record_is_committed_the_readme_says_so():
    said = "no record of the checkers yet" in " ".join((ROOT / "README.md").read_text().split())
    assert said == (not RECORDS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_readme_names_the_tools_that_a_record_lacks(path: Path):
    text = " ".join((ROOT / "README.md").read_text().split())
    lacking = [tool for tool in TOOLS if tool not in json.loads(path.read_text())["checkers"]]
    *most, last = lacking or [""]
    named = f"It lacks {', '.join(most)} and {last}" if most else f"It lacks {last}"
    assert (named in text) == bool(lacking)


def test_parts_of_all_tools_run_side_by_side_and_each_has_its_entry(tool, tmp_path: Path):
    races, failed = how(summary=CLEAN_RACES), how(child_exit=1)
    folder = tool(memcheck=failed, racecheck=races, any=how())
    asked = ("memcheck", "racecheck", "synccheck")
    found = dict(run_checkers(tmp_path, asked, limit=60, matrices=ONE))
    assert list(found) == list(asked) and isinstance(found["memcheck"], RuntimeError)
    for name in asked[1:]:
        entry = found[name]
        assert isinstance(entry, dict) and entry["systems"] == list(checker(name).systems)
        assert entry["errors"] == 0 and entry["products"]
    words = [options for calls in called(folder).values() for options, _, _ in calls]
    assert {each[each.index("--tool") + 1] for each in words} == set(asked)


def test_the_limit_is_for_all_tools_together(tool, tmp_path: Path, monkeypatch):
    tool(racecheck=how(summary=CLEAN_RACES))
    seen: list[float] = []

    def watch(program, chosen, root, until, *rest):
        seen.append(until - time.perf_counter())

    monkeypatch.setattr(module, "watch_part", watch)
    for _, found in run_checkers(tmp_path, ("memcheck", "racecheck"), limit=60, matrices=ONE):
        assert isinstance(found, RuntimeError) and "within 120 s" in str(found)
    assert seen and all(100 < left <= 120 for left in seen)
