"""Atomic replacement of files, so that several processes may share them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "replacing"]

# Suffix of an incomplete file.
PARTIAL = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; that file then replaces ``path``, unless writing fails."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    # An unpredictable name and O_EXCL: never an existing file or link. The umask applies.
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
