"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for a file's tests; each opens its page in a context of its own."""
    from .browser import start_chromium  # playwright may not be installed

    yield from start_chromium()
