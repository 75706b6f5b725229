"""Where the assembler's words are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import ptxas


@pytest.fixture(scope="session", autouse=True)
def _kept_words(request: pytest.FixtureRequest) -> None:
    cache = getattr(request.config, "cache", None)
    ptxas.kept = None if cache is None else Path(cache.mkdir("ptxas"))
