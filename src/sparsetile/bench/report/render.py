"""From a template to one self-contained page: style and scripts are put inside it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["render"]


def _read(name: str) -> str:
    return (files("sparsetile.bench.report") / "templates" / name).read_text(encoding="utf-8")


def render(
    template: str, *, scripts: Sequence[str] = (), filters: Any = None, **context: Any
) -> str:
    """Return a page made from ``templates/<template>``.

    Parameters
    ----------
    template : str
        It extends ``base.html``, which holds what all pages share.
    scripts : sequence of str
        Scripts of the page beside ``common.js``.
    filters : dict, optional
        Functions that the template may apply to values.
    **context
        What the template names.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        loader=FunctionLoader(_read),
    )
    environment.filters.update(filters or {})
    return environment.get_template(template).render(
        style=Markup(_read("report.css")),
        script=Markup("\n".join(_read(name) for name in ("common.js", *scripts))),
        **context,
    )
