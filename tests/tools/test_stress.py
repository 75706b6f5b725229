"""The stream stress: a short one on the CPU, what it notices, when its record is out of date."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from tools.record import ROOT
from tools.stress import FEWEST, RECORD_NAME, SCHEMA, check_stress, main, try_case
from tools.stress_cases import PLAN_JOBS, SUBJECTS, StressCase, draw

import sparsetile as st
from sparsetile.systems import SYSTEMS
from tests.today import digests_of_today
from tools import stress as module
from tools import stress_jobs

RECORDS = sorted((ROOT / "results").glob(f"*/{RECORD_NAME}"))


def a_case(*jobs: tuple[str, ...], **wanted: Any) -> StressCase:
    """A case with entries, plain but for what is wanted."""
    plain: dict[str, Any] = {
        "subject": "plan", "rows": 64, "cols": 64, "entries": 50, "weighted": True,
        "dtype": "float32", "system": "cpu", "order": "identity", "tune": "model", "n": 8,
        "width": 8, "updated": False, "moved": "", "dropped": False, "swapped": False,
    }  # fmt: skip
    chosen = jobs or (("product",), ("product", "transpose"))
    return replace(draw(0, 0, "cpu"), jobs=chosen, **{**plain, **wanted})


def test_cold_plans_on_the_cpu_are_right_in_several_processes(tmp_path):
    asked = ["--seconds", "1", "--processes", "2", "--seed", "5", "--out", str(tmp_path)]
    assert main(asked) == 0
    record = json.loads((tmp_path / "cpu" / "stress.json").read_text())
    assert record["seeds"] == [5, 6] and record["processes"] == 2 and record["failures"] == []
    assert record["plans"] == sum(record["systems"].values()) > 0
    assert record["parts"] == digests_of_today() and record["device"] == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cold_plans_on_a_gpu_have_the_same_bits_on_every_stream():
    for number in range(60):
        outcome = try_case(draw(20240611, number, "cuda"))
        assert not outcome.wrong, outcome.line


def test_a_seed_and_a_number_give_the_same_case_each_time():
    assert [draw(3, k, "cpu") for k in range(50)] == [draw(3, k, "cpu") for k in range(50)]
    assert draw(3, 0, "cpu") != draw(4, 0, "cpu")


def test_cases_reach_every_system_job_and_subject():
    cases = [draw(1, k, "cuda") for k in range(3000)]
    able = {name for name in SYSTEMS if "cuda" in SYSTEMS[name].devices}
    assert {case.system for case in cases} == {"auto", *able}
    assert {job for case in cases for jobs in case.jobs for job in jobs} == set(PLAN_JOBS)
    assert {case.subject for case in cases} == set(SUBJECTS)
    for choice in ("side", "waits", "dropped", "swapped", "updated"):
        assert {getattr(case, choice) for case in cases} == {False, True}
    assert 0 in {case.rows for case in cases} and 0 in {case.entries for case in cases}


@pytest.mark.parametrize("job", PLAN_JOBS)
@pytest.mark.parametrize("swapped", [False, True])
def test_every_job_gives_the_same_alone(job, swapped):
    case = a_case((job,), (job, "product"), swapped=swapped)
    outcome = try_case(case)
    assert outcome.wrong == outcome.refused == "" and outcome.system == "cpu"


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("dropped", [False, True])
def test_every_subject_gives_the_same_alone(subject, dropped):
    case = a_case(("product", "gradient"), ("gradient",), subject=subject, dropped=dropped)
    assert not try_case(case).wrong


@pytest.mark.parametrize(("subject", "kept"), [("plan", 0), ("GCNConv", 1)])
def test_a_plan_is_dropped_but_parameters_of_a_layer_are_not(subject, kept, calls_of):
    compared = calls_of(module, "compare_results")
    assert not try_case(a_case(subject=subject, dropped=True)).wrong
    assert [len(call.given[3]) for call in compared] == [kept]


def elsewhere() -> bool:
    return threading.current_thread() is not threading.main_thread()


def test_one_wrong_bit_in_a_thread_is_caught(damaged):
    def flip(out: torch.Tensor) -> None:
        if elsewhere() and out.numel():
            out.view(torch.int32)[-1, -1] ^= 1

    damaged(flip)
    outcome = try_case(a_case())
    assert "thread 0, product: 1 of 512 elements differ, first (63, 7)" in outcome.wrong
    assert outcome.wrong.endswith("the plan is right afterwards")
    assert outcome.line.startswith("python -m tools.stress --device cpu --replay 0 |")
    assert "\n" not in outcome.line


def test_another_zero_in_a_thread_is_caught(damaged):
    def negate(out: torch.Tensor) -> None:
        if elsewhere():
            out[out == 0] = -0.0

    damaged(negate)
    assert "other bits of equal numbers" in try_case(a_case()).wrong


def test_a_plan_that_stays_wrong_is_caught_by_the_second_plan(fault):
    made = []

    def plan(real: Any, A: Any, *rest: Any, **options: Any) -> Any:
        if made:
            return real(A, *rest, **options)
        made.append(True)
        edges, weight, shape = A
        weight = weight.clone()
        weight[0] *= 2
        return real((edges, weight, shape), *rest, **options)

    fault(stress_jobs.st, "plan", plan)
    assert try_case(a_case()).wrong.endswith("the plan is wrong afterwards")


def test_a_stale_cache_of_a_layer_is_caught(fault):
    kept = []

    def aggregate(real: Any, x: torch.Tensor, *graph: Any) -> torch.Tensor:
        kept.append(real(x, *graph))
        return kept[0] if elsewhere() else kept[-1]

    fault(stress_jobs.nn, "aggregate", aggregate)
    case = a_case(("product",), ("product",), subject="aggregate")
    assert "elements differ" in try_case(case).wrong


def test_an_error_in_a_thread_is_caught(damaged):
    def fail(out: torch.Tensor) -> None:
        if elsewhere():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    damaged(fail)
    wrong = try_case(a_case()).wrong
    assert wrong.startswith("RuntimeError at test_stress.py") and "illegal memory access" in wrong


def test_a_refusal_must_be_the_same_alone(monkeypatch, damaged):
    def refuse(out: torch.Tensor) -> None:
        if elsewhere():
            raise st.UnsupportedError("run: B must be small, got a large one. Use less.\n  cpu: no")

    damaged(refuse)
    wrong = try_case(a_case()).wrong
    assert "UnsupportedError: run: B must be small" in wrong and "instead of a result" in wrong
    monkeypatch.setattr("tests.tools.test_stress.elsewhere", lambda: True)
    assert not try_case(a_case()).wrong


def test_a_case_is_replayed_several_times(monkeypatch, capsys, damaged):
    case = a_case()
    monkeypatch.setattr(module, "draw", lambda seed, number, device: case)
    assert main(["--replay", "7", "--times", "3"]) == 0
    assert "outcome: right, 3 times" in capsys.readouterr().out
    calls = iter(range(100))
    damaged(lambda out: out.add_(next(calls) == 8))
    assert main(["--replay", "7", "--times", "9"]) == 1
    assert "elements differ" in capsys.readouterr().out


def a_record(**changes: Any) -> dict[str, Any]:
    systems = {name: 9 for name in SYSTEMS if "cuda" in SYSTEMS[name].devices}
    whole = {"schema": SCHEMA, "parts": digests_of_today(), "device": "cuda", "failures": []}
    features = {"job": dict.fromkeys(PLAN_JOBS, 9)}
    return {**whole, **FEWEST, "systems": systems, "features": features, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": 7}, "has schema 7"),
        ({"plans": 19_999}, "19999 plans, fewer than 20000"),
        ({"processes": 1}, "1 processes, fewer than 4"),
        ({"systems": {"csr": 20_000}}, "no product of acc, "),
        ({"features": {"job": {"product": 9}}}, "nobody asked for autocast, "),
        ({"failures": ["python -m tools.stress --replay 3 | wrong"]}, "--replay 3 | wrong"),
        ({"failures": None}, "does not count"),
    ],
)
def test_a_record_that_proves_too_little_is_told_so(tmp_path, changes, text):
    path = tmp_path / "stress.json"
    path.write_text(json.dumps(a_record()))
    assert check_stress(path) == []
    path.write_text(json.dumps(a_record(**changes)))
    (found,) = check_stress(path)
    assert text in found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_every_committed_record_is_whole_and_without_failures(path):
    assert check_stress(path) == []


@pytest.mark.parametrize(
    "words", [["--seconds", "0"], ["--seed", "-1"], ["--processes", "0"], ["--times", "0"],
              ["--replay", "-1"]],
)  # fmt: skip
def test_bad_usage_ends_with_code_2(words, capsys):
    assert main(words) == 2
    assert "must be" in capsys.readouterr().err
