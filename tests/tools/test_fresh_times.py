"""tools.fresh_times: every part on the CPU, its figures, its time limit and its summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.fresh_cases import Baselines, Case, Context, Figures, matrix_names, sampled_error

import sparsetile as st
from sparsetile.bench.baselines import BASELINES
from sparsetile.intake import as_csr
from sparsetile.intake.files import write_npz
from tests.contracts.cases import csr_of, random_matrix
from tools import fresh_cases, fresh_planning, fresh_products, fresh_times, fresh_training

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in (("one", 40), ("two", 30), ("three", 20)):
        write_npz(data / f"{name}.npz", csr_of(random_matrix(rows, 25, 0.2)))
    (data / "CORE.txt").write_text("two\none\n")
    return data


@pytest.fixture
def quick(constants) -> None:
    constants(fresh_products, WIDTHS=(4,), FEW_COLUMNS=(1,), EXPECTED_RUNS=(10,), FRESH=2)


def run(folder: Path, part: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
    out = folder.parent / "out"
    words = ["--data", str(folder), "--out", str(out), "--part", part, "--device", "cpu"]
    code = fresh_times.main([*words, "--small", *more])
    lines = (out / "fresh_times.jsonl").read_text().splitlines()
    return code, [json.loads(line) for line in lines]


def case_of(rows: int = 40) -> Case:
    return Case("mine", csr_of(random_matrix(rows, 25, 0.2)), CPU, torch.int64)


def context_of(path: Path, names: list[str] | None = None) -> Context:
    figures = Figures(path / "figures.jsonl")
    return Context(CPU, path, names or [], figures, torch.int64, small=True)


@pytest.mark.parametrize(
    ("part", "groups", "ratios"),
    [
        ("first", {"N=4 TF32", "N=4 float32"}, {"over torch"}),
        (
            "counts",
            {f"N=4 {kind} x{count}" for kind in ("TF32", "float32") for count in (1, 10, 100)},
            {"over the best", "over the best, calls"},
        ),
        (
            "one",
            {
                f"N=1 {kind}, {way}"
                for kind in ("TF32", "float32")
                for way in ("plan @ B", "st.spmm", "functional.spmm")
            },
            set(),
        ),
        ("breakeven", {"N=4 TF32, 10 runs", "N=4 float32, 10 runs"}, {"over no plan"}),
    ],
)
def test_a_part_measures_every_matrix(folder, quick, part, groups, ratios):
    code, (first, *lines) = run(folder, part)
    assert code == 0 and first["environment"]["device"] == "cpu"
    assert lines.pop()["seconds"] > 0
    assert {line["subject"] for line in lines} == {"one", "two"}, "the core of the folder"
    assert {line["group"] for line in lines} == groups
    assert all(set(line.get("ratios", ())) == ratios for line in lines)
    assert all(line["ours_us" if part != "breakeven" else "kernel_us"] > 0 for line in lines)
    if part != "counts":
        assert all(line["error"] < 1e-6 for line in lines)


def test_planning_is_timed_for_every_form_of_a_matrix(folder, constants):
    constants(fresh_planning, REPEATS=3, WIDTH=4)
    code, (_, *lines, seconds) = run(folder, "planning")
    assert code == 0 and seconds["seconds"] > 0
    assert {line["subject"] for line in lines} == {"one", "two"}
    groups = {line["group"] for line in lines}
    assert {f"exact system, {form}" for form in fresh_planning.FORMS} < groups
    assert {f"{named}, int64 arrays" for named in fresh_planning.PLANS} < groups
    for line in lines:
        assert len(line["plans_us"]) == 3 and line["nnz"] > 0
        medians = line["medians"]
        assert medians["calls"] > 50 and medians["plan, us"] == sorted(line["plans_us"])[1]


def test_forms_of_a_matrix_are_the_same_matrix():
    case = case_of()
    for variant in (0, 3):
        csr = case.variant(variant)
        for name, form in fresh_planning.FORMS.items():
            found = as_csr(form(case, variant))
            assert torch.equal(found.indptr, csr.indptr), name
            assert torch.equal(found.indices, csr.indices), name
            assert (found.entry_map is not None) == (name == "edges")


def test_a_changing_pattern_is_measured_by_every_way(folder):
    code, (_, line, _) = run(folder, "change")
    assert code == 0 and set(line["ms"]["forward"]) >= {"gather", "dense", "st.spmm"}
    errors = line["errors"]
    assert set(errors) >= set(fresh_training.OURS)
    assert all(max(each.values()) < 1e-5 for each in errors.values())


def test_a_wrong_gradient_of_a_changing_pattern_is_named(folder, capsys, fault):
    def broken(ways, codes, W, values):
        product = ways(codes, W, values)["gather"]
        return ways(codes, W, values) | {"st.spmm": lambda i: product(i) + 0.5 * values.sum()}

    fault(fresh_training, "_ways", broken)
    code, (_, line, _) = run(folder, "change")
    assert code == 1 and line["wrong"] and line["error"] > 0.1
    assert "wrong: setting, 32 x 64 x 16" in capsys.readouterr().out


def test_host_time_is_compared_with_torch_add(folder):
    code, (_, *lines, _) = run(folder, "host")
    assert code == 0 and [line["group"] for line in lines] == ["float32", "TF32"]
    assert {"spmm(fresh tensor) / add", "functional.spmm / add"} <= set(lines[0]["medians"])


def test_steps_of_both_packages_are_compared(folder, monkeypatch):
    pytest.importorskip("torch_geometric")
    for name in ("minibatches", "convolutions"):
        monkeypatch.setattr(fresh_training.gnn_times, name, lambda *_: {"speedup": 2.0})
    code, (_, *lines, _) = run(folder, "batches")
    assert code == 0 and [line["subject"] for line in lines] == [
        "SAGE", "GCN", "GCNConv", "SAGEConv"
    ]  # fmt: skip
    assert lines[0]["ratios"] == {"over PyG eager": 2.0}
    assert all(line["error"] < 1e-4 for line in lines[2:]), "the same weights, the same losses"
    assert set(lines[2]["ratios"]) == {"ours over PyG's best"}


def test_a_failing_product_is_a_result_and_the_next_ones_run(folder, quick, capsys, fault):
    def failing(spmm, A, B):
        if B.shape[1] == 4 and A.shape[0] == 40:
            raise RuntimeError("no luck\nhere")
        return spmm(A, B)

    fault(st, "spmm", failing)
    code, lines = run(folder, "first")
    found = {line["subject"]: line for line in lines if "subject" in line}
    assert code == 1 and found["one"]["failed"] == "RuntimeError: no luck here"
    assert found["two"]["ratios"]["over torch"] > 0
    assert "failed: one, N=4 TF32: RuntimeError: no luck here" in capsys.readouterr().out


def test_a_wrong_product_is_named(folder, quick, capsys, fault):
    fault(st, "spmm", lambda spmm, A, B: 1.01 * spmm(A, B))
    code, lines = run(folder, "first", "--matrices", "one")
    assert code == 1 and all(line["wrong"] for line in lines if "error" in line)
    assert "wrong: one, N=4 float32: error" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["first", "change", "host", "batches"])
def test_what_the_time_limit_leaves_out_is_named(folder, part):
    code, lines = run(folder, part, "--time-limit", "0.001")
    skipped = [line for line in lines if "skipped" in line]
    assert code == 0 and skipped and all(line["reason"] == "time limit" for line in skipped)
    assert not any("ratios" in line for line in lines)


def test_variants_are_other_matrices_of_the_same_entries():
    case = case_of()
    dense = case.fresh().to_dense() != 0
    flips = [(), (0,), (1,), (0, 1)]
    for number, flip in enumerate(flips):
        A = case.fresh(number)
        assert torch.equal(A.to_dense() != 0, dense.flip(flip))
        assert A.crow_indices().data_ptr() != case.fresh(number).crow_indices().data_ptr()
    assert not torch.equal(case.fresh().values(), case.fresh().values())


def test_the_error_of_sampled_rows_finds_wrong_and_missing_results():
    case = case_of()
    A, B = case.fresh(), case.dense(3)
    arrays = A.crow_indices(), A.col_indices(), A.values()
    C = A.to_dense() @ B
    assert sampled_error(*arrays, B, C) < 1e-6
    longest = int(torch.diff(arrays[0]).argmax())
    for bad, least in ((C[longest, 1] + 0.1, 1e-3), (torch.tensor(math.nan), math.inf)):
        spoiled = C.clone()
        spoiled[longest, 1] = bad
        assert sampled_error(*arrays, B, spoiled) >= least


def test_a_plan_pays_once_its_gain_covers_what_it_cost_more():
    paid = fresh_products.paid_after
    assert paid(1e-3, 1e-5, 2e-4, 3e-5) == 40
    assert paid(1e-4, 1e-5, 2e-4, 3e-5) == 0, "cheaper from the first product on"
    assert paid(1e-3, 3e-5, 2e-4, 3e-5) == math.inf
    assert Baselines({"a": 5.0, "b": 0.0}, {"a": 1.0, "b": 2.0}).total(10) == 15
    assert Baselines({"a": 5.0, "b": 0.0}, {"a": 1.0, "b": 2.0}).total(1) == 2


def test_cusparse_counts_with_its_preprocessing_and_by_its_fastest(folder, quick, monkeypatch):
    found = Baselines({"a": 50.0, "b": 5.0}, {"a": 10.0, "b": 20.0}, call=11.0)
    monkeypatch.setattr(Case, "baselines", lambda case, n: found)
    _, (_, *lines, _) = run(folder, "counts", "--matrices", "one")
    totals = {line["count"]: line for line in lines}
    assert [totals[count]["cusparse_us"] for count in (1, 10, 100)] == [25e6, 150e6, 1050e6]
    assert totals[10]["cusparse_calls_us"] == 160e6
    assert totals[10]["ratios"]["over the best"] == pytest.approx(
        totals[10]["torch_us"] / totals[10]["ours_us"], rel=1e-4
    ), "torch is the best here"
    _, (_, line, *_) = run(folder, "one", "--matrices", "one")
    assert line["baseline"] == "a"
    assert line["ratios"]["over cuSPARSE"] == pytest.approx(10e6 / line["ours_us"], rel=1e-4)
    _, (_, line, *_) = run(folder, "breakeven", "--matrices", "one")
    assert line["break_even"] == 0 and line["ratios"]["over cuSPARSE"] == pytest.approx(
        150e6 / (line["plan_us"] + 10 * line["kernel_us"]), rel=1e-4
    )
    assert ("over no plan" in line["loses"]) == (line["ratios"]["over no plan"] < 1)


def test_one_column_is_also_compared_with_spmv(constants):
    own = dict.fromkeys((*fresh_cases.SPMM, *fresh_cases.SPMV), BASELINES["torch-csr"])
    constants(fresh_cases, BASELINES=own)
    case = case_of()
    assert set(case._measure_baselines(1).kernel) == set(own)
    wider = case._measure_baselines(8)
    assert set(wider.kernel) == set(wider.preprocess) == set(fresh_cases.SPMM)
    assert wider.best in wider.kernel and wider.call > 0 and wider.facts == {}


def test_a_baseline_that_fails_leaves_the_others_and_is_named(
    folder, quick, monkeypatch, capsys, constants
):
    own = dict.fromkeys(("cusparse-csr1", "cusparse-csr3"), BASELINES["torch-csr"])
    constants(fresh_cases, BASELINES=own | {"cusparse-csr2": None})
    monkeypatch.setattr(Case, "baselines", Case._measure_baselines)
    constants(fresh_products, FEW_COLUMNS=(8,))
    code, (_, line, *_) = run(folder, "one", "--matrices", "one")
    assert code == 0 and set(line["kernels_us"]) == set(own)
    assert (
        "baseline cusparse-csr2: one, N=8 TF32, plan @ B: AttributeError" in capsys.readouterr().out
    )


def test_the_summary_has_means_medians_and_the_lowest_five(tmp_path):
    context = context_of(tmp_path)
    for number in range(1, 7):
        figure = {"ratios": {"over x": float(number)}, "medians": {"us": 10.0 * number}}
        context.attempt("first", "N=1", f"m{number}", lambda figure=figure: figure)
    context.attempt("first", "N=1", "never", lambda: {"medians": {"us": math.inf}})
    ratio, median = context.figures.rows("first")
    assert ratio == ["first", "N=1", "over x", "6", "2.994", "1.00 m1"]
    assert median == ["first", "N=1", "us", "7", "40 median", "inf never, highest"]
    (lowest,) = context.figures.lowest("first")
    assert lowest.startswith("over x: 1.000 m1 N=1; 2.000 m2") and "m6" not in lowest
    last = json.loads((tmp_path / "figures.jsonl").read_text().splitlines()[-1])
    assert last["medians"] == {"us": None}, "JSON has no infinity"


def test_matrices_are_the_core_all_or_some_of_the_core(folder):
    assert matrix_names("core", folder) == ["two", "one"]
    assert matrix_names("all", folder) == ["two", "one", "three"]
    assert matrix_names("1", folder) == ["two"]
    assert matrix_names("three,one", folder) == ["three", "one"]


def test_an_unknown_part_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        run(folder, "first,last")
    assert ended.value.code == 2
    assert "--part must be of first, change, host" in capsys.readouterr().err
