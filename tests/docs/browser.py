"""Pages in Chromium, without its window: what is wrong with them at a width, and what they compute.

All pages of a call are loaded by one process, each in a frame that is as wide as asked, from a
server of this process that only this machine reaches.
"""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "evaluate", "faults"]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CHECKS = Path(__file__).with_name("page_checks.js")
_HOST = "/checks.html"
_PAGE = """<!doctype html><body><script>{checks}
(async () => {{
  const found = [];
  for (const [path, width] of {views}) {{
    const frame = document.createElement("iframe");
    Object.assign(frame, {{width, height: 900}});
    frame.style.border = 0;
    document.body.append(frame);
    await new Promise((done) => {{ frame.onload = done; frame.src = path; }});
    await settled(frame.contentWindow);
    try {{
      found.push(await ({run})(frame));
    }} catch (error) {{
      found.push([`raised ${{error}}`]);
    }}
    frame.remove();
  }}
  await fetch("{host}", {{method: "POST", body: JSON.stringify(found)}});
}})();
</script>"""
_SECONDS = 240


class _Pages(http.server.SimpleHTTPRequestHandler):
    """Serve a folder, and the page that loads its pages and hands in what was found."""

    server: _Server

    def do_GET(self) -> None:
        if self.path != _HOST:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page)

    def do_POST(self) -> None:
        self.server.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, site: Path, page: str) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Pages, directory=str(site)))
        self.page, self.found = page.encode(), queue.Queue[list[Any]]()


def evaluate(site: Path, views: Sequence[tuple[str, int]], run: str = "check") -> list[Any]:
    """Return what the JavaScript function ``run`` returns for each page (path, width)."""
    assert CHROMIUM, "no Chromium"
    page = _PAGE.format(
        checks=CHECKS.read_text(encoding="utf-8"), host=_HOST, run=run,
        views=json.dumps([(f"/{path}", width) for path, width in views]),
    )  # fmt: skip
    with _Server(site, page) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={profile}", f"http://127.0.0.1:{server.server_port}{_HOST}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return server.found.get(timeout=_SECONDS)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()


def faults(site: Path, views: Sequence[tuple[str, int]]) -> list[str]:
    """Return a sentence for each thing that is wrong with a page of ``site`` at a width."""
    return [
        f"{path} at {width} pixels {words}"
        for (path, width), found in zip(views, evaluate(site, views), strict=True)
        for words in found
    ]
