"""Every test file is collected. By default pytest skips folders of some names, such as ``dist``."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DEFINES_TESTS = re.compile(r"^(?:async def test_|def test_|class Test)", re.MULTILINE)
FILES = [path for path in sorted(TESTS.rglob("*.py")) if DEFINES_TESTS.search(path.read_text())]


def ignored_by(config: pytest.Config, path: Path) -> Path | None:
    """Return the file or the folder above it that pytest's own rules leave out."""
    between = [path, *path.parents][: len(path.relative_to(TESTS.parent).parts)]
    for part in reversed(between):
        if config.hook.pytest_ignore_collect(collection_path=part, config=config):
            return part
    return None


def test_every_file_with_tests_is_collected(pytestconfig):
    assert len(FILES) > 100
    assert pytestconfig.getini("testpaths") == [TESTS.name]
    names = pytestconfig.getini("python_files")
    for path in FILES:
        assert ignored_by(pytestconfig, path) is None, path
        assert any(fnmatch.fnmatch(path.name, name) for name in names), path


def test_a_folder_that_is_left_out_is_noticed(pytestconfig, monkeypatch):
    real = pytestconfig.getini
    with monkeypatch.context() as patched:
        patched.setattr(
            pytestconfig, "getini", lambda name: ["dist"] if name == "norecursedirs" else real(name)
        )
        found = ignored_by(pytestconfig, TESTS / "dist" / "test_products.py")
    assert found == TESTS / "dist"
