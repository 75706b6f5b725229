"""Every test of the patch starts and ends without it, with nothing kept or counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sparsetile.pyg
from sparsetile.nn import clear_graph_cache
from sparsetile.pyg import reporting


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    clear_graph_cache()
    yield
    sparsetile.pyg.unpatch()
    reporting.clear_counts()
    clear_graph_cache()
