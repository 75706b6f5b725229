"""The core suite as an older GPU: what is asked of which process, its record, its table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tools.as_capability import core_table, proofs_as

from sparsetile.bench.pool import WorkerDied
from sparsetile.intake import write_npz
from tests.contracts.cases import csr_of, random_matrix
from tests.tools.sanitizer import FACTS
from tools import core_as as module

MATRICES = ("PubMed", "cage11")


class Workers:
    """Stands for the processes: csr takes 2 us as itself and 4 us as an older GPU."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.started: set[str] = set()
        self.closed = False
        self.replies: dict[str, Any] = {}

    def start(self, family: str) -> None:
        self.started.add(family)

    def ask_all(self, families: Any, request: dict[str, Any], seconds: float) -> None:
        assert set(families) == self.started and request["cmd"] == "load"
        self.asked.append(("all", Path(request["path"]).stem))

    def ask(self, family: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append((family, request["cmd"]))
        if family in self.replies:
            reply = self.replies[family]
            if isinstance(reply, Exception):
                raise reply
            return dict(reply)
        if request["cmd"] == "again":
            micro = 4 if family.endswith(module.OLDER) else 8 if "cusparse" in family else 2
            samples = {"seconds": [micro * 1e-6] * 3, "method": "graph", "launches": 1}
            return {"status": "ok", "samples": samples}
        assert request["entry"]["rounds"] == 2 and request["entry"]["weights"] == "random"
        found = {"status": "ok", "error": {"worst": 0.5}, "planning": {"total": 0.1}}
        return {**found, "reorder": "lsh"}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def workers(monkeypatch, environment) -> Workers:
    made = Workers()
    environment(SPARSETILE_CAPABILITY="8.0")
    gpu = {**FACTS["gpu"], "slug": "h200/as-sm80"}
    monkeypatch.setattr(module, "machine_facts", lambda: {**FACTS, "gpu": gpu})
    monkeypatch.setattr(module, "pool_of", lambda capability: made)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in MATRICES:
        write_npz(folder / f"{name}.npz", csr_of(random_matrix(20, 20, 0.2)))
    return folder


def run(data: Path, *words: str) -> tuple[int, Path, list[dict[str, Any]]]:
    out = data.parent / "results"
    code = module.main(["--data", str(data), "--out", str(out), *words])
    path = out / "h200" / "as-sm80" / "core.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return code, path, [json.loads(line) for line in lines]


def test_each_system_is_timed_both_ways_beside_cusparse(workers, data, capsys):
    code, _, (head, *lines) = run(data, "--commit", "abc")
    assert code == 0 and workers.closed and head["commit"] == "abc"
    assert head["gpu"]["slug"] == "h200/as-sm80"
    keys = {(line["matrix"], line["n"], line["system"]) for line in lines}
    assert keys == {(m, n, s) for m in MATRICES for n in (32, 128, 512) for s in module.SYSTEMS}
    for line in lines:
        assert line["native"]["time"]["p50"] == 2e-6 and line["older"]["time"]["p50"] == 4e-6
        assert line["cusparse"] == 8e-6 and line["older"]["error"] == 0.5
        assert line["dtype"] == "float32"
    assert "| `csr` | 128 | 2 | 2.00 | 4.00 | 0.50 |" in capsys.readouterr().out
    before = len(workers.asked)
    assert run(data)[2] == [head, *lines], "what is in the file is not measured again"
    assert len(workers.asked) == before


def test_products_are_prepared_at_once_and_timed_one_after_the_other(workers, data):
    run(data, "--matrices", "cage11", "-n", "32")
    (loaded, *asked), count = workers.asked, len(module.SYSTEMS) * 2 + len(module.CUSPARSE)
    assert loaded == ("all", "cage11")
    assert {what for _, what in asked[:count]} == {"measure"}
    assert [what for _, what in asked[count:]] == ["again"] * count
    assert {family for family, _ in asked} == workers.started


@pytest.mark.parametrize(
    "reply",
    [WorkerDied("ended by SIGSEGV"), {"status": "wrong", "reason": "error is 9 times the bound"}],
)
def test_a_product_that_fails_is_said_and_not_timed(workers, data, capsys, reply):
    workers.replies["acc older"] = reply
    code, _, (_, *lines) = run(data, "--matrices", "cage11", "-n", "32")
    said = capsys.readouterr()
    assert code == 1 and "core_as: cage11, acc older: " in said.err
    (acc,) = [line for line in lines if line["system"] == "acc"]
    assert "time" not in acc["older"] and acc["native"]["time"]["p50"] == 2e-6
    assert "| `acc` | 32 | 1 |  | 4.00 |  |" in said.out


def test_an_algorithm_of_cusparse_that_cannot_run_is_left_out(workers, data):
    workers.replies["cusparse-csr3 native"] = {"status": "skipped", "reason": "no"}
    code, _, (_, *lines) = run(data, "--matrices", "cage11", "-n", "32")
    assert code == 0 and {line["cusparse"] for line in lines} == {8e-6}


def test_what_there_is_no_time_for_is_said(workers, data, capsys):
    code, _, lines = run(data, "--time-limit", "0")
    assert code == 0 and len(lines) == 1
    assert "core_as: no time for PubMed, N=128" in capsys.readouterr().err


def test_without_a_capability_it_refuses(workers, data, environment, capsys):
    environment(SPARSETILE_CAPABILITY=None)
    assert run(data)[0] == 2
    assert "core_as: SPARSETILE_CAPABILITY must be set to a capability" in capsys.readouterr().err


def test_processes_differ_in_their_capability(monkeypatch, environment):
    from sparsetile.bench import worker

    environment(SPARSETILE_CAPABILITY="8.9")
    seen = []
    monkeypatch.setattr(
        worker, "serve", lambda device, _: seen.append((device, os.environ[module._VARIABLE]))
    )
    pool = module.pool_of("8.9")
    for family in ("csr native", "csr older"):
        pool._serve_for(family)(None)  # type: ignore[arg-type]
    assert seen == [("cuda", ""), ("cuda", "8.9")]


def test_records_are_told_in_words(tmp_path: Path):
    assert proofs_as(tmp_path) == "nothing ran"
    assert core_table(tmp_path / "core.jsonl")[0].startswith("No record yet")
    counts = {"passed": 3457, "failed": 3}
    (tmp_path / "verify.json").write_text(json.dumps({"counts": counts}))
    (tmp_path / "fuzz.json").write_text(json.dumps({"cases": 5100, "failures": []}))
    entries = {"memcheck": {"errors": 0, "products": 1200}}
    (tmp_path / "checkers.json").write_text(json.dumps({"checkers": entries}))
    assert proofs_as(tmp_path) == (
        "3,457 GPU tests passed, 3 failed; 5,100 random products and layers, none wrong; "
        "memcheck no errors in 1,200 products"
    )
