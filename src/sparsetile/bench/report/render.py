"""From a template to one self-contained page: style and scripts are put inside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from sparsetile.bench.report.svg import Raw
from sparsetile.check.extras import report_package
from sparsetile.check.pictures import tile_mask

__all__ = ["render"]


def _read(name: str) -> str:
    return (files("sparsetile.bench.report") / "templates" / name).read_text(encoding="utf-8")


def render(
    template: str,
    *,
    function: str,
    scripts: Sequence[str] = (),
    filters: Any = None,
    **context: Any,
) -> str:
    """Return a page made from ``templates/<template>``.

    Parameters
    ----------
    template : str
        It extends ``base.html``, which holds what all pages share.
    function : str
        Of the user's command, for errors.
    scripts : sequence of str
        Scripts of the page beside ``common.js``.
    filters : dict, optional
        Functions that the template may apply to values.
    **context
        What the template names.
    """
    jinja2 = report_package(function, "jinja2")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        loader=jinja2.FunctionLoader(_read),
    )
    environment.filters.update({"tile_mask": tile_mask, **(filters or {})})
    page: str = environment.get_template(template).render(
        style=Raw(_read("report.css")),
        script=Raw("\n".join(_read(name) for name in ("common.js", *scripts))),
        **context,
    )
    return page
