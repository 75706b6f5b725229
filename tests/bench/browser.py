"""A page opened in a real Chromium, and what every page of ours must do there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install the package chromium to test the page"
)

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def start_chromium() -> Iterator[Any]:
    """Yield a browser that is closed behind its user."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, headless=True
        )
        yield browser
        browser.close()


def open_page(browser: Any, page_file: Path, **options: Any) -> Iterator[Any]:
    """Yield the page; whatever the console or the network reports fails the test.

    Storage, cache and settings are those of a browser that was never used.
    """
    context = browser.new_context(**options)
    try:
        page = context.new_page()
        page.errors = []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda r: page.errors.append(r.url) if r.url[:4] == "http" else None)
        page.goto(page_file.as_uri())
        yield page
        assert page.errors == []
    finally:
        context.close()


def column(page: Any, table: str, place: int) -> list[str]:
    """Return the cells of one column, from 1, as they are shown."""
    found: list[str] = page.eval_on_selector_all(
        f"{table} tbody tr td:nth-child({place})", "cells => cells.map(c => c.textContent.trim())"
    )
    return found


def contrast(page: Any) -> tuple[float, bool]:
    """Return the contrast of text and ground as WCAG counts it, and whether the ground is light."""
    ink, paper = page.evaluate(
        """() => { const s = getComputedStyle(document.body);
        const light = c => { const [r, g, b] = c.match(/\\d+/g).map(v => {
          v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        return [light(s.color), light(s.backgroundColor)]; }"""
    )
    bright, dark = max(ink, paper), min(ink, paper)
    return (bright + 0.05) / (dark + 0.05), paper > ink
