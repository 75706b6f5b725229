"""README: figures are those of the records, code runs. Links of all pages lead somewhere."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from sparsetile.bench.analysis import attach_baselines, system_label
from sparsetile.bench.record import Record, read_records
from tests.docs.pages import DOCS, anchors, blocks, links
from tests.examples import ROOT
from tools import summary

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@functools.cache
def records(name: str) -> list[Record]:
    found, damaged = read_records(ROOT / "results" / "h200" / f"{name}.jsonl.gz")
    assert not damaged
    return attach_baselines(found)


def chosen(file: str, label: str, n: int, **fields: Any) -> list[Record]:
    """Return the forward sums of one system at one width that have a ratio."""
    wanted = {"op": "spmm", "reduce": "sum", "status": "ok", "n": n, **fields}
    return [
        record
        for record in records(file)
        if system_label(record) == label
        and all(record[key] == value for key, value in wanted.items())
        and record["speedup"] is not None
    ]


def test_the_table_is_what_the_records_say():
    lines = README.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if " | cuSPARSE | " in line or " | dense `torch.mm` | " in line]
    assert len(table) == 9 and table == summary.readme_rows()


def test_planning_times_of_the_pages_are_those_of_the_records():
    plain = chosen("core", "csr", 128, dtype="float32")
    ordered = chosen("core", "csr affinity", 128, dtype="float32")
    times = [
        1e3 * median(r["planning"]["total"] - r["planning"].get("compile", 0.0) for r in found)
        for found in (plain, ordered)
    ]
    paid = median(r["break_even"] for r in plain)
    said = (
        f"takes {times[0]:.0f} ms and pays off against cuSPARSE after {paid:.0f} products. "
        f"With `affinity` it takes {times[1]:.0f} ms."
    )
    how_to = (DOCS / "how-to" / "choose-and-measure.md").read_text(encoding="utf-8")
    assert said in " ".join(how_to.split())
    orders = (DOCS / "explanation" / "row-orders.md").read_text(encoding="utf-8")
    wanted = f"takes {times[0]:.0f} ms in the given order and {times[1]:.0f} ms with `affinity`"
    assert wanted in " ".join(orders.split())


def test_its_code_runs():
    found = blocks(README, "python")
    assert found
    names: dict[str, Any] = {}
    for block in found:
        exec(compile("\n" * (block.line - 1) + block.text, "README.md", "exec"), names)
    assert isinstance(names["C"], torch.Tensor)


def test_the_code_of_the_home_page_runs():
    (block,) = blocks(DOCS / "index.md", "python")
    names: dict[str, Any] = {"A": torch.eye(9).to_sparse_csr(), "B": torch.randn(9, 128)}
    exec(block.text, names)
    assert torch.equal(names["C"], names["B"])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    """``make docs`` checks the site; this one needs no generator, and README is no page of it."""
    for target in links(path):
        name, _, anchor = target.partition("#")
        place = path.parent / name if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_links_are_found_in_text_and_not_in_code(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[one](x.md#y) ![two](p.svg) `[no](z.md)`\n```\n[no](z.md)\n```\n")
    assert links(page) == ["x.md#y", "p.svg"]
    assert anchors(page) == {"a-b-c"}


def test_the_glossary_defines_the_words_of_our_own():
    words = {"system", "plan", "floor", "affinity", "stand-in", "row-order", "window", "tile"}
    assert words <= anchors(DOCS / "glossary.md")


def test_every_system_has_a_page_with_a_picture_and_a_row():
    index = (DOCS / "explanation" / "systems" / "index.md").read_text(encoding="utf-8")
    folder = ROOT / "src" / "sparsetile" / "systems"
    names = {path.parent.name for path in folder.glob("*/system.py")}
    shared = set(re.findall(r"\[(\w+), (\w+), (\w+)\]\(others\.md\)", index)[0])
    assert names == shared | {name for name in names if f"[{name}]({name}.md)" in index}
    for name in names - shared:
        page = (DOCS / "explanation" / "systems" / f"{name}.md").read_text(encoding="utf-8")
        assert f"pictures/{name}.svg" in page
