"""Reports from records, as Markdown."""

from __future__ import annotations

from sparsetile.bench.report.markdown import render_markdown

__all__ = ["render_markdown"]
