"""Runs programs of the source checkout, ``tools/``, which are not installed with the package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsetile.core.errors import value_error

__all__ = ["checkout_root", "run_tool"]

# A fresh interpreter that finds the tools and the package of the checkout.
_CHILD = (
    "import sys; sys.path[:0] = [sys.argv.pop(1), sys.argv.pop(1)]; "
    "from tools.{name} import main; sys.exit(main(sys.argv[1:]))"
)


def checkout_root() -> Path | None:
    """Return the root of the source checkout that this package runs from; None if installed."""
    root = Path(__file__).resolve().parents[3]
    whole = (root / "tools" / "verify.py").is_file() and (root / "tests").is_dir()
    return root if whole and (root / "src" / "sparsetile").is_dir() else None


def run_tool(name: str, words: Sequence[str]) -> int:
    """Run ``tools/<name>.py`` of the checkout in its root and return the exit code."""
    root = checkout_root()
    if root is None:
        raise value_error(
            name, "installation", "a source checkout with its tests", "an installed package",
            "Clone the project and install it with `pip install -e .`",
        )  # fmt: skip
    sys.stdout.flush()
    command = [sys.executable, "-c", _CHILD.format(name=name), str(root), str(root / "src")]
    return subprocess.run([*command, *words], cwd=root, check=False).returncode
