"""A paper's figures and a suite's own tables: the right products, the best row order, the words."""

from __future__ import annotations

from typing import Any

import pytest

from sparsetile.bench.analysis import attach_baselines
from sparsetile.bench.record import Record
from sparsetile.bench.report import render_markdown
from sparsetile.bench.report.papers import (
    RatioRow,
    RatioTable,
    ladder_steps,
    published_rows,
    ratio_tables,
)
from sparsetile.bench.suites import load_suite

from .fakes import record

SUITE = load_suite("asyncsparse")
PRUNED = {"dtype": "bfloat16", "yardstick": ["torch-dense"], "rows": 1000, "nnz": 100_000}


def _real(matrix: str, system: str, n: int, seconds: float, **changes: Any) -> Record:
    return record(matrix, system, n, seconds, suite="asyncsparse", **changes)


def _pruned(system: str, n: int, seconds: float, **changes: Any) -> Record:
    return _real("gate_proj-90", system, n, seconds, **{**PRUNED, **changes})


def _thin_and_full() -> list[Record]:
    """Two matrices, one of density over 0.5 %, in two row orders: each has its own best."""
    found = []
    for name, nnz, given, affinity in (("thin", 900, 1e-5, 4e-5), ("full", 9000, 2e-5, 0.5e-5)):
        size = {"rows": 1000, "nnz": nnz}
        found += [
            _real(name, "cusparse-csr2", 512, 2e-5, **size),
            _real(name, "wcsr", 512, given, **size),
            _real(name, "wcsr", 512, affinity, config={"reorder": "affinity"}, **size),
        ]
    return attach_baselines(found)


def _table(title: str, records: list[Record]) -> RatioTable:
    tables = {table.title: table for table in ratio_tables(SUITE, attach_baselines(records))}
    return tables[title]


def test_ratios_by_density_take_each_matrix_in_its_best_row_order() -> None:
    table = _table("wcsr over cuSPARSE, by density", _thin_and_full())
    over = [row for row in table.rows if row.what == "over cuSPARSE's best CSR algorithm"]
    assert table.widths == (256, 512, 1024)
    assert [(row.label, row.count, row.figures[1]) for row in over] == [
        ("all", 2, pytest.approx(8**0.5)),
        ("density over 0.1 %", 1, pytest.approx(4.0)),
        ("density over 0.5 %", 1, pytest.approx(4.0)),
    ]
    assert over[0].figures[0] is None  # not measured at that width
    assert table.note == "float32, the best row order of each matrix (affinity or given)"


def test_the_tables_of_ratios_are_in_the_text() -> None:
    text = render_markdown(_thin_and_full())
    assert "### wcsr over cuSPARSE, by density" in text
    assert "Measured in float32, the best row order of each matrix (affinity or given)." in text
    assert "| on | figure | matrices | N = 256 | N = 512 | N = 1024 |" in text
    assert "| density over 0.5 % | over cuSPARSE's best CSR algorithm | 1 |  | 4.00 |  |" in text


def test_tables_of_which_nothing_was_measured_are_left_away() -> None:
    assert ratio_tables(SUITE, attach_baselines([record(suite="asyncsparse")])) == []
    assert "pruned weights, FP8" not in render_markdown(_thin_and_full())


def test_published_throughput_stands_beside_the_best_row_order_of_each_matrix() -> None:
    records = _thin_and_full()
    rows = {
        (row["what"], row["where"]): row
        for row in published_rows(SUITE, records)
        if row["system"] == "wcsr"
    }
    row = rows["geomean TFLOP/s, TF32, density over 0.5 %", "N = 512"]
    assert row["measured"] == pytest.approx(2 * 9000 * 512 / 0.5e-5 / 1e12)
    assert row["published"] == 19.33 and row["count"] == 1
    assert row["note"] == "float32, row order affinity"
    assert "the best row order of each matrix (affinity or given) |" in render_markdown(records)


def test_where_a_paper_s_type_is_not_built_another_stands_in_and_is_named() -> None:
    half = _real("a", "bcsr", 256, 1e-5, dtype="bfloat16")
    single = _real("a", "bcsr", 256, 4e-5)
    pruned = _pruned("bcsr", 256, 1e-7)  # no matrix of that table

    def row(records: list[Record]) -> dict[str, Any]:
        rows = published_rows(SUITE, attach_baselines(records))
        what = "geomean TFLOP/s, TF32, all 414 matrices"
        return next(r for r in rows if (r["system"], r["what"]) == ("bcsr", what))

    assert row([half, pruned])["measured"] == pytest.approx(half["gflops"] / 1e3)
    assert row([half, pruned])["note"].startswith("bfloat16, ")
    assert row([half, single])["measured"] == pytest.approx(single["gflops"] / 1e3)
    assert row([half, single])["note"].startswith("float32, ")


def test_fp8_is_held_against_the_dense_product_and_itself_in_bfloat16() -> None:
    records = [
        _pruned("torch-dense", 4096, 8e-5),
        _pruned("bcsr", 4096, 2e-5),
        _pruned("bcsr", 4096, 1e-5, dtype="float8_e4m3fn"),
        _pruned("torch-dense", 4096, 5e-5, dtype="float8_e4m3fn"),
    ]
    rows = _table("bcsr on pruned weights, FP8", records).rows
    assert {row.what: row.figures[1] for row in rows} == {
        "over dense torch.mm in BF16": pytest.approx(8.0),
        "over itself in BF16": pytest.approx(2.0),
        "over the dense product in FP8": pytest.approx(5.0),
    }


def test_a_linear_layer_is_held_against_one_and_against_row_major_operands() -> None:
    linear = {"config": {"layout": "linear"}}
    records = [
        _pruned("torch-dense", 1024, 9e-5),
        _pruned("bcsr", 1024, 3e-5),
        _pruned("torch-dense", 1024, 8e-5, **linear),
        _pruned("bcsr", 1024, 2e-5, **linear),
    ]
    rows = _table("bcsr on pruned weights as a linear layer, BF16", records).rows
    assert {row.what: row.figures[0] for row in rows} == {
        "over torch.nn.functional.linear": pytest.approx(4.0),
        "over itself on row-major B and C": pytest.approx(1.5),
    }
    text = render_markdown(records)
    assert "### spmm, bfloat16, Test GPU, ratio to torch-dense" in text
    assert "| 1024 | bcsr linear | 4.00 |" in text and "| 1024 | bcsr | 3.00 |" in text


def test_the_width_of_a_tile_is_held_against_the_one_that_the_plan_chooses() -> None:
    records = [
        _pruned("bcsr", 256, 2e-5),
        _pruned("bcsr", 256, 4e-5, config={"ablation": "columns128"}),
    ]
    (row,) = _table("bcsr on pruned weights, tiles of 128 columns", records).rows
    assert row == RatioRow(
        "gate_proj-90", "over the width that the plan chooses", 1, (pytest.approx(0.5), None, None)
    )


def test_all_widths_of_the_third_table_stand_beside_the_paper_s() -> None:
    records = []
    for n in (1024, 4096, 16384, 65536):
        records += [_pruned("torch-dense", n, 8e-5), _pruned("bcsr", n, 2e-5)]
    rows = [
        (row["published"], row["measured"])
        for row in published_rows(SUITE, attach_baselines(records))
        if row["source"] == "AsyncSparse, table III" and row["where"].startswith("gate_proj-90")
    ]
    assert rows == [(share, pytest.approx(4.0)) for share in (1.58, 1.98, 1.92, 1.96)]


def test_the_two_ladders_keep_to_their_own_matrices() -> None:
    step = {"config": {"ablation": "opt0"}}
    records = [
        _pruned("torch-dense", 1024, 8e-5),
        _pruned("bcsr", 1024, 4e-5, **step),
        _real("DD", "cusparse-csr1", 1024, 9e-5),
        _real("DD", "bcsr", 1024, 3e-5, dtype="bfloat16", **step),
    ]
    weights, real, _ = ladder_steps(SUITE, attach_baselines(records))
    assert weights["bars"] == [("opt0 CUDA cores", pytest.approx(2.0))]
    assert real["bars"] == [("opt0 CUDA cores", pytest.approx(3.0))]
    assert (weights["over"], real["over"]) == ("torch-dense", "the best baseline")
    assert "| step | over torch-dense | over the step before |" in render_markdown(records)
    rows = published_rows(SUITE, attach_baselines(records))
    (row,) = [r for r in rows if r["source"].endswith(" II") and r["what"].endswith("opt0")]
    assert row["count"] == 1 and row["published"] == 0.12


def test_losses_of_a_step_are_counted_and_those_of_a_system_named() -> None:
    records = [
        _real("DD", "cusparse-csr1", 1024, 1e-5),
        _real("DD", "bcsr", 1024, 2e-5, dtype="bfloat16"),
        _real("DD", "bcsr", 1024, 4e-5, dtype="bfloat16", config={"ablation": "opt0"}),
    ]
    text = render_markdown(records)
    assert "- bcsr, N = 1024: DD 0.50" in text
    assert "- bcsr ablation=opt0, N = 1024: 1 of 1" in text


def test_a_step_that_is_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsetile.systems import SYSTEMS

    monkeypatch.setattr(type(SYSTEMS["bcsr"]), "ablations", ("opt0",))
    rows = published_rows(SUITE, attach_baselines([record(suite="asyncsparse")]))
    steps = {
        row["what"].split(", ")[3]: row["missing"] for row in rows if row["source"].endswith(" II")
    }
    assert steps["opt0"] == "not measured" and steps["opt7"] == "not built yet"
    timed = _pruned("bcsr", 1024, 4e-5, config={"ablation": "opt0"})
    records = attach_baselines([_pruned("torch-dense", 1024, 8e-5), timed])
    assert ladder_steps(SUITE, records)[0]["why"] == "not built yet"
