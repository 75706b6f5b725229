"""Settings of the documentation site; `make docs` builds it and fails on any warning.

Pages are Markdown (MyST). Links between pages, to headings and to files of the project are checked
by the build. API pages are made from docstrings, so the package must be importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparsetile import __version__

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tools, which are not installed

from tools.as_capability import CORE_NAME, core_table, proofs_as  # noqa: E402
from tools.proofs import ages  # noqa: E402

project = "sparsetile"
author = "the sparsetile authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"sparsetile {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_js_files = ["tables.js"]
html_show_copyright = False

# {{ proofs }} on a page is the table of proofs with their ages, {{ as_sm80 }} what the records of
# this GPU as sm_80 prove, {{ core_as_sm80 }} the table of the core suite there.
myst_enable_extensions = ["substitution"]
_rows = [f"| `{age.name}` | {age.text} |" for age in ages(ROOT)]
_as = ROOT / "results" / "h200"
myst_substitutions = {
    "proofs": "\n".join(["| proof | of |", "| --- | --- |", *_rows]),
    "as_sm80": proofs_as(_as / "as-sm80"),
    "as_sm89": proofs_as(_as / "as-sm89"),
    "core_as_sm80": "\n".join(core_table(_as / "as-sm80" / CORE_NAME)),
}

# Links may name headings of the first three levels: [text](page.md#a-heading).
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say types, with shapes
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_rtype = False

# Every :func:, :meth: and :attr: of a docstring must lead somewhere. Types of arguments are words
# such as "Tensor [M, N]", which are no links.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", ".*")]
