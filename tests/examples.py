"""The scripts of ``examples/`` as modules: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "load_example"]

ROOT = Path(__file__).resolve().parents[1]


def load_example(name: str) -> Any:
    """Return the module of ``examples/<name>.py``."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
