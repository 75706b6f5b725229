"""The soak run: a short one on the CPU, what it notices, and when its record is out of date."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools.record import ROOT
from tools.soak import FEWEST, RECORD_NAME, SCHEMA, check_soak, main, soak

import sparsetile as st
from sparsetile.systems import SYSTEMS
from tests.today import digests_of_today
from tools import soak as module

RECORDS = sorted((ROOT / "results").glob(f"*/{RECORD_NAME}"))
KINDS = {
    "sum", "out", "max", "transpose", "values", "gradient of B", "gradient of values",
    "new plan", "update",
}  # fmt: skip


def test_products_on_several_threads_are_all_right_and_memory_does_not_grow(tmp_path):
    asked = ["--seconds", "1", "--threads", "4", "--plans", "20", "--out", str(tmp_path)]
    assert main(asked) == 0
    record = json.loads((tmp_path / "cpu" / "soak.json").read_text())
    assert record["wrong"] == 0 and record["failures"] == [] and record["plans"] >= 20
    assert set(record["kinds"]) == KINDS and set(record["systems"]) == {"cpu", "dense"}
    assert record["products"] == sum(record["systems"].values()) > 100
    assert record["memory_start"]["host"] > 0 and record["parts"] == digests_of_today()


def few(monkeypatch) -> None:
    """One station, so that a run takes no time."""
    real = module.make_stations
    monkeypatch.setattr(module, "make_stations", lambda *given: real(*given)[-4:-3])
    monkeypatch.setattr(module, "DTYPES", module.DTYPES[:1])


def test_a_wrong_element_is_noticed_and_named(monkeypatch, capsys, damaged):
    few(monkeypatch)
    damaged(lambda out: out[..., -1, -1].add_(1))
    found = soak("cpu", 0.1, 1, 2, 1, 0)
    assert found["wrong"] > 0 and "cpu, torch.float32" in found["failures"][0]
    assert module._problems(found)


def test_an_error_in_a_thread_is_a_failure(monkeypatch, fault):
    few(monkeypatch)
    calls = iter(range(10**6))

    def plan(real: Any, *given: Any, **options: Any) -> Any:
        if next(calls) > 8:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(*given, **options)

    fault(st, "plan", plan)
    found = soak("cpu", 0.1, 1, 2, 10**6, 0)
    assert found["wrong"] and "RuntimeError at test_soak.py" in found["failures"][0]


def a_record(**changes: Any) -> dict[str, Any]:
    systems = {name: 9 for name in SYSTEMS if "cuda" in SYSTEMS[name].devices}
    memory = {"host": 10**9, "device": 10**8}
    whole = {"schema": SCHEMA, "parts": digests_of_today(), "device": "cuda", "wrong": 0}
    whole |= {**FEWEST, "systems": systems, "failures": []}
    return {**whole, "memory_start": memory, "memory_end": memory, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": 7}, "has schema 7"),
        ({"plans": 9_999}, "9999 plans, fewer than 10000"),
        ({"systems": {"csr": 9}}, "no product of acc, "),
        ({"wrong": 3, "failures": ["small, csr: sum"]}, "3 wrong: small, csr: sum"),
        ({"memory_end": {"host": 10**9, "device": 10**9}}, "memory of the device grew by 9"),
        ({"memory_end": {"host": 2 * 10**9, "device": 10**8}}, "memory of the host grew by 1"),
        ({"memory_end": None}, "does not count"),
    ],
)
def test_a_record_that_proves_too_little_is_told_so(tmp_path, changes, text):
    path = tmp_path / "soak.json"
    path.write_text(json.dumps(a_record()))
    assert check_soak(path) == []
    path.write_text(json.dumps(a_record(**changes)))
    (found,) = check_soak(path)
    assert text in found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_every_committed_record_is_whole_and_without_failures(path):
    """There may be none: README says so then."""
    assert check_soak(path) == []


def test_where_no_record_is_committed_the_readme_says_so():
    said = "no record of the soak" in " ".join((ROOT / "README.md").read_text().split())
    assert said == (not RECORDS)


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--threads", "0"], ["--plans", "-1"]])
def test_bad_usage_ends_with_code_2(words, capsys):
    assert main(words) == 2
    assert "must be" in capsys.readouterr().err
