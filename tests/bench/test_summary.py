"""The summary at the end of a run: ratios, losses, what was skipped or left out."""

from __future__ import annotations

import json

from sparsetile.bench.record import Record
from sparsetile.bench.summary import summary_data, summary_lines

from .fakes import failed, record


def _records() -> list[Record]:
    return [
        record("a", "cusparse-csr1", seconds=2e-5),
        record("a", "csr", seconds=1e-5),
        record("b", "cusparse-csr1", seconds=2e-5),
        record("b", "csr", seconds=4e-5),
        failed("skipped", "needs a shape divisible by 16", matrix="a", system="torch-bsr"),
        failed("skipped", "needs a shape divisible by 16", matrix="b", system="torch-bsr"),
    ]


def test_the_summary_prints_ratios_and_every_loss() -> None:
    lines = summary_lines(_records(), ["voltrix: not built yet"], ["c N=8 csr: crash"])
    assert any(line.startswith("| 128 | csr | 1.00 | 1/2 | 0.50 b |") for line in lines)
    assert "- csr, N = 128: b 0.50" in lines
    assert "skipped: torch-bsr on 2 products: needs a shape divisible by 16" in lines
    assert "left out: voltrix: not built yet" in lines
    assert "failed: c N=8 csr: crash" in lines


def test_the_summary_is_plain_data_too() -> None:
    found = json.loads(json.dumps(summary_data(_records(), [], [])))
    group = next(group for group in found["groups"] if group["system"] == "csr")
    assert group["won"] == 1 and group["losses"] == [{"matrix": "b", "speedup": 0.5}]
    assert found["skipped"] == [
        {"system": "torch-bsr", "reason": "needs a shape divisible by 16", "entries": 2}
    ]


def test_ratios_to_another_yardstick_have_a_table_of_their_own() -> None:
    own = [
        record("w", "torch-dense", seconds=2e-5),
        record("w", "bcsr", seconds=1e-5, yardstick=["torch-dense"], config={"layout": "rows"}),
    ]
    titles = [line for line in summary_lines([*_records(), *own], [], []) if "###" in line]
    assert titles == [
        "### spmm, float32, Test GPU", "### spmm, float32, Test GPU, ratio to torch-dense",
    ]  # fmt: skip
