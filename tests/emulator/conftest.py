"""Where kernels that are compiled for the host are kept."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.emulator.build import cache_key

KEPT = 24 * 3600  # seconds


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries of today's code, which a later run takes up; those of other code are removed."""
    cache = getattr(request.config, "cache", None)
    if cache is None:  # pytest runs without one
        return tmp_path_factory.mktemp("emulator")
    here: Path = cache.mkdir("emulator")
    for old in here.iterdir():
        if old.name != cache_key() and time.time() - old.stat().st_mtime > KEPT:
            shutil.rmtree(old, ignore_errors=True)
    found = here / cache_key()
    found.mkdir(exist_ok=True)
    return found
