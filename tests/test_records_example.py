"""examples/records.py: its commands make every record there is, within a budget, and go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer

from sparsetile.bench.suites import suite_names
from sparsetile.cli.app import app
from tests.examples import ROOT, load_example

records = load_example("records")


def test_every_committed_record_of_the_h200_has_its_command():
    committed = {path.name for path in (ROOT / "results" / "h200").iterdir()}
    # `make mutate`, fuzzer, soak, the studies of papers (`python -m tools.rsh_study`, ...), and
    # whole networks and ranks (`bench gnn`, `bench llm`, `dist_nccl_check.py`) are runs of their
    # own.
    apart = {"mutations.json", "fuzz.json", "soak.json", "checkers.partial.json"}
    apart |= {"gnn.jsonl", "gnn_times.jsonl", "llm.jsonl", "dist_nccl.jsonl"}
    apart |= {"rsh_core.json", "rsh_study.json", "brp_core.jsonl", "brp_study.json"}
    apart |= {"voltrix_study.json", "brp_orders.jsonl", "voltrix_orders.jsonl", "large_auto.jsonl"}
    assert committed - apart <= {step.file for step in records.STEPS}


def test_every_gpu_suite_is_measured():
    measured = {step.words[1] for step in records.STEPS if step.kind == "bench"}
    assert measured == set(suite_names()) - {"cpu", "cpu_busy"}


def test_the_page_lists_exactly_these_commands():
    assert f"```\n{records.listing()}\n```" in (ROOT / "docs" / "reference" / "cli.md").read_text()


@pytest.mark.parametrize("step", records.STEPS, ids=lambda step: step.name)
def test_every_command_is_one_that_the_command_line_takes(step, tmp_path: Path):
    words = records.command(step, tmp_path / "h200", tmp_path, "abc", 500.0)
    assert words[0] == sys.executable
    if step.kind.endswith(".py"):
        assert (ROOT / step.kind).is_file() and words[1:] == [step.kind]
        return
    assert words[1:3] == ["-m", "sparsetile"]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands[words[3]].make_context(words[3], words[4:])  # raises on a word it does not know
    if step.kind == "bench":
        limit = float(words[words.index("--time-limit") + 1])
        assert step.seconds < limit <= 500 and words[-1] == "--json"
        assert words[words.index("--out") + 1] == str(tmp_path / "h200" / step.file)


class Machine:
    """Runs nothing: every command takes the seconds it should, and ends as the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.ran: list[str] = []
        self.ends: dict[str, tuple[int, str]] = {}

    def clock(self) -> float:
        return self.now

    def run(self, words: list[str], left: float) -> tuple[int, str]:
        step = next(
            s for s in records.STEPS if records.command(s, self.folder, Path(), "", left) == words
        )
        self.ran.append(step.name)
        self.now += min(step.seconds, left) if step.kind == "bench" else step.seconds
        if step.name in self.ends:
            return self.ends[step.name]
        if step.kind == "bench":
            return 0, json.dumps({"not_run": ["x"] if step.seconds > left else []})
        if "--checker" in step.words:
            path = self.folder / step.file
            held = json.loads(path.read_text())["checkers"] if path.exists() else {}
            path.write_text(json.dumps({"checkers": {**held, step.name: {}}}))
        elif step.kind == "verify":
            (self.folder / step.file).write_text("{}")
        return 0, "[1]\n"

    def call(self, digest: str = "d") -> int:
        self.ran = []
        found: int = records.make(
            self.folder, Path(), digest=digest, run=self.run, clock=self.clock
        )
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "h200")


def test_calls_of_nine_minutes_make_everything_and_nothing_twice(machine: Machine, capsys):
    everything: list[str] = []
    codes = []
    for _ in range(5):
        begun = machine.now
        codes.append(machine.call())
        everything += machine.ran
        assert machine.now - begun <= records.BUDGET + 1
        if codes[-1] == 0:
            break
    assert codes == [3, 3, 3, 0], "four calls of nine minutes"
    twice = {name for name in everything if everything.count(name) > 1}
    assert twice <= {step.name for step in records.STEPS if step.kind == "bench"}
    assert set(everything) == {step.name for step in records.STEPS}
    assert "all made: " in capsys.readouterr().err
    assert (machine.folder / "run.json").read_text() == "[1]\n"
    assert machine.call() == 0 and machine.ran == []


def test_a_step_that_fails_is_named_and_tried_again(machine: Machine, capsys):
    machine.ends = {"memcheck": (1, ""), "core": (2, ""), "run": (0, ""), "large": (0, "no JSON")}
    assert machine.call() == 1
    assert "memcheck: exit code 1" in (said := capsys.readouterr().err)
    assert "failed: memcheck, core" in said
    machine.ends = {}
    machine.call()
    assert {"memcheck", "core", "large"} <= set(machine.ran)
    assert "verify" not in machine.ran


def test_a_suite_in_which_a_product_was_wrong_is_made_all_the_same(machine: Machine):
    machine.ends = {"core": (1, json.dumps({"not_run": []}))}
    machine.call()
    machine.call()
    assert "core" not in machine.ran


def test_records_of_other_kernels_are_not_mixed(machine: Machine, capsys):
    machine.call("one")
    assert machine.call("other") == 2 and machine.ran == []
    assert "holds records of other kernels; name another --out" in capsys.readouterr().err


def test_a_command_that_does_not_end_is_given_up(monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert records.execute(sleeper, -29.0) == (124, "")
    assert records.execute([sys.executable, "-c", "print(5)"], 60.0) == (0, "5\n")


def test_without_data_it_says_what_it_wants(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["records.py"])
    with pytest.raises(SystemExit) as caught:
        records.main()
    assert caught.value.code == 2
    assert "--data must be an existing folder of matrices, got None" in capsys.readouterr().err
