"""tools.unseen_times on the CPU: its record, its table, and that a wrong product is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tools.unseen_times import MODES, summary

from sparsetile.intake.files import write_npz
from tests.contracts.cases import csr_of, random_matrix
from tools import unseen_times


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    for name, rows in (("one", 40), ("two", 30)):
        write_npz(tmp_path / f"{name}.npz", csr_of(random_matrix(rows, 25, 0.2)))
    return ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]


def record(folder: Path) -> list[dict]:
    lines = (folder / "out" / "unseen.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_record_has_each_matrix_type_and_width(words, tmp_path):
    assert unseen_times.main([*words, "--widths", "4,8"]) == 0
    head, *lines = record(tmp_path)
    assert head["environment"]["matrices"] == 2
    cells = {(line["subject"], line["type"], line["n"]) for line in lines}
    assert len(cells) == len(lines) == 2 * 3 * 2
    assert all(set(line["us"]) == set(MODES) == set(line["systems"]) for line in lines)
    assert all(line["error"] < 2e-3 for line in lines)


def test_a_wrong_product_is_not_timed_and_fails(words, tmp_path, monkeypatch):
    monkeypatch.setattr(unseen_times, "sampled_error", lambda *_: 1.0)
    assert unseen_times.main([*words, "--widths", "4", "--types", "float32"]) == 1
    assert all(line["wrong"] and not line["us"] for line in record(tmp_path)[1:])


def test_what_does_not_fit_the_time_is_named(words, tmp_path):
    unseen_times.main([*words, "--time-limit", "0"])
    assert record(tmp_path)[-1]["skipped"] == ["one", "two"]


def test_the_table_has_means_the_lowest_and_how_many_are_below():
    def line(name: str, over: float, best: float) -> dict:
        ratios = {key: over for key in MODES} | {f"{key} over the best": best for key in MODES}
        return {"subject": name, "type": "TF32", "n": 32, "ratios": ratios}

    rows = summary([line("a", 4.0, 2.0), line("b", 1.0, 0.9)])
    assert rows == [["TF32", "32", mode, "2", "2.000", "0.90 b", "1"] for mode in MODES]


def test_rejects_unknown_types(words, capsys):
    with pytest.raises(SystemExit):
        unseen_times.main([*words, "--types", "float8"])
    assert "--types must be of TF32, float16, float32, got float8" in capsys.readouterr().err


def test_compiling_reports_a_matrix_that_cannot_be_read(tmp_path):
    asked = ("absent", tmp_path, "cpu", ("float32",), (4,))
    assert "absent" in unseen_times._compile(asked)


def test_compiling_multiplies_by_every_plan(words, tmp_path):
    before = torch.backends.cuda.matmul.allow_tf32
    assert unseen_times._compile(("one", tmp_path, "cpu", ("TF32", "float16"), (4,))) == ""
    assert torch.backends.cuda.matmul.allow_tf32 is before
