"""Files that are replaced as a whole, so that several processes may share them."""

from __future__ import annotations

import contextlib
import os
import secrets
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
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    # A name that nobody can foresee, and no file or link that was there before; the umask applies.
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
