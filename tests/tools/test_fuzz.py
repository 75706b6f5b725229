"""The fuzzer: cases can be replayed, wrong results are caught, and some cases run here."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tools.as_capability import runs_as
from tools.digest import code_digest
from tools.fuzz import RECORD_NAME, SCHEMA, Outcome, check_fuzz, fuzz, main, try_case
from tools.fuzz_cases import CONTAINERS, Case, draw
from tools.fuzz_checks import multiplied
from tools.fuzz_inputs import read
from tools.fuzz_judge import Run, Wrong, is_refusal
from tools.fuzz_layers import LAYERS
from tools.record import ROOT

import sparsetile as st
from sparsetile.core.errors import value_error
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from sparsetile.systems.cpu.runner import CPURunner
from sparsetile.systems.dense.runner import DenseRunner
from tests.today import digests_of_today
from tools import fuzz as fuzz_module
from tools import fuzz_pool

RECORDS = sorted((ROOT / "results").glob(f"*/{RECORD_NAME}"))
# Of GPUs that were treated as older ones.
AS_RECORDS = sorted((ROOT / "results").glob(f"*/as-*/{RECORD_NAME}"))
# Enough for every system; `tools.fuzz` runs for minutes before a release.
CASES = 24


def systems_of(device: str) -> set[str]:
    return {name for name, system in SYSTEMS.items() if device in system.devices}


def first_case(**wanted: object) -> Case:
    """The first case of seed 0 whose fields are as wanted, with entries in A and columns in B."""
    for number in range(20_000):
        case = draw(0, number, "cpu")
        fits = all(getattr(case, name) == value for name, value in wanted.items())
        solid = case.rows > 8 and case.cols > 8 and case.n and case.structure == "uniform"
        if fits and solid and 0 not in case.lead and case.alpha:
            return case
    raise AssertionError(f"no case with {wanted}")


def test_drawn_products_on_the_cpu_are_right():
    """Others whenever the code is another."""
    found = fuzz("cpu", int(code_digest()[:7], 16), CASES, "products")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["cases"] == CASES
    assert systems_of("cpu") <= set(found["systems"])


def test_a_seed_and_a_number_give_the_same_case_each_time():
    assert [draw(3, k, "cpu") for k in range(50)] == [draw(3, k, "cpu") for k in range(50)]
    assert draw(3, 0, "cpu") != draw(4, 0, "cpu")
    assert len({draw(3, k, "cpu") for k in range(50)}) == 50


def test_cases_reach_every_system_of_the_device_and_every_container():
    cases = [draw(1, k, "cpu") for k in range(3000)]
    assert {case.system for case in cases} == {"auto", *systems_of("cpu")}
    assert len({case.container for case in cases}) == len(CONTAINERS)
    assert {case.reduce for case in cases} == {"sum", "mean", "max", "min"}
    on_gpu = [draw(1, k, "cuda") for k in range(3000)]
    assert {case.system for case in on_gpu} == {"auto", *systems_of("cuda")}
    assert {"graph"} <= {case.action for case in on_gpu}


def test_torch_settings_are_put_back(tmp_path):
    before = torch.backends.cuda.matmul.allow_tf32
    for tf32 in (False, True):
        try_case(first_case(action="product", tf32=tf32), tmp_path)
        assert torch.backends.cuda.matmul.allow_tf32 is before


def test_what_is_drawn_for_a_case_does_not_depend_on_other_cases(tmp_path):
    case = first_case(action="product", system="cpu")
    assert try_case(case, tmp_path) == try_case(case, tmp_path) == Outcome(case, "cpu")


def last_element(out: torch.Tensor) -> None:
    if out.numel():
        out[..., -1, -1] += 1 + out[..., -1, -1].abs()


def nan_in_one_place(out: torch.Tensor) -> None:
    if out.numel():
        out[..., 0, 0] = torch.nan


@pytest.mark.parametrize("damage", [last_element, nan_in_one_place])
@pytest.mark.parametrize(("system", "cls"), [("cpu", CPURunner), ("dense", DenseRunner)])
def test_a_product_with_one_wrong_element_is_caught(damaged, tmp_path, damage, system, cls):
    wanted = {"action": "product", "system": system, "reduce": "sum", "relu": False}
    case = first_case(**wanted, special_a="none", special_b="none")
    assert not try_case(case, tmp_path).wrong
    damaged(damage, cls)
    outcome = try_case(case, tmp_path)
    assert "elements wrong" in outcome.wrong
    assert outcome.line.startswith(case.replay)
    assert "\n" not in outcome.line


def test_an_infinity_that_reaches_another_row_is_caught(monkeypatch, tmp_path):
    wanted = {"action": "product", "system": "dense", "reduce": "sum", "order": "auto"}
    monkeypatch.setattr(CPURunner, "repair", lambda *_, **__: None)
    for number in range(3000):
        case = draw(0, number, "cpu")
        if all(getattr(case, k) == v for k, v in wanted.items()) and case.special_b == "all inf":
            outcome = try_case(case, tmp_path)
            if "nan instead of" in outcome.wrong:
                return
    raise AssertionError("no case noticed that nothing was repaired")


def test_other_bits_in_a_second_run_are_caught(damaged, tmp_path):
    case = first_case(action="product", system="cpu", out="none", reduce="sum", dtype="float32")
    calls = iter(range(10_000))
    damaged(lambda out: out.mul_(1 + 2.0**-23 * (next(calls) % 2)))
    assert "other bits" in try_case(case, tmp_path).wrong


def test_a_column_written_beside_out_is_caught(damaged, tmp_path):
    case = first_case(action="product", system="cpu", out="row stride", lead=())
    damaged(lambda out: out.as_strided((1,), (1,), out.storage_offset() + out.shape[-1]).fill_(0))
    assert "beside out" in try_case(case, tmp_path).wrong


def raising(error: Exception):
    def refuse(out: torch.Tensor) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    "error",
    [
        KeyError("bounds"),
        RuntimeError("spmm: A must be small, got a large one. Use less."),
        value_error("spmm", "A", "small", "a large one", "Use less"),
        st.UnsupportedError("spmm: A must be small, got a large one. Use less.\n  cpu: cannot."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_a_product_that_must_work_is_caught(damaged, tmp_path, error):
    case = first_case(action="product", system="cpu", reduce="sum")
    damaged(raising(error))
    assert type(error).__name__ in try_case(case, tmp_path).wrong


def test_the_pattern_is_that_of_the_package():
    assert is_refusal(value_error("run", "B", "dense", "sparse", "Call B.to_dense()"))
    assert not is_refusal(ValueError("B is sparse"))
    assert not is_refusal(KeyError("run: B must be dense, got sparse. Call B.to_dense()."))


def test_a_case_is_replayed_and_printed(capsys):
    assert main(["--device", "cpu", "--kind", "products", "--replay", "5000007"]) == 0
    said = capsys.readouterr().out
    case = draw(5, 7, "cpu")
    assert f"container = {case.container!r}" in said
    assert "outcome: right" in said


def test_a_replayed_failure_ends_with_code_1(damaged, capsys):
    case = first_case(action="product", system="cpu", reduce="sum")
    damaged(raising(KeyError("bounds")))
    assert main(case.replay.split()[3:]) == 1
    assert "outcome: KeyError" in capsys.readouterr().out


def test_a_record_holds_counts_and_the_digest(tmp_path):
    begun = time.perf_counter()
    asked = ["--kind", "all", "--seconds", "1", "--processes", "2", "--seed", "11"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    assert time.perf_counter() - begun < 30
    record = json.loads((tmp_path / "cpu" / "fuzz.json").read_text())
    assert record["seeds"] == [11, 12] and record["processes"] == 2
    assert record["failures"] == []
    assert sum(record["features"]["container"].values()) == record["kinds"]["products"]
    assert sum(record["layers"].values()) == record["kinds"]["layers"] > 0
    done = sum(record["systems"].values()) + sum(record["refusals"].values())
    assert done + record["kinds"]["layers"] == record["cases"]
    assert record["parts"] == digests_of_today()


@pytest.mark.parametrize(
    "words", [["--seconds", "0"], ["--seed", "-1"], ["--seconds", "nan"], ["--processes", "0"]]
)
def test_bad_usage_ends_with_code_2(words, capsys):
    assert main(words) == 2
    assert "must be" in capsys.readouterr().err


def test_a_case_that_hangs_or_kills_its_process_does_not_lose_the_others(constants):
    """Each is a failure that one number replays; the cases behind it run in a new process."""
    script = (
        "import sys, time, os; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]\n"
        "import json; first = int(sys.argv[3])\n"
        "def say(**facts): print(json.dumps(facts), flush=True)\n"
        "say(compiled='rcm')\n"
        "for case in range(first, 6):\n"
        "    say(case=case)\n"
        "    if case == 1: time.sleep(600)\n"
        "    if case == 3: os.kill(os.getpid(), 11)\n"
        "    say(case=case, system='cpu', wrong='', refused='')\n"
    )
    constants(fuzz_pool, CHILD=script, CASE_SECONDS=1.5)
    said: list[str] = []
    work = fuzz_pool.Work("fuzz", "cpu", lambda seed, number: draw(seed, number, "cpu"))
    found = fuzz_pool.run_in_processes(work, 7, 60.0, 1, said.append)
    assert found["cases"] == 6 and found["systems"] == {"cpu": 4}
    hung, killed = found["failures"]
    assert hung.startswith("python -m tools.fuzz --device cpu --kind products --replay 7000001 |")
    assert hung.endswith("no end within 1.5 s")
    assert "--replay 7000003 |" in killed and killed.endswith("ended with code -11")
    assert said[2:] == ["fuzz: seed 7: its process does not start"], "after three of no case"


def test_a_run_ends_after_the_cases_it_was_asked_for(tmp_path):
    asked = ["--kind", "products", "--seconds", "900", "--processes", "2", "--cases", "3"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "cpu" / "fuzz.json").read_text())
    assert record["cases"] >= 3 and record["failures"] == [] and record["mps"] is False
    assert record["seconds"] < 600


def test_processes_on_a_gpu_share_it(monkeypatch, tmp_path):
    """Each waits for its products: in turns they would mostly wait for each other."""
    given = []
    empty = fuzz_pool.Tally(print).found()

    def run(work, seed, seconds, processes, say, environment, cases):
        given.append((environment, cases))
        return empty

    monkeypatch.setattr(fuzz_module, "run_in_processes", run)
    monkeypatch.setattr(fuzz_module, "shared_gpu", lambda: contextlib.nullcontext({"MPS": "on"}))
    monkeypatch.setattr(fuzz_module, "is_shared", lambda around: around == {"MPS": "on"})
    facts = {"gpu": {"slug": "h200"}}
    monkeypatch.setattr(fuzz_pool, "device_facts", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for processes, shared in ((3, True), (1, False)):
        asked = ["--device", "cuda", "--processes", str(processes), "--out", str(tmp_path)]
        assert main(asked) == 0
        record = json.loads((tmp_path / "h200" / "fuzz.json").read_text())
        assert record["mps"] is shared
    assert given == [({"MPS": "on"}, math.inf), ({}, math.inf)]


def test_each_process_compiles_another_row_order_first(monkeypatch):
    asked: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(st, "plan", lambda A, n, reorder, device: asked.append(reorder))
    for turn in range(len(REORDERERS)):
        fuzz_pool.warm("cpu", turn, told.append)
    assert told == asked
    every = [asked[k : k + len(REORDERERS)] for k in range(0, len(asked), len(REORDERERS))]
    assert {names[0] for names in every} == set(REORDERERS)
    assert all(sorted(names) == sorted(REORDERERS) for names in every)


def a_record(**changes: Any) -> dict[str, Any]:
    systems = {name: 9 for name in SYSTEMS if "cuda" in SYSTEMS[name].devices}
    whole = {"schema": SCHEMA, "parts": digests_of_today(), "device": "cuda", "failures": []}
    whole |= {"kinds": {"products": 20_000, "layers": 5_000}, "layers": dict.fromkeys(LAYERS, 9)}
    return {**whole, "systems": systems, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": 7}, "has schema 7"),
        ({"kinds": {"products": 19_999, "layers": 5_000}}, "19999 cases of products, fewer than"),
        ({"kinds": {"products": 20_000, "layers": 4_999}}, "4999 cases of layers, fewer than 5000"),
        ({"kinds": {"products": 20_000}}, "0 cases of layers, fewer than 5000"),
        ({"layers": {"GCNConv": 5_000}}, "no call of GATConv, GINConv, MLP, "),
        ({"systems": {"csr": 20_000}}, "no product of acc, "),
        ({"failures": ["python -m tools.fuzz --replay 3 | wrong"]}, "--replay 3 | wrong"),
        ({"failures": None}, "does not count"),
    ],
)
def test_a_record_that_proves_too_little_is_told_so(tmp_path, changes, text):
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps(a_record()))
    assert check_fuzz(path) == []
    path.write_text(json.dumps(a_record(**changes)))
    (found,) = check_fuzz(path)
    assert text in found


def test_as_an_older_gpu_fewer_cases_and_its_own_systems_suffice(tmp_path):
    path = tmp_path / "fuzz.json"
    systems = {name: 9 for name in a_record()["systems"] if runs_as(name, (8, 0))}
    older = {"gpu": {"slug": "h200/as-sm80"}, "systems": systems}
    path.write_text(json.dumps(a_record(**older, kinds={"products": 3_600, "layers": 1_400})))
    assert check_fuzz(path) == []
    path.write_text(json.dumps(a_record(**older, kinds={"products": 3_400, "layers": 1_599})))
    few, fewer = check_fuzz(path)
    assert "4999 cases, fewer than 5000" in few and "3400 cases of products, fewer" in fewer
    older["systems"] = dict(list(systems.items())[1:])
    path.write_text(json.dumps(a_record(**older)))
    (found,) = check_fuzz(path)
    assert f"no product of {next(iter(systems))};" in found


@pytest.mark.parametrize("path", [*RECORDS, *AS_RECORDS], ids=lambda path: path.parent.name)
def test_every_committed_record_is_whole_and_without_failures(path):
    """There may be none: README says so then."""
    assert check_fuzz(path) == []


def test_where_no_record_is_committed_the_readme_says_so():
    said = "no record of the fuzzer" in " ".join((ROOT / "README.md").read_text().split())
    assert said == (not RECORDS)


# Faults that the fuzzer found, each in its smallest form.


def large_row() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]]:
    values = torch.full((2,), 40_000.0)
    return torch.tensor([0, 2]), torch.tensor([0, 1]), values, (1, 2)


@pytest.mark.parametrize("system", ["cpu", "dense"])
@pytest.mark.parametrize(
    "options, expected", [({"reduce": "mean"}, 40_000.0), ({"alpha": 0.25}, 20_000.0)]
)
def test_a_sum_may_exceed_float16_before_its_epilogue(system, options, expected):
    plan = st.plan(large_row(), 3, dtype=torch.float16, system=system)
    C = plan.run(torch.ones(2, 3, dtype=torch.float16), **options)
    assert C.tolist() == [[expected] * 3]


def test_what_out_held_is_scaled_before_it_is_rounded():
    plan = st.plan(large_row(), 3, dtype=torch.float16, system="dense")
    out = torch.full((1, 3), 48_000.0, dtype=torch.float16)
    plan.run(torch.ones(2, 3, dtype=torch.float16), out=out, alpha=-1.0, beta=2.0)
    assert out.tolist() == [[16_000.0] * 3]


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_an_extremum_may_exceed_float16_before_alpha(reduce):
    plan = st.plan(large_row(), 3, dtype=torch.float16, system="cpu")
    B = torch.full((2, 3), 2.0, dtype=torch.float16)
    assert plan.run(B, reduce=reduce, alpha=0.25).tolist() == [[20_000.0] * 3]


@pytest.mark.parametrize("system", ["cpu", "dense"])
def test_a_16_bit_result_with_a_bias_is_rounded_once(system):
    A = (torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([256.0, 1.0]), (1, 2))
    plan = st.plan(A, 3, dtype=torch.bfloat16, system=system)
    B = torch.ones(2, 3, dtype=torch.bfloat16)
    C = plan.run(B, bias=torch.full((3,), 0.5, dtype=torch.bfloat16))
    assert C.tolist() == [[258.0] * 3]  # 257.5 between 256 and 258


@pytest.fixture
def twice(tmp_path) -> tuple[Run, torch.Tensor]:
    """A run whose A has entries 1 and -1 at one place, and a B with an infinity in that row."""
    drawn = first_case(container="csr tuple", dtype="float32")
    run = Run(replace(drawn, rows=2, cols=2, n=1, lead=()), np.random.default_rng(0), tmp_path)
    A = (torch.tensor([0, 2, 3]), torch.tensor([1, 1, 0]), torch.tensor([1.0, -1.0, 2.0]), (2, 2))
    run.matrix, run.system = read(run.case, A, A), "auto"
    return run, torch.tensor([[1.0], [torch.inf]])


def test_entries_of_one_place_are_judged_one_by_one_without_a_plan(twice):
    run, B = twice
    A, matrix = run.matrix.A, run.matrix
    assert multiplied(A, B, matrix) is matrix.entries
    C = st.spmm(A, B)
    assert C[:, 0].isnan().tolist() == [True, False]
    run.judge(B, C, "spmm", csr=matrix.entries)
    with pytest.raises(Wrong, match="instead of nan"):
        run.judge(B, torch.tensor([[torch.inf], [2.0]]), "spmm", csr=matrix.entries)


def test_entries_of_one_place_are_judged_as_one_with_a_plan(twice):
    run, B = twice
    A, matrix = run.matrix.A, run.matrix
    assert multiplied(A, B, matrix, "mean") is matrix.truth
    assert multiplied(A, B.double(), matrix) is matrix.truth  # of another type than A
    run.matrix.truth.values[0] = 3.0
    planned = st.plan((A[0], A[1], torch.tensor([1.0, 2.0, 2.0]), (2, 2)), 1) @ B
    run.judge(B, planned, "plan", csr=matrix.truth)
    with pytest.raises(Wrong, match="1 of 2 elements wrong"):
        run.judge(B, torch.tensor([[torch.nan], [2.0]]), "plan", csr=matrix.truth)
