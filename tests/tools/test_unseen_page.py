"""tools.unseen_page: its tables, and that the page is what the record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.unseen_times import MODES

from tools import unseen_page


@pytest.fixture
def record(constants, tmp_path: Path) -> Path:
    """A record of two matrices; the second is slower than dense."""
    path = tmp_path / "unseen.jsonl"
    lines: list[dict] = [{"schema": 1, "environment": {"device_name": "NVIDIA Toy"}}]
    for name, over, best in (("bcsstk16", 4.0, 2.0), ("other", 1.0, 0.5)):
        ratios = {mode: over for mode in MODES} | {f"{mode} over the best": best for mode in MODES}
        us = {mode: 10.0 for mode in MODES} | {"cusparse-csr2": 10 * over, "dense": 10 * best}
        systems = {mode: "csr" for mode in MODES}
        line = {"subject": name, "type": "TF32", "n": 32, "ratios": ratios, "us": us}
        lines.append(line | {"systems": systems})
    lines.append({"part": "unseen", "skipped": ["third"], "reason": "time limit"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    constants(unseen_page, RECORD=path, PAGE=tmp_path / "unseen.md")
    return path


def test_the_page_has_means_classes_and_what_is_slower(record):
    text = unseen_page.render()
    everything, fem = (part for part in text.split("\n") if part.startswith("| TF32 | 32"))
    assert everything == "| TF32 | 32 | 2 | 2.00 | 2.00 | 2.00 | 1.00 other |"
    assert fem == "| TF32 | 32 | 1 | 4.00 | 4.00 | 4.00 | 4.00 bcsstk16 |"
    slower = [part for part in text.split("\n") if part.startswith(("| other", "| bcsstk16"))]
    assert slower == [
        f"| other | TF32 | 32 | {mode} | 0.50 | csr | 10.0 | dense 5.0 |" for mode in MODES[1:]
    ]
    assert "2 real matrices" in text and "NVIDIA Toy" in text


def test_the_page_is_written_and_compared(record):
    assert unseen_page.main(["--check"]) == 1
    assert unseen_page.main([]) == 0
    assert unseen_page.main(["--check"]) == 0


@pytest.mark.skipif(not unseen_page.RECORD.is_file(), reason="there is no record yet")
def test_the_committed_page_is_current():
    assert unseen_page.main(["--check"]) == 0
