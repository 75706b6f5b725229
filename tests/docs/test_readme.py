"""README: figures are those of the records, code runs. Links of all pages lead somewhere."""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tools.charts import cpu_times
from tools.paper_readings import suite_records

from sparsetile.bench.analysis import attach_baselines, geomean, system_label
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


def test_the_table_beside_scipy_is_what_the_record_says():
    lines = (DOCS / "how-to" / "other-libraries.md").read_text(encoding="utf-8").splitlines()
    for dtype in ("float32", "float64"):
        for product, words in (("plan", "a plan"), ("spmm", "`st.spmm`")):
            cells = []
            for n in summary.CPU_WIDTHS:
                ratios = [ratio for _, ratio in cpu_times(product, dtype, n).values()]
                cells.append(f"{geomean(ratios):.2f} ({min(ratios):.2f})")
            assert f"| {dtype}, {words} | {' | '.join(cells)} |" in lines


def _times(name: str) -> dict[tuple[str, int, str], dict[str, float]]:
    """Product -> system or baseline -> its least time."""
    found: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for record in suite_records(f"{name}.jsonl.gz"):
        if (record["op"], record["reduce"]) == ("spmm", "sum"):
            times = found[record["matrix"], record["n"], record["dtype"]]
            seconds = record["time"]["p50"]
            times[record["system"]] = min(seconds, times.get(record["system"], seconds))
    return found


def test_what_auto_misses_is_what_the_records_say():
    products = _times("all")
    assert all("auto" in times for times in products.values())
    for (matrix, n, _), times in products.items():
        wider = products[matrix, n, "float32"]  # what a product in 16 bits is compared with, too
        others = [*(t for s, t in times.items() if s != "auto"),
                  *(t for s, t in wider.items() if s.startswith("cusparse"))]  # fmt: skip
        assert times["auto"] < 1.02 * min(others)
    known = {key: times for key, times in _times("hindsight").items() if "auto" in times}
    lost = {key: times["auto"] / min(times.values()) for key, times in known.items()}
    dense = [times["auto"] / times["dense"] for times in known.values() if "dense" in times]
    said = (
        f"Of {len(products)} products of {len({matrix for matrix, *_ in products})} matrices, none "
        "was more than 2 % slower than the better of cuSPARSE and dense. On "
        f"{len({matrix for matrix, *_ in known})} of the 66 matrices that no kernel was tuned on, "
        f"it was {100 * geomean(lost.values()) - 100:.1f} % slower than the fastest of all "
        f"systems, and at most {max(lost.values()):.2f} times slower; there one of {len(known)} "
        f"products was more than 1 % slower than dense, {max(dense):.2f} times"
    )
    assert sum(ratio > 1.01 for ratio in dense) == 1
    assert said in " ".join(README.read_text(encoding="utf-8").split())


def test_mutations_are_what_their_record_says():
    record = json.loads((ROOT / "results/h200/mutations.partial.json").read_text())
    assert record["counts"]["not run"] == 4 and set(record["counts"]) <= {
        "failed", "hung", "crashed", "not run",
    }  # fmt: skip


def test_planning_times_of_the_pages_are_those_of_the_records():
    plain = chosen("core", "csr", 128, dtype="float32")
    ordered = chosen("core", "csr affinity", 128, dtype="float32")
    times = [
        1e3 * median(r["planning"]["total"] - r["planning"].get("compile", 0.0) for r in found)
        for found in (plain, ordered)
    ]
    paid = median(r["break_even"] for r in plain)
    said = (
        f"took {times[0]:.0f} ms and paid off against cuSPARSE after {paid:.0f} products when",
        f"With `affinity` it took {times[1]:.0f} ms.",
    )
    how_to = (DOCS / "how-to" / "choose-and-measure.md").read_text(encoding="utf-8")
    assert all(each in " ".join(how_to.split()) for each in said)
    orders = (DOCS / "explanation" / "row-orders.md").read_text(encoding="utf-8")
    wanted = f"took {times[0]:.0f} ms in the given order and {times[1]:.0f} ms with `affinity`"
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
    names: dict[str, Any] = {}
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
