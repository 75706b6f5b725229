"""One set of gloo processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four ranks, started once."""
    made = Workers()
    yield made
    made.close()
