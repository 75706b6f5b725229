"""Names of cases that one test goes through: reported with the error of the one that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["case_of"]


@contextlib.contextmanager
def case_of(*names: object) -> Iterator[None]:
    """Add the case's names to an error that is raised in it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {', '.join(map(str, names))}")
        raise
