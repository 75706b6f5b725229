"""What the report's Markdown contains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.report import main, render_markdown

from sparsetile.bench.record import append_record
from tests.bench.fakes import environment, failed, record
from tests.examples import ROOT


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="report: FILES must be records of at least one"):
        render_markdown([])


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
    text = render_markdown(records)
    assert "ratio to scipy, torch-csr, numba-loop" in text and "PubMed 0.50" in text
    assert "| numba-loop |" in text
    assert "scipy 1.17.1, numba 0.68.1, driver" in text
    assert "aarch64, 2 cores, load average 0.25 before" in text


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
    plain, transposed = text.index("## spmm, float32"), text.index("## transpose, float32")
    assert plain < transposed < text.index("- csr, N = 128: a 0.50")
    assert text.count("<summary>Losses: 1 product</summary>") == 1


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


def test_records_that_hold_one_figure_of_build_have_no_table_of_planning() -> None:
    records = [record(), record(system="cusparse-csr1", seconds=2e-5)]
    assert "Planning, milliseconds" not in render_markdown(records)


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


def written(folder: Path, name: str, *seconds: float) -> str:
    path = folder / name
    for n, spent in enumerate(seconds, 1):
        append_record(path, record(n=n, seconds=spent))
    return str(path)


def test_files_that_cannot_be_read_or_written_are_one_line(tmp_path: Path, capsys):
    assert main([str(tmp_path / "no.jsonl")]) == 2
    assert "existing file of records" in capsys.readouterr().err
    path = written(tmp_path, "a.jsonl", 1e-5)
    assert main([path, "--markdown", str(tmp_path / "no" / "r.md")]) == 2
    error = capsys.readouterr().err
    assert "report: --markdown must be a file in a folder that exists" in error


def test_a_file_of_something_else_is_refused_in_a_dozen_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text("{\n" * 500)
    assert main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("skipped other.json:1: not JSON")
    assert lines[10] == "... and 490 more such lines" and len(lines) == 12
    assert "report: FILES must be records of at least one measurement" in lines[11]


def test_a_report_is_written_and_damaged_lines_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "a.jsonl", 1e-5)
    with open(path, "a") as stream:
        stream.write("{broken\n")
    text = tmp_path / "r.md"
    assert main([path, "--markdown", str(text)]) == 0
    assert "skipped a.jsonl:3: not JSON" in capsys.readouterr().err
    assert text.read_text().startswith("# Core: 32 real matrices\n")
    assert main([path]) == 0
    assert capsys.readouterr().out == text.read_text()


def test_records_of_two_machines_are_both_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append_record(first, record())
    append_record(second, record(environment=environment(device_name="Other GPU")))
    out = tmp_path / "r.md"
    assert main([str(first), str(second), "--markdown", str(out)]) == 0
    assert "Test GPU" in out.read_text() and "Other GPU" in out.read_text()


def test_a_folder_gets_a_page_for_each_suite(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for suite in ("core", "cpu"):
        append_record(path, record(suite=suite))
    pages = tmp_path / "pages"
    pages.mkdir()
    assert main([str(path), "--markdown", str(pages)]) == 0
    assert sorted(page.name for page in pages.iterdir()) == ["core.md", "cpu.md"]
    assert (pages / "cpu.md").read_text().startswith("# CPU: the core matrices on the host\n")
    assert main([str(path), "--title", "Both", "--markdown", str(pages / "all.md")]) == 0
    both = (pages / "all.md").read_text()
    assert both.startswith("# Both\n") and both.count("\n## C") == 2


def test_the_committed_pages_are_what_the_records_say(tmp_path: Path) -> None:
    """The same command as docs/results/reproduce.md has."""
    page = (ROOT / "docs/results/reproduce.md").read_text(encoding="utf-8")
    names = re.search(r"report \{(.+)\}\.jsonl --markdown docs/results/tables", page)
    assert names
    found = [
        str(next(path for path in (ROOT / "results").glob(f"*/{name}.jsonl*")))
        for name in names[1].split(",")
    ]
    assert main([*found, "--markdown", str(tmp_path)]) == 0
    pages = ROOT / "docs/results/tables"
    assert sorted(p.name for p in pages.iterdir()) == sorted(p.name for p in tmp_path.iterdir())
    for made in tmp_path.iterdir():
        assert made.read_text() == (pages / made.name).read_text(), f"run: {names[0]}"
