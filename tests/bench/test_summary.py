"""The summary at the end of a run: ratios, losses, what was skipped or left out."""

from __future__ import annotations

import io
import json

from rich.console import Console

from sparsetile.bench.record import Record
from sparsetile.bench.summary import print_summary, summary_data

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
    stream = io.StringIO()
    console = Console(file=stream, width=160)
    print_summary(_records(), ["voltrix: not built yet"], ["c N=8 csr: crash"], console=console)
    text = stream.getvalue()
    row = next(line for line in text.splitlines() if "csr " in line and "cusparse" not in line)
    for figure in ("1.00", "1/2", "0.50", "50 %"):
        assert figure in row
    assert "lost: csr N=128 float32: b 0.50" in text
    assert "skipped: torch-bsr on 2 products: needs a shape divisible by 16" in text
    assert "left out: voltrix: not built yet" in text
    assert "failed: c N=8 csr: crash" in text


def test_the_summary_is_plain_data_too() -> None:
    found = json.loads(json.dumps(summary_data(_records(), [], [])))
    group = next(group for group in found["groups"] if group["system"] == "csr")
    assert group["won"] == 1 and group["losses"] == [{"matrix": "b", "speedup": 0.5}]
    assert found["skipped"] == [
        {"system": "torch-bsr", "reason": "needs a shape divisible by 16", "entries": 2}
    ]


def test_ratios_to_another_yardstick_have_a_table_of_their_own() -> None:
    stream = io.StringIO()
    own = [
        record("w", "torch-dense", seconds=2e-5),
        record("w", "bcsr", seconds=1e-5, yardstick=["torch-dense"], config={"layout": "rows"}),
    ]
    print_summary([*_records(), *own], [], [], console=Console(file=stream, width=160))
    text = stream.getvalue()
    assert "ratio to the best baseline" in text and "ratio to torch-dense" in text
