"""Files that are replaced as a whole, so that several processes may share them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PARTIAL", "replacing"]

# Suffix of a file that is not complete.
PARTIAL = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; its file takes the place of ``path`` unless writing fails.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.json"
    ...     with replacing(path) as partial:
    ...         _ = partial.write_text("[1]")
    ...     path.read_text(), len(list(Path(folder).iterdir()))
    ('[1]', 1)
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
