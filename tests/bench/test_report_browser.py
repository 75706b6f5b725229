"""The page in a real Chromium: it opens quickly, sorts, filters, and logs no error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsetile.bench.report import render_page
from sparsetile.data.registry import generate
from sparsetile.intake import write_npz

from .browser import column, contrast, needs_chromium, open_page
from .fakes import a_run, failed, record

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_npz(folder / "PubMed.npz", generate("road_grid", rows=400))
    records = [
        *a_run(6),
        record("PubMed", "csr"),
        record("PubMed", "cusparse-csr1", seconds=2e-5),
        failed(matrix="PubMed", system="dense"),
    ]
    path = folder / "report.html"
    path.write_text(render_page(records, data=folder), encoding="utf-8")
    return path


@pytest.fixture
def page(chromium: Any, page_file: Path) -> Iterator[Any]:
    yield from open_page(chromium, page_file, viewport={"width": 1200, "height": 900})


# The first of a suite's tables.
SUMMARY = '#suite-core [aria-label^="Summary"] table'


def test_a_summary_table_sorts_both_ways(page: Any) -> None:
    header = page.locator(f"{SUMMARY} thead th").nth(2)
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    values = [float(text) for text in column(page, SUMMARY, 3)]
    assert values == sorted(values, reverse=True) and len(set(values)) > 3
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    values = [float(text) for text in column(page, SUMMARY, 3)]
    assert values == sorted(values)


def test_a_table_sorts_from_the_keyboard(page: Any) -> None:
    page.locator(f"{SUMMARY} thead th button").nth(1).focus()
    page.keyboard.press("Enter")
    systems = column(page, SUMMARY, 2)
    assert systems == sorted(systems)


def test_the_first_tab_stop_skips_to_the_figures(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_records_filter_by_word_and_by_choice(page: Any) -> None:
    page.fill("#filter-text", "pubmed")
    assert set(column(page, "#all", 1)) == {"PubMed"}
    assert page.inner_text("#shown").startswith("3 of ")
    page.select_option("#filter-system", "csr")
    assert column(page, "#all", 3) == ["csr"]
    page.fill("#filter-text", "")
    assert set(column(page, "#all", 3)) == {"csr"}


def test_records_sort_with_empty_cells_last(page: Any) -> None:
    header = page.locator("#all thead th", has_text="speedup").locator("button")
    for _ in range(2):
        header.click()
        heads = page.locator("#all thead th").all_inner_texts()
        place = next(i for i, text in enumerate(heads, 1) if text.startswith("speedup"))
        values = column(page, "#all", place)
        assert values[-1] == "" and values[0] != ""


def test_a_matrix_opens_with_its_picture_records_and_plan(page: Any) -> None:
    page.fill("#find-matrix", "pub")
    boxes = page.locator("details.matrix:visible")
    assert boxes.count() == 1
    boxes.locator("summary").press("Enter")
    boxes.locator(".fill table tbody tr").first.wait_for()  # drawn when the box has opened
    assert boxes.locator(".fill table tbody tr").count() == 3
    assert "Plan(100x100" in boxes.locator("pre").inner_text()
    assert boxes.locator(".mask").count() == 5
    assert boxes.locator("svg rect").count() >= 1  # the row lengths


def test_the_theme_button_switches_colours(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != before


def test_hovering_a_point_names_it(page: Any) -> None:
    dot = page.locator("#suite-core svg circle").first
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)
    assert page.locator("#tip").is_visible()
    assert "N=" in page.locator("#tip").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(chromium: Any, page_file: Path, scheme: str) -> None:
    for page in open_page(chromium, page_file, color_scheme=scheme):
        ratio, on_light = contrast(page)
        assert ratio > 7 and on_light == (scheme == "light")


def test_suites_are_folded_but_the_first_and_links_unfold_them(
    chromium: Any, tmp_path: Path
) -> None:
    path = tmp_path / "two.html"
    path.write_text(render_page([*a_run(3), *a_run(3, suite="all")]), encoding="utf-8")
    for page in open_page(chromium, path, viewport={"width": 390, "height": 800}):
        first, second = (page.locator(f"#suite-{name} table").first for name in ("core", "all"))
        assert first.is_visible() and not second.is_visible()
        assert page.locator("#suite-all .shows").is_visible()
        page.click("nav a[href='#suite-all']")
        assert second.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        dead = """() => [...document.querySelectorAll('a[href^="#"]')]
            .filter(a => !document.getElementById(a.getAttribute('href').slice(1))).length"""
        assert page.evaluate(dead) == 0


def test_a_phone_never_scrolls_sideways(chromium: Any, page_file: Path) -> None:
    for page in open_page(chromium, page_file, viewport={"width": 390, "height": 800}):
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_two_thousand_records_open_in_two_seconds(chromium: Any, tmp_path: Path) -> None:
    records = [*a_run(34), *a_run(34, suite="all")][:2000]
    assert len(records) == 2000
    path = tmp_path / "large.html"
    path.write_text(render_page(records), encoding="utf-8")
    for page in open_page(chromium, path):
        # The best of three: the machine that runs the tests may be busy with others.
        spent = []
        for _ in range(3):
            begun = time.perf_counter()
            page.reload()
            page.wait_for_selector("#all tbody tr")
            spent.append(time.perf_counter() - begun)
        assert min(spent) < 2.0
        assert page.inner_text("#shown").startswith("2,000 of 2,000")
