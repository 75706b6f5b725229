"""The site as Chromium shows it, on a desktop and on a phone.

``make docs`` builds the site and runs this file; ``SITE`` names the folder. Other tests of this
file need no site, only Chromium.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.browser import CHROMIUM, evaluate, faults
from tests.docs.pages import DOCS

SITE = Path(os.environ.get("SITE", ""))
WIDTHS = (1280, 390)
PAGES = (
    "index", "tutorial/index", "how-to/gnn", "reference/api", "glossary", "results/index",
    "results/which-system", "results/papers", "results/hindsight", "results/more",
    "results/tables/core", "results/tables/asyncsparse", "results/tables/cpu",
)  # fmt: skip

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install one, so that pages are looked at"
)
site = pytest.mark.skipif(
    not os.environ.get("SITE"), reason="`make docs` builds the site and runs this"
)


class _Page(HTMLParser):
    """The links of a page, and the names that links may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {name for key in ("id", "name") if (name := found.get(key))}
        self.links |= {link for key in ("href", "src") if (link := found.get(key))}


def broken(folder: Path) -> list[str]:
    """Return the internal links of a site that lead to no file or to no anchor."""
    pages = {path.resolve(): _Page(path) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = not parts.fragment or place not in pages
            if not place.exists() or not (named or unquote(parts.fragment) in pages[place].names):
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


@site
@browser
def test_pages_fit_can_be_read_and_describe_their_pictures():
    assert not faults(SITE, [(f"{name}.html", width) for name in PAGES for width in WIDTHS])


@site
@browser
def test_text_in_pictures_can_be_read():
    pictures = sorted((SITE / "_images").glob("*.svg"))
    assert len(pictures) >= 10
    views = [(f"_images/{picture.name}", 900) for picture in pictures]
    found = evaluate(SITE, views, "(frame) => faintInPicture(frame)")
    assert not [
        (path, each) for (path, _), faint in zip(views, found, strict=True) for each in faint
    ]


@site
def test_links_and_anchors_lead_somewhere():
    assert len(list(SITE.rglob("*.html"))) > 40 and not broken(SITE)


def page(folder: Path, body: str, name: str = "page.html") -> str:
    text = f"<!doctype html><html lang='en'><body>{body}</body></html>"
    (folder / name).write_text(text, encoding="utf-8")
    return name


WRONG = {
    "<h1>One</h1><div style='width:500px'>wide</div>": "pixels wide on",
    "<h1>One</h1><p style='color:#999'>faint</p>": "has contrast 2.85 at p.: faint",
    "<h1 style='color:rgb(0 0 0/40%)'>One</h1>": "has contrast 2.85 at h1",
    "<h1>One</h1><h3>Three</h3>": "has h3 after h1: Three",
    "<h2>Two</h2>": "has h2 after h0",
    "<p>No heading</p>": "has no heading",
    "<h1>One</h1><img src='0.html'>": "has an image without a description",
    "<h1>One</h1><img src='no.png' alt='no'>": "has an image that does not load",
}


@browser
def test_what_is_wrong_with_a_page_is_noticed(tmp_path: Path):
    views = [(page(tmp_path, body, f"{i}.html"), 390) for i, body in enumerate(WRONG)]
    found = faults(tmp_path, views)
    for (name, _), words in zip(views, WRONG.values(), strict=True):
        assert any(each.startswith(name) and words in each for each in found), (words, found)


@browser
def test_nothing_is_wrong_with_a_good_page_and_faint_text_of_pictures_is_noticed(tmp_path: Path):
    name = page(tmp_path, "<h1>One</h1><h2>Two</h2><img src='p.svg' alt='A picture'>")
    text = "<text x='5' y='20' fill='{}'>words</text>"
    (tmp_path / "p.svg").write_text(
        "<svg xmlns='http://www.w3.org/2000/svg' width='90' height='60'>"
        f"<rect width='90' height='30' fill='#222'/>{text.format('#eee')}{text.format('#333')}"
        "<text x='5' y='50'>black on white</text></svg>"
    )
    assert not faults(tmp_path, [(name, width) for width in WIDTHS])
    (found,) = evaluate(tmp_path, [("p.svg", 200)], "(frame) => faintInPicture(frame)")
    assert len(found) == 1 and "words" in found[0]


def test_broken_links_are_noticed(tmp_path: Path):
    page(tmp_path, "<p id='a'><a href='#a'><a href='#b'><a href='none.html'><a href='//c.d'>")
    assert broken(tmp_path) == ["page.html: #b", "page.html: none.html"]


TABLE = """<article><h1>One</h1><div class="table-wrapper"><table><thead><tr><th>name</th><th>size
</th></tr></thead><tbody>{rows}</tbody></table></div></article><script>{script}</script>"""
SCRIPT = (DOCS / "_static" / "tables.js").read_text(encoding="utf-8")
SHOWN = """const shown = () => [...frame.contentDocument.querySelectorAll("tbody tr")]
  .filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
const heads = frame.contentDocument.querySelectorAll("th");
const box = frame.contentDocument.querySelector("input");"""


def table(folder: Path, cells: Sequence[str]) -> tuple[str, int]:
    rows = "".join(f"<tr><td>row {i}</td><td>{cell}</td></tr>" for i, cell in enumerate(cells))
    return page(folder, TABLE.format(rows=rows, script=SCRIPT)), 390


@browser
def test_a_click_sorts_by_the_first_number_of_a_cell_and_words_filter_rows(tmp_path: Path):
    sizes = ["1,917", "0.63 cage11", "-", "9 ms", *(f"{10 + i}" for i in range(12))]
    view = table(tmp_path, sizes)
    (found,) = evaluate(tmp_path, [view], f"""(frame) => {{ {SHOWN}
      const click = () => (heads[1].querySelector("button").click(), shown());
      const [down, up] = [click(), click()];
      box.value = "ROW 15"; box.dispatchEvent(new frame.contentWindow.Event("input"));
      return [down, up, shown(), heads[1].getAttribute("aria-sort")];
    }}""")  # fmt: skip
    down, up, filtered, order = found
    assert up[:3] == ["row 1", "row 3", "row 4"] and up[-2:] == ["row 0", "row 2"]
    assert down == up[::-1] and order == "ascending"
    assert sorted(filtered) == ["row 15", "row 9"]  # whose size is 15


@browser
def test_short_tables_stay_as_they_are(tmp_path: Path):
    found = evaluate(tmp_path, [table(tmp_path, "12345678")], f"""(frame) => {{ {SHOWN}
      return [box, heads[0].querySelector("button")];
    }}""")  # fmt: skip
    assert found == [[None, None]]
