"""``sparsetile bench`` and ``sparsetile report``: exit codes, and one clear line on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparsetile.bench.record import append_record
from sparsetile.cli import main

from .fakes import record


def _file(folder: Path, name: str, *seconds: float) -> str:
    path = folder / name
    for n, spent in enumerate(seconds, 1):
        append_record(path, record(n=n, seconds=spent))
    return str(path)


def _fails(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error


def test_bad_usage_is_one_line_and_exit_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fails(capsys, ["bench"], "bench: SUITE must be one of")
    _fails(capsys, ["bench", "nosuch"], "bench: suite must be one of")
    _fails(capsys, ["bench", "cpu", "-n", "0"], "bench: -n must be whole numbers from 1 up")
    _fails(capsys, ["bench", "cpu", "--data", str(tmp_path / "no")], "data must be an existing")
    _fails(capsys, ["bench", "cpu", "--device", "tpu"], "bench: device must be one of")
    _fails(capsys, ["report", str(tmp_path / "no.jsonl")], "existing file of records")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_suite_without_a_gpu_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _fails(capsys, ["bench", "core"], "bench: device must be a CUDA GPU for this suite, got none")


def test_the_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    assert "core" in capsys.readouterr().out


def test_compare_exits_one_on_a_regression_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = _file(tmp_path, "old.jsonl", 1e-5, 1e-5)
    new = _file(tmp_path, "new.jsonl", 1e-5, 2e-5)
    assert main(["bench", "--compare", old, new]) == 1
    out = capsys.readouterr().out
    assert "regression: PubMed N=2 float32 csr: 100.0 % slower" in out
    assert "2 products compared, 1 regressions" in out
    assert main(["bench", "--compare", old, old]) == 0
    assert main(["bench", "--compare", old, new, "--json"]) == 1
    assert [c["verdict"] for c in json.loads(capsys.readouterr().out.split("\n", 1)[1])["changes"]]


def test_a_report_is_written_and_damaged_lines_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, "a.jsonl", 1e-5)
    with open(path, "a") as stream:
        stream.write("{broken\n")
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    assert main(["report", path, "--out", str(page), "--markdown", str(text)]) == 0
    assert "skipped a.jsonl:2: not JSON" in capsys.readouterr().err
    assert page.read_text().startswith("<!doctype html>") and text.read_text().startswith("# Res")


def test_records_of_two_machines_are_both_kept(tmp_path: Path) -> None:
    from .fakes import environment

    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append_record(first, record())
    append_record(second, record(environment=environment(device_name="Other GPU")))
    out = tmp_path / "r.html"
    assert main(["report", str(first), str(second), "--out", str(out)]) == 0
    assert "Test GPU" in out.read_text() and "Other GPU" in out.read_text()
