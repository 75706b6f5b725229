"""Reports from records: Markdown for the documentation, and the same as one self-contained page."""

from __future__ import annotations

from sparsetile.bench.report.markdown import render_markdown
from sparsetile.bench.report.page import render_page

__all__ = ["render_markdown", "render_page"]
