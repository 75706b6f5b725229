"""Papers' ladders and figures: the right products, the best row order, why something is missing."""

from __future__ import annotations

from typing import Any

import pytest
from tools.report import render_markdown
from tools.report_papers import ladder_lines, published_rows

from sparsetile.bench.analysis import attach_baselines
from sparsetile.bench.record import Record
from sparsetile.bench.suites import load_suite
from sparsetile.systems import SYSTEMS
from tests.bench.fakes import failed, record

ASYNC = load_suite("asyncsparse")
PRUNED = {"dtype": "bfloat16", "yardstick": ["torch-dense"], "rows": 1000, "nnz": 100_000}
COLUMNS = ("source", "what", "system", "at", "published", "gpu", "measured", "products",
           "standins", "note")  # fmt: skip


def _real(matrix: str, system: str, n: int, seconds: float, **changes: Any) -> Record:
    return record(matrix, system, n, seconds, suite="asyncsparse", **changes)


def _pruned(system: str, n: int, seconds: float, **changes: Any) -> Record:
    return _real("gate_proj-90", system, n, seconds, **{**PRUNED, **changes})


def _published(suite: str, records: list[Record], **wanted: str) -> list[dict[str, str]]:
    """Rows of the table of published figures, by column."""
    rows = []
    for line in published_rows(load_suite(suite), attach_baselines(records)):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        row = dict(zip(COLUMNS, cells, strict=True))
        if all(text in row[name] for name, text in wanted.items()):
            rows.append(row)
    return rows


def _ladder(
    found: dict[tuple[str, str], float], suite: str = "acc", which: int = 0
) -> list[Record]:
    """Records of a suite's ladder: (matrix, label) -> seconds, against 8e-5."""
    steps = {step["label"]: step["config"] for step in load_suite(suite).ladders[which]["steps"]}
    records = []
    for (matrix, label), seconds in found.items():
        records.append(record(matrix, "acc", 128, seconds, suite=suite, config=steps[label]))
        records.append(record(matrix, "cusparse-csr1", 128, 8e-5, suite=suite))
    return attach_baselines(records)


def test_published_figures_and_ladders_stand_beside_the_measured() -> None:
    records = []
    for n, seconds in ((256, 1e-5), (512, 0.5e-5)):
        records.append(record("DD", "voltrix", n, seconds, suite="voltrix"))
        records.append(record("DD", "cusparse-csr1", n, 2e-5, suite="voltrix"))
    step = {"config": {"ablation": "tma"}}
    records.append(record("DD", "voltrix", 256, 4e-5, suite="voltrix", **step))
    text = render_markdown(records)
    assert "Beside the published figures" in text
    assert "| not measured |" in text  # nothing at N = 1024
    assert "Not measured: synchronous copies, + BMat, + multi-tier, + persistent." in text
    assert "| voltrix | N = 256 | 2.4 | H100 | 2.00 | 1 | 0 |" in text


def test_a_ladder_compares_its_steps_on_the_same_products() -> None:
    records = _ladder(
        {
            ("a", "BitTCF"): 4e-5,
            ("a", "+ reorder"): 2e-5,
            ("a", "+ balance"): 1e-5,
            ("b", "+ balance"): 9e-5,
        }
    )
    text = render_markdown(records)
    # b lacks two steps, so it counts in none.
    assert "Each step has all before it; geomeans over the same 1 products." in text
    assert "| BitTCF | 2.00 |  |\n| + reorder | 4.00 | 2.00 |\n| + balance | 8.00 | 2.00 |" in text
    assert "Not measured: + cache policy, + pipeline." in text


def test_parts_that_are_off_alone_are_compared_with_the_whole() -> None:
    alone = {("a", "everything"): 1e-5, ("a", "without balance"): 2e-5}
    records = _ladder({**alone, ("a", "nor the pipeline"): 1.25e-5}, "acc_parts", 1)
    text = render_markdown(records)
    assert "Each step is compared with the first; geomeans over the same 1 products." in text
    assert "| step | over the best baseline | over the first |" in text
    assert "| everything | 8.00 |  |\n| without balance | 4.00 | 0.50 |" in text
    assert "| nor the pipeline | 6.40 | 0.80 |" in text
    assert "\n## Acc: BitTCF, reordering, cache policy, pipeline, balance" in text


def test_without_the_whole_nothing_is_compared_with_it() -> None:
    records = _ladder({("a", "without balance"): 2e-5}, "acc_parts", 1)
    lines = ladder_lines(load_suite("acc_parts"), records)
    assert "| without balance | 4.00 |  |" in lines
    assert any(line.startswith("Not measured: everything, ") for line in lines)


def test_a_ladder_counts_at_its_own_width_alone() -> None:
    records = _ladder({("a", "BitTCF"): 4e-5})
    assert ladder_lines(load_suite("acc"), records)
    assert ladder_lines(load_suite("acc"), [{**r, "n": 512} for r in records]) == []


def test_a_step_that_was_refused_says_why() -> None:
    steps = load_suite("acc").ladders[0]["steps"]
    refused = failed(
        "skipped", "needs sm_80 or newer", matrix="a", system="acc", n=128, suite="acc",
        config=steps[0]["config"],
    )  # fmt: skip
    records = [*_ladder({("a", "+ balance"): 1e-5}), *attach_baselines([refused])]
    why = ladder_lines(load_suite("acc"), records)[-1]
    assert why == "Needs sm_80 or newer: BitTCF, + reorder, + cache policy, + pipeline."


def test_the_two_ladders_keep_to_their_own_matrices() -> None:
    step = {"config": {"ablation": "opt0"}}
    records = [
        _pruned("torch-dense", 1024, 8e-5),
        _pruned("bcsr", 1024, 4e-5, **step),
        _real("DD", "cusparse-csr1", 1024, 9e-5),
        _real("DD", "bcsr", 1024, 3e-5, dtype="bfloat16", **step),
    ]
    lines = ladder_lines(ASYNC, attach_baselines(records))
    assert [line for line in lines if line.startswith(("| step", "| opt0"))] == [
        "| step | over torch-dense | over the step before |", "| opt0 CUDA cores | 2.00 |  |",
        "| step | over the best baseline | over the step before |",
        "| opt0 CUDA cores | 3.00 |  |",
    ]  # fmt: skip
    (row,) = _published("asyncsparse", records, source="table II", what="opt0", products="1")
    assert row["published"] == "0.12"


def test_a_step_that_is_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SYSTEMS["bcsr"]), "ablations", ("opt0",))
    steps = {
        row["what"].split(", ")[3]: row["measured"]
        for row in _published("asyncsparse", [record(suite="asyncsparse")])
        if row["source"].endswith(" II")
    }
    assert steps["opt0"] == "not measured" and steps["opt7"] == "not built yet"
    timed = _pruned("bcsr", 1024, 4e-5, config={"ablation": "opt0"})
    records = attach_baselines([_pruned("torch-dense", 1024, 8e-5), timed])
    assert ladder_lines(ASYNC, records)[-1].startswith("Not built yet: opt1 WGMMA, ")


def test_a_published_time_stands_beside_the_stand_in_that_was_measured() -> None:
    records = [record("flickr-like", "brp", suite="brp", source="stand-in")]
    rows = {row["at"]: row for row in _published("brp", records)}
    assert (rows["flickr-like"]["measured"], rows["flickr-like"]["standins"]) == ("51.20", "1")
    assert (rows["Yelp"]["measured"], rows["Yelp"]["products"]) == ("not measured", "0")


def test_a_published_figure_of_dense_enough_matrices_leaves_the_others_out() -> None:
    """Table I of AsyncSparse: the same products, by density and type."""
    size = {"rows": 1000, "cols": 1000, "n": 512}
    records = [
        {**_real("thin", "wcsr", 512, 1e-5), **size, "nnz": 900, "gflops": 1000.0},
        {**_real("full", "wcsr", 512, 1e-5), **size, "nnz": 9000, "gflops": 4000.0},
        {
            **_real("half", "wcsr", 512, 1e-5, dtype="bfloat16"),
            **size, "nnz": 9000, "gflops": 64000.0,
        },
    ]  # fmt: skip
    found = {
        row["what"].rpartition(", ")[2]: (row["measured"], row["published"])
        for row in _published("asyncsparse", records, system="wcsr", at="N = 512")
    }
    assert found["all 414 matrices"] == ("2.00", "4.04")
    assert found["density over 0.1 %"] == ("4.00", "11.76")
    assert found["density over 0.5 %"] == ("4.00", "19.33")
    assert found["density over 1 %"] == ("not measured", "21.89")


def test_a_published_ratio_to_one_baseline_is_to_that_baseline() -> None:
    """Table III of AsyncSparse is over torch.mm, which is no yardstick of sparse products."""
    records = [
        _pruned("bcsr", 4096, 2e-5),
        _pruned("torch-dense", 4096, 9e-5),
        _pruned("cusparse-csr3", 4096, 4e-5),
        _pruned("bcsr", 1024, 1e-5),
    ]
    rows = {row["at"]: row for row in _published("asyncsparse", records, what="torch.mm")}
    at = rows["gate_proj-90, N = 4096"]
    assert (at["measured"], at["published"]) == ("4.50", "1.98")
    assert rows["gate_proj-90, N = 1024"]["measured"] == "not measured"  # no dense time there
    assert rows["gate_proj-99, N = 16384"]["published"] == "3.19"


def test_published_throughput_stands_beside_the_best_row_order_of_each_matrix() -> None:
    records = []
    for name, nnz, given, affinity in (("thin", 900, 1e-5, 4e-5), ("full", 9000, 2e-5, 0.5e-5)):
        size = {"rows": 1000, "nnz": nnz}
        records += [
            _real(name, "wcsr", 512, given, **size),
            _real(name, "wcsr", 512, affinity, config={"reorder": "affinity"}, **size),
        ]
    (row,) = _published("asyncsparse", records, system="wcsr", what="0.5 %", at="512")
    assert row["measured"] == f"{2 * 9000 * 512 / 0.5e-5 / 1e12:.2f}" and row["products"] == "1"
    assert row["note"] == "float32, row order affinity"
    assert "the best row order of each matrix (affinity or given) |" in render_markdown(records)


def test_if_a_paper_s_type_is_not_built_another_stands_in_and_is_named() -> None:
    half = _real("a", "bcsr", 256, 1e-5, dtype="bfloat16")
    single = _real("a", "bcsr", 256, 4e-5)
    pruned = _pruned("bcsr", 256, 1e-7)  # no matrix of that table
    for records, counted in (([half, pruned], half), ([half, single], single)):
        row = _published("asyncsparse", records, system="bcsr", what="TF32, all 414 matrices")[0]
        assert row["measured"] == f"{counted['gflops'] / 1e3:.2f}"
        assert row["note"].startswith(f"{counted['dtype']}, ")


def test_losses_of_a_step_are_counted_and_those_of_a_system_named() -> None:
    records = [
        _real("DD", "cusparse-csr1", 1024, 1e-5),
        _real("DD", "bcsr", 1024, 2e-5, dtype="bfloat16"),
        _real("DD", "bcsr", 1024, 4e-5, dtype="bfloat16", config={"ablation": "opt0"}),
    ]
    text = render_markdown(records)
    assert "- bcsr, N = 1024: DD 0.50" in text
    assert "- bcsr ablation=opt0, N = 1024: 1 of 1" in text
