"""Reports without a browser: what the page and the Markdown hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparsetile.bench.analysis import attach_baselines
from sparsetile.bench.record import Damage
from sparsetile.bench.report import render_markdown, render_page
from sparsetile.bench.report.charts import peak_gflops, scaling_lines, speedup_scatter
from sparsetile.bench.report.published import ladder_steps, published_rows
from sparsetile.bench.report.svg import Axis, log_ticks
from sparsetile.bench.suites import load_suite
from sparsetile.data.registry import generate
from sparsetile.intake import write_npz

from .fakes import a_run, environment, failed, record


def test_the_page_needs_no_network_and_names_everything() -> None:
    page = render_page([*a_run(4), failed(matrix="PubMed", system="dense")])
    for address in re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', page):
        assert address.startswith(("#", "data:", "var(")), address
    assert "https://" not in page and "http://" not in page
    for text in ("Test GPU", "Core: 32 real matrices", "ended by SIGSEGV", "--data DIR"):
        assert text in page


def test_hostile_names_are_escaped() -> None:
    bad = "</script><script>alert(1)</script>"
    page = render_page([record(bad, "csr"), record(bad, "cusparse-csr1", seconds=2e-5)])
    assert "<script>alert" not in page
    body = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert body is not None and json.loads(body.group(1))["rows"][0][1] == bad


def test_published_figures_and_ladders_stand_beside_the_measured() -> None:
    records = []
    for n, seconds in ((256, 1e-5), (512, 0.5e-5)):
        for system in ("voltrix", "cusparse-csr1"):
            spent = seconds if system == "voltrix" else 2e-5
            records.append(record("DD", system, n, spent, suite="voltrix"))
    records.append(
        record("DD", "voltrix", 256, 4e-5, suite="voltrix", config={"ablation": "tma"})
    )  # fmt: skip
    page = render_page(records)
    assert "Beside the published figures" in page and "2.4" in page
    assert ">not measured</td>" in page  # nothing at N = 1024
    assert "Not measured: synchronous copies, + BMat, + multi-tier, + persistent." in page
    text = render_markdown(records)
    assert "| voltrix | N = 256 | 2.4 | H100 | 2.00 | 1 | 0 |" in text


def _ladder(found: dict[tuple[str, str], float], suite: str = "acc", which: int = 0) -> list[dict]:  # type: ignore[type-arg]
    """Records of a suite's ladder: (matrix, label) -> seconds, against 8e-5."""
    steps = {step["label"]: step["config"] for step in load_suite(suite).ladders[which]["steps"]}
    records = []
    for (matrix, label), seconds in found.items():
        records.append(record(matrix, "acc", 128, seconds, suite=suite, config=steps[label]))
        records.append(record(matrix, "cusparse-csr1", 128, 8e-5, suite=suite))
    return attach_baselines(records)


def test_a_ladder_compares_its_steps_on_the_same_products() -> None:
    records = _ladder(
        {
            ("a", "BitTCF"): 4e-5,
            ("a", "+ reorder"): 2e-5,
            ("a", "+ balance"): 1e-5,
            ("b", "+ balance"): 9e-5,
        }
    )
    (found,) = ladder_steps(load_suite("acc"), records)
    assert found["count"] == 1  # b lacks two steps, so it counts in none
    for text in ("2.00×", "4.00×", "8.00×"):
        assert text in found["svg"]
    assert found["missing"] == ["+ cache policy", "+ pipeline"]


def test_parts_that_are_off_alone_are_held_against_the_whole() -> None:
    alone = {("a", "everything"): 1e-5, ("a", "without balance"): 2e-5}
    records = _ladder({**alone, ("a", "nor the pipeline"): 1.25e-5}, "acc_parts", 1)
    both = ladder_steps(load_suite("acc_parts"), records)
    gains = [(label, gain and round(gain, 2)) for label, _, gain in both[1]["gains"]]
    assert gains == [("everything", None), ("without balance", 0.5), ("nor the pipeline", 0.8)]
    text = render_markdown(records)
    assert "Each step is held against the first; geomeans over the same 1 products." in text
    assert "| step | over the best baseline | over the first |" in text
    assert "| without balance | 4.00 | 0.50 |" in text
    assert "### Acc: BitTCF, reordering, cache policy, pipeline, balance" in text
    page = render_page(records)
    assert "over the first: without balance&nbsp;0.50, nor the pipeline&nbsp;0.80." in page


def test_without_the_whole_nothing_is_held_against_it() -> None:
    records = _ladder({("a", "without balance"): 2e-5}, "acc_parts", 1)
    found = ladder_steps(load_suite("acc_parts"), records)[1]
    assert found["gains"] == [("without balance", 4.0, None)]
    assert "everything" in found["missing"]


def test_the_steps_of_a_ladder_crowd_no_other_chart() -> None:
    page = render_page(_ladder({("a", "BitTCF"): 4e-5, ("a", "+ balance"): 1e-5}))
    boxes = re.search(r'aria-label="Distribution of the speedup.*?</svg>', page, re.DOTALL)
    assert boxes is not None and ">acc affinity</text>" in boxes.group()
    assert "bittcf" not in boxes.group() and "acc ablation=bittcf identity" in page


def test_a_ladder_is_drawn_at_its_own_width_alone() -> None:
    records = _ladder({("a", "BitTCF"): 4e-5})
    other = [{**r, "n": 512} for r in records]
    assert ladder_steps(load_suite("acc"), records)[0]["count"] == 1
    assert ladder_steps(load_suite("acc"), other)[0]["count"] == 0


def test_a_step_that_was_refused_says_why() -> None:
    config = load_suite("acc").ladders[0]["steps"][0]["config"]
    refused = failed(
        "skipped", "needs sm_80 or newer", matrix="a", system="acc", n=128, suite="acc",
        config=config,
    )  # fmt: skip
    (found,) = ladder_steps(load_suite("acc"), attach_baselines([refused]))
    assert found["why"] == "needs sm_80 or newer" and len(found["missing"]) == 5
    assert "Needs sm_80 or newer: BitTCF" in render_page([refused])


def test_a_published_time_stands_beside_the_stand_in_that_was_measured() -> None:
    records = [record("flickr-like", "brp", suite="brp", source="stand-in")]
    rows = {row["where"]: row for row in published_rows(load_suite("brp"), records)}
    assert rows["flickr-like"]["measured"] == pytest.approx(51.2)
    assert rows["flickr-like"]["standins"] == 1
    assert rows["Yelp"]["measured"] is None and rows["Yelp"]["count"] == 0


def test_a_published_figure_of_dense_enough_matrices_leaves_the_others_out() -> None:
    """Table I of AsyncSparse: the same products, by density and type."""
    size = {"rows": 1000, "cols": 1000, "n": 512}
    records = [
        {**record("thin", "wcsr", suite="asyncsparse"), **size, "nnz": 900, "gflops": 1000.0},
        {**record("full", "wcsr", suite="asyncsparse"), **size, "nnz": 9000, "gflops": 4000.0},
        {
            **record("half", "wcsr", suite="asyncsparse", dtype="bfloat16"),
            **size, "nnz": 9000, "gflops": 64000.0,
        },
    ]  # fmt: skip
    rows = published_rows(load_suite("asyncsparse"), records)
    found = {
        row["what"].rpartition(", ")[2]: (row["measured"], row["published"])
        for row in rows
        if row["system"] == "wcsr" and row["where"] == "N = 512"
    }
    assert found["all 414 matrices"] == (pytest.approx(2.0), 4.04)
    assert found["density over 0.1 %"] == (pytest.approx(4.0), 11.76)
    assert found["density over 0.5 %"] == (pytest.approx(4.0), 19.33)
    assert found["density over 1 %"] == (None, 21.89)


def test_a_published_ratio_to_one_baseline_is_held_against_that_baseline() -> None:
    """Table III of AsyncSparse is over torch.mm, which is no yardstick of sparse products."""
    names = {"suite": "asyncsparse", "dtype": "bfloat16"}
    records = [
        record("gate_proj-90", "bcsr", 4096, 2e-5, **names),
        record("gate_proj-90", "torch-dense", 4096, 9e-5, **names),
        record("gate_proj-90", "cusparse-csr3", 4096, 4e-5, **names),
        record("gate_proj-90", "bcsr", 1024, 1e-5, **names),
    ]
    rows = {
        row["where"]: row
        for row in published_rows(load_suite("asyncsparse"), attach_baselines(records))
        if "torch.mm" in row["what"]
    }
    assert rows["gate_proj-90, N = 4096"]["measured"] == pytest.approx(4.5)
    assert rows["gate_proj-90, N = 4096"]["published"] == 1.98
    assert rows["gate_proj-90, N = 1024"]["measured"] is None  # no dense time at that width
    assert rows["gate_proj-99, N = 16384"]["published"] == 3.19


def test_break_even_curves_are_drawn_where_planning_pays() -> None:
    paid = [record("a", "csr", seconds=1e-5), record("a", "cusparse-csr1", seconds=2e-5)]
    assert "When planning has paid" in render_page(paid)
    lost = [record("a", "csr", seconds=3e-5), record("a", "cusparse-csr1", seconds=2e-5)]
    assert "When planning has paid" not in render_page(lost)


def test_scaling_is_drawn_against_nonzeros_rows_and_width() -> None:
    records = [
        *(record(f"nnz-1e{k}", "csr", 128, 10.0 ** (k - 9), nnz=10**k) for k in (4, 5, 6)),
        *(record("nnz-1e6", "csr", n, n * 1e-7, nnz=10**6) for n in (1, 32, 512)),
        *(record(f"rows-1e{k}", "csr", 128, 1e-5, rows=10**k) for k in (3, 4)),
    ]
    drawn = scaling_lines(records, {"csr": 0})
    assert len(drawn) == 3
    for svg, title in zip(drawn, ("nonzeros", "rows", "columns of B"), strict=True):
        assert f"Time against {title}" in svg and svg.count("<circle") >= 2
    assert scaling_lines(records[:1], {"csr": 0}) == []


def test_damaged_lines_are_named_on_the_page() -> None:
    page = render_page([record()], damaged=[Damage("a.jsonl", 7, "not JSON")])
    assert "a.jsonl:7: not JSON" in page


def test_pictures_come_from_the_data_folder(tmp_path: Path) -> None:
    write_npz(tmp_path / "PubMed.npz", generate("road_grid", rows=400))
    with_data = render_page([record("PubMed"), record("Cora")], data=tmp_path)
    assert "data:image/png;base64" in with_data and "16×8" in with_data
    assert "No picture: the file is not in the data folder" in with_data


def test_pictures_of_stand_ins_come_from_where_they_were_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSETILE_DATA_DIR", str(tmp_path))
    (tmp_path / "generated").mkdir()
    write_npz(tmp_path / "generated" / "road-like-01234567.npz", generate("road_grid", rows=400))
    page = render_page([record("road-like", source="stand-in")], data=tmp_path)
    assert "data:image/png;base64" in page and "Rows by their number of nonzeros" in page


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="report: FILES must be records of at least one"):
        render_page([])
    with pytest.raises(ValueError, match="report: FILES must be records of at least one"):
        render_markdown([])


def test_a_missing_data_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report: data must be an existing folder"):
        render_page([record()], data=tmp_path / "none")


def test_the_page_says_wrong_baselines_once_and_other_failures_one_by_one() -> None:
    wrong = [
        {**failed("wrong", "far out", matrix=name, system="cusparse-csr1"), "error": {"worst": 9.0}}
        for name in ("a", "b")
    ]
    page = render_page([record("a"), *wrong, failed("wrong", "far out", matrix="c", system="csr")])
    assert "core: cusparse-csr1 float32: 2 products, by 9 to 9 times the error bound" in page
    assert "core: c N=128 float32 csr: far out" in page and "core: a N=128" not in page
    assert (
        "Wrong results of baselines: 2 (cusparse-csr1 in float32), used for no ratio. "
        "Wrong results of sparsetile: 1." in page
    )
    assert "Wrong results" not in render_page([record("a")])


def test_each_suite_says_in_one_sentence_what_it_shows() -> None:
    page = render_page([record(), record(system="cusparse-csr1", kind="baseline", seconds=2e-5)])
    assert "Fastest in float32, geomean over the baseline: csr 2.00× at N = 128." in page


def test_many_commands_are_folded_and_two_are_not() -> None:
    def page(count: int) -> str:
        made = [environment(command=f"sparsetile bench core -n {n}") for n in range(1, count + 1)]
        return render_page([record(n=n, environment=e) for n, e in enumerate(made, 1)])

    assert "Measured by 3 commands" in page(3) and "sparsetile bench core -n 3" in page(3)
    assert "Measured by" not in page(2) and "sparsetile bench core -n 2" in page(2)


def test_a_product_far_slower_than_the_others_does_not_press_them_together() -> None:
    records = []
    for matrix, nnz in (("a", 1000), ("b", 100_000)):
        records += [
            record(matrix, "cusparse-csr1", seconds=1e-5, nnz=nnz),
            record(matrix, "csr", seconds=5e-6, nnz=nnz),
            record(matrix, "dense", seconds=1e-3, nnz=nnz),
        ]
    shown = [r for r in attach_baselines(records) if r["kind"] == "system"]
    slow = speedup_scatter(shown, 128, {"csr": 0, "dense": 1})
    assert "(below 0.2: at the edge)" in slow and ">0.01<" not in slow
    alone = [r for r in shown if r["system"] == "csr"]
    assert "at the edge" not in speedup_scatter(alone, 128, {"csr": 0})


@pytest.mark.parametrize(
    "dtype, times", [("float32", 1), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 4)]
)
def test_the_roof_is_that_of_the_type(dtype: str, times: int) -> None:
    assert peak_gflops([record(dtype=dtype)], 390e12) == pytest.approx(times * 390e3)


def test_widths_at_which_few_matrices_were_measured_have_no_chart() -> None:
    records = []
    for matrix, widths in (("a", (7, 128)), ("b", (128,)), ("c", (128,))):
        for n in widths:
            records += [record(matrix, "csr", n), record(matrix, "cusparse-csr1", n, 2e-5)]
    page = render_page(records)
    assert "Speedup over the best baseline at N=128, by matrix" in page
    assert "Speedup over the best baseline at N=7, by matrix" not in page


def test_the_page_gives_sixteen_bit_products_over_float32_alone_too() -> None:
    records = [record(system="cusparse-csr2", seconds=4e-5), record(system="csr", dtype="float16")]
    assert "over float32" in render_page(records)
    assert "over float32" not in render_page(records[:1])


def test_the_host_s_report_shows_the_numba_loop_and_the_state_of_the_machine() -> None:
    cpu = {"architecture": "aarch64", "cores": 2, "threads": 2, "load_average": 0.25}
    versions = {"torch": "2.11.0", "scipy": "1.17.1", "numba": "0.68.1"}
    host = environment(device="cpu", device_name="Arm, 2 threads", cpu=cpu, versions=versions)
    held = {"suite": "cpu", "environment": host, "yardstick": ["scipy", "torch-csr", "numba-loop"]}
    records = [
        record(system="scipy", kind="baseline", seconds=4e-3, **held),
        record(system="numba-loop", kind="baseline", seconds=1e-3, **held),
        record(system="cpu", seconds=2e-3, **held),
    ]
    text, page = render_markdown(records), render_page(records)
    assert "ratio to scipy, torch-csr, numba-loop" in text and "PubMed 0.50" in text
    assert "| numba-loop |" in text and "numba-loop" in page
    assert "scipy 1.17.1, numba 0.68.1, driver" in text
    assert "aarch64, 2 cores, load average 0.25 before" in text
    assert "aarch64, 2 cores, load average 0.25 before" in page


def test_markdown_lists_every_loss() -> None:
    records = [
        record("a", "cusparse-csr1", seconds=1e-5),
        record("a", "csr", seconds=2e-5),
        failed(matrix="b", system="csr"),
    ]
    text = render_markdown(records)
    assert "- csr, N = 128: a 0.50" in text
    assert "- Failed: b, N = 128, float32, csr: crash, ended by SIGSEGV" in text


def test_markdown_lists_losses_under_the_product_they_belong_to() -> None:
    records = []
    for op, seconds in (("spmm", 1e-5), ("transpose", 4e-5)):
        records += [
            record("a", "cusparse-csr1", seconds=2e-5, op=op),
            record("a", "csr", seconds=seconds, op=op),
        ]
    text = render_markdown(records)
    plain, transposed = text.index("### spmm, float32"), text.index("### transpose, float32")
    assert plain < transposed < text.index("- csr, N = 128: a 0.50")
    assert text.count("Losses:") == 1


def test_markdown_counts_what_dense_loses_and_names_what_sparse_systems_lose() -> None:
    records = [record("a", "cusparse-csr1", seconds=1e-5)]
    records += [record("a", system, seconds=2e-5) for system in ("csr", "dense")]
    text = render_markdown(records)
    assert "- csr, N = 128: a 0.50" in text and "- dense, N = 128: 1 of 1" in text


def test_markdown_names_the_matrix_of_the_best_and_the_worst_ratio() -> None:
    records = []
    for matrix, seconds in (("slow", 1e-5), ("fast", 0.5e-5)):
        records += [
            record(matrix, "cusparse-csr1", seconds=2e-5),
            record(matrix, "csr", seconds=seconds),
        ]
    row = "| 128 | csr | 2.83 | 2/2 | 2.00 slow | 4.00 fast | 50 % |"
    assert row in render_markdown(records)


def test_markdown_gives_sixteen_bit_products_over_float32_alone_too() -> None:
    records = [
        record(system="cusparse-csr2", seconds=4e-5),
        record(system="cusparse-csr3", seconds=2e-5, dtype="float16"),
        record(system="csr", seconds=1e-5, dtype="float16"),
    ]
    text = render_markdown(records)
    assert "| N | system | geomean | over float32 | won |" in text
    assert "| 128 | csr | 2.00 | 4.00 | 1/1 |" in text
    assert "| 128 | cusparse-csr2 | 1.00 | 1/1 |" in text  # its own table has no such column


def test_markdown_gives_every_command_and_commit_of_a_suite() -> None:
    made = [environment(command=f"sparsetile bench core -n {n}", commit=f"c{n}") for n in (32, 64)]
    text = render_markdown([record(n=32, environment=made[0]), record(n=64, environment=made[1])])
    assert "```\nsparsetile bench core -n 32\nsparsetile bench core -n 64\n```" in text
    assert "commit c32, c64." in text


def test_markdown_holds_other_products_against_the_forward_sum() -> None:
    records = []
    for matrix, seconds in (("a", 1e-5), ("b", 4e-5)):
        records += [
            record(matrix, "csr", seconds=1e-5),
            record(matrix, "csr", seconds=seconds, reduce="max"),
        ]
    text = render_markdown(records)
    assert "| spmm max, float32, Test GPU | 128 | csr | 2.00 | 1.00 | 4.00 b | 2 |" in text


def _planned(matrix: str, **spent: float) -> list[dict]:  # type: ignore[type-arg]
    total = sum(spent.values()) + 4e-3
    split = {**spent, "build": 9.0, "total": total}
    return [
        record(matrix, "acc", seconds=1e-5, planning=split, config={"reorder": "affinity"}),
        record(matrix, "cusparse-csr1", seconds=3e-5, planning={"build": 0.0, "total": 0.0}),
    ]


def test_planning_is_parted_where_records_part_it() -> None:
    records = _planned("a", reorder=0.1, format=2e-3, schedule=1e-3, compile=3.0)
    records += _planned("b", reorder=0.3, format=4e-3, schedule=3e-3)
    split = {"format": 3e-3, "schedule": 2e-3, "reorder": 0.2, "total": 0.3}
    lost = record("c", "acc", seconds=9e-5, config={"reorder": "affinity"}, planning=split)
    records += [lost, record("c", "cusparse-csr1", seconds=1e-5, planning={})]
    text = render_markdown(records)
    row = "| float32, Test GPU | 128 | acc affinity | 200.00 | 3.00 | 2.00 | 4.00 | 300.00 |"
    assert f"{row} 10,450 | 2/3 |" in text
    page = render_page(records)
    assert '<td class="num" data-value="0.003">3.00</td>' in page and ">2/3</td>" in page


def test_records_that_hold_one_figure_of_build_have_no_table_of_planning() -> None:
    records = [record(), record(system="cusparse-csr1", seconds=2e-5)]
    assert "Planning, milliseconds" not in render_markdown(records)
    assert "Planning of core" not in render_page(records)


def test_markdown_has_a_ladder_as_a_table() -> None:
    text = render_markdown(_ladder({("a", "BitTCF"): 4e-5, ("a", "+ balance"): 1e-5}))
    assert "| BitTCF | 2.00 |  |" in text and "| + balance | 8.00 | 4.00 |" in text
    assert "Not measured: + reorder, + cache policy, + pipeline." in text


def test_markdown_says_in_one_line_what_was_wrong_or_skipped() -> None:
    every = "plan: no. Each system's reason: dense: would write A out in 9 GiB cpu: runs on cpu"
    records = [
        record("a", "csr"),
        failed("skipped", every, matrix="a", system="dense"),
        failed("skipped", every, matrix="b", system="dense"),
        *(
            {
                **failed("wrong", "outside", matrix="a", system="cusparse-csr1", n=n),
                "error": {"worst": worst},
            }
            for n, worst in ((32, 40.0), (64, 7.0))
        ),
        failed("wrong", "error is 3 times the bound", matrix="a", system="csr", n=64),
    ]
    text = render_markdown(records)
    assert "- Skipped: dense, spmm, 2 products (a, b): would write A out in 9 GiB." in text
    assert (
        "- Wrong, so not timed: cusparse-csr1 in float32 on 2 products, by 7 to 40 times the "
        "error bound." in text
    )
    assert "- Failed: a, N = 64, float32, csr: wrong, error is 3 times the bound" in text


def test_markdown_counts_the_stand_ins_of_a_suite() -> None:
    records = [record("a"), record("b-like", source="stand-in")]
    text = render_markdown(records)
    assert "Stand-ins, not the published graphs, 1 of 2: b-like." in text


@pytest.mark.parametrize(("low", "high"), [(0.3, 4.0), (1e3, 1e8), (0.9, 1.1), (5.0, 5.5)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert len(ticks) <= 12 and all(low * 0.99 <= tick <= high * 1.01 for tick in ticks)


def test_an_axis_is_monotone_and_stays_inside() -> None:
    axis = Axis.fitted([1.0, 100.0], 10, 20, log=True)
    assert 10 < axis.at(1.0) < axis.at(10.0) < axis.at(100.0) < 20
    assert axis.at(1e9) == 20 and axis.at(0.0) == 10
