"""Times of the CPU beside scipy's: what the record holds, and that a wrong product is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparsetile.data import generators
from sparsetile.intake.files import write_npz
from tools import cpu_times


@pytest.fixture
def quick(constants, tmp_path: Path) -> list[str]:
    constants(cpu_times, _ROUNDS=1, _ROUND_SECONDS=0, WIDTHS=(1, 8))
    write_npz(tmp_path / "small.npz", generators.power_law(50, 300, seed=0))
    return ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--matrices", "small"]


def lines(folder: Path) -> list[dict]:
    text = (folder / "out" / "cpu_times.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_has_each_product_and_the_fixed_costs(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_times.first_product, "__defaults__", (2,))
    assert cpu_times.main(quick) == 0
    head, *products, fixed, first = lines(tmp_path)
    assert head["environment"]["device"] == "cpu"
    assert [(each["dtype"], each["n"]) for each in products] == [
        ("float32", 1), ("float32", 8), ("float64", 1), ("float64", 8),
    ]  # fmt: skip
    assert all(set(each["seconds"]) == {"scipy", "plan", "spmm"} for each in [*products, fixed])
    assert all(each["error_over_bound"] < 1 for each in products)
    assert first["seconds"]["wall"] > 0 and first["seconds"]["cpu"] > 0
    assert capsys.readouterr().out.count(" small") >= 4


def test_a_wrong_product_is_named(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_times.st, "spmm", lambda A, B: torch.zeros(A.shape[0], B.shape[1]))
    monkeypatch.setattr(cpu_times, "fixed_cost", lambda: {"what": "", "seconds": {}})
    monkeypatch.setattr(cpu_times, "first_product", lambda: {"what": "", "seconds": {}})
    assert cpu_times.main(quick) == 1
    assert "cpu_times: wrong:" in capsys.readouterr().err
