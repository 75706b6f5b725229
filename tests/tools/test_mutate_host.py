"""The mutation run of host code: what is changed, which tests run, how it ends, and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools.host_mutations import EQUIVALENT, Place, draw, mutant, places
from tools.host_reach import Checkout, Reach
from tools.mutate_host import (
    LEAST,
    RECORD_NAME,
    SHARE,
    check_host,
    collect,
    main,
    outcome_of,
    totals,
)
from tools.parts import HOST_PACKAGES
from tools.record import ROOT

from tools import host_reach
from tools import mutate_host as module

RECORD = ROOT / "results" / "cpu" / RECORD_NAME
CODE = '''"""A module."""
import subprocess
import sys
from typing import TYPE_CHECKING, overload

__all__ = ["area", "first"]
LIMIT = 3


def area(width: int | None, height: int) -> int:
    """Is tested."""
    if width is None:
        raise ValueError(f"width must be {1 + 2}, got None")
    return width * height


def less(count: int) -> int:
    return count - 1


def wait(count: int) -> int:
    while count > 0:
        count = less(count)
    return 4


def elsewhere(width: int) -> int:
    return width + 2


def started(width: int) -> int:
    code = f"from tiny.area.shapes import elsewhere; print(elsewhere({width}))"
    return int(subprocess.check_output([sys.executable, "-c", code]))


def planted(limit: int) -> bool:
    return limit < 10


def unknown(limit: int) -> bool:
    return limit == 10
'''
TESTS = """
import pytest
from tiny.area.shapes import area, planted, started, wait

def test_area():
    assert area(2, 3) == 6
    with pytest.raises(ValueError, match="must be 3"):
        area(None, 3)

def test_wait():
    assert wait(3) == 4

def test_started():
    assert started(1) == 3

def test_planted():
    assert planted(1) and not planted(20)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Checkout:
    """A package of one module that is tested, but for two of its functions."""
    for path, text in (
        ("src/tiny/__init__.py", ""),
        ("src/tiny/area/__init__.py", ""),
        ("src/tiny/area/shapes.py", CODE),
        ("tests/area/test_shapes.py", TESTS),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return Checkout(tmp_path, "tiny", ("area",), (), ())


def places_of(text: str, tmp_path: Path) -> list[Place]:
    path = tmp_path / "code.py"
    path.write_text(text)
    return places(path, tmp_path)


def changes(text: str, tmp_path: Path) -> list[str]:
    return [place.change for place in places_of(text, tmp_path)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", "a < b -> a <= b"),
        ("x = a == b", "a == b -> a != b"),
        ("x = a is None", "a is None -> a is not None"),
        ("x = a in b", "a in b -> a not in b"),
        ("x = a and b", "a and b -> a or b"),
        ("x = not a", "not a -> a"),
        ("x = a if c else b", "a if c else b -> b if c else a"),
        ("x = 4", "4 -> 5"),
        ("x = True", "True -> False"),
        ("x = a // b", "a // b -> a * b"),
        ("a.clear()", "a.clear() -> pass"),
        ("a.b = c", "a.b = c -> pass"),
        ("return a", "return a -> return None"),
        ("key = (a, b)", "(a, b) -> (b,)"),
        ("key = (a, b)", "(a, b) -> (a,)"),
        ("x = kept.get((a, b))", "(a, b) -> (b,)"),
        ("with self._lock:\n        x = a", "with self._lock -> no lock"),
        ("with lock, other:\n        x = a", "with lock, other -> with other"),
    ],
)
def test_each_kind_of_change_is_found_and_compiles(line: str, expected: str, tmp_path: Path):
    found = places_of(f"def f(a, b, c):\n    {line}\n", tmp_path)
    assert expected in [place.change for place in found]
    for place in found:
        assert mutant(place, tmp_path).co_consts != compile("", "", "exec").co_consts


@pytest.mark.parametrize(
    "text",
    [
        "LIMIT = 3\n__all__ = ['a']\n",
        'def f(a):\n    """Text."""\n    raise ValueError(f"{1 + 2}" + str(3))\n',
        "def f(a: Literal[1, 2] = None) -> tuple[1, 2]:\n    b: Literal[3]\n    assert a == 3\n",
        "def f(a):\n    if TYPE_CHECKING:\n        a.b()\n    if a.is_cuda:\n        a.c()\n",
        "def f(a):\n    with torch.cuda.stream(a):\n        a.record(3)\n",
        "def f(a):\n    a.record_stream(3)\n    return 1 if a.is_cuda else 2\n",
        "class A:\n    def __repr__(self):\n        return 3\n",
        "@overload\ndef f(a: int = 3) -> int: ...\n",
        "def f(with_blocks):\n    with with_blocks:\n        pass\n",
    ],
)
def test_what_tests_need_not_notice_stays(text: str, tmp_path: Path):
    assert changes(text, tmp_path) == []


def test_a_seed_draws_the_same_changes_and_other_code_leaves_them(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text(CODE)
    before = {place.key for place in draw(tmp_path, tmp_path, 6, 1)}
    assert before == {place.key for place in draw(tmp_path, tmp_path, 6, 1)}
    assert before != {place.key for place in draw(tmp_path, tmp_path, 6, 2)}
    path.write_text("def g(a):\n    return a\n\n\n" + CODE)
    after = {place.key for place in draw(tmp_path, tmp_path, 6, 1)}
    assert len(before & after) >= 5


def test_packages_are_drawn_from_by_size_but_each_often_enough():
    drawn = Checkout().drawn(150, 0)
    counts = totals([{"file": each.file, "outcome": "failed"} for each in drawn])["packages"]
    assert set(counts) == set(HOST_PACKAGES) and sum(counts.values()) >= LEAST
    assert min(counts.values()) >= 12 and counts["nn"] > counts["plan"] > counts["pyg"]


def test_a_planted_survivor_shows_and_all_else_is_noticed(tiny: Checkout, tmp_path, constants):
    constants(module, TEST_LIMIT=5.0)
    asked = [each for each in places(tiny.files[1], tiny.package) if each.kind != "return"]
    entries = collect(asked, tiny, tmp_path / "kept", parallel=2)
    found = {(entry["function"], entry["change"]): entry for entry in entries}
    outcomes = {name: entry["outcome"] for name, entry in found.items()}
    assert {name for name, outcome in outcomes.items() if outcome == "survived"} == {
        ("planted", "limit < 10 -> limit <= 10"),
        ("planted", "10 -> 11"),
        ("wait", "count > 0 -> count >= 0"),
        ("less", "1 -> 2"),
        ("wait", "0 -> 1"),
    }
    assert {name for name, _ in outcomes if outcomes[name, _] == "not covered"} == {"unknown"}
    assert outcomes["less", "count - 1 -> count + 1"] == "hung"
    noticed = found["elsewhere", "width + 2 -> width - 2"]
    assert noticed["outcome"] == "failed" and noticed["test"].endswith("::test_started")
    assert found["area", "width is None -> width is not None"]["error"] == "ValueError"
    assert list((tmp_path / "kept").glob("*.npy")), "the lines of tests are kept"


def test_a_mutant_that_hangs_or_crashes_is_noticed():
    assert outcome_of({"stopped": "test", "test": "a"}) == "hung"
    assert outcome_of({"signal": -11}) == "crashed"
    assert outcome_of({"stopped": "job"}) == "unfinished"
    assert outcome_of({"exit": 2, "passed": 0}) == "failed", "its tests cannot be imported"
    for code in (3, 5):  # an error of pytest's own, no tests
        assert outcome_of({"exit": code, "passed": 0}) == "unfinished"
    assert outcome_of({"exit": 0, "passed": 0}) == "unfinished"


def test_tests_that_fail_without_a_change_are_an_error(tiny: Checkout, tmp_path: Path):
    path = tiny.root / "tests" / "area" / "test_shapes.py"
    path.write_text(TESTS + "\ndef test_wrong():\n    assert area(1, 1) == 2\n")
    with pytest.raises(RuntimeError, match=r"test_shapes\.py must pass on the code as it is"):
        collect([], tiny, tmp_path / "kept")


def test_tests_of_the_module_come_first_and_their_time_is_bounded(constants):
    place = Place("plan/files.py", "read", 0, "number", 3, (3, 4), (2, 6), "1 -> 2")
    folders = ["nn/test_a", "plan/test_b", "plan/test_files", "plan/test_c"]
    names = [f"tests/{name}.py::test" for name in folders]
    seconds = dict(zip(names, (0.1, 0.2, 5.0, 0.3), strict=True))
    lines = {3: names[:2], 4: names[2:3], 5: names[1:2], 9: names[3:]}
    reach = Reach(seconds, {("plan/files.py", n): set(tests) for n, tests in lines.items()})
    assert reach.chosen(place) == [names[2], names[1], names[0]]
    assert reach.chosen(place, first=names[0]) == [names[0], names[2], names[1]]
    constants(host_reach, TESTS_SECONDS=5.1)
    assert reach.chosen(place) == [names[2]]
    assert (
        reach.chosen(Place("plan/files.py", "read", 0, "number", 12, (12,), (8, 12), "1 -> 2"))
        == []
    )


def record_of(outcomes: dict[str, int], **changes: Any) -> dict[str, Any]:
    """A record in which each package has these outcomes."""
    entry = {"function": "f", "change": "1 -> 2", "reason": "", "test": "a"}
    entries = [
        {**entry, "file": f"{package}/a.py", "outcome": outcome}
        for package in HOST_PACKAGES
        for outcome, count in outcomes.items()
        for _ in range(count)
    ]
    return {"schema": 1, "totals": totals(entries), "mutations": entries, **changes}


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (record_of({"failed": 18}), ""),
        (record_of({"failed": 38, "survived": 1, "not covered": 1}), ""),
        (record_of({"failed": 15}), "fewer than 120"),
        (record_of({"failed": 19, "survived": 2}), "tests noticed 90.5%, fewer than 95%"),
        (record_of({"failed": 19, "not covered": 2}), "tests noticed 90.5%"),
        (record_of({"failed": 19, "unreliable": 2}), "tests noticed 90.5%"),
        (record_of({"failed": 20}, totals={}), "its totals are not those of its mutations"),
        (record_of({"failed": 20}, mutations=[{}]), "does not list an outcome per mutation"),
        (record_of({"failed": 20}, schema=0), "has schema 0"),
    ],
)
def test_a_record_must_hold_enough_mutations_that_tests_notice(record, problem, tmp_path: Path):
    path = tmp_path / RECORD_NAME
    path.write_text(json.dumps(record))
    found = check_host(path)
    assert (problem in found[0]) if problem else not found


def test_what_is_called_equivalent_must_be_listed_and_survive(tmp_path: Path, monkeypatch):
    record = record_of({"failed": 20})
    record["mutations"][0]["reason"] = "only slower"
    path = tmp_path / RECORD_NAME
    path.write_text(json.dumps(record))
    assert "calls others equivalent" in check_host(path)[0]
    monkeypatch.setitem(EQUIVALENT, ("plan/a.py", "f", "1 -> 2"), "only slower")
    assert "is called equivalent, and a notices it" in check_host(path)[0]


def test_only_what_a_record_of_today_s_code_does_not_settle_runs_again(tmp_path: Path):
    record = record_of({"failed": 1, "survived": 1}, packages={"plan": "1"})
    for line, entry in enumerate(record["mutations"]):
        entry["line"] = line
    path = tmp_path / RECORD_NAME
    path.write_text(json.dumps(record))
    settled = module._settled(path, {"plan": "1"})
    assert len(settled) == 7 and {entry["outcome"] for entry in settled.values()} == {"failed"}
    assert module._settled(path, {"plan": "2"}) == {}


def test_the_committed_record_is_right():
    record = json.loads(RECORD.read_text())
    assert check_host(RECORD) == []
    assert record["totals"]["share"] >= SHARE and len(EQUIVALENT) <= 12
    for entry in record["mutations"]:
        assert entry["test"] or entry["outcome"] not in ("failed", "hung"), entry


def test_a_change_that_is_not_drawn_is_bad_usage(tiny: Checkout, monkeypatch, capsys):
    monkeypatch.setattr(module, "Checkout", lambda: tiny)
    monkeypatch.setattr(module, "host_digests", dict)
    assert main(["--only", "nowhere"]) == 2
    assert "mutate_host: --only must be part of the file" in capsys.readouterr().err
