"""pytest plugin of the GPU record: deselects tests, and lists all tests.

It is loaded in every process that runs tests. An environment variable names the folder that it
reads and writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = "SPARSETILE_LEFT_OUT"
_NAME = "left_out.json"


def leave_out(tests: list[str], folder: Path) -> dict[str, str]:
    """Name the tests to deselect; return the environment for pytest."""
    (folder / _NAME).write_text(json.dumps(tests))
    return {FOLDER: str(folder)}


def collected(folder: Path) -> set[str]:
    """Return the tests that the processes found, with the deselected ones."""
    lists = [json.loads(path.read_text()) for path in folder.glob("collected-*.json")]
    return {test for tests in lists for test in tests}


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Write the list of tests, and deselect those that are named."""
    folder = Path(os.environ[FOLDER])
    path = folder / f"collected-{os.getpid()}.json"
    path.write_text(json.dumps([item.nodeid for item in items]))
    left = set(json.loads((folder / _NAME).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
