"""``sparsetile cache``: the compiled kernels on disk."""

from __future__ import annotations

from pathlib import Path

from sparsetile.cli.console import note, print_json, print_table, print_text
from sparsetile.cli.options import ACTIONS, Action, Json
from sparsetile.core import settings
from sparsetile.core.checks import one_of

__all__ = ["cache"]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def _clear(folder: Path) -> None:
    # cuda.core's own clear() does not touch files that another process is writing.
    from sparsetile.jit.compiler import open_cache

    before = len(_files(folder))
    if before:
        kernels = open_cache()
        try:
            kernels.clear()
        finally:
            kernels.close()
    note(f"sparsetile: removed {before - len(_files(folder))} files from {folder}")


def cache(action: Action = "show", as_json: Json = False) -> int:
    """Show, clear or locate the cache of compiled kernels."""
    one_of("cache", "action", action, ACTIONS)
    folder = settings.cache_dir()
    if action == "path":
        print_text(str(folder))
        return 0
    if action == "clear":
        _clear(folder)
        return 0
    files = _files(folder)
    found = {
        "path": str(folder),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "limit_bytes": settings.cache_limit_bytes(),
    }
    if as_json:
        print_json(found)
    else:
        print_table(("kernel cache", ""), [[name, str(value)] for name, value in found.items()])
    return 0
