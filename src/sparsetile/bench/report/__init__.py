"""Reports from records: one self-contained page, and Markdown for the documentation."""

from __future__ import annotations

from sparsetile.bench.report.markdown import render_markdown
from sparsetile.bench.report.matrix_page import render_matrix_page
from sparsetile.bench.report.orders import view_orders
from sparsetile.bench.report.page import render_page

__all__ = ["render_markdown", "render_matrix_page", "render_page", "view_orders"]
