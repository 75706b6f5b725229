"""The page of ``sparsetile inspect --html`` in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsetile.bench.report import render_matrix_page, view_orders
from sparsetile.cli.profile import profile
from sparsetile.data.registry import generate

from .browser import column, contrast, needs_chromium, open_page

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    csr = generate("power_law", rows=2000, nnz=24_000, communities=20, mixing=0.1, seed=1)
    views = view_orders(csr, ["identity", "rcm", "affinity"])
    path = tmp_path_factory.mktemp("page") / "matrix.html"
    path.write_text(render_matrix_page("a-graph", profile(csr), views), encoding="utf-8")
    return path


@pytest.fixture
def page(chromium: Any, page_file: Path) -> Iterator[Any]:
    yield from open_page(chromium, page_file, viewport={"width": 1200, "height": 900})


def test_every_order_has_its_pictures_and_every_chart_its_bars(page: Any) -> None:
    assert page.locator("h1").inner_text() == "a-graph"
    assert page.locator("#entries .mask:visible").count() == 3
    assert page.locator("#tiles .mask:visible").count() == 3 * 4
    assert page.locator("#rows svg rect").count() > 3
    assert page.locator("#tiles svg").nth(0).locator("rect").count() == 4 * 3
    assert page.locator("#tiles svg").nth(1).locator("rect").count() == 4 * 3


def test_a_picture_is_painted(page: Any) -> None:
    shot = page.locator("#entries .mask").first
    mask = shot.evaluate(
        "e => getComputedStyle(e).maskImage || getComputedStyle(e).webkitMaskImage"
    )
    assert mask.startswith('url("data:image/png;base64,')
    width, height = shot.evaluate("e => [e.clientWidth, e.clientHeight]")
    assert width > 200 and height > 200


def test_tables_sort_by_mouse_and_keyboard(page: Any) -> None:
    header = page.locator("#by-format thead th").nth(3)
    header.locator("button").click()
    values = [float(text) for text in column(page, "#by-format", 4)]
    assert values == sorted(values, reverse=True) and len(values) == 12
    page.locator("#sharing thead th button").first.focus()
    page.keyboard.press("Enter")
    assert column(page, "#sharing", 1) == ["affinity", "identity", "rcm"]


def test_the_first_tab_stop_skips_to_the_figures(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_the_theme_button_switches_colours(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(colour) != before


def test_hovering_a_bar_names_it(page: Any) -> None:
    bar = page.locator("#tiles svg rect").first
    bar.scroll_into_view_if_needed()
    bar.hover(force=True)
    assert page.locator("#tip").inner_text().startswith("4 rows · identity · ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(chromium: Any, page_file: Path, scheme: str) -> None:
    for page in open_page(chromium, page_file, color_scheme=scheme):
        ratio, on_light = contrast(page)
        assert ratio > 7 and on_light == (scheme == "light")


def test_a_phone_never_scrolls_sideways(chromium: Any, page_file: Path) -> None:
    for page in open_page(chromium, page_file, viewport={"width": 390, "height": 800}):
        assert page.evaluate("document.documentElement.scrollWidth") == 390
